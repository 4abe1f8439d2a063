"""`headrace trace`: record which experts a run asks for, and replay that against other memories."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.help import Command, CommandGroup
from headrace.cli.options import MODEL_HELP, Json, parsed_bytes, takes, usage
from headrace.config import LOSSY_OPTIONS, POLICIES, EngineConfig, ExpertConfig, SamplingParams
from headrace.errors import CheckpointError, ConfigError
from headrace.metrics import format_bytes

if TYPE_CHECKING:
    from headrace.experts.policy import Replay
    from headrace.experts.trace import Trace

app = typer.Typer(
    cls=CommandGroup,
    help="Record routing, and replay it against other memories and policies.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_CHART_ROWS = 12


@app.command(cls=Command)
@takes(EngineConfig, SamplingParams, without=("sequences", "trace", "profile", *LOSSY_OPTIONS))
def record(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="the trace; continued if it exists")],
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL_HELP)] = "demo",
    prompts: Annotated[
        Path | None,
        typer.Option(help="a file of prompts, one a line", show_default="one of our own"),
    ] = None,
    *,
    engine: EngineConfig,
    sampling: SamplingParams,
) -> int:
    """Answer prompts with MODEL, one after the other as raw text, and write the routing to FILE."""
    from dataclasses import replace

    from headrace.cli.report import say
    from headrace.cli.run import DEFAULT_PROMPT, DEMO_PROMPT
    from headrace.cli.wait import loading
    from headrace.llm import DEMO, LLM

    own = DEMO_PROMPT if model == DEMO else DEFAULT_PROMPT
    texts = [own] if prompts is None else _lines(prompts)
    traced = replace(engine, experts=replace(engine.experts, trace=file))
    with loading(model):
        llm = LLM(model, traced)
    with llm:
        if llm.store is None:
            raise ConfigError(f"{model} has no routed experts: there is nothing to trace")
        for number, text in enumerate(texts, start=1):
            answer = llm.generate(text, sampling)
            receipt = answer.receipt
            say(
                f"{number} of {len(texts)}: {receipt.prompt_tokens} + {receipt.completion_tokens} "
                f"tokens, {100 * receipt.expert_hit_rate:.1f} % hit"
            )
            if answer.error is not None:
                say(f"headrace: {answer.error}", style="")
                return 1
    say(f"{file}: {format_bytes(file.stat().st_size)}", style="")
    return int(llm.store.is_trace_cut)


def _lines(path: Path) -> list[str]:
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"cannot read prompts: {path}: {error}") from None
    if not lines:
        raise typer.BadParameter(f"no prompt in {path}")
    return lines


def _sizes(text: str) -> list[int]:
    return [parsed_bytes(part) for part in text.split(",")]


def _rates(text: str) -> list[int]:
    return [parsed_bytes(part.strip().removesuffix("/s")) for part in text.split(",")]


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) >= 2 for part in parts):
        raise typer.BadParameter(f"expected numbers of 2 and more such as 64,128, got `{text}`")
    return [int(part) for part in parts]


def _policies(text: str) -> list[str]:
    names = list(POLICIES) if text == "all" else text.split(",")
    unknown = [name for name in names if name not in POLICIES]
    if unknown:
        raise typer.BadParameter(
            f"unknown policy `{unknown[0]}`; expected all, {', '.join(POLICIES)}"
        )
    return names


@app.command(cls=Command)
def replay(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="a trace")],
    memory: Annotated[
        Any,
        typer.Option(
            parser=_sizes, metavar="SIZES", show_default=False,
            help="ceilings of the whole process, such as 1GiB,2GiB",
        ),
    ] = None,
    slots: Annotated[
        Any,
        typer.Option(
            parser=_counts, metavar="COUNTS", help="or slots, such as 64,128",
            show_default="an eighth to a half of the records",
        ),
    ] = None,
    policy: Annotated[
        Any,
        typer.Option(
            parser=_policies, metavar="NAMES", help="all, or some of: " + ", ".join(POLICIES)
        ),
    ] = "all",
    drives: Annotated[
        Any,
        typer.Option(
            parser=_rates, metavar="RATES", help="of other drives, such as 0.5GB/s,2GB/s",
            show_default=False,
        ),
    ] = None,
    half_life_tokens: Annotated[
        int,
        typer.Option(min=1, max=1 << 40, metavar="TOKENS", help="of `frequency`, as the run had"),
    ] = ExpertConfig().half_life_tokens,
    partial: Annotated[
        bool, typer.Option("--partial", help="of a damaged trace take the whole blocks before that")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option(help="draw the hit rates into an image, such as out.png")
    ] = None,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Say how often experts would be found in a slot, for each memory and policy."""
    from headrace.experts.policy import BELADY
    from headrace.experts.policy import replay as run
    from headrace.experts.trace import read_trace

    if plot is not None:
        _require_drawing(plot)
    trace = read_trace(file, partial=partial)
    if trace.num_tokens == 0:
        raise CheckpointError(f"no token in the trace: {file}")
    budgets = _budgets(trace, memory, slots)
    replays = [
        [
            run(trace, name, num_slots=count, half_life_tokens=float(half_life_tokens))
            for name in (*policy, BELADY)
        ]
        for _, count in budgets
    ]
    if as_json:
        print(json.dumps(_as_dict(trace, budgets, replays, drives or [])))
    else:
        _print(trace, budgets, replays, drives or [])
    if plot is not None:
        _draw(plot, trace, replays)


def _budgets(
    trace: "Trace", memory: list[int] | None, slots: list[int] | None
) -> list[tuple[int | None, int]]:
    """Memory, if that was given, and slots of each replay."""
    from headrace.plan import margin_bytes

    header = trace.header
    num_records = len(header.layers) * header.num_experts
    if memory is not None and slots is not None:
        raise typer.BadParameter("--memory and --slots say the same: give one of them")
    if memory is None:
        chosen = slots or sorted({max(2, num_records * part // 8) for part in range(1, 5)})
        return [(None, min(count, num_records)) for count in chosen]
    if not header.other_bytes:
        raise ConfigError("this trace does not know what its model takes besides slots: --slots")
    budgets: list[tuple[int | None, int]] = []
    for size in memory:
        rest = size - header.other_bytes - margin_bytes(size)
        if rest < 2 * header.record_bytes:
            least = format_bytes(size - rest + 2 * header.record_bytes)
            raise ConfigError(
                f"{format_bytes(size)} leaves no room for slots: the recorded run took "
                f"{format_bytes(header.other_bytes)} besides\nexpected about {least} or more\n"
                f"hint: record with `--memory`, under which it takes less, or replay with `--slots`"
            )
        budgets.append((size, min(rest // header.record_bytes, num_records)))
    return budgets


def _bytes_per_token(trace: "Trace", result: "Replay") -> float:
    return result.decode.misses_per_token * trace.header.read_bytes


def _speed(trace: "Trace", result: "Replay", drive: int | None = None) -> float | None:
    """Tokens per second to expect, on the drive that was recorded or on another."""
    from headrace.experts.policy import predict_speed

    per_token = result.decode.misses_per_token
    return predict_speed(trace.pace, per_token, trace.header.read_bytes, drive)


def _as_dict(
    trace: "Trace",
    budgets: list[tuple[int | None, int]],
    replays: list[list["Replay"]],
    drives: list[int],
) -> dict[str, Any]:
    from dataclasses import asdict

    rows = [
        {
            "memory_bytes": size,
            "num_slots": count,
            "policy": result.policy,
            "hit_rate": result.decode.hit_rate,
            "bytes_per_token": _bytes_per_token(trace, result),
            "tokens_per_s": _speed(trace, result),
            "tokens_per_s_by_drive": {str(d): _speed(trace, result, d) for d in drives},
            "decode": asdict(result.decode),
            "prefill": asdict(result.prefill),
        }
        for (size, count), results in zip(budgets, replays, strict=True)
        for result in results
    ]
    return {
        **asdict(trace.header),
        "tokens": trace.num_tokens,
        "pace": trace.pace._asdict(),
        "replays": rows,
    }


def _print(
    trace: "Trace",
    budgets: list[tuple[int | None, int]],
    replays: list[list["Replay"]],
    drives: list[int],
) -> None:
    from rich.table import Table

    from headrace.cli.report import stdout

    header, first = trace.header, replays[0][0]
    print(
        f"{first.prefill.tokens} tokens prefilled, {first.decode.tokens} decoded; "
        f"{len(header.layers)} layers of {header.num_experts} experts, "
        f"{format_bytes(header.record_bytes)} each"
    )
    table = Table(box=None, pad_edge=False)
    speeds = ("tok/s", *map(_rate_name, drives))
    for name in ("memory", "slots", "policy", "hit", "read/token", *speeds):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for (size, count), results in zip(budgets, replays, strict=True):
        for result in results:
            expected = [_speed(trace, result, drive) for drive in (None, *drives)]
            table.add_row(
                "-" if size is None else format_bytes(size),
                str(count),
                result.policy,
                f"{100 * result.decode.hit_rate:.1f} %",
                format_bytes(_bytes_per_token(trace, result)),
                *("-" if speed is None else f"{speed:.1f}" for speed in expected),
            )
    stdout().print(table)
    print("\n".join(draw_chart(replays)))


def _rate_name(drive: int) -> str:
    return f"at {drive / 1e9:.3g} GB/s"


def draw_chart(replays: list[list["Replay"]]) -> list[str]:
    """Draw hit rates of decoding over slots with letters, the first of each policy's name."""
    width = 7
    lines = []
    for row in range(_CHART_ROWS, -1, -1):
        cells = []
        for results in replays:
            here = [
                result.policy[0].upper()
                for result in results
                if round(result.decode.hit_rate * _CHART_ROWS) == row
            ]
            cells.append("".join(here).center(width))
        label = f"{100 * row / _CHART_ROWS:4.0f} % |" if row % 3 == 0 else "       |"
        lines.append((label + "".join(cells)).rstrip())
    lines.append("       +" + "-" * width * len(replays))
    lines.append("slots   " + "".join(str(r[0].num_slots).center(width) for r in replays).rstrip())
    names = [result.policy for result in replays[0]]
    lines.append("        " + "  ".join(f"{name[0].upper()} {name}" for name in names))
    return lines


def _require_drawing(path: Path) -> None:
    """Refuse a plot before the work that it would show."""
    try:
        import matplotlib.figure  # noqa: F401 - only whether it is there
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib, which is not installed\nhint: `pip install 'headrace[bench]'`"
        ) from None
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"no such folder for the plot: {path.absolute().parent}")


def _draw(path: Path, trace: "Trace", replays: list[list["Replay"]]) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(
        xlabel=f"slots of {len(trace.header.layers) * trace.header.num_experts} records",
        ylabel="share of requests in a slot, decoding",
        ylim=(0, 1),
    )
    slots = [results[0].num_slots for results in replays]
    for index, result in enumerate(replays[0]):
        rates = [results[index].decode.hit_rate for results in replays]
        axes.plot(slots, rates, marker="o", label=result.policy)
    axes.grid(alpha=0.3)
    axes.legend()
    with usage():
        try:
            figure.savefig(path)
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot write plot: {path}: {error}") from None
