"""Settings that `headrace tune` found faster for one model on one machine, and when they hold.

One small file per model in the user's cache directory, with an entry per machine. It is advice: a
file that is missing, damaged or of another machine is put aside with one logged line and never
stops a run, and an option that was given wins.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeAlias

import platformdirs

from headrace.checkpoint import Checkpoint
from headrace.config import EngineConfig, ExpertConfig
from headrace.drive import find_drive
from headrace.errors import ConfigError
from headrace.experts.history import write_atomically
from headrace.experts.reading import Reading
from headrace.machine import ROOT, memory_info, processor_name
from headrace.metrics import format_bytes, resident_bytes
from headrace.plan import MemoryPlan, auto_ceiling

_log = logging.getLogger(__name__)

FORMAT = "headrace tuned"
FORMAT_VERSION = 1
ENGINE_FIELDS = ("threads", "chunk", "slots")
EXPERT_FIELDS = ("readers", "block_bytes", "read_ahead", "policy", "lookahead")
MEMORY_FIELDS = ("chunk", "slots", "policy")
"""What was best with one ceiling and says nothing about another."""
SAME_MEMORY = 0.1
"""Ceilings closer than this are the same: `auto` gives another one at every start."""
_MAX_FILE_BYTES = 1 << 20

Settings: TypeAlias = Mapping[str, int | str]


@dataclass(frozen=True)
class Tuned:
    """What was found, and where it holds."""

    ceiling_bytes: int
    settings: dict[str, int | str]
    seconds_before: float  # of the measured task
    seconds_after: float
    tuned_at: float  # seconds since 1970


def machine_identity(checkpoint: Checkpoint, root: Path = ROOT) -> str:
    """What must be the same for a setting to hold: processor, memory, and the records' drive."""
    memory = memory_info(root).get("MemTotal", 0) >> 20
    drive = "none"
    if checkpoint.records is not None:
        try:
            drive = find_drive(checkpoint.records.files[0]).identity
        except OSError:
            drive = "not known"
    return f"{processor_name(root)} x {os.cpu_count()}, {memory} MiB, {drive}"


def default_path(fingerprint: str) -> Path:
    """Return where the settings for a model are kept."""
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
    return Path(platformdirs.user_cache_dir("headrace")) / "tuned" / f"{name}.json"


def save_tuned(path: Path, fingerprint: str, machine: str, tuned: Tuned) -> None:
    """Keep an entry beside those of other machines; atomic.

    Raises:
        OSError: the file cannot be written.
    """
    machines = {name: asdict(entry) for name, entry in _read(path, fingerprint).items()}
    content = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "fingerprint": fingerprint,
        "machines": machines | {machine: asdict(tuned)},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(content, indent=1).encode())


def apply_tuned(
    config: EngineConfig, checkpoint: Checkpoint, *, path: Path | None = None, root: Path = ROOT
) -> tuple[EngineConfig, Settings]:
    """Fill in what the caller left at its default, where an entry fits model, machine and memory.

    Args:
        config: as asked for; options given win, each by itself.
        checkpoint: opened.
        path: the file; None is the user's.
        root: where `proc` is found.

    Returns:
        The config to run with, and the tuned settings in it.
    """
    if not config.tuned:
        return config, {}
    entries = _read(path or default_path(checkpoint.fingerprint), checkpoint.fingerprint)
    if not entries:
        return config, {}
    entry = entries.get(machine_identity(checkpoint, root))
    if entry is None:
        _log.warning("tuned settings are of another machine and are not used; `headrace tune`")
        return config, {}
    settings = _fitting(entry, config)
    taken = {name: value for name, value in settings.items() if is_open(config, name)}
    try:
        return with_settings(config, taken), taken
    except ConfigError as error:
        _log.warning("tuned settings not used: %s", str(error).splitlines()[0])
        return config, {}


def _fitting(entry: Tuned, config: EngineConfig) -> Settings:
    """The settings that hold for this ceiling."""
    ceiling = auto_ceiling(resident_bytes() or 0) if config.memory == "auto" else config.memory
    if abs(ceiling - entry.ceiling_bytes) <= SAME_MEMORY * entry.ceiling_bytes:
        return entry.settings
    dropped = [name for name in entry.settings if name in MEMORY_FIELDS]
    if dropped:
        _log.warning(
            "tuned %s not used: found with %s of memory, now it is %s",
            ", ".join(dropped), format_bytes(entry.ceiling_bytes), format_bytes(ceiling),
        )  # fmt: skip
    return {name: value for name, value in entry.settings.items() if name not in dropped}


def is_open(config: EngineConfig, name: str) -> bool:
    """Whether the caller left a field at its default."""
    owner: Any = config if name in ENGINE_FIELDS else config.experts
    default = next(item.default for item in fields(owner) if item.name == name)
    return bool(getattr(owner, name) == default)


def with_settings(config: EngineConfig, settings: Settings) -> EngineConfig:
    """Return a config with these settings in it.

    Raises:
        ConfigError: one is out of range.
    """
    engine: dict[str, Any] = {n: v for n, v in settings.items() if n in ENGINE_FIELDS}
    experts: dict[str, Any] = {n: v for n, v in settings.items() if n in EXPERT_FIELDS}
    return replace(config, experts=_replaced(config.experts, experts), **engine)


def _replaced(config: ExpertConfig, settings: dict[str, Any]) -> ExpertConfig:
    return replace(config, **settings)


def name_source(reading: Reading, settings: Settings) -> Reading:
    """Say that the readers come from here, not from the caller."""
    return replace(reading, source="tuned") if "readers" in settings else reading


def with_tuned(plan: MemoryPlan, settings: Settings) -> MemoryPlan:
    """Return the plan with a note on the tuned settings in it."""
    if not settings:
        return plan
    return replace(plan, notes=(*plan.notes, f"tuned: {describe_settings(settings)}"))


def describe_settings(settings: Settings) -> str:
    """Write settings for people."""
    shown = {
        name: format_bytes(value) if name == "block_bytes" and isinstance(value, int) else value
        for name, value in settings.items()
    }
    return ", ".join(f"{name.replace('_', '-')} {value}" for name, value in shown.items())


def _read(path: Path, fingerprint: str) -> dict[str, Tuned]:
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
        return _parse(json.loads(path.read_bytes()), fingerprint)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        _log.warning("tuned settings ignored: %s: %s", path, error)
        return {}


def _parse(content: object, fingerprint: str) -> dict[str, Tuned]:
    """Check a parsed file; ValueError says what is wrong."""
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ValueError("not a file of this kind")
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(f"version {content.get('version')!r}, expected {FORMAT_VERSION}")
    if content.get("fingerprint") != fingerprint:
        raise ValueError("of another model")
    machines = content.get("machines")
    if not isinstance(machines, dict):
        raise ValueError("`machines` is missing")
    return {str(name): _entry(value) for name, value in machines.items()}


def _entry(value: Any) -> Tuned:
    if not isinstance(value, dict) or set(value) != {item.name for item in fields(Tuned)}:
        raise ValueError("an entry has other fields")
    entry = Tuned(**value)
    numbers = (entry.seconds_before, entry.seconds_after, entry.tuned_at)
    if (
        type(entry.ceiling_bytes) is not int
        or entry.ceiling_bytes <= 0
        or not all(type(x) in (int, float) for x in numbers)
        or not isinstance(entry.settings, dict)
        or not set(entry.settings) <= {*ENGINE_FIELDS, *EXPERT_FIELDS}
        or not all(type(x) in (int, str) for x in entry.settings.values())
    ):
        raise ValueError("an entry holds a value out of range")
    return entry
