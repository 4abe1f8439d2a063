"""`headrace convert`: a checkpoint becomes a container of packed records, or a GGUF file."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.options import Group, Json, make_recipe, usage

if TYPE_CHECKING:
    from headrace.checkpoint.layout import Recipe
    from headrace.config import EngineConfig
    from headrace.convert.importance import Importance
    from headrace.convert.source import OpenedSource


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE",
            help="a Hugging Face checkpoint directory, a GGUF file, or the id of a pulled model; "
            "to write GGUF any model, or `demo`",
        ),
    ],
    dest: Annotated[
        Path,
        typer.Argument(metavar="DEST", help="the container to make, or a file that ends in .gguf"),
    ],
    experts: Annotated[
        str | None,
        typer.Option(
            help="format of experts: keep, q4, q8, mxfp4, bf16 or f32",
            show_default="q4; keep if the source is quantised; in GGUF as in the source",
        ),
    ] = None,
    group: Group = None,
    head: Annotated[
        str | None,
        typer.Option(help="format of the head: as of experts", show_default="as --dense"),
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="a whole recipe: small, balanced or faithful")
    ] = None,
    recipe_file: Annotated[
        Path | None, typer.Option("--recipe", help="a recipe, TOML or JSON (docs/quantisation.md)")
    ] = None,
    scales: Annotated[
        str | None,
        typer.Option(
            help="search: least squared error; largest: by each group's largest weight",
            show_default="search",
        ),
    ] = None,
    importance: Annotated[
        Path | None,
        typer.Option(help="importance file, of headrace or an imatrix of llama.cpp in GGUF form"),
    ] = None,
    calibrate: Annotated[
        Path | None,
        typer.Option(help="weigh errors by what the model's matrices are given on this text"),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="compare the answers of DEST and SOURCE on this text when it is done"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(help="ceiling of the runs for --calibrate and --report", show_default="auto"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="print the sizes and write nothing")
    ] = False,
    dense: Annotated[
        str | None,
        typer.Option(
            help="format of everything else: as of experts",
            show_default="q8; keep if the source is quantised; in GGUF as in the source",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Write DEST, a container of SOURCE that is read without repacking.

    Of a source that is quantised already codes and scales are kept unless a format is asked for. A
    conversion that was stopped goes on where it was when called again. If DEST ends in .gguf, one
    file for llama.cpp and its kin is written instead, by default without loss.
    """
    if dest.suffix == ".gguf":
        if group is not None:
            raise typer.BadParameter(
                f"--group {group} does nothing: q4 in a GGUF file always has 32 inputs per scale"
            )
        own = {
            "--head": head, "--preset": preset, "--recipe": recipe_file, "--scales": scales,
            "--importance": importance, "--dry-run": dry_run or None,
            "--calibrate": calibrate, "--report": report, "--memory": memory,
        }  # fmt: skip
        for option, value in own.items():
            if value is not None:
                raise typer.BadParameter(f"{option} does nothing for a GGUF file")
        _write_gguf(source, dest, experts, dense, as_json)
        return
    opened, recipe = _open(source, experts, group, dense, head, preset, recipe_file, scales)
    texts = _Texts(importance, calibrate, report, memory)
    texts.check(recipe, dry_run)
    if dry_run:
        _print_sizes(opened, recipe, as_json)
    else:
        _write_container(opened, dest, recipe, texts, as_json)


@dataclass(frozen=True)
class _Texts:
    """What weighs the errors and what is compared, as the options say."""

    importance: Path | None
    calibrate: Path | None
    report: Path | None
    memory: str | None

    def check(self, recipe: "Recipe", dry_run: bool) -> None:
        """Refuse options that contradict one another or would do nothing."""
        if self.importance is not None and self.calibrate is not None:
            raise typer.BadParameter("--importance and --calibrate both weigh errors: give one")
        runs = {"--calibrate": self.calibrate, "--report": self.report}
        weighs = {"--importance": self.importance, "--calibrate": self.calibrate}
        for option, value in weighs.items():
            if value is not None and recipe.scales != "search":
                raise typer.BadParameter(f"{option} does nothing unless scales are searched")
        if self.memory is not None and not any(runs.values()):
            raise typer.BadParameter("--memory does nothing without --calibrate or --report")
        for option, value in {**weighs, **runs}.items():
            if value is not None and dry_run:
                raise typer.BadParameter(f"{option} does nothing with --dry-run")


def _open(
    source: Path,
    experts: str | None,
    group: int | None,
    dense: str | None,
    head: str | None,
    preset: str | None,
    recipe_file: Path | None,
    scales: str | None,
) -> "tuple[OpenedSource, Recipe]":
    """Open the source and work out its recipe, some of which depends on it."""
    from dataclasses import replace

    from headrace.convert.recipe import PRESETS, default_for, preset_for, read_recipe
    from headrace.convert.source import open_source
    from headrace.llm import resolve_model
    from headrace.quant_search import SEARCHED

    options = {"--experts": experts, "--group": group, "--dense": dense, "--head": head}
    given = [name for name, value in options.items() if value is not None]
    if preset is not None and recipe_file is not None:
        raise typer.BadParameter("--preset and --recipe are both a whole recipe: give one")
    if given and (preset is not None or recipe_file is not None):
        whole = "--preset" if preset is not None else "--recipe"
        raise typer.BadParameter(f"{given[0]} contradicts {whole}, which is a whole recipe")
    if preset is not None and preset not in PRESETS:
        raise typer.BadParameter(f"unknown preset {preset!r}; expected one of {', '.join(PRESETS)}")
    with usage():
        make_recipe(experts, group, dense, head)  # wrong values first, before any file is opened
        recipe = None if recipe_file is None else read_recipe(recipe_file)
    opened = open_source(resolve_model(source))
    if preset is not None:
        recipe = preset_for(preset, opened.checkpoint)
    elif recipe is None:
        default = default_for(opened.checkpoint)
        recipe = make_recipe(experts or default.experts, group, dense or default.dense, head)
    is_dense = opened.checkpoint.records is None
    if is_dense and experts is not None:
        raise typer.BadParameter(f"--experts does nothing: {opened.path} is a dense model")
    formats = (replace(recipe, experts=recipe.dense) if is_dense else recipe).formats
    if group is not None and "q4" not in formats:
        raise typer.BadParameter(f"--group {group} does nothing: no matrix becomes q4")
    if formats.isdisjoint(SEARCHED):
        if scales is not None:
            raise typer.BadParameter("--scales does nothing: no weight is rounded to codes")
        return opened, replace(recipe, scales="largest")
    with usage():
        return opened, replace(recipe, scales=scales or "search")


def _print_sizes(source: "OpenedSource", recipe: "Recipe", as_json: bool) -> None:
    from headrace.cli.report import say
    from headrace.convert.plan import make_plan
    from headrace.metrics import format_bytes

    plan = make_plan(source, recipe)
    classes, total = plan.class_bytes(), sum(plan.file_bytes().values())
    if as_json:
        sizes = {"recipe": recipe.describe(), "classes": classes, "total_bytes": total}
        print(json.dumps({**sizes, "requantised": plan.requantised}))
        return
    for kind, held in plan.requantised.items():
        say(f"{kind}: quantised twice: the source holds codes, {held}", style="yellow")
    for name, size in classes.items():
        print(f"{name:14} {format_bytes(size)}")
    print(f"{'in all':14} {format_bytes(total)}")


def _write_container(
    source: "OpenedSource", dest: Path, recipe: "Recipe", texts: _Texts, as_json: bool
) -> None:
    from headrace.cli.report import byte_progress, say
    from headrace.config import EngineConfig, parse_memory
    from headrace.convert import Progress, convert
    from headrace.metrics import format_bytes
    from headrace.study import compare, read_text

    with usage():
        config = EngineConfig(memory=parse_memory(texts.memory or "auto"))
        for text in (texts.calibrate, texts.report):
            if text is not None:
                read_text(text)  # a wrong path is said now, not after hours
    importance = _importance(source.path, dest, texts, config)
    with byte_progress(sys.stderr.isatty()) as show:

        def tell(progress: Progress) -> None:
            show(progress.file, progress.done_bytes, progress.total_bytes)

        report = convert(source, dest, recipe, tell, importance)
    comparison = None
    if texts.report is not None:
        with byte_progress(sys.stderr.isatty(), unit="tokens") as show:
            comparison = compare(source.path, dest, texts.report, config, show)
    if as_json:
        compared = None if comparison is None else comparison.as_dict()
        print(json.dumps({**vars(report), "dest": str(dest), "comparison": compared}))
        return
    if report.already_done:
        say(f"{dest} is complete already: nothing was done", style="")
    else:
        kept = f", {report.kept_files} kept from an earlier run" if report.kept_files else ""
        size = format_bytes(report.total_bytes)
        say(f"{dest}: {size} in {report.num_files} files{kept}", style="")
        for kind, loss in report.losses.items():
            say(
                f"{kind}: {loss['bits_per_value']:.2f} bits a weight, "
                f"error {loss['relative_rms_error']:.2%} of the weights (root mean square)",
                style="",
            )
    if comparison is not None:
        high = ", ".join(f"{p} % {v:.4f}" for p, v in comparison.kl_percentiles.items())
        say(
            f"against the source on {comparison.num_tokens} tokens: divergence "
            f"{comparison.kl_mean:.5f} nats a token ({high}, most {comparison.kl_max:.3f}); the "
            f"same likeliest token after {comparison.top_1_agreement:.2%}; loss "
            f"{comparison.converted_nats:.4f} nats, source {comparison.source_nats:.4f}",
            style="",
        )


def _importance(
    source: Path, dest: Path, texts: _Texts, config: "EngineConfig"
) -> "Importance | None":
    from headrace.checkpoint import read_config
    from headrace.cli.report import byte_progress
    from headrace.convert.importance import read_importance
    from headrace.study import calibrate

    if texts.importance is not None:
        return read_importance(texts.importance, str(read_config(source).get("model_type")))
    if texts.calibrate is None:
        return None
    cache = dest.with_name(dest.name + ".importance")
    with byte_progress(sys.stderr.isatty(), unit="tokens") as show:
        return calibrate(source, texts.calibrate, cache, config, show)


def _write_gguf(
    source: Path, dest: Path, experts: str | None, dense: str | None, as_json: bool
) -> None:
    from headrace.cli.report import byte_progress, say
    from headrace.convert import GgufRecipe, Progress, convert_to_gguf
    from headrace.llm import resolve_model
    from headrace.metrics import format_bytes

    with usage():
        recipe = GgufRecipe(experts, dense)
    with byte_progress(sys.stderr.isatty()) as show:

        def tell(progress: Progress) -> None:
            show(progress.file, progress.done_bytes, progress.total_bytes)

        report = convert_to_gguf(resolve_model(source), dest, recipe, tell)
    if as_json:
        print(json.dumps({**vars(report), "dest": str(dest)}))
        return
    say(f"{dest}: {format_bytes(report.total_bytes)} in {report.num_tensors} tensors", style="")
    for note in report.notes:
        say(f"note: {note}", style="yellow")


command.__name__ = "convert"
