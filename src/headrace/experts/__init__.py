"""Where each expert's bytes are: the store that models ask, and the history that warms it."""

from headrace.experts.history import History
from headrace.experts.store import DriveUse, ExpertStore, Lease, StepCounters, StoreStats

__all__ = ["DriveUse", "ExpertStore", "History", "Lease", "StepCounters", "StoreStats"]
