"""Lends `_core` NumPy stand-ins for what is not built yet; idle once all native parts exist."""

import packed_reference as reference

from headrace import _core

for _name in reference.STAND_INS:
    if not hasattr(_core, _name):
        setattr(_core, _name, getattr(reference, _name))
