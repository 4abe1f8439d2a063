"""Tokenizers rebuilt from GGUF files give the ids that llama.cpp gives.

tests/fixtures/tokenizer.json holds two small vocabularies and llama.cpp's ids;
scripts/make_tokenizer_fixtures.py made it and has the texts.
"""

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tiny_gguf import pack_file
from tiny_models import FIXTURES

from headrace.checkpoint.gguf_header import read_header
from headrace.checkpoint.gguf_tokenizer import PRE_TOKENIZERS, SAME_RULE, tokenizer_json
from headrace.checkpoint.gguf_vocabulary import vocabulary_metadata

SENTENCEPIECE = "sentencepiece"
# For these names llama.cpp cuts words by another rule than the models' own, which is kept here:
# it takes no mark into a word, and outside ASCII it does not tell capitals from small letters.
APPROXIMATED = ("gpt-4o", "minimax-m2", "tekken")


@cache
def fixture() -> dict[str, Any]:
    return dict(json.loads((FIXTURES / "tokenizer.json").read_text()))


def rebuild(path: Path, metadata: dict[str, Any]) -> tokenizers.Tokenizer:
    """The tokenizer of a GGUF file with this metadata."""
    path.write_bytes(pack_file({"general.architecture": "llama", **metadata}, {}))
    return tokenizers.Tokenizer.from_str(tokenizer_json(read_header(path)))


def byte_level(name: str, **changes: Any) -> dict[str, Any]:
    return {**fixture()["byte_level"], "tokenizer.ggml.pre": name, **changes}


def differing(tokenizer: tokenizers.Tokenizer, name: str) -> list[tuple[str, list[int], list[int]]]:
    """Text, ids and llama.cpp's ids where the two differ."""
    found = []
    for case in fixture()["cases"]:
        theirs = next(ids for names, ids in case["ids"] if name in names)
        ours = tokenizer.encode(case["text"]).ids
        if ours != theirs:
            found.append((case["text"], ours, theirs))
    return found


@pytest.mark.parametrize("name", [name for name in PRE_TOKENIZERS if name not in APPROXIMATED])
def test_byte_level_ids_are_those_of_llamacpp(tmp_path: Path, name: str) -> None:
    tokenizer = rebuild(tmp_path / "vocab.gguf", byte_level(name))
    assert differing(tokenizer, name) == []


@pytest.mark.parametrize("name", APPROXIMATED)
def test_ids_differ_only_where_llamacpp_approximates(tmp_path: Path, name: str) -> None:
    tokenizer = rebuild(tmp_path / "vocab.gguf", byte_level(name))
    found = differing(tokenizer, name)
    for text, ours, theirs in found:
        kinds = {unicodedata.category(c) for c in text if not c.isascii()}
        assert kinds & {"Lu", "Lt", "Mn", "Mc", "Me"}, (text, ours, theirs)
    assert 0 < len(found) < 25


@pytest.mark.parametrize(("name", "wanted"), SAME_RULE.items())
def test_a_further_name_means_the_same_rule(tmp_path: Path, name: str, wanted: str) -> None:
    found, expected = (
        rebuild(tmp_path / f"{each}.gguf", byte_level(each)) for each in (name, wanted)
    )
    assert found.to_str() == expected.to_str()


@pytest.mark.parametrize(
    ("changes", "tokens"),
    [
        ({}, ["<s>", "e"]),
        ({"tokenizer.ggml.add_bos_token": False}, ["e"]),
        ({"tokenizer.ggml.add_eos_token": True}, ["<s>", "e", "<|end|>"]),
    ],
)
def test_tokens_around_a_text_are_those_the_file_asks_for(
    tmp_path: Path, changes: dict[str, Any], tokens: list[str]
) -> None:
    tokenizer = rebuild(tmp_path / "vocab.gguf", byte_level("llama-bpe", **changes))
    assert tokenizer.encode("e").tokens == tokens


def test_a_normalizer_without_steps_is_none(tmp_path: Path) -> None:
    tokenizer = rebuild(tmp_path / "vocab.gguf", byte_level("deepseek-v3"))
    content = {
        **json.loads(tokenizer.to_str()),
        "normalizer": {"type": "Sequence", "normalizers": []},
    }
    metadata = vocabulary_metadata(content, tokenizer.get_vocab_size(), tmp_path)
    assert metadata["tokenizer.ggml.pre"] == "deepseek-v3"


def test_sentencepiece_ids_are_those_of_llamacpp(tmp_path: Path) -> None:
    tokenizer = rebuild(tmp_path / "vocab.gguf", fixture()[SENTENCEPIECE])
    assert differing(tokenizer, SENTENCEPIECE) == []


def test_every_name_of_a_rule_is_in_the_fixture() -> None:
    for case in fixture()["cases"]:
        names = sorted(name for names, _ in case["ids"] for name in names)
        assert names == sorted([*PRE_TOKENIZERS, SENTENCEPIECE])
