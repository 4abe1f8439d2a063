"""How the kernels use this machine: instruction set, threads, and the pool of result buffers.

These settings belong to the process: the native core has one thread pool and one buffer pool. None
of them changes a bit of any result.
"""

from headrace import _core
from headrace.arrays import Bytes


def isa() -> str:
    """The instruction set in use: scalar, avx2, avx-vnni, avx512, amx, neon or neon-i8mm."""
    return _core.isa()


def set_isa(name: str) -> None:
    """Choose an instruction set; `auto` takes the best that this processor has.

    Raises:
        ConfigError: the name is unknown, or the processor lacks it.
    """
    _core.set_isa(name)


def available_isas() -> list[str]:
    """The instruction sets that this processor has, plainest first."""
    return _core.available_isas()


def num_threads() -> int:
    """Computing threads, the caller's own included."""
    return _core.num_threads()


def set_threads(num_threads: int) -> None:
    """Choose the number of computing threads, the caller's own included."""
    _core.set_threads(num_threads)


def pool_bytes() -> int:
    """Bytes that the buffers of results take, in use and free."""
    return _core.pool_bytes()


def pool_trim() -> None:
    """Give the free buffers of results back to the system."""
    _core.pool_trim()


def trim_memory() -> None:
    """Give the system all that was freed and is kept for reuse, so that what this process holds is
    what it needs; takes milliseconds.
    """
    _core.pool_trim()
    _core.trim_heap()


def lock_memory(data: Bytes) -> None:
    """Keep the pages of an array from being swapped out, as long as it lives.

    Args:
        data: [n] uint8.

    Raises:
        MemoryBudgetError: the system does not allow so much; says its limit.
    """
    _core.lock_memory(data)


def memory_nodes(sysfs: str = "/sys") -> list[int]:
    """Numbers of the NUMA nodes that have memory; empty where the system does not say."""
    return _core.memory_nodes(sysfs)


def can_interleave(nodes: list[int]) -> bool:
    """Whether the system lets this process spread its memory over nodes; containers may not."""
    return _core.can_interleave(nodes)
