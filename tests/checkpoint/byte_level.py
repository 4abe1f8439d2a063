"""A byte-level tokenizer of a few tokens, as a checkpoint's files."""

import json
from pathlib import Path
from typing import Any

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
