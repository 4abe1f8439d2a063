"""GGUF models in a hub repository: which files make one, what it is called, and its header.

A repository of GGUF files holds one model in many quantisations, each a file or the parts of a
split one, told apart by the ends of their names: `OWNER/NAME:Q4_K_M` names one of them, as it does
for llama.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.gguf_header import parse_header
from headrace.checkpoint.gguf_split import stem_of
from headrace.errors import CheckpointError

SUFFIX = ".gguf"
FIRST_BYTES = 1 << 20
"""Asked for at once; a header with a vocabulary of 150,000 tokens has 6 MB."""
MAX_HEADER_BYTES = 256 << 20
_NO_MODEL = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Files of a projector for images or of an importance matrix."""
_SEPARATOR = re.compile(r"[-.]")


@dataclass(frozen=True)
class GgufFiles:
    """One model of a repository."""

    stem: str
    """The name of its file without suffix and number of the part."""
    names: tuple[str, ...]
    """Its files, parts in order."""


def gguf_models(names: Iterable[str]) -> dict[str, GgufFiles]:
    """Group the GGUF files of a repository into models, by what tells their names apart.

    Args:
        names: paths within the repository; what is no GGUF model is passed over.

    Returns:
        Such as `Q4_K_M` or `UD-Q4_K_XL` -> the files, in the order of the names.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name in sorted(names):
        folder, _, file = name.rpartition("/")
        if file.endswith(SUFFIX) and not _NO_MODEL.search(file):
            groups.setdefault((folder, stem_of(file)), []).append(name)
    stems = [stem for _, stem in groups]
    found = {
        stem if stems.count(stem) == 1 else f"{folder}/{stem}".strip("/").replace("/", "-"): files
        for (folder, stem), files in groups.items()
    }
    start = _shared_words(found)
    return {stem[start:]: GgufFiles(stem, tuple(files)) for stem, files in found.items()}


def _shared_words(stems: Iterable[str]) -> int:
    """Return how many characters of whole words all stems begin with; the last word is no such."""
    length = 0
    for letters in zip(*stems, strict=False):
        if len(set(letters)) > 1:
            break
        length += 1
    first = next(iter(stems), "")[:length]
    return max((match.end() for match in _SEPARATOR.finditer(first)), default=0)


def matching(tag: str, stems: Mapping[str, str]) -> list[str]:
    """Return the labels that a tag may mean: the one it equals, else those whose name contains it.

    Args:
        tag: in any case; empty for any model.
        stems: label -> name without suffix.
    """
    wanted = tag.lower().removesuffix(SUFFIX)
    same = [label for label in stems if label.lower() == wanted]
    if same or not wanted:
        return same or list(stems)
    words = re.compile(rf"(?<![^-./]){re.escape(wanted)}(?![^-./])")
    return [label for label, stem in stems.items() if words.search(stem.lower())]


def read_gguf_header(name: str, num_bytes: int, read_range: Callable[[int, int], bytes]) -> bytes:
    """Fetch as much of a remote GGUF file as its header takes, and check it.

    Args:
        name: for messages.
        num_bytes: of the whole file.
        read_range: gives `length` bytes from `offset` on.

    Raises:
        CheckpointError, UnsupportedModelError: as `gguf_header.read_header`, or the header is
            absurdly long.
    """
    view = _Growing(name, num_bytes, read_range)
    header = parse_header(Path(name), view, num_bytes)
    return bytes(view.data[: header.header_bytes])


class _Growing:
    """The beginning of a remote file, fetched as far as it is looked at."""

    def __init__(self, name: str, num_bytes: int, read_range: Callable[[int, int], bytes]) -> None:
        self.name, self.num_bytes, self.read_range = name, num_bytes, read_range
        self.data = bytearray()

    def __getitem__(self, span: slice) -> bytes:
        end = min(span.stop, self.num_bytes)
        if end > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"GGUF header is too long: {self.name}\n"
                f"expected at most {MAX_HEADER_BYTES} bytes, got {end} or more"
            )
        while len(self.data) < end:
            have = len(self.data)
            length = max(FIRST_BYTES, have, end - have)  # doubled: few answers, little too much
            self.data += self.read_range(have, min(length, self.num_bytes - have))
        return bytes(self.data[span])
