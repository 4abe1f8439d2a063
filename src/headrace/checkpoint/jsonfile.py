"""Strict reading of JSON that came with a checkpoint.

Python's parser takes more than JSON: repeated keys, NaN, integers and nesting without bound. A file
that says one thing twice is damaged or hostile, so all of these are CheckpointErrors here. Owns no
meaning: what the keys say is checked by the caller.
"""

import json
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.errors import CheckpointError

MAX_JSON_BYTES = 256 << 20
"""More than any real index: 100,000 tensors take about 10 MB."""


_LFS_POINTER = b"version https://git-lfs"


def lfs_hint(first_bytes: bytes) -> str:
    """What to do about a file that a clone without Git LFS left in place of the real one; or ""."""
    if not first_bytes or not _LFS_POINTER.startswith(first_bytes[: len(_LFS_POINTER)]):
        return ""
    return (
        "the file is a pointer of Git LFS; `git lfs pull` in its folder fetches what it stands for"
    )


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise ValueError(f"the key {key!r} appears twice in one object")
        result[key] = value
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def canonical_json(content: Mapping[str, Any]) -> bytes:
    """Write an object as JSON, the same bytes for the same content."""
    return (json.dumps(content, indent=1, sort_keys=True) + "\n").encode()


def parse_object(data: bytes, where: str) -> dict[str, Any]:
    """Parse `data` as one JSON object.

    Args:
        data: UTF-8 text.
        where: the file, for the message.

    Raises:
        CheckpointError: not UTF-8, not JSON, not an object, or a key that appears twice.
    """
    try:
        value = json.loads(
            data.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        hint = lfs_hint(data)
        reason += f"\nhint: {hint}" if hint else ""
        raise CheckpointError(f"malformed JSON: {where}\n{reason}") from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"malformed JSON: {where}\nexpected an object, got {type(value).__name__}"
        )
    return value


def is_there(path: Path) -> bool:
    """Whether a checkpoint has a file that it may do without.

    Raises:
        CheckpointError: the name is there and no file, such as a link to nothing, which a download
            that was cut leaves behind.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.is_symlink():
            return False
        raise CheckpointError(
            f"a link to a file that is not there: {path}\n"
            "hint: the download is incomplete; fetch the files again"
        ) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    if not stat.S_ISREG(mode):
        raise CheckpointError(f"not a file: {path}")
    return True


def read_object(path: Path) -> dict[str, Any]:
    """Read the JSON object in the file `path`.

    Raises:
        CheckpointError: the file cannot be read, is larger than MAX_JSON_BYTES, or is malformed.
    """
    try:
        num_bytes = path.stat().st_size
        if num_bytes > MAX_JSON_BYTES:
            raise CheckpointError(
                f"JSON file is too large: {path}\n"
                f"expected at most {MAX_JSON_BYTES} bytes, got {num_bytes}"
            )
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error
    return parse_object(data, str(path))
