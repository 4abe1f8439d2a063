import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import (
    EngineConfig,
    ExpertConfig,
    SamplingParams,
    ignored_generation_fields,
    make_engine_config,
    parse_bytes,
    parse_memory,
    resolve_sampling,
)
from headrace.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1536MiB", 1536 << 20),
        ("2GiB", 2 << 30),
        ("8G", 8 << 30),
        ("8GB", 8 * 10**9),
        ("1.5 gib", 3 << 29),
        ("64k", 64 << 10),
        ("123", 123),
        ("9007199254740993", 9007199254740993),
        ("8388607.5TiB", 16777215 << 39),
        (4096, 4096),
    ],
)
def test_byte_sizes(text: str, expected: Any) -> None:
    assert parse_bytes(text) == expected
    assert parse_memory(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "GiB",
        "-1",
        "2 apples",
        "0",
        "0GiB",
        "1e9",
        "nan",
        "2GiBB",
        1.5,
        None,
        True,
        "9" * 400,
        "9" * 5000,
        "8388608TiB",
        "0.1",
        1 << 63,
    ],
)
def test_what_is_no_byte_size_is_refused(text: Any) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)


def test_memory_may_be_auto() -> None:
    assert parse_memory("auto") == "auto"


@pytest.mark.parametrize(
    "options",
    [
        {"max_tokens": 0},
        {"max_tokens": True},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": "hot"},
        {"top_p": 0.0},
        {"top_p": 1.01},
        {"top_k": -1},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"seed": 1 << 63},
        {"stop": ("",)},
        {"stop": ("\udcff",)},
        {"stop": "text"},
        {"stop_ids": (-1,)},
        {"logprobs": 21},
        {"ignore_eos": "no"},
        {"top_k": 10**30},
    ],
)
def test_sampling_out_of_range_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        SamplingParams(**options)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (EngineConfig, {"memory": 0}),
        (EngineConfig, {"experts": {"history": "off"}}),
        (ExpertConfig, {"direct": "no"}),
        (ExpertConfig, {"read_ahead": 10**30}),
        (ExpertConfig, {"block_bytes": 4096 * 10**30}),
        (ExpertConfig, {"half_life_tokens": 10**400}),
        (EngineConfig, {"threads": 10**30}),
        (ExpertConfig, {"history_path": "counts.json"}),
        (ExpertConfig, {"history_path": Path("counts.json"), "history": "off"}),
        (EngineConfig, {"memory": "2GiB"}),
        (EngineConfig, {"context": 1}),
        (EngineConfig, {"sequences": 0}),
        (EngineConfig, {"chunk": 0}),
        (EngineConfig, {"kv": "q4"}),
        (EngineConfig, {"embedding": "gpu"}),
        (EngineConfig, {"threads": 0}),
        (EngineConfig, {"isa": "sse2"}),
        (ExpertConfig, {"readers": 0}),
        (ExpertConfig, {"block_bytes": 1000}),
        (ExpertConfig, {"history": "maybe"}),
    ],
)
def test_engine_options_out_of_range_are_named(kind: Any, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        kind(**options)


def test_unknown_option_is_an_error() -> None:
    with pytest.raises(TypeError):
        SamplingParams(temprature=1.0)


def test_nothing_writes_back() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().max_tokens = 3


def test_the_users_word_goes_before_the_models_and_that_before_the_defaults() -> None:
    model = {"do_sample": True, "temperature": 0.6, "top_k": 20, "max_length": 9}
    params = resolve_sampling(SamplingParams(temperature=0.1), model)
    assert (params.temperature, params.top_k) == (0.1, 20)
    assert (params.top_p, params.min_p) == (1.0, 0.0)  # the model speaks: the rest is neutral
    silent = resolve_sampling(SamplingParams(), {})
    assert (silent.temperature, silent.top_p, silent.repetition_penalty) == (0.8, 0.95, 1.0)


def test_greedy_model_stays_greedy_unless_asked() -> None:
    greedy = {"do_sample": False, "temperature": 0.7}
    assert resolve_sampling(SamplingParams(), greedy).temperature == 0.0
    assert resolve_sampling(SamplingParams(temperature=1.0), greedy).temperature == 1.0


def test_damaged_generation_config_is_named() -> None:
    with pytest.raises(ConfigError, match=r"generation_config.json: .*top_p"):
        resolve_sampling(SamplingParams(), {"top_p": "high"})


@pytest.mark.parametrize("config", [SamplingParams, EngineConfig, ExpertConfig])
def test_every_option_has_help(config: Any) -> None:
    for field in dataclasses.fields(config):
        if field.name != "experts":
            assert field.metadata["help"]


def test_generation_fields_that_nobody_obeys_are_found_and_harmless_ones_are_not() -> None:
    harmless = {
        "_from_model_config": True, "transformers_version": "5.0", "eos_token_id": [1, 2],
        "do_sample": True, "temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.1,
        "repetition_penalty": 1.05, "max_new_tokens": 2048, "use_cache": True, "num_beams": 1,
        "typical_p": 1.0, "no_repeat_ngram_size": 0, "penalty_alpha": None, "suppress_tokens": [],
        "bad_words_ids": None, "forced_eos_token_id": None, "min_length": 0,
    }  # fmt: skip
    assert ignored_generation_fields(harmless) == {}
    asking = {
        "no_repeat_ngram_size": 3, "suppress_tokens": [5], "begin_suppress_tokens": [1],
        "bad_words_ids": [[7]], "forced_bos_token_id": 0, "forced_eos_token_id": 2,
        "typical_p": 0.9, "epsilon_cutoff": 3e-4, "eta_cutoff": 1e-3, "num_beams": 4,
        "penalty_alpha": 0.6, "stop_strings": ["end"], "min_new_tokens": 9, "never_heard_of": 1,
    }  # fmt: skip
    assert ignored_generation_fields({**harmless, **asking}) == asking


def test_a_size_may_be_any_whole_number_and_no_other() -> None:
    assert make_engine_config(None, {"memory": np.int64(1 << 30)}).memory == 1 << 30
    for wrong in (1.5e9, True, None):
        with pytest.raises(ConfigError, match=f"not a byte size: {wrong}"):
            parse_bytes(wrong)  # type: ignore[arg-type]
