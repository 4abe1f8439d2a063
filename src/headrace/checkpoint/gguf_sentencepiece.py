"""Sentencepiece vocabularies: merges in a `tokenizer.json`, scores in a GGUF file.

Sentencepiece joins the neighbours whose joined token has the best score, and any two that make a
token may be joined. A list of merges says the same if it holds every split of every token, and if
the merges that make one token stand together, best token first: then a token's score is its place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UnsupportedModelError

_SPACE = "\u2581"
_REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
_PREPEND = {"type": "Prepend", "prepend": _SPACE}
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def is_byte_token(text: str) -> bool:
    """Whether a token stands for one byte of a character that has no token."""
    return _BYTE_TOKEN.fullmatch(text) is not None


def sentencepiece_rules(has_prefix: bool) -> dict[str, Any]:
    """Normalizer and decoder of a `tokenizer.json`; with a prefix, a text begins with a space."""
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    back = {"type": "Replace", "pattern": {"String": _SPACE}, "content": " "}
    return {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [_PREPEND, _REPLACE] if has_prefix else [_REPLACE],
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [back, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
    }


def has_space_prefix(tokenizer: Mapping[str, Any], where: Path) -> bool:
    """Whether a text gets a space before its first word, and after each special token.

    Raises:
        UnsupportedModelError: text is changed or cut in a way that llama.cpp has no word for.
    """
    normalizer = tokenizer.get("normalizer") or {}
    steps = normalizer.get("normalizers", [normalizer])
    if tokenizer.get("pre_tokenizer") is None and steps in ([_PREPEND, _REPLACE], [_REPLACE]):
        return len(steps) == 2
    cut = (tokenizer.get("pre_tokenizer") or {}).get("type")
    raise UnsupportedModelError(
        f"tokenizer cannot be written to a GGUF file: {where}\n"
        "expected a sentencepiece vocabulary that prepends and replaces spaces by its normalizer, "
        f"got normalizer {[step.get('type') for step in steps]}, pre-tokenizer {cut}"
    )


def merge_scores(tokenizer: Mapping[str, Any], where: Path) -> dict[str, float]:
    """The score of each token that merges make; tokens of one character have none.

    Raises:
        UnsupportedModelError: merges whose order or number scores cannot say.
    """
    vocab = tokenizer["model"]["vocab"]
    pairs = [
        tuple(merge.split(" ", 1)) if isinstance(merge, str) else tuple(merge)
        for merge in tokenizer["model"]["merges"]
    ]
    scores: dict[str, float] = {}
    previous = ""
    for left, right in pairs:
        if left + right != previous and left + right in scores:
            raise _not_sentencepiece(f"merges of {left + right!r} stand apart", where)
        previous = left + right
        scores.setdefault(previous, -float(len(scores)))
    known = set(pairs)
    missing = next((p for t in vocab for p in _splits(t, vocab) if p not in known), None)
    if missing is not None:
        raise _not_sentencepiece(f"{missing[0]!r} and {missing[1]!r} are never joined", where)
    absent = [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]
    if absent:
        raise _not_sentencepiece(f"there is no token {absent[0]}", where)
    return scores


def merges_of_scores(scores: Mapping[str, float]) -> list[list[str]]:
    """Every way to join two tokens to a third, best third first."""
    best_first = sorted(scores, key=lambda token: -scores[token])
    return [list(pair) for token in best_first for pair in _splits(token, scores)]


def _splits(token: str, vocab: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for at in range(1, len(token)):
        if token[:at] in vocab and token[at:] in vocab:
            yield token[:at], token[at:]


def _not_sentencepiece(what: str, where: Path) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"tokenizer cannot be written to a GGUF file: {where}\n"
        f"expected merges that scores can state, as sentencepiece has them, but {what}"
    )
