"""Recipes: which format each tensor is stored in, from presets, files and classes of tensors.

A rule's `match` is a class (`attention`, `ffn`, `head`, `other`, `experts`, `experts.gate`,
`experts.up`, `experts.down`) or a pattern, as `fnmatch` has it, of the names of dense tensors. The
first rule that matches counts; one that never does is an error. Vectors, routers and an embedding
table that is not the head as well stay as they are.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from headrace.checkpoint import Checkpoint
from headrace.checkpoint.layout import KEEP, Recipe, Rule
from headrace.checkpoint.records import EXPERT_ROLES
from headrace.convert.source import is_quantised
from headrace.errors import ConfigError

DENSE_CLASSES = ("attention", "ffn", "head", "other")
EXPERT_CLASSES = ("experts", *(f"experts.{role}" for role in EXPERT_ROLES))

PRESETS: Mapping[str, Recipe] = {
    "small": Recipe("q4", "q4", 64, head="q8", scales="search"),
    "balanced": Recipe("q4", "q8", 32, scales="search"),
    "faithful": Recipe("q8", "bf16", 64, head="q8", scales="search"),
}
"""Least memory; nearly the source's answers; hardly told from the source."""
KEPT_WHOLE = Recipe(KEEP, KEEP)
"""Everything as the source holds it."""


def preset_for(name: str, source: Checkpoint) -> Recipe:
    """Return a preset, a key of PRESETS; `faithful` of a quantised source keeps its codes."""
    return KEPT_WHOLE if name == "faithful" and is_quantised(source) else PRESETS[name]


def default_for(source: Checkpoint) -> Recipe:
    """Return what is stored where nothing is asked for: nothing is quantised a second time."""
    return KEPT_WHOLE if is_quantised(source) else Recipe(scales="search")


def tensor_class(name: str, head: str) -> str:
    """Name the class of a dense matrix.

    Args:
        name: as Hugging Face has it.
        head: name of the matrix that scores the vocabulary.
    """
    if name == head:
        return "head"
    if "attn" in name or "attention" in name:
        return "attention"
    return "ffn" if ".mlp." in name or "shared_expert" in name else "other"


@dataclass
class Assignment:
    """Formats by a recipe, with the books of which rule was ever the first to match."""

    recipe: Recipe
    used: set[int] = field(default_factory=set)
    shadowed: dict[int, int] = field(default_factory=dict)
    """Rules that matched behind another one, and that one."""

    def of_expert(self, role: str) -> tuple[str, int]:
        """Format and group of an expert's gate, up or down."""
        found = self._first(lambda match: match in ("experts", f"experts.{role}"))
        if found is not None:
            return found
        return self.recipe.experts, self.recipe.group_of(self.recipe.experts)

    def of_dense(self, name: str, kind: str) -> tuple[str, int]:
        """Format and group of a dense matrix of class `kind`."""
        found = self._first(lambda match: match == kind or fnmatchcase(name, match))
        if found is not None:
            return found
        format = self.recipe.dense
        if kind == "head" and self.recipe.head is not None:
            format = self.recipe.head
        return format, self.recipe.group_of(format)

    def _first(self, matches: Any) -> tuple[str, int] | None:
        found: int | None = None
        for number, rule in enumerate(self.recipe.rules):
            if not matches(rule.match):
                continue
            if found is None:
                found = number
                self.used.add(number)
            else:
                self.shadowed.setdefault(number, found)
        if found is None:
            return None
        rule = self.recipe.rules[found]
        return rule.format, rule.group

    def require_used(self, source: Path) -> None:
        """Raise ConfigError for a rule that decided nothing."""
        for number, rule in enumerate(self.recipe.rules):
            if number in self.used:
                continue
            where = f"rule {number + 1}, `{rule.match}`"
            if number in self.shadowed:
                earlier = self.recipe.rules[self.shadowed[number]]
                raise ConfigError(
                    f"{where}, never counts: `{earlier.match}` before it matches the same tensors\n"
                    "hint: the first rule that matches a tensor counts; put narrow rules first"
                )
            raise ConfigError(
                f"{where}, matches nothing that can be stored otherwise: {source}\n"
                f"expected a class ({', '.join((*DENSE_CLASSES, *EXPERT_CLASSES))}) or a pattern "
                "of dense matrix names\n"
                "hint: vectors, routers and tables read by row stay as they are; experts are "
                "chosen by class, for all layers alike"
            )


def read_recipe(path: Path) -> Recipe:
    """Read a recipe file, TOML or JSON by its suffix.

    Keys: `preset` to start from; `experts`, `dense`, `head`, `group`; and `rules`, a list of
    `{match, format, group}`, the group for q4 only.

    Raises:
        ConfigError: the file cannot be read, or a key is unknown, or a value out of range.
    """
    content = _parse(path)
    known = ("preset", "experts", "dense", "head", "group", "rules")
    _require_known(content, known, str(path))
    preset = content.get("preset", "balanced")
    if preset not in PRESETS:
        raise ConfigError(
            f"{path}: unknown preset {preset!r}\nexpected one of {', '.join(PRESETS)}"
        )
    base = PRESETS[preset]
    changes = {key: content[key] for key in ("experts", "dense", "head", "group") if key in content}
    try:
        recipe = replace(base, **changes)
        rules = _rules(content.get("rules", []), recipe.group, path)
        return replace(recipe, rules=rules)
    except (ConfigError, TypeError) as error:
        text = str(error)
        raise ConfigError(text if text.startswith(str(path)) else f"{path}: {text}") from None


def _rules(content: Any, group: int, path: Path) -> tuple[Rule, ...]:
    if not isinstance(content, list) or not all(isinstance(rule, dict) for rule in content):
        raise ConfigError(f"{path}: `rules` is no list of tables")
    rules: list[Rule] = []
    for number, entry in enumerate(content, 1):
        where = f"{path}: rule {number}"
        _require_known(entry, ("match", "format", "group"), where)
        match, format = entry.get("match"), entry.get("format")
        if not isinstance(match, str) or not match or not isinstance(format, str):
            raise ConfigError(f"{where}: expected `match` and `format`, got {entry!r}")
        if "group" in entry and format != "q4":
            raise ConfigError(f"{where}: `group` does nothing: it is q4's, not {format}'s")
        if any(rule.match == match for rule in rules):
            raise ConfigError(f"{where}: there is a rule for `{match}` already")
        default = Recipe(group=group).group_of(format)
        try:
            rules.append(Rule(match, format, entry.get("group", default)))
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
    return tuple(rules)


def _require_known(content: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    strange = sorted(set(content) - set(known))
    if strange:
        raise ConfigError(f"{where}: unknown key `{strange[0]}`\nexpected {', '.join(known)}")


def _parse(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
        content = tomllib.loads(text) if path.suffix == ".toml" else json.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read recipe {path}: {error.strerror}") from error
    except ValueError as error:
        kind = "TOML" if path.suffix == ".toml" else "JSON"
        raise ConfigError(f"{path}: no {kind}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: expected one object, got {type(content).__name__}")
    return content
