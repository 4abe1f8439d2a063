"""Rebuilds a tokenizer from a GGUF file: vocabulary and merges are in it, the pre-tokenizer by
name.

The result is the text of a Hugging Face `tokenizer.json`, so that one tokenizer serves every kind
of checkpoint. Byte-level BPE vocabularies (`gpt2`) and sentencepiece ones (`llama`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from headrace.checkpoint.gguf_header import GgufHeader
from headrace.checkpoint.gguf_sentencepiece import merges_of_scores, sentencepiece_rules
from headrace.errors import CheckpointError, UnsupportedModelError


class TokenType(IntEnum):
    """What an entry of `tokenizer.ggml.token_type` says."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


@dataclass(frozen=True)
class PreTokenizer:
    """What a name in `tokenizer.ggml.pre` stands for.

    Attributes:
        steps: as in a `tokenizer.json`.
        ignore_merges: a piece that is itself a token is taken whole, before any merge.
        has_nfc: text is normalised first. llama.cpp never does; text that is not NFC differs there.
        adds_bos: a file that does not say whether a text begins with the bos token means that it
            does.
    """

    steps: list[dict[str, Any]]
    ignore_merges: bool = False
    has_nfc: bool = False
    adds_bos: bool = False


_WHOLE_BYTE_LEVEL = {**_BYTE_LEVEL, "use_regex": True}
_PLAIN_BYTE_LEVEL = {**_BYTE_LEVEL, "use_regex": False}

# Pieces of the patterns below.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
_LINES_AND_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_SIGNS = r"| ?[^\s\p{L}\p{N}]+[\r\n]*" + _LINES_AND_SPACES
_SIGNS_OR_SLASHES = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*" + _LINES_AND_SPACES
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased_words(ending: str) -> str:
    """Words cut before a capital letter, each with an `ending` that may follow."""
    before = r"[^\r\n\p{L}\p{N}]?"
    return f"{before}{_UPPER}*{_LOWER}+{ending}|{before}{_UPPER}+{_LOWER}*{ending}|"


_THREE_DIGITS = _split(_CONTRACTIONS + _WORDS + r"\p{N}{1,3}" + _SIGNS)
_ONE_DIGIT = _split(_CONTRACTIONS + _WORDS + r"\p{N}" + _SIGNS)
_CASED = _split(_cased_words(_CONTRACTIONS + "?") + r"\p{N}{1,3}" + _SIGNS_OR_SLASHES)

# GGUF stores the name of a pre-tokenizer, not its rule. Each rule is the one in the
# `tokenizer.json` of the models that carry the name.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer(
        [{"type": "Digits", "individual_digits": True}, _WHOLE_BYTE_LEVEL],
    ),
    "gpt-2": PreTokenizer([_WHOLE_BYTE_LEVEL]),
    "olmo": PreTokenizer([_WHOLE_BYTE_LEVEL], has_nfc=True),
    "llama-bpe": PreTokenizer(
        [_THREE_DIGITS, _PLAIN_BYTE_LEVEL], ignore_merges=True, adds_bos=True
    ),
    "glm4": PreTokenizer([_THREE_DIGITS, _PLAIN_BYTE_LEVEL], ignore_merges=True),
    "dbrx": PreTokenizer([_THREE_DIGITS, _PLAIN_BYTE_LEVEL]),
    "qwen2": PreTokenizer([_ONE_DIGIT, _PLAIN_BYTE_LEVEL], has_nfc=True),
    "hunyuan": PreTokenizer([_ONE_DIGIT, _PLAIN_BYTE_LEVEL]),
    "qwen35": PreTokenizer(
        [
            _split(
                _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}"
                r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + _LINES_AND_SPACES
            ),
            _PLAIN_BYTE_LEVEL,
        ],
        has_nfc=True,
    ),
    "gpt-4o": PreTokenizer([_CASED, _PLAIN_BYTE_LEVEL], ignore_merges=True),
    "minimax-m2": PreTokenizer([_CASED, _PLAIN_BYTE_LEVEL]),
    "tekken": PreTokenizer(
        [_split(_cased_words("") + r"\p{N}" + _SIGNS_OR_SLASHES), _PLAIN_BYTE_LEVEL],
        ignore_merges=True,
        adds_bos=True,
    ),
    "deepseek-v3": PreTokenizer(
        [
            _split(r"\p{N}{1,3}"),
            _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            _split(
                r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
                "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
                "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
            _PLAIN_BYTE_LEVEL,
        ],
    ),
}

SPECIAL_TOKENS: Mapping[str, str] = {
    "bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator",
    "cls": "cls", "mask": "mask", "eot": "eot", "eom": "eom",
    **{name: name for name in ("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep")},
}  # fmt: skip
"""`{name}_token` of a `tokenizer_config.json` -> `tokenizer.ggml.{key}_token_id`, spelt so."""
END_TOKENS = ("eos", "eot", "eom")
"""Those that end a text, one each: of a turn, and of a message that asks for a tool."""

SAME_RULE: Mapping[str, str] = {
    "llama3": "llama-bpe",
    "llama-v3": "llama-bpe",
    "glm5": "glm4",
    "chatglm-bpe": "dbrx",
    "smaug-bpe": "dbrx",
    "deepseek-r1-qwen": "qwen2",
    "refact": "smollm",
    "starcoder": "smollm",
    "phi-2": "gpt-2",
    "joyai-llm": "deepseek-v3",
    "hunyuan-dense": "deepseek-v3",
}
"""Further names in files of other tools and times; llama.cpp cuts text as for the second name."""


def tokenizer_json(header: GgufHeader) -> str:
    """The text of the `tokenizer.json` that this vocabulary came from.

    Raises:
        CheckpointError: vocabulary, types or merges are missing or inconsistent.
        UnsupportedModelError: another kind of vocabulary, or an unknown pre-tokenizer.
    """
    metadata = header.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "llama" and (
        kind != "gpt2" or not isinstance(pre, str) or SAME_RULE.get(pre, pre) not in PRE_TOKENIZERS
    ):
        names = ", ".join(map(repr, [*PRE_TOKENIZERS, *SAME_RULE]))
        raise UnsupportedModelError(
            f"GGUF tokenizer {kind!r} with pre-tokenizer {pre!r} is not supported: {header.path}\n"
            f"expected 'llama', or 'gpt2' with {names}"
        )
    tokens = _strings(header, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [TokenType.NORMAL] * len(tokens))
    if not isinstance(types, list) or len(types) != len(tokens):
        raise CheckpointError(
            f"GGUF vocabulary is inconsistent: {header.path}\n"
            f"expected a type for each of {len(tokens)} tokens"
        )
    vocab = {token: i for i, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise CheckpointError(
            f"GGUF vocabulary has {len(tokens) - len(vocab)} tokens twice: {header.path}"
        )
    parts = (
        _sentencepiece_parts(header, tokens, types)
        if kind == "llama"
        else _byte_level_parts(header, str(pre), vocab)
    )
    adds_bos = kind == "llama" or PRE_TOKENIZERS[SAME_RULE.get(str(pre), str(pre))].adds_bos
    model = {
        "type": "BPE",
        "dropout": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "vocab": vocab,
        **parts.pop("model"),
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added_tokens(tokens, types),
        "post_processor": _post_processor(header, tokens, adds_bos),
        **parts,
        "model": model,
    }
    return json.dumps(content)


def _byte_level_parts(header: GgufHeader, pre: str, vocab: Mapping[str, int]) -> dict[str, Any]:
    known = PRE_TOKENIZERS[SAME_RULE.get(pre, pre)]
    merges = _strings(header, "tokenizer.ggml.merges")
    return {
        "normalizer": {"type": "NFC"} if known.has_nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": known.steps},
        "decoder": _WHOLE_BYTE_LEVEL,
        "model": {
            "unk_token": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": known.ignore_merges,
            "merges": [_pair(header, merge, vocab) for merge in merges],
        },
    }


def _sentencepiece_parts(header: GgufHeader, tokens: list[str], types: list[int]) -> dict[str, Any]:
    scores = header.metadata.get("tokenizer.ggml.scores")
    if not isinstance(scores, list) or len(scores) != len(tokens):
        raise CheckpointError(
            f"GGUF vocabulary is inconsistent: {header.path}\n"
            f"expected a score for each of {len(tokens)} tokens"
        )
    normal = {
        token: float(score)
        for token, score, kind in zip(tokens, scores, types, strict=True)
        if kind == TokenType.NORMAL
    }
    unknown = [t for t, kind in zip(tokens, types, strict=True) if kind == TokenType.UNKNOWN]
    has_prefix = bool(header.metadata.get("tokenizer.ggml.add_space_prefix", True))
    return {
        **sentencepiece_rules(has_prefix),
        "pre_tokenizer": None,
        "model": {
            "unk_token": unknown[0] if unknown else None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "merges": merges_of_scores(normal),
        },
    }


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Special tokens by name and the chat template, as `tokenizer_config.json` has them."""
    metadata = header.metadata
    tokens = _strings(header, "tokenizer.ggml.tokens")
    config: dict[str, Any] = {}
    for name, key in SPECIAL_TOKENS.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if token is not None:
            config[f"{name}_token"] = tokens[_token_id(header, key, len(tokens))]
    template = metadata.get("tokenizer.chat_template")
    if isinstance(template, str):
        config["chat_template"] = template
    return config


def _strings(header: GgufHeader, key: str) -> list[str]:
    value = header.metadata.get(key)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise CheckpointError(
            f"GGUF metadata key `{key}` is missing or no list of texts: {header.path}"
        )
    return value


def _token_id(header: GgufHeader, key: str, vocab_size: int) -> int:
    name = f"tokenizer.ggml.{key}_token_id"
    value = header.metadata.get(name)
    if not isinstance(value, int) or not 0 <= value < vocab_size:
        raise CheckpointError(
            f"GGUF metadata key `{name}` is no token: {header.path}\n"
            f"expected 0 to {vocab_size - 1}, got {value!r}"
        )
    return value


def _added_tokens(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    """Control tokens are special; user-defined ones are matched first but shown as text."""
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": i, "content": token, **plain, "special": kind != TokenType.USER_DEFINED}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (TokenType.UNKNOWN, TokenType.CONTROL, TokenType.USER_DEFINED)
    ]


def _post_processor(header: GgufHeader, tokens: list[str], adds_bos: bool) -> dict[str, Any] | None:
    """Put the tokens before and after a plain prompt that the file, or its silence, asks for."""
    before = ["bos"] if header.metadata.get("tokenizer.ggml.add_bos_token", adds_bos) else []
    after = ["eos"] if header.metadata.get("tokenizer.ggml.add_eos_token", False) else []
    if not before + after:
        return None
    ids = {key: _token_id(header, key, len(tokens)) for key in before + after}
    first, last = (
        [{"SpecialToken": {"id": tokens[ids[key]], "type_id": 0}} for key in keys]
        for keys in (before, after)
    )
    one, two = ({"Sequence": {"id": part, "type_id": i}} for i, part in enumerate("AB"))
    return {
        "type": "TemplateProcessing",
        "single": [*first, one, *last],
        "pair": [*first, one, two, *last],
        "special_tokens": {
            tokens[i]: {"id": tokens[i], "ids": [i], "tokens": [tokens[i]]} for i in ids.values()
        },
    }


def _pair(header: GgufHeader, merge: str, vocab: Mapping[str, int]) -> list[str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise CheckpointError(
            f"GGUF merge {merge[:80]!r} is not made of tokens of the vocabulary: {header.path}"
        )
    return [left, right]
