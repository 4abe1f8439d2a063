"""From config.json to a spec: both generations of names, and no field ignored in silence."""

import json
from typing import Any

import numpy as np
import pytest
from tiny_models import FIXTURES, list_cases, read_case_config

from headrace.errors import ConfigError, EngineError, UnsupportedModelError
from headrace.models import names
from headrace.models.fields import HARMLESS
from headrace.models.registry import REGISTRY, dense_names, expert_names, load_spec
from headrace.models.rope import Rope

FIXTURE_NAMES = sorted(REGISTRY)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**read_case_config(name, "default"), **changes}


def test_every_architecture_has_a_fixture() -> None:
    assert {name for name, _ in list_cases()} == set(REGISTRY)


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_old_and_new_names_give_one_spec(name: str) -> None:
    new = json.loads((FIXTURES / name / "config.new-names.json").read_text())
    old = read_case_config(name, "default")
    assert ("rope_parameters" in new, "rope_parameters" in old) == (True, False)
    assert load_spec(new) == load_spec(old)


def test_sizes_are_read_from_the_file() -> None:
    spec = load_spec(read_case_config("qwen3_moe", "default"))
    assert (spec.num_attention_heads, spec.head_dim, spec.hidden_size) == (4, 16, 48)
    assert (spec.num_experts, spec.num_experts_per_tok, spec.moe_intermediate_size) == (8, 3, 32)
    assert spec.moe_layers == (0, 2)
    assert spec.eos_token_ids == (2,)
    assert spec.kv_bytes_per_token("f16") == 3 * 2 * 2 * 16 * 2


def test_head_dim_follows_from_the_hidden_size_where_it_is_not_stated() -> None:
    assert load_spec(read_case_config("mixtral", "default")).head_dim == 8
    assert load_spec(changed("mixtral", head_dim=None)).head_dim == 8


def test_sparse_step_and_dense_layers() -> None:
    config = changed("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[], num_hidden_layers=5)
    assert load_spec(config).moe_layers == (1, 3)
    config = changed("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3], num_hidden_layers=5)
    assert load_spec(config).moe_layers == (1,)


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_an_unknown_field_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match="`attention_temperature`"):
        load_spec(changed(name, attention_temperature=0.5))


def test_a_null_field_asks_for_nothing() -> None:
    load_spec(changed("llama", attention_temperature=None))


def test_harmless_fields_are_accepted() -> None:
    harmless = {name: "anything" for names in HARMLESS.values() for name in names.split()}
    assert load_spec(changed("llama", **harmless)) == load_spec(changed("llama"))


SLIDING = {"use_sliding_window": True, "sliding_window": 8}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": "mamba"}, "unknown `model_type` 'mamba'"),
        ("llama", {"hidden_act": "gelu"}, "`hidden_act: 'gelu'`"),
        ("qwen3", {"attention_bias": True}, "`attention_bias: True`"),
        ("llama", {"mlp_bias": True}, "`mlp_bias: True`"),
        ("llama", {"sliding_window": 64}, "`sliding_window: 64`.*`llama`\nexpected None"),
        ("olmoe", {"sliding_window": 64}, "`sliding_window: 64`.*`olmoe`\nexpected None"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
        ("qwen3", {**SLIDING, "layer_types": ["full_attention"]}, "layer_types.*\nexpected.* 2 "),
        ("qwen3", {**SLIDING, "layer_types": ["chunked_attention"] * 2}, "layer_types"),
        ("qwen3", {**SLIDING, "layer_types": 7}, "layer_types: 7`"),
        ("mixtral", {"sliding_window": 8, "layer_types": ["full_attention"] * 2}, "layer_types"),
        ("qwen3_moe", {**SLIDING}, "`max_window_layers: 3`.*\nexpected 0"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
    ],
)
def test_what_no_model_computes_is_refused_by_name(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        load_spec(changed(name, **changes))


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("llama", {"model_type": None}, "`model_type` is missing"),
        ("llama", {"hidden_size": None}, "`hidden_size` is missing"),
        ("llama", {"rope_theta": None}, "`rope_theta` is missing"),
        ("llama", {"hidden_size": "48"}, "`hidden_size` must be an integer"),
        ("llama", {"vocab_size": True}, "`vocab_size` must be an integer"),
        ("llama", {"num_hidden_layers": 0}, "at least 1\ngot 0"),
        ("llama", {"num_hidden_layers": 2**40}, "`num_hidden_layers`"),
        ("llama", {"rms_norm_eps": float("nan")}, "`rms_norm_eps` must be a finite number"),
        ("llama", {"num_key_value_heads": 3}, "multiple of `num_key_value_heads`"),
        ("llama", {"hidden_size": 50}, "without `head_dim`"),
        ("llama", {"head_dim": 13}, "`head_dim` must be even"),
        ("llama", {"tie_word_embeddings": "yes"}, "must be true or false"),
        ("llama", {"eos_token_id": -1}, "non-negative integers"),
        ("llama", {"rope_theta": 1.0}, "`rope_theta` must be above 1"),
        ("llama", {"rope_scaling": [1]}, "`rope_scaling` must be an object"),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "`factor` is missing"),
        ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0, "slope": 1}}, "`slope`"),
        ("olmoe", {"num_experts_per_tok": 9}, "exceeds the number of experts"),
        ("olmoe", {"norm_topk_prob": None}, "`norm_topk_prob` is missing"),
        ("mixtral", {"sliding_window": 0}, "`sliding_window` must be an integer of at least 1"),
        ("qwen3", {**SLIDING, "max_window_layers": -1}, "`max_window_layers` must be"),
        ("qwen3_moe", {"num_local_experts": 4}, "mean the same and disagree"),
        ("qwen3", {"rope_parameters": {"rope_theta": 5.0}}, "disagree"),
    ],
)
def test_a_bad_field_is_named_with_its_value(
    name: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(changed(name, **changes))


JUNK = [
    None,
    True,
    0,
    -1,
    3,
    2**63,
    1.5,
    float("inf"),
    float("nan"),
    "x",
    "",
    [],
    [None],
    {},
    {"a": 1},
]


@pytest.mark.parametrize("name", FIXTURE_NAMES)
def test_no_junk_in_a_field_goes_unnamed(name: str) -> None:
    """Whatever a field holds, a spec comes back or an error of ours: never another exception."""
    config = read_case_config(name, "default")
    fields = [*config, "rope_parameters", "layer_types", "quantization_config", "num_local_experts"]
    scaling = ["factor", "rope_type", "type", "rope_theta", "original_max_position_embeddings"]
    num_refused = 0
    for junk in JUNK:
        broken = [{**config, field: junk} for field in fields]
        broken += [
            {**config, key: {"rope_type": kind, "factor": 2.0, field: junk}}
            for key in ("rope_scaling", "rope_parameters")
            for kind in ("default", "linear", "yarn", "llama3")
            for field in scaling
        ]
        for content in broken:
            try:
                spec = load_spec(content)
                spec.rope.inv_freq(spec.head_dim)
            except EngineError:
                num_refused += 1
    assert num_refused > 300


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("mixtral", {"sliding_window": 8}, (8, 8)),
        ("mixtral", {"sliding_window": 8, "layer_types": ["sliding_attention"] * 2}, (8, 8)),
        ("mixtral", {"sliding_window": 8, "use_sliding_window": False}, ()),
        ("qwen3", {**SLIDING, "max_window_layers": 0}, (8, 8)),
        ("qwen3", {**SLIDING, "max_window_layers": 1}, (None, 8)),
        ("qwen3", {**SLIDING, "max_window_layers": 2}, ()),
        ("qwen3", {**SLIDING, "max_window_layers": None}, ()),
        ("qwen3", {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}, (8, None)),
        ("qwen3", {"sliding_window": 8, "use_sliding_window": None}, ()),
        ("qwen3_moe", {**SLIDING, "max_window_layers": 0}, (8, 8, 8)),
        ("qwen3_moe", {**SLIDING, "max_window_layers": None}, (8, 8, 8)),
        ("qwen3_moe", {**SLIDING, "use_sliding_window": None}, ()),
    ],
)
def test_layers_have_the_windows_that_transformers_gives_them(
    name: str, changes: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert load_spec(changed(name, **changes)).windows == windows


def test_a_window_as_long_as_the_context_cuts_nothing() -> None:
    assert load_spec(changed("mixtral", sliding_window=128)) == load_spec(changed("mixtral"))


def test_dense_names_do_not_hold_experts() -> None:
    spec = load_spec(read_case_config("mixtral", "default"))
    found = dense_names(spec)
    assert "model.layers.1.block_sparse_moe.gate.weight" in found
    assert not any(".experts." in name for name in found)
    assert expert_names(spec) == names.MIXTRAL.experts
    assert expert_names(load_spec(read_case_config("llama", "default"))) is None


def test_yarn_frequencies() -> None:
    """Values agreed with transformers 5.24; 64 dimensions, theta 150000, 32 times 4096 tokens."""
    yarn = Rope(150000.0, "yarn", factor=32.0, original_context=4096, fast=32.0, slow=1.0)
    exact = {0: 1.0, 1: 0.689044306, 8: 0.0508132748, 12: 7.01571391e-3, 31: 3.02351143e-7}
    untruncated = {**exact, 9: 0.0317056962, 12: 6.79495949e-3, 16: 4.56483919e-4}
    for truncate, golden in ((True, exact), (False, untruncated)):
        rope = Rope(**{**vars(yarn), "truncate": truncate})
        frequencies = rope.inv_freq(64)
        assert frequencies.dtype == np.float32
        for index, value in golden.items():
            assert frequencies[index] == pytest.approx(value, rel=1e-6)


def test_yarn_scales_cos_and_sin() -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4}
    rope = load_spec(changed("qwen3", rope_scaling=scaling)).rope
    assert rope.attention_factor == pytest.approx(1.34657359, rel=1e-8)
    both = {**scaling, "mscale": 1.0, "mscale_all_dim": 1.0}
    assert load_spec(changed("qwen3", rope_scaling=both)).rope.attention_factor == 1.0
    stated = {**scaling, "attention_factor": 1.5}
    assert load_spec(changed("qwen3", rope_scaling=stated)).rope.attention_factor == 1.5


def test_linear_scaling_divides_frequencies() -> None:
    scaled = load_spec(changed("qwen3", rope_scaling={"type": "linear", "factor": 4.0})).rope
    plain = load_spec(changed("qwen3")).rope
    np.testing.assert_array_equal(scaled.inv_freq(20) * 4, plain.inv_freq(20))
