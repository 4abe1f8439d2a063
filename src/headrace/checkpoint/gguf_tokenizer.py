"""Tokenizers across the border of GGUF: vocabulary and merges are in a file, the pre-tokenizer by
name.

One direction makes the text of a Hugging Face `tokenizer.json`, so that one tokenizer serves every
kind of checkpoint; the other makes the metadata of a file. Byte-level BPE vocabularies (`gpt2`)
only.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_header import GgufHeader
from headrace.errors import CheckpointError, UnsupportedModelError

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

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
    """

    steps: list[dict[str, Any]]
    ignore_merges: bool = False
    has_nfc: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WHOLE_BYTE_LEVEL = {**_BYTE_LEVEL, "use_regex": True}
_PLAIN_BYTE_LEVEL = {**_BYTE_LEVEL, "use_regex": False}

# GGUF stores the name of a pre-tokenizer, not its rule. Each rule is the one in the
# `tokenizer.json` of the models that carry the name.
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "smollm": PreTokenizer(
        [{"type": "Digits", "individual_digits": True}, _WHOLE_BYTE_LEVEL],
    ),
    "gpt-2": PreTokenizer([_WHOLE_BYTE_LEVEL]),
    "olmo": PreTokenizer([_WHOLE_BYTE_LEVEL], has_nfc=True),
    "llama-bpe": PreTokenizer(
        [
            _split(
                _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            _PLAIN_BYTE_LEVEL,
        ],
        ignore_merges=True,
    ),
    "qwen2": PreTokenizer(
        [
            _split(
                _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
                r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
            ),
            _PLAIN_BYTE_LEVEL,
        ],
        has_nfc=True,
    ),
}


def tokenizer_json(header: GgufHeader) -> str:
    """The text of the `tokenizer.json` that this vocabulary came from.

    Raises:
        CheckpointError: vocabulary, types or merges are missing or inconsistent.
        UnsupportedModelError: another kind of vocabulary, or an unknown pre-tokenizer.
    """
    metadata = header.metadata
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if model != "gpt2" or not isinstance(pre, str) or pre not in PRE_TOKENIZERS:
        raise UnsupportedModelError(
            f"GGUF tokenizer {model!r} with pre-tokenizer {pre!r} is not supported: {header.path}\n"
            f"expected 'gpt2' with {', '.join(map(repr, PRE_TOKENIZERS))}"
        )
    tokens = _strings(header, "tokenizer.ggml.tokens")
    merges = _strings(header, "tokenizer.ggml.merges")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
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
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added_tokens(tokens, types),
            "normalizer": {"type": "NFC"} if PRE_TOKENIZERS[pre].has_nfc else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[pre].steps},
            "post_processor": _post_processor(header, tokens),
            "decoder": {**_BYTE_LEVEL, "use_regex": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "ignore_merges": PRE_TOKENIZERS[pre].ignore_merges,
                "vocab": vocab,
                "merges": [_pair(header, merge, vocab) for merge in merges],
            },
        }
    )


def tokenizer_config(header: GgufHeader) -> dict[str, Any]:
    """Special tokens by name and the chat template, as `tokenizer_config.json` has them."""
    metadata = header.metadata
    tokens = _strings(header, "tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    config: dict[str, Any] = {}
    for name, key in names.items():
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
        {"id": i, "content": token, **plain, "special": kind != _USER_DEFINED}
        for i, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
    ]


def _post_processor(header: GgufHeader, tokens: list[str]) -> dict[str, Any] | None:
    """Put the beginning-of-text token before a plain prompt if the file asks for it."""
    if not header.metadata.get("tokenizer.ggml.add_bos_token", False):
        return None
    token_id = _token_id(header, "bos", len(tokens))
    bos = {"SpecialToken": {"id": tokens[token_id], "type_id": 0}}
    text = [{"Sequence": {"id": part, "type_id": i}} for i, part in enumerate("AB")]
    special = {"id": tokens[token_id], "ids": [token_id], "tokens": [tokens[token_id]]}
    return {
        "type": "TemplateProcessing",
        "single": [bos, text[0]],
        "pair": [bos, *text],
        "special_tokens": {tokens[token_id]: special},
    }


def _pair(header: GgufHeader, merge: str, vocab: Mapping[str, int]) -> list[str]:
    left, _, right = merge.partition(" ")
    if left not in vocab or right not in vocab or left + right not in vocab:
        raise CheckpointError(
            f"GGUF merge {merge[:80]!r} is not made of tokens of the vocabulary: {header.path}"
        )
    return [left, right]


# The other direction


def vocabulary_metadata(
    tokenizer: Mapping[str, Any], vocab_size: int, where: Path
) -> dict[str, Any]:
    """State a `tokenizer.json` as the metadata of a GGUF file.

    Args:
        tokenizer: content of the file, which the `tokenizers` library has read without complaint.
        vocab_size: rows of the embedding. Ids without a token become unused ones, `[PAD7]`.
        where: the checkpoint, for messages.

    Raises:
        UnsupportedModelError: the vocabulary, or the way text is cut before it, has no name in GGUF
            here; or the tokenizer has more ids than the embedding.
    """
    model = tokenizer["model"]
    _require_byte_level(tokenizer, where)
    pre = _pre_tokenizer_name(tokenizer, where)
    added = {int(t["id"]): t for t in tokenizer.get("added_tokens") or ()}
    texts = {**{i: text for text, i in model["vocab"].items()}}
    texts |= {i: token["content"] for i, token in added.items()}
    if max(texts) >= vocab_size:
        raise UnsupportedModelError(
            f"the tokenizer has more ids than the embedding has rows: {where}\n"
            f"expected ids below {vocab_size}, got {max(texts)}"
        )
    types = [
        _UNUSED if i not in texts else _NORMAL if i not in added else _added_type(added[i])
        for i in range(vocab_size)
    ]
    first, last = _surrounding_tokens(tokenizer, where)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": [texts.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [_merge_text(merge) for merge in model["merges"]],
        "tokenizer.ggml.add_bos_token": first is not None,
        "tokenizer.ggml.add_eos_token": last is not None,
    }
    ids = {text: i for i, text in texts.items()}
    if first is not None:
        metadata["tokenizer.ggml.bos_token_id"] = ids[first]
    if last is not None:
        metadata["tokenizer.ggml.eos_token_id"] = ids[last]
    return metadata


def _added_type(token: Mapping[str, Any]) -> int:
    return _CONTROL if token.get("special") else _USER_DEFINED


def _merge_text(merge: str | Sequence[str]) -> str:
    """`tokenizer.json` writes a merge as one text or as a pair."""
    return merge if isinstance(merge, str) else " ".join(merge)


def _require_byte_level(tokenizer: Mapping[str, Any], where: Path) -> None:
    """Refuse a vocabulary that is not what GGUF calls `gpt2`."""
    model = tokenizer["model"]
    kind = model.get("type", "unknown")
    strange = [
        name
        for name in ("byte_fallback", "continuing_subword_prefix", "end_of_word_suffix", "dropout")
        if model.get(name)
    ]
    decoder = (tokenizer.get("decoder") or {}).get("type")
    normalizer = (tokenizer.get("normalizer") or {}).get("type")
    if kind == "BPE" and not strange and decoder == "ByteLevel" and normalizer in (None, "NFC"):
        return
    raise UnsupportedModelError(
        f"tokenizer cannot be written to a GGUF file: {where}\n"
        f"expected byte-level BPE without a normalizer other than NFC, got {kind}"
        f"{' with ' + ', '.join(strange) if strange else ''}, decoder {decoder}, "
        f"normalizer {normalizer}\n"
        "hint: sentencepiece vocabularies (Llama 2, Mixtral) need llama.cpp's own converter"
    )


def _pre_tokenizer_name(tokenizer: Mapping[str, Any], where: Path) -> str:
    """The name under which llama.cpp cuts text the same way."""
    steps = list(_canonical_steps(tokenizer.get("pre_tokenizer")))
    ignore_merges = bool(tokenizer["model"].get("ignore_merges"))
    has_nfc = tokenizer.get("normalizer") is not None
    names = [
        name
        for name, known in PRE_TOKENIZERS.items()
        if [*_canonical_steps({"type": "Sequence", "pretokenizers": known.steps})] == steps
        and known.ignore_merges == ignore_merges
    ]
    for name in names:
        if PRE_TOKENIZERS[name].has_nfc == has_nfc:
            return name
    if names:
        return names[0]  # llama.cpp does not normalise under any of these names
    raise UnsupportedModelError(
        f"pre-tokenizer has no known name in GGUF: {where}\n"
        f"expected that of {', '.join(PRE_TOKENIZERS)}, "
        f"got {steps}, ignore_merges {ignore_merges}"
    )


def _canonical_steps(pre_tokenizer: Mapping[str, Any] | None) -> Iterator[tuple[Any, ...]]:
    """The steps of a pre-tokenizer without what does not change ids."""
    if pre_tokenizer is None:
        return
    kind = pre_tokenizer["type"]
    if kind == "Sequence":
        for step in pre_tokenizer["pretokenizers"]:
            yield from _canonical_steps(step)
    elif kind == "ByteLevel":
        use_regex = pre_tokenizer.get("use_regex", True)
        yield kind, bool(pre_tokenizer.get("add_prefix_space", True)), bool(use_regex)
    elif kind == "Split":
        pattern = tuple(pre_tokenizer["pattern"].items())
        yield kind, pattern, pre_tokenizer["behavior"], bool(pre_tokenizer.get("invert"))
    else:
        yield kind, *sorted((k, v) for k, v in pre_tokenizer.items() if k != "type")


def _surrounding_tokens(tokenizer: Mapping[str, Any], where: Path) -> tuple[str | None, str | None]:
    """The special tokens put before and after a plain text, if any."""
    processor = tokenizer.get("post_processor") or {"type": "ByteLevel"}
    for part in processor.get("processors", [processor]):
        if part["type"] == "ByteLevel":
            continue
        single = part.get("single") if part["type"] == "TemplateProcessing" else None
        names = [piece.get("SpecialToken", {}).get("id") for piece in single or ()]
        if single is None or names.count(None) != 1 or len(names) > 3 or names.index(None) > 1:
            raise UnsupportedModelError(
                f"post-processor cannot be written to a GGUF file: {where}\n"
                f"expected at most one token before a text and one after it, "
                f"got {part['type']} {names}"
            )
        at = names.index(None)
        if len(names) - at > 2:
            raise UnsupportedModelError(
                f"post-processor puts {len(names) - at - 1} tokens after a text: {where}\n"
                "expected at most one: a GGUF file states no more"
            )
        return (names[0] if at else None), (names[-1] if at + 1 < len(names) else None)
    return None, None
