"""Write tests/fixtures/gguf_blocks.json: random blocks of each GGUF type, and what they stand for.

Needs the package `gguf` (extra `oracle`), whose dequantisation is the reference. Per type: blocks
of random bytes with random finite scales of either sign, some of them subnormal, and the SHA-256
of their values as little-endian float32.

    python scripts/make_gguf_fixture.py            write the fixture anew
    python scripts/make_gguf_fixture.py --check    compare with the one that is there
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import sys
from pathlib import Path

import gguf
import numpy as np

PATH = Path(__file__).parent.parent / "tests" / "fixtures" / "gguf_blocks.json"
NUM_BLOCKS = 32
# By type: where in a block its scales of float16 lie.
SCALES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,),
    "MXFP4": (),
}  # fmt: skip


def make(name: str, random: np.random.RandomState) -> dict[str, str]:
    """Return the blocks of a type and the digest of their values."""
    type = gguf.GGMLQuantizationType[name]
    _, nbytes = gguf.GGML_QUANT_SIZES[type]
    blocks = random.randint(0, 256, (NUM_BLOCKS, nbytes)).astype(np.uint8)
    for at in SCALES[name]:
        size = 10.0 ** random.randint(-7, 2, NUM_BLOCKS)
        scales = (random.standard_normal(NUM_BLOCKS) * size).astype("<f2")
        blocks[:, at : at + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        blocks[:, 0] = random.randint(90, 160, NUM_BLOCKS)  # exponents, 127 of 1
    values = gguf.quants.dequantize(blocks, type).astype("<f4")
    digest = hashlib.sha256(values.tobytes()).hexdigest()
    return {"blocks": base64.b64encode(blocks.tobytes()).decode(), "values_sha256": digest}


def main() -> int:
    """Make the fixture; with --check return 1 if it differs."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    random = np.random.RandomState(0)
    text = json.dumps({name: make(name, random) for name in SCALES}, indent=1) + "\n"
    if parser.parse_args().check:
        is_same = PATH.read_text() == text
        print("the same" if is_same else f"differs: {PATH.name}")
        return 0 if is_same else 1
    PATH.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
