"""Tokenizers of a few tokens, byte-level and sentencepiece, as a checkpoint's files."""

import json
from pathlib import Path
from typing import Any

from headrace.checkpoint.gguf_sentencepiece import sentencepiece_rules

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
LETTERS = [chr(c) for c in range(0x21, 0x7F)]
SPACE = "\u0120"
TOKENS = ["<s>", "</s>", "<|im_end|>", "<tool>", *LETTERS, SPACE, "ab", "abc", SPACE + "a"]


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    """Ids 0..2 are special, 3 is added but plain text; two merges make `abc`, one makes ` a`."""
    added = [
        {"id": i, "content": TOKENS[i], "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False, "special": i < 3}
        for i in range(4)
    ]  # fmt: skip
    model = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": {token: i for i, token in enumerate(TOKENS)},
        "merges": [["a", "b"], ["ab", "c"], [SPACE, "a"]],
    }
    content = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**BYTE_LEVEL, "use_regex": True},
        "post_processor": None,
        "decoder": {**BYTE_LEVEL, "use_regex": True},
        "model": model,
    }
    return {**content, **changes}


def put_tokenizer(folder: Path, template: str | None = "{{ messages }}", **changes: Any) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` over those of a checkpoint."""
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(**changes)))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def sentencepiece_json(
    merges: list[list[str]] | None = None, prefix: bool = True
) -> dict[str, Any]:
    """Ids 0..2 are special, then a byte each, letters, and what merges make."""
    made = ["ab", "\u2581ab", "bab", "abab", "\u2581abab"]
    pieces = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{i:02X}>" for i in range(256)),
        *"\u2581ab\u00e9",
        *made,
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    if merges is None:
        merges = [
            [token[:at], token[at:]]
            for token in made
            for at in range(1, len(token))
            if token[:at] in vocab and token[at:] in vocab
        ]
    parts = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    special = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    content = tokenizer_json(
        **sentencepiece_rules(prefix),
        pre_tokenizer=None,
        post_processor={
            "type": "TemplateProcessing", "single": parts, "pair": parts, "special_tokens": special
        },
    )  # fmt: skip
    content["added_tokens"] = [
        {**content["added_tokens"][i], "id": i, "content": pieces[i]} for i in range(3)
    ]
    content["model"] |= {
        "unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True, "vocab": vocab,
        "merges": merges,
    }  # fmt: skip
    return content
