"""The errors headrace raises, as one tree.

    EngineError
    ├── ConfigError            (ValueError)       an option or config field is unknown or wrong
    ├── CheckpointError        (ValueError)       a file is missing, damaged or inconsistent
    ├── UnsupportedModelError  (ValueError)       a sound checkpoint that nothing here computes
    ├── MemoryBudgetError      (MemoryError)      the memory granted is below the floor
    ├── ExpertReadError        (OSError)          an expert's bytes cannot be read, or are wrong
    ├── RequestError           (ValueError)       one request cannot be served; the others go on
    ├── NumericError           (ArithmeticError)  a NaN or infinity appeared where none may be
    └── ShapeError             (ValueError)       an array is not of the shape or dtype an op takes

A message says what, where, expected and got, in units, then one hint that can be acted on. The
native core raises the same classes: `_core` translates its errors by kind. An address in a message
goes through `hide_credentials`.
"""

import re

_CREDENTIALS = re.compile(r"://\S*@")


class EngineError(Exception):
    """Base of every error that headrace raises on purpose."""


class ConfigError(EngineError, ValueError):
    """An option or a config field is unknown, missing or out of range."""


class CheckpointError(EngineError, ValueError):
    """A file of the checkpoint is missing, damaged or inconsistent."""


class UnsupportedModelError(EngineError, ValueError):
    """The checkpoint is sound, but no model here computes it."""


class MemoryBudgetError(EngineError, MemoryError):
    """The memory granted is below the least that can run."""


class ExpertReadError(EngineError, OSError):
    """An expert's bytes could not be read, failed their checksum, or hold a NaN or infinity."""


class RequestError(EngineError, ValueError):
    """One request cannot be served; the others go on."""


class NumericError(EngineError, ArithmeticError):
    """A NaN or an infinity appeared where the contract allows none."""


class ShapeError(EngineError, ValueError):
    """An array's shape, dtype or memory layout is not what the operation takes."""


def hide_credentials(text: str) -> str:
    """Write `***` for the user, password or token that a URL names before its host."""
    return _CREDENTIALS.sub("://***@", text)
