"""Writes the files of a container, each whole or not at all.

A file is written under a temporary name, fsynced, and renamed. Checksums are taken from the bytes
that were handed to the file. Which files there are, and in which order, the caller decides.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from headrace.arrays import Bytes
from headrace.checkpoint.jsonfile import canonical_json
from headrace.checkpoint.layout import DenseTensor, dense_header, expert_header
from headrace.checkpoint.values import bytes_checksum
from headrace.errors import CheckpointError, ExpertReadError

TEMPORARY_SUFFIX = ".tmp"


def sync_directory(path: Path) -> None:
    """Make renames within a directory survive a power cut; a no-op where directories have no fd."""
    if os.name != "posix":
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(folder: Path, num_bytes: int, what: str, hint: str) -> None:
    """Check that a drive has room; makes nothing, so that what is refused leaves nothing behind.

    Args:
        folder: that is written to; it need not exist.
        num_bytes: needed.
        what: needs them, for the message.
        hint: what else may be done than to free some space.

    Raises:
        CheckpointError: there are fewer; says how many are needed and there.
    """
    folder = folder.absolute()
    place = next(p for p in (folder, *folder.parents) if p.exists())
    have = shutil.disk_usage(place).free
    if have < num_bytes:
        raise CheckpointError(
            f"not enough space for {what}: {folder}\n"
            f"expected {num_bytes} bytes free ({num_bytes / 2**30:.2f} GiB), "
            f"got {have} ({have / 2**30:.2f} GiB)\n"
            f"hint: free some space, {hint}"
        )


@contextmanager
def whole_file(path: Path, is_one_of_many: bool = True) -> Iterator[BinaryIO]:
    """Open a file that appears under its name complete and on the drive, or does not appear.

    Args:
        path: of the file.
        is_one_of_many: others of the same work stay when this one fails; a message says so.

    Raises:
        CheckpointError: the drive is full, or another error of the file system; names it.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    try:
        with temporary.open("wb", buffering=0) as file:
            yield file
            os.fsync(file.fileno())
        temporary.replace(path)
        sync_directory(path.parent)
    except ExpertReadError:  # an OSError as well, of the source
        raise
    except OSError as error:
        raise write_error(path, error, is_one_of_many) from error
    finally:
        temporary.unlink(missing_ok=True)


def write_error(path: Path, error: OSError, is_one_of_many: bool = True) -> CheckpointError:
    """Turn a failed write into a message."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        kept = "; finished files are kept" if is_one_of_many else ""
        return CheckpointError(
            f"no space left for {path}: {error.strerror}\n"
            f"hint: free some space and run the same command again{kept}"
        )
    return CheckpointError(f"cannot write {path}: {error.strerror or error}")


def write_all(file: BinaryIO, data: bytes | Bytes) -> None:
    """Write every byte to an unbuffered file, at its position."""
    view = memoryview(data if isinstance(data, bytes) else data.data).cast("B")
    done = 0
    while done < len(view):
        done += file.write(view[done:])


def write_expert_file(
    path: Path,
    layer: int,
    num_experts: int,
    record_bytes: int,
    records: Iterable[Bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """Write one layer's records.

    Args:
        path: of the file.
        layer: number of the layer in the model.
        num_experts: E.
        record_bytes: of each record, a multiple of 4096.
        records: E arrays in id order.
        progress: called with the bytes written since the last call.

    Returns:
        the checksum of each record.

    Raises:
        CheckpointError: the file cannot be written.
    """
    checksums = []
    with whole_file(path) as file:
        write_all(file, expert_header(layer, num_experts, record_bytes))
        for record in records:
            if record.nbytes != record_bytes:
                raise AssertionError(f"record of {record.nbytes} bytes, expected {record_bytes}")
            write_all(file, record)
            checksums.append(bytes_checksum(record))
            progress(record_bytes)
        if len(checksums) != num_experts:
            raise AssertionError(f"{len(checksums)} records, expected {num_experts}")
    return checksums


def write_dense_file(
    path: Path,
    tensors: Sequence[DenseTensor],
    load: Callable[[DenseTensor], Bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """Write the dense tensors.

    Args:
        path: of the file.
        tensors: in `dense_order`.
        load: returns a tensor's bytes, `nbytes` of them; only one tensor is in memory at a time.
        progress: called with the bytes written since the last call.

    Returns:
        the checksum of each tensor.

    Raises:
        CheckpointError: the file cannot be written.
    """
    checksums = []
    with whole_file(path) as file:
        write_all(file, dense_header(tensors))
        for tensor in tensors:
            data = load(tensor)
            if data.nbytes != tensor.nbytes:
                raise AssertionError(
                    f"{tensor.name} has {data.nbytes} bytes, expected {tensor.nbytes}"
                )
            write_all(file, data)
            write_all(file, np.zeros(tensor.stored_bytes - tensor.nbytes, np.uint8))
            checksums.append(bytes_checksum(data))
            progress(tensor.stored_bytes)
    return checksums


def write_arrays(
    path: Path,
    header: bytes,
    arrays: Iterable[Bytes],
    progress: Callable[[int], None] = lambda _: None,
) -> None:
    """Write a header and the arrays it describes.

    Raises:
        CheckpointError: the file cannot be written.
    """
    with whole_file(path) as file:
        write_all(file, header)
        progress(len(header))
        for array in arrays:
            write_all(file, array)
            progress(array.nbytes)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file whole."""
    with whole_file(path) as file:
        write_all(file, data)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON whole, the same bytes for the same content."""
    write_bytes(path, canonical_json(content))
