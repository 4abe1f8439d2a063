"""Draws what `bench/kernels.py --json` measured: every op under the machine's two kinds of roof.

    python bench/roofline.py kernels.json docs/roofline.svg

The slanted roof is the read bandwidth; a flat one is what an instruction set's unit reaches on
registers. Needs the extra `bench` (matplotlib).
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

MARKERS = {"linear": "o", "moe_ffn": "s", "attention": "^", "latent": "v"}


def colours_of(report: dict[str, Any]) -> dict[str, str]:
    """A colour for each instruction set that was measured."""
    return {isa: f"C{index}" for index, isa in enumerate(report["peak_operations_per_s"])}


def draw_roofs(axes: Any, report: dict[str, Any], intensities: list[float]) -> None:
    """Bandwidth, and the peak of each instruction set's units."""
    colours = colours_of(report)
    read = report["read_bytes_per_s"] / 1e9
    low, high = min(intensities) / 2, max(intensities) * 2
    peaks = report["peak_operations_per_s"]
    top = max(peak for units in peaks.values() for peak in units.values()) / 1e9
    axes.plot([low, top / read], [low * read, top], color="black", linewidth=1)
    axes.annotate(f"read {read:.0f} GB/s", (low * 1.3, low * 1.3 * read * 1.3), rotation=38)
    drawn: set[int] = set()
    for isa, units in peaks.items():
        for unit, operations in units.items():
            peak = operations / 1e9
            if round(peak, -1) in drawn:
                continue
            drawn.add(round(peak, -1))
            axes.plot([peak / read, high], [peak, peak], color=colours[isa], linewidth=1)
            axes.annotate(f"{isa} {unit} {peak:.0f}", (high, peak), ha="right", va="bottom",
                          color=colours[isa], fontsize=8)  # fmt: skip


def draw_ops(axes: Any, report: dict[str, Any]) -> None:
    """A line through the row counts of each op, format and instruction set."""
    colours = colours_of(report)
    lines = defaultdict(list)
    for row in report["rows"]:
        point = (row["intensity"], row["operations_per_s"] / 1e9)
        lines[row["op"], row["format"], row["isa"]].append(point)
    for (op, _, isa), points in lines.items():
        x, y = zip(*sorted(points), strict=True)
        axes.plot(x, y, marker=MARKERS[op], markersize=4, linewidth=0.5, alpha=0.7,
                  color=colours[isa])  # fmt: skip


def main() -> None:
    """Read the report, write the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("report", type=Path)
    parser.add_argument("picture", type=Path)
    args = parser.parse_args()
    report = json.loads(args.report.read_text())
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "headrace", "font.size": 9})
    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    axes.set(xscale="log", yscale="log")
    draw_roofs(axes, report, [row["intensity"] for row in report["rows"]])
    draw_ops(axes, report)
    for op, marker in MARKERS.items():
        axes.plot([], [], marker=marker, color="grey", linestyle="none", label=op)
    axes.legend(loc="upper left")
    axes.set_xlabel("operations per byte of weights, or of keys and values")
    axes.set_ylabel("G operations per second (a multiply-add is two)")
    axes.set_title(report["machine"], fontsize=8)
    axes.grid(alpha=0.3, which="both", linewidth=0.3)
    figure.savefig(args.picture, metadata={"Date": None})


if __name__ == "__main__":
    main()
