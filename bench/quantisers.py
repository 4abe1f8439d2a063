"""One model quantised here and by llama.cpp, each run here over one text beside the original.

    python bench/quantisers.py SOURCE --report TEXT --calibrate TEXT --quantize PATH/llama-quantize
        [--work FOLDER] [--types Q4_0 Q4_K] [--groups 32 64]

SOURCE holds floating weights. Every matrix becomes `q4` three ways: the largest weight's scale,
searched, searched and calibrated. `llama-quantize --pure` makes its types from the same weights,
written as F32; its files run in place with the same kernels, activations rounded alike. A row of
the table has the bytes of the files with weights, the Kullback-Leibler divergence in nats, its
percentiles, and how often the same token is likeliest.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from headrace.config import EngineConfig
from headrace.convert.source import open_source
from headrace.study import calibrate, compare

WAYS = ("largest", "searched", "calibrated")


def headrace(*arguments: str) -> None:
    """Run the command line; its errors end this program."""
    program = "import sys; from headrace.cli import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode())


def every_matrix(source: Path, format: str) -> list[str]:
    """Give the options that store every matrix alike; a dense model has no experts to name."""
    has_experts = open_source(source).checkpoint.records is not None
    return ["--dense", format, *(["--experts", format] if has_experts else [])]


def ours(source: Path, importance: Path, group: int, work: Path) -> Iterator[tuple[str, Path]]:
    """Convert every matrix to `q4`, one way after the other."""
    extra = {"largest": ["--scales", "largest"], "calibrated": ["--importance", str(importance)]}
    for way in WAYS:
        made = work / f"{way}-{group}"
        options = [*every_matrix(source, "q4"), "--group", str(group), *extra.get(way, [])]
        headrace("convert", str(source), str(made), *options)
        yield f"q4 of {group}, {way}", made


def theirs(source: Path, quantize: Path, type: str, work: Path) -> Path:
    """Let llama.cpp quantise the weights, written as F32."""
    plain, made = work / "f32.gguf", work / f"{type}.gguf"
    if not plain.exists():
        headrace("convert", str(source), str(plain), *every_matrix(source, "f32"))
    command = [str(quantize), "--pure", str(plain), str(made), type]
    done = subprocess.run(command, capture_output=True)
    if done.returncode:
        raise SystemExit(done.stderr.decode()[-2000:])
    return made


def num_bytes(made: Path) -> int:
    """Of the files that hold weights."""
    files = [made] if made.is_file() else made.glob("*.safetensors")
    return sum(file.stat().st_size for file in files)


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--report", type=Path, required=True, help="text to compare on")
    parser.add_argument("--calibrate", type=Path, required=True, help="another text")
    parser.add_argument("--quantize", type=Path, required=True, help="llama.cpp's program")
    parser.add_argument("--types", nargs="+", default=["Q4_0", "Q4_K"])
    parser.add_argument("--groups", nargs="+", type=int, default=[32, 64])
    parser.add_argument("--work", type=Path, help="folder for what is made; default: temporary")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.work) as folder:
        work = Path(folder)
        importance = work / "importance"
        calibrate(args.source, args.calibrate, importance, EngineConfig())
        rows = [row for g in args.groups for row in ours(args.source, importance, g, work)]
        rows += [(t, theirs(args.source, args.quantize, t, work)) for t in args.types]
        print("| | bytes | divergence, nats | 90 % | 99 % | same likeliest |")
        print("|---|---|---|---|---|---|")
        for name, made in rows:
            found = compare(args.source, made, args.report, EngineConfig())
            print(
                f"| {name} | {num_bytes(made):,} | {found.kl_mean:.5f} "
                f"| {found.kl_percentiles['90']:.4f} | {found.kl_percentiles['99']:.4f} "
                f"| {100 * found.top_1_agreement:.1f} % |",
                flush=True,
            )
        print(f"{found.num_tokens} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
