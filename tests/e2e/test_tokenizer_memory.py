"""What a tokenizer takes when it is loaded, against what the plan counts before."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NUM_CHARACTERS = 180
FIRST = 0x4E00  # letters that need no byte-level alphabet

# Both in one process: what is left of the libraries' own size cancels out against a small one.
PROGRAM = """
import sys
from pathlib import Path
from types import SimpleNamespace
from headrace.metrics import resident_bytes
from headrace.plan import tokenizer_bytes
from headrace.tokenizer import Tokenizer

small, large = (Path(folder) for folder in sys.argv[1:3])
kept = [Tokenizer.load(small)]
before = resident_bytes()
kept.append(Tokenizer.load(large))
taken = resident_bytes() - before
spec = SimpleNamespace(vocab_size=kept[1].vocab_size)
print(taken, tokenizer_bytes(spec, SimpleNamespace(tokenizer_dir=large)))
"""


def write_tokenizer(folder: Path, num_characters: int, has_merges: bool) -> Path:
    letters = [chr(FIRST + i) for i in range(num_characters)]
    pairs = [(a, b) for a in letters for b in letters]
    vocabulary = {text: i for i, text in enumerate([*letters, *(a + b for a, b in pairs)])}
    model = {"type": "BPE", "vocab": vocabulary, "merges": pairs if has_merges else []}
    folder.mkdir()
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return folder


@pytest.mark.parametrize("has_merges", [False, True])
def test_a_plan_counts_what_a_tokenizer_takes(tmp_path: Path, has_merges: bool) -> None:
    small = write_tokenizer(tmp_path / "small", 2, has_merges)
    large = write_tokenizer(tmp_path / "large", NUM_CHARACTERS, has_merges)
    command = [sys.executable, "-c", PROGRAM, str(small), str(large)]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stderr
    taken, planned = map(int, done.stdout.split())
    assert taken <= 1.1 * planned  # the allocator rounds up as it likes
    assert planned <= 3 * taken
