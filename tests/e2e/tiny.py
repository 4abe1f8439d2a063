"""A model of a few hundred kB with a tokenizer, made from a fixture of tests/models."""

import json
import shutil
import string
from pathlib import Path

import tokenizers
from tokenizers import decoders, models

FIXTURES = Path(__file__).parents[1] / "fixtures"
SPECIALS = ["<unk>", "<|start|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}: {{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant: {% endif %}"
)
VOCAB_SIZE = 120


def make_tokenizer() -> tokenizers.Tokenizer:
    """Special ids 0..2, one id per printable ASCII character, then words of two letters."""
    words = [*SPECIALS, *string.printable[:97]]
    words += [a + b for a in "tho" for b in "aeiouhrs"][: VOCAB_SIZE - len(words)]
    vocab = {word: i for i, word in enumerate(words)}
    merges = [(w[0], w[1]) for w in vocab if len(w) == 2]
    core = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([tokenizers.AddedToken(t, special=True) for t in SPECIALS])
    return core


def make_tiny(folder: Path, architecture: str = "qwen3_moe", chat: bool = False) -> Path:
    """Copy a fixture's checkpoint and put a tokenizer beside it."""
    source = FIXTURES / architecture
    folder.mkdir(parents=True)
    shutil.copy(source / "config.json", folder)
    for file in [*source.glob("*.safetensors"), *source.glob("*.index.json")]:
        shutil.copy(file, folder)
    make_tokenizer().save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|end|>"}
    if chat:
        config["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
