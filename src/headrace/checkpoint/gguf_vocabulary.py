"""States a Hugging Face `tokenizer.json` as the metadata of a GGUF file.

GGUF keeps a vocabulary and the name of a way to cut text, no rules. What has no name there, or
would give other ids under it, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_sentencepiece import has_space_prefix, is_byte_token, merge_scores
from headrace.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, TokenType
from headrace.errors import UnsupportedModelError


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
    added = {int(t["id"]): t for t in tokenizer.get("added_tokens") or ()}
    texts = {**{i: text for text, i in model["vocab"].items()}}
    texts |= {i: token["content"] for i, token in added.items()}
    if max(texts) >= vocab_size:
        raise UnsupportedModelError(
            f"the tokenizer has more ids than the embedding has rows: {where}\n"
            f"expected ids below {vocab_size}, got {max(texts)}"
        )
    first, last = _surrounding_tokens(tokenizer, where)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.tokens": [texts.get(i, _unused(i)) for i in range(vocab_size)],
        "tokenizer.ggml.token_type": [
            int(_type_of(i, texts.get(i), added.get(i), model)) for i in range(vocab_size)
        ],
        "tokenizer.ggml.add_bos_token": first is not None,
        "tokenizer.ggml.add_eos_token": last is not None,
    }
    if model.get("byte_fallback"):
        has_prefix = has_space_prefix(tokenizer, where)
        scores = merge_scores(tokenizer, where)
        metadata |= {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.scores": [scores.get(texts.get(i, ""), 0.0) for i in range(vocab_size)],
            "tokenizer.ggml.add_space_prefix": has_prefix,
        }
    else:
        _require_byte_level(tokenizer, where)
        metadata |= {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": _pre_tokenizer_name(tokenizer, where),
            "tokenizer.ggml.merges": [merge_text(merge) for merge in model["merges"]],
        }
    ids = {text: i for i, text in texts.items()}
    if first is not None:
        metadata["tokenizer.ggml.bos_token_id"] = ids[first]
    if last is not None:
        metadata["tokenizer.ggml.eos_token_id"] = ids[last]
    return metadata


def _unused(id: int) -> str:
    """What a file calls an id without a token."""
    return f"[PAD{id}]"


def _type_of(
    id: int, text: str | None, added: Mapping[str, Any] | None, model: Mapping[str, Any]
) -> int:
    if text is None or (added is None and text == _unused(id)):
        return TokenType.UNUSED
    if model.get("byte_fallback") and text == model.get("unk_token"):
        return TokenType.UNKNOWN
    if added is not None:
        return TokenType.CONTROL if added.get("special") else TokenType.USER_DEFINED
    if model.get("byte_fallback") and is_byte_token(text):
        return TokenType.BYTE
    return TokenType.NORMAL


def merge_text(merge: str | Sequence[str]) -> str:
    """`tokenizer.json` writes a merge as one text or as a pair."""
    return merge if isinstance(merge, str) else " ".join(merge)


def _normalizer(tokenizer: Mapping[str, Any]) -> str | None:
    """The kind of the normalizer; a sequence of none or of one counts as what is in it."""
    step = tokenizer.get("normalizer")
    while step is not None and step["type"] == "Sequence" and len(step["normalizers"]) < 2:
        step = next(iter(step["normalizers"]), None)
    return None if step is None else str(step["type"])


def _require_byte_level(tokenizer: Mapping[str, Any], where: Path) -> None:
    """Refuse a vocabulary that is not what GGUF calls `gpt2`."""
    model = tokenizer["model"]
    kind = model.get("type", "unknown")
    options = ("continuing_subword_prefix", "end_of_word_suffix", "dropout")
    strange = [name for name in options if model.get(name)]
    decoder = (tokenizer.get("decoder") or {}).get("type")
    normalizer = _normalizer(tokenizer)
    if kind == "BPE" and not strange and decoder == "ByteLevel" and normalizer in (None, "NFC"):
        return
    raise UnsupportedModelError(
        f"tokenizer cannot be written to a GGUF file: {where}\n"
        f"expected byte-level BPE without a normalizer other than NFC, got {kind}"
        f"{' with ' + ', '.join(strange) if strange else ''}, decoder {decoder}, "
        f"normalizer {normalizer}"
    )


def _pre_tokenizer_name(tokenizer: Mapping[str, Any], where: Path) -> str:
    """The name under which llama.cpp cuts text the same way."""
    steps = list(_canonical_steps(tokenizer.get("pre_tokenizer")))
    ignore_merges = bool(tokenizer["model"].get("ignore_merges"))
    has_nfc = _normalizer(tokenizer) is not None
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
