"""How the reads of records are spread over several drives, and what the drives give together.

Arithmetic over a record table and what was counted or measured; reads nothing.
"""

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.records import RecordTable

Floats: TypeAlias = npt.NDArray[np.float64]

UNSEEN_COUNT = 0.5
"""A record that a history never saw counts as half a token: it will be wanted some day."""


def expected_reads(counts: Floats | None, table: RecordTable, num_slots: int) -> Floats:
    """How often each record will be read, on the scale of the counts: [Lm, E].

    A cache of independent requests holds a record wanted at rate r with probability
    1 - exp(-r T), T such that the probabilities add up to the slots.

    Args:
        counts: [Lm, E] of a history; None takes all records as equal.
        table: the records.
        num_slots: records that memory holds.

    Source:
        H. Che, Y. Tung, Z. Wang: Hierarchical Web Caching Systems (2002), the characteristic time.
    """
    shape = (len(table.layers), table.num_experts)
    rates = np.ones(shape) if counts is None else counts + UNSEEN_COUNT
    if num_slots >= rates.size:
        return rates
    low, high = 0.0, 1.0
    while (1 - np.exp(-rates * high)).sum() < num_slots:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if (1 - np.exp(-rates * middle)).sum() < num_slots:
            low = middle
        else:
            high = middle
    return rates * np.exp(-rates * low)


def sum_bytes_per_s(rates: Sequence[float], table: RecordTable, reads: Floats) -> float:
    """Bandwidth of all drives together, each record being divided among those that hold it.

    The drives of any set must read by themselves what no other drive holds; the set that takes
    longest over its own part sets the pace, and no other bound exists (the max-flow min-cut
    theorem).

    Args:
        rates: bytes per second of each drive of the table.
        table: the records, with drives.
        reads: [Lm, E], how often each record is read, on any scale.
    """
    holders = np.zeros(table.num_records, np.int64)  # a bit for each drive
    drive_of_file = np.zeros(len(table.files), np.int64)
    drive_of_file[: len(table.drive_of_file)] = table.drive_of_file
    holders |= 1 << drive_of_file[table.file[:, :, 0].ravel()]
    np.bitwise_or.at(holders, table.copies[:, 0], 1 << drive_of_file[table.copies[:, 1]])
    kinds, kind_of_record = np.unique(holders, return_inverse=True)
    parts = np.bincount(kind_of_record, weights=reads.ravel()) / reads.sum()
    sets = {0}
    for kind in kinds.tolist():
        sets |= {other | kind for other in sets}
    seconds_per_byte = 0.0
    for chosen in sets - {0}:
        own = float(parts[kinds & ~chosen == 0].sum())
        together = sum(rate for drive, rate in enumerate(rates) if chosen >> drive & 1)
        seconds_per_byte = max(seconds_per_byte, own / together)
    return 1 / seconds_per_byte
