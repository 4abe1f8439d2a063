"""Command-line options, made from the fields of the configs: names, help and defaults stand there.

`@takes(EngineConfig, SamplingParams)` gives a command one option per field and hands it the
finished objects as `engine` and `sampling`.
"""

import contextlib
import functools
import inspect
import typing
from collections.abc import Callable, Iterator
from dataclasses import Field, fields
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, TypeVar

import typer

from headrace.config import (
    EngineConfig,
    ExpertConfig,
    SamplingParams,
    parse_bytes,
    parse_memory,
)
from headrace.errors import ConfigError
from headrace.metrics import format_bytes

if TYPE_CHECKING:
    from headrace.checkpoint.layout import Recipe

Json: TypeAlias = Annotated[bool, typer.Option("--json", help="print one JSON object")]

MODEL_HELP = "a folder, a GGUF file, the id of a pulled model, or `demo`"

_PANELS = {
    SamplingParams: "Answer",
    EngineConfig: "Memory and speed (never change a token)",
    ExpertConfig: "Memory and speed (never change a token)",
}
_F = TypeVar("_F", bound=Callable[..., Any])


def takes(*configs: type, without: tuple[str, ...] = ()) -> Callable[[_F], _F]:
    """Give a command the options of these configs.

    Args:
        configs: EngineConfig (with ExpertConfig's fields), SamplingParams, or both; they arrive
            as the keyword arguments `engine` and `sampling`.
        without: fields that mean nothing to this command and keep their default.
    """

    def decorate(command: _F) -> _F:
        own = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.name not in ("engine", "sampling")
        ]
        made = [p for config in configs for p in _parameters(config) if p.name not in without]

        @functools.wraps(command)
        def run(**values: Any) -> Any:
            objects = {}
            if EngineConfig in configs:
                experts = _build(ExpertConfig, values)
                objects["engine"] = _build(EngineConfig, values, experts=experts)
            if SamplingParams in configs:
                objects["sampling"] = _build(SamplingParams, values)
            return command(**values, **objects)

        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in own] + made
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return typing.cast(_F, run)

    return decorate


def _parameters(config: type) -> Iterator[inspect.Parameter]:
    for item in _fields(config):
        if item.name == "experts":
            yield from _parameters(ExpertConfig)
            continue
        kind = typing.get_type_hints(config)[item.name]
        yield inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=None if item.default == () else item.default,
            annotation=_annotation(config, item, kind),
        )


def _fields(config: type) -> list[Field[Any]]:
    return [f for f in fields(config) if not f.metadata.get("api_only")]


def _annotation(config: type, item: Field[Any], kind: Any) -> Any:
    name = "--" + item.name.replace("_", "-")
    flags = [item.metadata["short"], name] if "short" in item.metadata else [name]
    panel = _PANELS[SamplingParams if item.metadata.get("changes_tokens") else config]
    extra: dict[str, Any] = {"help": item.metadata["help"], "rich_help_panel": panel}
    if "env" in item.metadata:
        extra["envvar"] = item.metadata["env"]
    if item.metadata.get("unit") == "bytes":
        parse = parse_memory if item.default == "auto" else parse_bytes
        extra |= {"parser": functools.partial(_parsed, parse), "metavar": "SIZE"}
        if isinstance(item.default, int):
            extra["show_default"] = format_bytes(item.default)
        kind = Any
    elif item.default == "auto" and kind is not str:
        extra |= {"parser": _count_or_auto, "metavar": "INTEGER"}
        kind = Any
    elif kind in (bool, bool | None):
        flags = [f"{name}/--no-{name[2:]}"]
    elif typing.get_origin(kind) is tuple:
        kind = list[typing.get_args(kind)[0]] | None  # type: ignore[misc]
    if item.default is None:
        extra["show_default"] = "as the model says" if config is SamplingParams else False
        if item.name == "seed":
            extra["show_default"] = "random"
    return Annotated[kind, typer.Option(*flags, **extra)]


def _build(config: type, values: dict[str, Any], **more: Any) -> Any:
    taken = {f.name: values.pop(f.name) for f in _fields(config) if f.name in values}
    for item in fields(config):
        if item.default == () and item.name in taken:
            taken[item.name] = tuple(taken[item.name] or ())
    with usage():
        return config(**taken, **more)


ExpertFormat: TypeAlias = Annotated[
    str | None,
    typer.Option(help="format of experts: q4, q8, mxfp4, bf16 or f32", show_default="q4"),
]
DenseFormat: TypeAlias = Annotated[
    str | None,
    typer.Option(help="format of everything else: as of experts", show_default="q8"),
]
Group: TypeAlias = Annotated[
    int | None, typer.Option(help="inputs per scale of q4: 32 or 64", show_default="64")
]


def make_recipe(
    experts: str | None, group: int | None, dense: str | None, head: str | None = None
) -> "Recipe":
    """Make a recipe of the options that were given; None leaves a default as it is.

    Raises:
        typer.BadParameter: a value is unknown, or the group is given where nothing is q4.
    """
    from headrace.checkpoint.layout import Recipe

    options = {"experts": experts, "group": group, "dense": dense, "head": head}
    with usage():
        recipe = Recipe(**{n: v for n, v in options.items() if v is not None})  # type: ignore[arg-type]
    if group is not None and "q4" not in (recipe.experts, recipe.dense, recipe.head):
        raise typer.BadParameter(
            f"--group {group} does nothing: it is q4's, but experts are {recipe.experts} and "
            f"everything else is {recipe.dense}"
        )
    return recipe


@contextlib.contextmanager
def usage() -> Iterator[None]:
    """Make an option that is out of range wrong usage: it comes from the command line here."""
    try:
        yield
    except ConfigError as error:
        raise typer.BadParameter(str(error).replace("\n", "; ")) from None


def parsed_bytes(text: str) -> int:
    """Read a byte size; a wrong one is wrong usage."""
    return typing.cast(int, _parsed(parse_bytes, text))


def _parsed(parse: Callable[[str], Any], text: str) -> Any:
    with usage():
        return parse(text)


def _count_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"expected `auto` or a number, got `{text}`") from None
