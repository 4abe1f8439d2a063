"""Reads a checkpoint's `config.json` field by field, and accounts for every one of them.

A reader takes the fields it understands. What is left at the end must be known to be harmless, or
the config is refused: a field nobody read may be the one that changes the result.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from headrace.errors import ConfigError, UnsupportedModelError

# Fields that do not change what a model computes at inference, by reason. They are the keys that
# the published checkpoints of the supported families carry.
HARMLESS = {
    "who wrote the file, and with what": (
        "architectures _name_or_path _commit_hash transformers_version transformers.js_config "
        "model_max_length unsloth_version unsloth_fixed unsloth_training_used is_llama_config "
        "tokenizer_class name_or_path"
    ),
    "how weights were stored or loaded; the tensors themselves say it": (
        "torch_dtype dtype use_bfloat16 _attn_implementation_autoset _attn_implementation "
        "attn_implementation experts_implementation _experts_implementation quantization_config"
    ),
    "training only": (
        "initializer_range attention_dropout hidden_dropout resid_pdrop embd_pdrop "
        "router_aux_loss_coef router_z_loss_coef router_jitter_noise output_router_logits "
        "problem_type id2label label2id gradient_checkpointing"
    ),
    "what the caller asks of another library": (
        "use_cache return_dict output_attentions output_hidden_states torchscript "
        "chunk_size_feed_forward is_encoder_decoder cache_implementation"
    ),
    "slices the same product to match training hardware": "pretraining_tp",
    "token ids that only text handling uses": "bos_token_id pad_token_id unk_token_id sep_token_id",
    "extra prediction layers: kept in the checkpoint, not part of the main model": (
        "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_modules "
        "mtp_use_dedicated_embeddings"
    ),
}
_HARMLESS_NAMES = frozenset(name for names in HARMLESS.values() for name in names.split())

_MISSING: Any = object()


class ConfigFields:
    """One `config.json`, remembering which fields were read."""

    def __init__(self, config: Mapping[str, Any], where: str = "config.json") -> None:
        self._config = config
        self._where = where
        self._read: set[str] = set()

    def value(self, *names: str, default: Any = _MISSING) -> Any:
        """The field under the first of `names` that is present; null counts as absent.

        Raises:
            ConfigError: no name is present and there is no default, or two names disagree.
        """
        self._read.update(names)
        found = {n: self._config[n] for n in names if self._config.get(n) is not None}
        if not found:
            if default is _MISSING:
                raise ConfigError(
                    f"{self._where}: field `{names[0]}` is missing" + _also(names[1:])
                )
            return default
        first, *others = found
        for other in others:
            if found[other] != found[first]:
                raise ConfigError(
                    f"{self._where}: `{first}` and `{other}` mean the same and disagree\n"
                    f"got {found[first]!r} and {found[other]!r}"
                )
        return found[first]

    def integer(self, *names: str, default: Any = _MISSING, least: int = 1) -> int:
        """An integer field of at least `least`."""
        value = self.value(*names, default=default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 2**31:
            raise ConfigError(
                f"{self._where}: field `{names[0]}` must be an integer of at least {least}\n"
                f"got {value!r}"
            )
        return value

    def number(
        self, *names: str, default: Any = _MISSING, least: float = sys.float_info.min
    ) -> float:
        """A finite number of at least `least`; without it, above zero."""
        value = self.value(*names, default=default)
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not good or not least <= value <= sys.float_info.max:
            bound = "above 0" if least == sys.float_info.min else f"of at least {least}"
            raise ConfigError(
                f"{self._where}: field `{names[0]}` must be a finite number {bound}\ngot {value!r}"
            )
        return float(value)

    def boolean(self, *names: str, default: Any = _MISSING) -> bool:
        """A true or false field."""
        value = self.value(*names, default=default)
        if not isinstance(value, bool):
            raise ConfigError(
                f"{self._where}: field `{names[0]}` must be true or false\ngot {value!r}"
            )
        return value

    def integers(self, *names: str, default: Any = _MISSING) -> tuple[int, ...]:
        """A list of non-negative integers; a bare integer is a list of one."""
        value = self.value(*names, default=default)
        items = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(i, bool) or not isinstance(i, int) or i < 0 for i in items):
            raise ConfigError(
                f"{self._where}: field `{names[0]}` must hold non-negative integers\ngot {value!r}"
            )
        return tuple(items)

    def require(self, name: str, *allowed: Any, default: Any = _MISSING) -> None:
        """Refuse a checkpoint whose field `name` asks for something no model here computes.

        Raises:
            UnsupportedModelError: the value is none of `allowed`.
        """
        value = self.value(name, default=allowed[0] if default is _MISSING else default)
        if value not in allowed:
            wanted = " or ".join(repr(a) for a in allowed)
            raise UnsupportedModelError(
                f"{self._where}: `{name}: {value!r}` is not supported for "
                f"`{self._config.get('model_type')}`\nexpected {wanted}"
            )

    def is_set(self, name: str) -> bool:
        """Whether `name` is present and not null. Does not count as reading it."""
        return self._config.get(name) is not None

    def finish(self) -> None:
        """Account for the fields that nobody read.

        Raises:
            ConfigError: a field is neither read nor known to be harmless.
        """
        left = {n for n, v in self._config.items() if v is not None} - self._read - _HARMLESS_NAMES
        if left:
            names = ", ".join(f"`{name}`" for name in sorted(left))
            raise ConfigError(
                f"{self._where}: unknown field{'s' if len(left) > 1 else ''} {names}\n"
                "a field that is not understood may change the result\n"
                "hint: if it is known to be harmless, remove it from config.json and report it"
            )


def _also(names: tuple[str, ...]) -> str:
    return f" (also looked for {', '.join(f'`{n}`' for n in names)})" if names else ""
