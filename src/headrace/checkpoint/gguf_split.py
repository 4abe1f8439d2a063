"""A model as one GGUF file or as several that llama.cpp split it into.

The parts are named `NAME-00001-of-0000N.gguf`; each has a header and a share of the tensors, the
first one the metadata of the model.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.gguf_header import GgufHeader, GgufTensor, read_header
from headrace.errors import CheckpointError

_PART = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf")


@dataclass(frozen=True)
class GgufModel(GgufHeader):
    """The header of a whole model: metadata of the first file, tensors of all of them."""

    parts: tuple[GgufHeader, ...]


def read_model(path: Path) -> GgufModel:
    """Read the headers of every file of a model.

    Args:
        path: a whole model, or any part of one that is split.

    Raises:
        CheckpointError: a part is missing, or the parts do not belong together; or as
            `read_header`.
    """
    header = read_header(path)
    count = _count(header)
    if count == 1:
        return GgufModel(**vars(header), parts=(header,))
    match = _PART.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"a part of a split GGUF model has another name: {path}\n"
            f"expected NAME-00001-of-{count:05}.gguf, as metadata says that there are {count} parts"
        )
    names = [f"{match['stem']}-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {count} parts of a split GGUF model are missing: {path.parent}\n"
            f"expected {missing[0]}\nhint: download every part into the same folder"
        )
    parts = tuple(read_header(path.parent / name) for name in names)
    tensors: dict[str, GgufTensor] = {}
    for number, part in enumerate(parts):
        if _count(part) != count or part.metadata.get("split.no", 0) != number:
            raise CheckpointError(
                f"a file is no part {number + 1} of {count}: {part.path}\n"
                f"got part {part.metadata.get('split.no', 0)!r} of {_count(part)}, counted from 0"
            )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise CheckpointError(
                f"tensor {min(twice)[:80]!r} is in two parts of a split model: {part.path}"
            )
        tensors.update(part.tensors)
    total = parts[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise CheckpointError(
            f"tensors of a split GGUF model are missing: {path}\n"
            f"expected {total} in {count} parts, got {len(tensors)}"
        )
    first = parts[0]
    return GgufModel(
        path=first.path,
        file_bytes=sum(part.file_bytes for part in parts),
        header_bytes=first.header_bytes,
        metadata=first.metadata,
        tensors=tensors,
        parts=parts,
    )


def stem_of(name: str) -> str:
    """Return a file's name without `.gguf` and without the number of the part."""
    match = _PART.fullmatch(name)
    return name.removesuffix(".gguf") if match is None else match["stem"]


def _count(header: GgufHeader) -> int:
    count = header.metadata.get("split.count", 1)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 99999:
        raise CheckpointError(
            f"GGUF metadata key `split.count` has an unexpected value: {header.path}\n"
            f"expected 1 to 99999, got {count!r}"
        )
    return max(count, 1)
