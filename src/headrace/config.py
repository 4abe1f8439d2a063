"""What a caller may choose, as frozen dataclasses, each default written once.

Owns option names, defaults and their checks. It resolves nothing: "auto" becomes a number in
`plan.py`, and what a request leaves open (`None`) is filled from the model's generation_config.
"""

import math
import numbers
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from headrace.errors import ConfigError

Auto: TypeAlias = Literal["auto"]

KV_DTYPES = ("f16", "bf16", "f32", "q8")
POLICIES = ("next-use", "frequency", "slru", "lru")
HISTORY_MODES = ("write", "read", "off")
EMBEDDING_PLACES = ("auto", "resident", "drive")
LOSSY_MODES = ("expert_top_p", "expert_top_k", "cache_aware_routing", "drop_cold")
LOSSY_CHECK_EVERY = 16
LOSSY_OPTIONS = (*LOSSY_MODES, "lossy_check_every", "max_kl")
ISAS = ("auto", "scalar", "avx2", "avx-vnni", "avx512", "amx", "neon", "neon-i8mm")

TUNE_MINUTES, TUNE_TOKENS = 5.0, 48  # of all measurements; decoded in each run

# How a drive is read that nobody measured.
DEFAULT_READERS = 4
DEFAULT_BLOCK_BYTES = 1 << 20
MOST_DRIVES = 32
MOST_BYTES = (1 << 63) - 1

_UNITS = {"": 1, "B": 1}
_UNITS |= {
    prefix + suffix: factor
    for power, letter in enumerate("KMGT", start=1)
    for prefix, suffix, factor in (
        (letter, "", 1024**power),
        (letter, "IB", 1024**power),
        (letter, "B", 1000**power),
    )
}
_SIZE = re.compile(r"\s*([0-9]{1,30}(?:\.[0-9]{1,30})?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str | int) -> int:
    """Read a byte size: `1536MiB`, `2GiB`, `8G` (2^30), `8GB` (10^9) or a plain number of bytes.

    Raises:
        ConfigError: the text is no size, or not above zero.
    """
    if isinstance(text, numbers.Integral) and not isinstance(text, bool):
        value = int(text)  # a number of NumPy's, too
    else:
        match = _SIZE.fullmatch(text) if isinstance(text, str) else None
        if match is None or match[2].upper() not in _UNITS:
            raise ConfigError(
                f"not a byte size: {text!r}\n"
                "expected a number with an optional unit such as 1536MiB, 2GiB, 8G or 8GB"
            )
        value = _times(match[1], _UNITS[match[2].upper()])
    if not 0 < value <= MOST_BYTES:
        raise ConfigError(f"a byte size must be above zero and at most 2^63 - 1, got `{text}`")
    return value


def _times(number: str, factor: int) -> int:
    """A decimal number times a factor, exactly; a float would round large ones, or overflow."""
    whole, _, fraction = number.partition(".")
    parts: int = 10 ** len(fraction)
    return int(whole) * factor + int(fraction or "0") * factor // parts


def parse_memory(text: str | int) -> int | Auto:
    """Read a memory ceiling: `auto`, or what `parse_bytes` takes."""
    return "auto" if text == "auto" else parse_bytes(text)


def _require(condition: bool, name: str, expected: str, got: object) -> None:
    if not condition:
        raise ConfigError(f"option `{name}` is out of range\nexpected {expected}, got {got!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


@dataclass(frozen=True)
class ExpertConfig:
    """How experts are read and remembered; never changes a token."""

    readers: int | Auto = field(
        default="auto",
        metadata={"help": "threads that read from the drive; auto: as measured of the drive"},
    )
    block_bytes: int | Auto = field(
        default="auto",
        metadata={"help": "largest single read; auto: as measured", "unit": "bytes"},
    )
    direct: bool | None = field(
        default=None,
        metadata={"help": "read past the page cache (O_DIRECT); as measured if not given"},
    )
    drive: tuple[Path, ...] = field(
        default=(),
        metadata={
            "help": "a folder on a further drive, with files of experts moved there, or copies "
            "that `headrace mirror stage` wrote; may be repeated"
        },
    )
    read_ahead: int = field(default=16, metadata={"help": "records of a lease read ahead of use"})
    half_life_tokens: int = field(
        default=32, metadata={"help": "tokens after which a routed count weighs half"}
    )
    policy: str = field(
        default="auto",
        metadata={
            "help": "which record to give up: next-use, frequency, slru or lru; auto replays the "
            "routing of earlier runs and takes the best"
        },
    )
    lookahead: str = field(
        default="auto",
        metadata={
            "help": "read early what the next layer will probably ask for: auto, while it is "
            "measured to pay, or off"
        },
    )
    trace: Path | None = field(
        default=None, metadata={"help": "append the routing of this run to a file"}
    )
    verify: bool = field(
        default=True, metadata={"help": "check each record's checksum after a read"}
    )
    history: str = field(
        default="write",
        metadata={"help": "routed counts of earlier runs: read and write, only read, or off"},
    )
    history_path: Path | None = field(
        default=None,
        metadata={"help": "the history file; default beside the model or in the cache"},
    )

    @property
    def num_readers(self) -> int:
        """Threads that read; what works on most drives while nothing was measured."""
        return DEFAULT_READERS if self.readers == "auto" else self.readers

    @property
    def largest_read_bytes(self) -> int:
        """Bytes of a block."""
        return DEFAULT_BLOCK_BYTES if self.block_bytes == "auto" else self.block_bytes

    @property
    def is_direct(self) -> bool:
        """Whether to ask for direct reads."""
        return self.direct is not False

    def __post_init__(self) -> None:
        _require(
            self.readers == "auto" or (_is_count(self.readers, 1) and self.readers <= 256),
            "readers", "auto or 1..256", self.readers,
        )  # fmt: skip
        _require(
            self.block_bytes == "auto"
            or (
                _is_count(self.block_bytes, 4096)
                and self.block_bytes % 4096 == 0
                and self.block_bytes <= 1 << 30
            ),
            "block_bytes", "auto or a multiple of 4096 up to 1 GiB", self.block_bytes,
        )  # fmt: skip
        _require(
            isinstance(self.drive, tuple)
            and all(isinstance(path, Path) for path in self.drive)
            and len(set(self.drive)) == len(self.drive) < MOST_DRIVES,
            "drive", f"fewer than {MOST_DRIVES} folders, each once", self.drive,
        )  # fmt: skip
        _require(
            self.verify or not self.drive,
            "verify", "True where records are read from copies (option `drive`)", self.verify,
        )  # fmt: skip
        _require(
            _is_count(self.read_ahead, 1) and self.read_ahead <= 1 << 20,
            "read_ahead", "1..1048576", self.read_ahead,
        )  # fmt: skip
        _require(
            _is_count(self.half_life_tokens, 1) and self.half_life_tokens <= 1 << 40,
            "half_life_tokens", "1..2^40",
            self.half_life_tokens,
        )  # fmt: skip
        _require(
            self.policy in ("auto", *POLICIES),
            "policy", " | ".join(("auto", *POLICIES)), self.policy,
        )  # fmt: skip
        _require(self.lookahead in ("auto", "off"), "lookahead", "auto | off", self.lookahead)
        _require(
            self.trace is None or isinstance(self.trace, Path),
            "trace", "a pathlib.Path", self.trace,
        )  # fmt: skip
        _require(self.history in HISTORY_MODES, "history", " | ".join(HISTORY_MODES), self.history)
        _require(
            self.direct is None or isinstance(self.direct, bool),
            "direct", "True, False or None", self.direct,
        )  # fmt: skip
        _require(isinstance(self.verify, bool), "verify", "True or False", self.verify)
        _require(
            self.history_path is None or isinstance(self.history_path, Path),
            "history_path", "a pathlib.Path", self.history_path,
        )  # fmt: skip
        _require(
            self.history_path is None or self.history != "off",
            "history_path", "a history that is not off", str(self.history_path),
        )  # fmt: skip


@dataclass(frozen=True)
class EngineConfig:
    """How a model is held in memory and run; only `kv` and the lossy modes can change a token."""

    memory: int | Auto = field(
        default="auto",
        metadata={
            "help": "ceiling for the whole process, such as 1536MiB or 2GiB",
            "unit": "bytes",
        },
    )
    context: int | Auto = field(
        default="auto", metadata={"help": "most tokens of prompt and answer together"}
    )
    sequences: int = field(default=1, metadata={"help": "sequences computed in one step"})
    chunk: int | Auto = field(
        default="auto", metadata={"help": "most prompt tokens computed in one step"}
    )
    slots: int | Auto = field(
        default="auto",
        metadata={"help": "most expert slots; auto: all that fit into the memory"},
    )
    tuned: bool = field(
        default=True, metadata={"help": "use what `headrace tune` found for this model here"}
    )
    kv: str = field(
        default="f16",
        metadata={
            "help": "format of keys and values: f16, bf16, f32, or q8, which takes half the bytes "
            "of f16 and is named lossy; each answers in its own way",
            "changes_tokens": True,
        },
    )
    embedding: str = field(
        default="auto",
        metadata={"help": "embedding table: resident, or read by row from the drive"},
    )
    lock_memory: bool = field(
        default=False, metadata={"help": "keep weights and expert slots from being swapped out"}
    )
    expert_top_p: float | None = field(
        default=None,
        metadata={
            "help": "lossy: while decoding, use a token's likeliest experts up to this share of "
            "their weight",
            "changes_tokens": True,
        },
    )
    expert_top_k: int | None = field(
        default=None,
        metadata={
            "help": "lossy: while decoding, use this many experts per token",
            "changes_tokens": True,
        },
    )
    cache_aware_routing: float | None = field(
        default=None,
        metadata={
            "help": "lossy: while decoding, choose as if experts in a slot were likelier by this "
            "share (0.2 is a fifth)",
            "changes_tokens": True,
        },
    )
    drop_cold: float | None = field(
        default=None,
        metadata={
            "help": "lossy: while decoding, leave out experts that are in no slot and have less "
            "than this share of a token's weight",
            "changes_tokens": True,
        },
    )
    lossy_check_every: int = field(
        default=LOSSY_CHECK_EVERY,
        metadata={
            "help": "with a lossy mode, compute one decoding step of this many exactly as well, "
            "for mean KL and flip rate",
            "changes_tokens": True,
        },
    )
    max_kl: float | None = field(
        default=None,
        metadata={
            "help": "end lossy modes when the mean KL of the checks is above this (nats)",
            "changes_tokens": True,
        },
    )
    threads: int | Auto = field(default="auto", metadata={"help": "computing threads"})
    isa: str = field(
        default="auto", metadata={"help": "instruction set of the kernels", "env": "HEADRACE_ISA"}
    )
    profile: bool = field(
        default=False, metadata={"help": "say where the time of the steps went, and what limits it"}
    )
    experts: ExpertConfig = field(default_factory=ExpertConfig)

    def __post_init__(self) -> None:
        _require(
            self.memory == "auto" or (_is_count(self.memory, 1) and self.memory <= MOST_BYTES),
            "memory", "auto or bytes", self.memory,
        )  # fmt: skip
        _require(
            self.context == "auto" or _is_count(self.context, 2), "context", "auto or 2 and more",
            self.context,
        )  # fmt: skip
        _require(_is_count(self.sequences, 1), "sequences", "1 or more", self.sequences)
        _require(
            self.chunk == "auto" or _is_count(self.chunk, 1),
            "chunk",
            "auto or 1 and more",
            self.chunk,
        )
        _require(
            self.slots == "auto" or _is_count(self.slots, 2), "slots", "auto or 2 and more",
            self.slots,
        )  # fmt: skip
        _require(isinstance(self.tuned, bool), "tuned", "True or False", self.tuned)
        _require(self.kv in KV_DTYPES, "kv", " | ".join(KV_DTYPES), self.kv)
        _require(
            self.embedding in EMBEDDING_PLACES, "embedding", " | ".join(EMBEDDING_PLACES),
            self.embedding,
        )  # fmt: skip
        _require(
            isinstance(self.lock_memory, bool), "lock_memory", "True or False", self.lock_memory
        )
        _require(
            self.threads == "auto" or (_is_count(self.threads, 1) and self.threads <= 1024),
            "threads", "auto or 1..1024", self.threads,
        )  # fmt: skip
        _require(isinstance(self.profile, bool), "profile", "True or False", self.profile)
        _require(self.isa in ISAS, "isa", " | ".join(ISAS), self.isa)
        _require(isinstance(self.experts, ExpertConfig), "experts", "an ExpertConfig", self.experts)
        self._check_lossy()

    @property
    def lossy_modes(self) -> dict[str, float | int]:
        """The lossy modes that were asked for."""
        values = {name: getattr(self, name) for name in LOSSY_MODES}
        return {name: value for name, value in values.items() if value is not None}

    def _check_lossy(self) -> None:
        for name in ("expert_top_p", "drop_cold"):
            value = getattr(self, name)
            inside = value is None or (_is_number(value) and 0 < value <= 1)
            _require(inside, name, "a number above 0, at most 1", value)
        _require(
            self.expert_top_k is None or _is_count(self.expert_top_k, 1),
            "expert_top_k", "1 or more", self.expert_top_k,
        )  # fmt: skip
        for name in ("cache_aware_routing", "max_kl"):
            value = getattr(self, name)
            inside = value is None or (_is_number(value) and 0 <= value <= 100)
            _require(inside, name, "a number from 0 to 100", value)
        _require(
            _is_count(self.lossy_check_every, 1), "lossy_check_every", "1 or more",
            self.lossy_check_every,
        )  # fmt: skip
        _require(
            self.max_kl is None or bool(self.lossy_modes), "max_kl", "a lossy mode beside it",
            self.max_kl,
        )  # fmt: skip
        _require(
            self.lossy_check_every == LOSSY_CHECK_EVERY or bool(self.lossy_modes),
            "lossy_check_every", "a lossy mode beside it", self.lossy_check_every,
        )  # fmt: skip
        _require(
            not self.lossy_modes or self.experts.trace is None, "trace",
            "a run without lossy modes: a trace tells what the router chose",
            str(self.experts.trace),
        )  # fmt: skip


def make_engine_config(base: EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    """Return `base` with fields replaced by name; a memory size may be text, such as `2GiB`.

    Raises:
        ConfigError: an option is unknown or out of range.
    """
    if base is not None and not isinstance(base, EngineConfig):
        raise ConfigError(
            f"the config is no EngineConfig\ngot {base!r}\n"
            'hint: give options by name, such as memory="2GiB"'
        )
    known = {item.name for item in fields(EngineConfig)}
    for name in options:
        if name not in known:
            raise ConfigError(
                f"unknown option `{name}`\nexpected one of {', '.join(sorted(known))}"
            )
    values = dict(options)
    if "memory" in values:
        values["memory"] = parse_memory(values["memory"])
    return replace(base or EngineConfig(), **values)


@dataclass(frozen=True)
class SamplingParams:
    """How one answer is chosen. `None` means: as the model's generation_config says, else as below.

    Logprobs are those of the model itself, before penalties and temperature.
    """

    max_tokens: int = field(
        default=256, metadata={"help": "most tokens to generate", "short": "-n"}
    )
    temperature: float | None = field(
        default=None, metadata={"help": "0 takes the likeliest token; higher is more varied"}
    )
    top_p: float | None = field(
        default=None, metadata={"help": "keep the likeliest tokens up to this probability"}
    )
    top_k: int | None = field(
        default=None, metadata={"help": "keep this many likeliest tokens; 0 keeps all"}
    )
    min_p: float | None = field(
        default=None, metadata={"help": "drop tokens below this share of the likeliest one"}
    )
    repetition_penalty: float | None = field(
        default=None, metadata={"help": "divide scores of tokens already in prompt or answer"}
    )
    presence_penalty: float = field(
        default=0.0, metadata={"help": "subtract from scores of tokens already in the answer"}
    )
    frequency_penalty: float = field(
        default=0.0, metadata={"help": "the same, once per occurrence"}
    )
    seed: int | None = field(
        default=None, metadata={"help": "same seed, same answer; drawn at random if not given"}
    )
    stop: tuple[str, ...] = field(
        default=(), metadata={"help": "end before this text appears; may be given several times"}
    )
    stop_ids: tuple[int, ...] = field(
        default=(), metadata={"help": "end at these token ids", "api_only": True}
    )
    ignore_eos: bool = field(default=False, metadata={"help": "go on past the model's end tokens"})
    logprobs: int | None = field(
        default=None,
        metadata={
            "help": "report logprobs with this many alternatives (0..20)",
            "api_only": True,
        },
    )

    def __post_init__(self) -> None:
        _require(_is_count(self.max_tokens, 1), "max_tokens", "1 or more", self.max_tokens)
        self._check_range("temperature", 0.0, 100.0)
        self._check_range("top_p", 0.0, 1.0, open_low=True)
        self._check_range("min_p", 0.0, 1.0)
        self._check_range("repetition_penalty", 0.0, 100.0, open_low=True)
        self._check_range("presence_penalty", -100.0, 100.0)
        self._check_range("frequency_penalty", -100.0, 100.0)
        _require(
            self.top_k is None or (_is_count(self.top_k, 0) and self.top_k < 1 << 31),
            "top_k", "0..2^31-1", self.top_k,
        )  # fmt: skip
        _require(
            self.seed is None or (_is_count(self.seed, 0) and self.seed < 1 << 63),
            "seed", "0..2^63-1", self.seed,
        )  # fmt: skip
        _require(
            isinstance(self.stop, tuple) and all(isinstance(s, str) and s for s in self.stop),
            "stop", "texts, none of them empty", self.stop,
        )  # fmt: skip
        _require(all(_is_unicode(s) for s in self.stop), "stop", "valid Unicode", self.stop)
        _require(
            isinstance(self.stop_ids, tuple) and all(_is_count(i, 0) for i in self.stop_ids),
            "stop_ids", "a tuple of token ids", self.stop_ids,
        )  # fmt: skip
        _require(isinstance(self.ignore_eos, bool), "ignore_eos", "True or False", self.ignore_eos)
        _require(
            self.logprobs is None or (_is_count(self.logprobs, 0) and self.logprobs <= 20),
            "logprobs", "0..20", self.logprobs,
        )  # fmt: skip

    def _check_range(self, name: str, low: float, high: float, open_low: bool = False) -> None:
        value = getattr(self, name)
        if value is None:
            return
        inside = _is_number(value) and low <= value <= high and not (open_low and value == low)
        expected = f"a number {'above' if open_low else 'from'} {low:g} to {high:g}"
        _require(inside, name, expected, value)


# What holds when neither the caller nor the model says anything.
SAMPLING_DEFAULTS: Mapping[str, float | int] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}


# Fields of a generation_config that change no token here: ids and texts that other parts read,
# lengths that the caller's `max_tokens` and the context decide, what a framework returns or caches,
# and how it batches or speculates. `do_sample` and the names above are used.
_HARMLESS_GENERATION_FIELDS = frozenset(
    {
        "_from_model_config", "transformers_version", "bos_token_id", "eos_token_id",
        "pad_token_id", "do_sample", "decoder_start_token_id", "max_length", "max_new_tokens",
        "max_time", "trust_remote_code", "chat_format", "max_window_size", "use_cache",
        "cache_implementation", "cache_config", "return_legacy_cache", "low_memory",
        "prefill_chunk_size", "compile_config", "disable_compile", "return_dict_in_generate",
        "output_attentions", "output_hidden_states", "output_scores", "output_logits",
        "num_return_sequences", "renormalize_logits", "is_assistant", "num_assistant_tokens",
        "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_early_exit",
        "assistant_lookbehind", "target_lookbehind", "prompt_lookup_num_tokens",
        "max_matching_ngram_size", "early_stopping", "length_penalty",
    }
)  # fmt: skip
# Fields that change tokens, with the values that ask for nothing; null and empty lists never do.
# `length_penalty` and `early_stopping` above only act on beams, which are named here.
_NEUTRAL_GENERATION_VALUES: Mapping[str, tuple[Any, ...]] = {
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "encoder_repetition_penalty": (1,),
    "hf_presence_penalty": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "diversity_penalty": (0,),
    "typical_p": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "penalty_alpha": (0,),
    "top_h": (1,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "guidance_scale": (1,),
    "min_length": (0,),
    "min_new_tokens": (0,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
}


def ignored_generation_fields(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a generation_config that may change tokens and that nothing here obeys.

    Fields that nobody here knows are among them: they might be of that kind.
    """
    ignored = {}
    for name, value in sorted(generation_config.items()):
        is_used = name in SAMPLING_DEFAULTS or name in _HARMLESS_GENERATION_FIELDS
        is_empty = value is None or value == [] or value == {}
        if not is_used and not is_empty and value not in _NEUTRAL_GENERATION_VALUES.get(name, ()):
            ignored[name] = value
    return ignored


@dataclass(frozen=True)
class ResolvedSampling:
    """Sampling parameters with nothing left open; what the engine works with."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logprobs: int | None


def resolve_sampling(
    params: SamplingParams, generation_config: Mapping[str, Any]
) -> ResolvedSampling:
    """Fill what `params` leaves open: from the model's generation_config, else from the defaults.

    A generation_config that gives any sampling value speaks for all of them: what it leaves out is
    neutral (temperature 1, no top-p), as its authors tested it. `do_sample: false` means greedy.

    Raises:
        ConfigError: `params` is something else, or the generation_config holds a value out of
            range.
    """
    if not isinstance(params, SamplingParams):
        raise ConfigError(f"the sampling parameters are no SamplingParams\ngot {params!r}")
    given = {
        name: generation_config[name]
        for name in SAMPLING_DEFAULTS
        if generation_config.get(name) is not None
    }
    speaks = "do_sample" in generation_config or bool(given)
    neutral = {"temperature": 1.0, "top_p": 1.0} if speaks else {}
    if generation_config.get("do_sample") is False:
        given["temperature"] = 0.0
    values = {**SAMPLING_DEFAULTS, **neutral, **given}
    opened = {name: value for name, value in values.items() if getattr(params, name) is None}
    try:
        checked = replace(params, **opened)
    except ConfigError as error:
        raise ConfigError(f"generation_config.json: {error}") from None
    return ResolvedSampling(**{f.name: getattr(checked, f.name) for f in fields(ResolvedSampling)})
