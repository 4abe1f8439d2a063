"""A GGUF file's tokenizer in headrace and in llama.cpp: the ids of one long text, side by side.

    python bench/parity_tokenizer.py FILE.gguf ... --tokenize PATH/llama-tokenize [--every 1]

Vocabularies without weights will do. The text has every assigned character of Unicode, of the large
blocks of ideographs and syllables every 97th, between letters, alone and between digits. llama.cpp
never brings text to NFC, so both are given it in NFC where the vocabulary's own rule asks for that.
--every N takes each Nth of the characters: some of llama.cpp's rules are slow. Exit status 1 if ids
differ.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import unicodedata
from pathlib import Path

import tokenizers

from headrace.checkpoint.gguf_header import read_header
from headrace.checkpoint.gguf_tokenizer import tokenizer_json

LARGE_BLOCKS = (
    range(0x3400, 0xA000), range(0xAC00, 0xD7A4), range(0x17000, 0x18D00), range(0x20000, 0x33000)
)  # fmt: skip
NOT_TEXT = ("Cn", "Co", "Cs")
SAMPLE = 97


def text(every: int) -> str:
    """A line for each character."""
    kept = [
        chr(code)
        for code in range(1, sys.maxunicode + 1)
        if unicodedata.category(chr(code)) not in NOT_TEXT
        and (code % SAMPLE == 0 or not any(code in block for block in LARGE_BLOCKS))
    ]
    return "".join(f"a{c}b {c}{c} 1{c}2\n" for c in kept[::every])


def llamacpp_ids(tokenize: Path, vocabulary: Path, content: str) -> list[int]:
    """What llama.cpp makes of a text."""
    with tempfile.NamedTemporaryFile() as file:
        Path(file.name).write_bytes(content.encode())
        command = [str(tokenize), "-m", str(vocabulary), "-f", file.name, "--ids", "--no-escape"]
        done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(f"{tokenize} failed\n{done.stderr.decode()[-2000:]}")
    return [int(token) for token in json.loads(done.stdout)]


def main() -> int:
    """Compare; print a line per vocabulary."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("vocabularies", type=Path, nargs="+", metavar="FILE.gguf")
    parser.add_argument("--tokenize", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--every", type=int, default=1)
    args = parser.parse_args()
    failed = False
    for path in args.vocabularies:
        definition = tokenizer_json(read_header(path))
        has_nfc = json.loads(definition)["normalizer"] == {"type": "NFC"}
        content = text(args.every)
        content = unicodedata.normalize("NFC", content) if has_nfc else content
        ours = list(tokenizers.Tokenizer.from_str(definition).encode(content).ids)
        theirs = llamacpp_ids(args.tokenize, path, content)
        verdict = "equal" if ours == theirs else f"{len(theirs)} there, not equal"
        print(f"{path.name}: {len(content)} characters, {len(ours)} ids, {verdict}", flush=True)
        failed |= ours != theirs
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
