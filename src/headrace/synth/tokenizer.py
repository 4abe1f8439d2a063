"""A tokenizer for a vocabulary of any size: bytes, filler words, an end token."""

import json
from typing import Any

END_TOKEN = "<|end|>"
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_characters() -> list[str]:
    """Return the 256 characters that byte-level BPE writes for the bytes 0..255.

    Source:
        The GPT-2 tokenizer: printable Latin-1 stands for itself, the rest is moved to 256 and up.
    """
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(moved)) for b in range(256)]


def tokenizer_files(vocab_size: int) -> dict[str, bytes]:
    """Return tokenizer.json and tokenizer_config.json.

    Ids 0..255 are the bytes, the last id is the end token, and those between are words like
    ` w300`, which text never encodes to but any id decodes to.
    """
    vocab = {character: i for i, character in enumerate(byte_characters())}
    space = byte_characters()[32]
    vocab |= {f"{space}w{i}": i for i in range(256, vocab_size - 1)}
    vocab[END_TOKEN] = vocab_size - 1
    byte_level: dict[str, Any] = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": True,
        "use_regex": True,
    }
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": vocab_size - 1,
                "content": END_TOKEN,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        ],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": vocab,
            "merges": [],
        },
    }
    config = {
        "add_bos_token": False,
        "chat_template": _TEMPLATE,
        "eos_token": END_TOKEN,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, ensure_ascii=False).encode(),
        "tokenizer_config.json": json.dumps(config, indent=1).encode(),
    }
