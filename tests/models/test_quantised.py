"""Quantised matrices read in place: every value compared with the format's public definition.

The expected values are computed element by element, without a function of the reader.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors_files import Tensors, write_safetensors
from tiny_models import open_model, run

from headrace import _core
from headrace.checkpoint import open_checkpoint
from headrace.checkpoint.layout import Recipe
from headrace.convert import convert
from headrace.errors import CheckpointError, EngineError, UnsupportedModelError

HIDDEN, INNER, VOCAB = 128, 256, 64
CONFIG = {
    "model_type": "llama", "hidden_size": HIDDEN, "intermediate_size": INNER, "vocab_size": VOCAB,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "max_position_embeddings": 64,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
MATRICES = {
    "self_attn.q_proj": (128, HIDDEN), "self_attn.k_proj": (64, HIDDEN),
    "self_attn.v_proj": (64, HIDDEN), "self_attn.o_proj": (HIDDEN, 128),
    "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
Stored = tuple[Tensors, dict[str, str], np.ndarray]
"""Tensors by suffix, their dtypes where NumPy has none, and the values [N, K] float32."""


def _e4m3(bits: int) -> float:
    sign, exponent, mantissa = -1.0 if bits & 128 else 1.0, int(bits) >> 3 & 15, int(bits) & 7
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


def _e2m1(code: int) -> float:
    return -E2M1[code & 7] if code & 8 else E2M1[code]


def _words(codes: np.ndarray, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """Pack eight codes of the last axis into a word; nibble i holds code order[i]."""
    groups = codes.reshape(*codes.shape[:-1], -1, 8).astype(np.uint32)
    words = np.zeros(groups.shape[:-1], np.uint32)
    for i, column in enumerate(order):
        words |= groups[..., column] << np.uint32(4 * i)
    return words.view(np.int32)


def _fp8(rng: np.random.Generator, n: int, k: int, e8m0: bool = False) -> Stored:
    bits = rng.integers(0, 256, (n, k), np.uint8)
    bits[(bits & 127) == 127] = 0  # NaN
    tiles = (-(-n // 128), -(-k // 128))
    exponents = rng.integers(118, 122, tiles, np.uint8)
    scales = (0.01 * rng.random(tiles)).astype(np.float32)
    if e8m0:
        scales = (2.0 ** (exponents.astype(np.float64) - 127)).astype(np.float32)
    values = np.array([_e4m3(b) for b in bits.reshape(-1)], np.float32).reshape(n, k)
    for i in range(n):
        for j in range(0, k, 128):
            values[i, j : j + 128] *= scales[i // 128, j // 128]
    stored = {"weight": bits, "weight_scale_inv": exponents if e8m0 else scales}
    dtypes = {"weight": "F8_E4M3"} | ({"weight_scale_inv": "F8_E8M0"} if e8m0 else {})
    return stored, dtypes, values


def _int4(
    rng: np.random.Generator, n: int, k: int, group: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    codes = rng.integers(0, 16, (n, k), np.uint8)
    zeros = rng.integers(0, 16, (n, k // group), np.uint8)
    return codes, zeros, (0.02 * rng.random((n, k // group)) + 0.001).astype(np.float16)


def _affine(codes: np.ndarray, zeros: Any, scales: np.ndarray, group: int) -> np.ndarray:
    wide = np.repeat(scales.astype(np.float64), group, axis=1)
    shifted = codes.astype(np.float64) - np.repeat(np.broadcast_to(zeros, scales.shape), group, 1)
    return shifted * wide


def _packed(rng: np.random.Generator, n: int, k: int, group: int, symmetric: bool) -> Stored:
    codes, zeros, scales = _int4(rng, n, k, group)
    stored = {
        "weight_packed": _words(codes), "weight_scale": scales,
        "weight_shape": np.array([n, k], np.int64),
    }  # fmt: skip
    if not symmetric:
        stored["weight_zero_point"] = np.ascontiguousarray(_words(zeros.T).T)
    return stored, {}, _affine(codes, 8 if symmetric else zeros, scales, group)


def _awq(rng: np.random.Generator, n: int, k: int, group: int) -> Stored:
    codes, zeros, scales = _int4(rng, n, k, group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    stored = {
        "qweight": _words(np.ascontiguousarray(codes.T), order),
        "qzeros": _words(np.ascontiguousarray(zeros.T), order),
        "scales": np.ascontiguousarray(scales.T),
    }
    return stored, {}, _affine(codes, zeros, scales, group)


def _gptq(rng: np.random.Generator, n: int, k: int, group: int, offset: int) -> Stored:
    codes, zeros, scales = _int4(rng, n, k, group)
    stored = {
        "qweight": np.ascontiguousarray(_words(codes).T),
        "qzeros": _words(np.ascontiguousarray(zeros.T)),
        "scales": np.ascontiguousarray(scales.T),
        "g_idx": (np.arange(k) // group).astype(np.int32),
    }
    return stored, {}, _affine(codes, zeros.astype(np.float64) + offset, scales, group)


def _fp4(rng: np.random.Generator, n: int, k: int, is_nv: bool) -> Stored:
    codes = rng.integers(0, 16, (n, k), np.uint8)
    packed = codes[:, ::2] | codes[:, 1::2] << 4
    values = np.array([_e2m1(c) for c in codes.reshape(-1)], np.float32).reshape(n, k)
    group = 16 if is_nv else 32
    if is_nv:
        bits = rng.integers(1, 126, (n, k // group), np.uint8)
        whole = np.array([37.5], np.float32)
        scales = np.array([_e4m3(b) for b in bits.reshape(-1)], np.float32).reshape(bits.shape)
        stored = {"weight_packed": packed, "weight_scale": bits, "weight_global_scale": whole}
        return stored, {"weight_scale": "F8_E4M3"}, values * np.repeat(scales / whole, group, 1)
    bits = rng.integers(115, 124, (n, k // group), np.uint8)
    bits[0, 0] = 0  # 2^-127, which float32 holds as a subnormal number
    scales = (2.0 ** (bits.astype(np.float64) - 127)).astype(np.float32)
    return {"weight_packed": packed, "weight_scale": bits}, {}, values * np.repeat(scales, group, 1)


def _compressed(format: str) -> dict[str, Any]:
    groups = {"group_0": {"weights": {"num_bits": 4, "type": "int"}}}
    return {"quant_method": "compressed-tensors", "format": format, "config_groups": groups}


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
AWQ = {"quant_method": "awq", "bits": 4, "version": "gemm", "zero_point": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "desc_act": False, "sym": False}
Make = Callable[[np.random.Generator, int, int], Stored]
CASES: dict[str, tuple[dict[str, Any], Make, str, int]] = {
    "fp8": (FP8, _fp8, "f8", 128),
    "fp8-e8m0": (FP8, lambda r, n, k: _fp8(r, n, k, e8m0=True), "f8", 128),
    "nvfp4": (
        _compressed("nvfp4-pack-quantized"), lambda r, n, k: _fp4(r, n, k, True), "q8f", 16
    ),
    "mxfp4": (
        _compressed("mxfp4-pack-quantized"), lambda r, n, k: _fp4(r, n, k, False), "mxfp4", 32
    ),
    "gptq_v2": (
        {**GPTQ, "checkpoint_format": "gptq_v2"}, lambda r, n, k: _gptq(r, n, k, 32, 0), "q4a", 32
    ),
}  # fmt: skip
for _group in (32, 64, 128):
    _memory = min(_group, 64)
    for _symmetric in (True, False):
        CASES[f"packed-{'sym' if _symmetric else 'asym'}-{_group}"] = (
            _compressed("pack-quantized"),
            lambda r, n, k, g=_group, s=_symmetric: _packed(r, n, k, g, s),
            "q4f" if _symmetric else "q4a",
            _memory,
        )
    CASES[f"awq-{_group}"] = (AWQ, lambda r, n, k, g=_group: _awq(r, n, k, g), "q4a", _memory)
    CASES[f"gptq-{_group}"] = (GPTQ, lambda r, n, k, g=_group: _gptq(r, n, k, g, 1), "q4a", _memory)


def _write(
    folder: Path,
    settings: dict[str, Any],
    make: Make,
    change: Callable[[Tensors, dict[str, str]], None] = lambda *_: None,
) -> dict[str, np.ndarray]:
    """Write a model whose matrices are quantised but for the embedding, head and one layer's o."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(5)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "quantization_config": settings}))

    def plain(*shape: int) -> np.ndarray:
        return (0.1 * rng.standard_normal(shape)).astype(np.float32)

    tensors: Tensors = {
        "model.embed_tokens.weight": plain(VOCAB, HIDDEN),
        "lm_head.weight": plain(VOCAB, HIDDEN), "model.norm.weight": plain(HIDDEN),
    }  # fmt: skip
    dtypes: dict[str, str] = {}
    values: dict[str, np.ndarray] = {}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{norm}.weight"] = plain(HIDDEN)
        for module, shape in MATRICES.items():
            name = prefix + module
            if name == "model.layers.1.self_attn.o_proj":
                values[name] = tensors[name + ".weight"] = plain(*shape)
                continue
            stored, types, values[name] = make(rng, *shape)
            tensors |= {f"{name}.{suffix}": array for suffix, array in stored.items()}
            dtypes |= {f"{name}.{suffix}": dtype for suffix, dtype in types.items()}
    change(tensors, dtypes)
    write_safetensors(folder / "model.safetensors", tensors, dtypes)
    return values


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_value_is_the_one_the_format_defines(case: str, tmp_path: Path) -> None:
    settings, make, format, group = CASES[case]
    values = _write(tmp_path, settings, make)
    checkpoint = open_checkpoint(tmp_path, None)
    for name, expected in values.items():
        matrix = checkpoint.load_matrix(name + ".weight")
        info = checkpoint.info(name + ".weight")
        is_plain = name == "model.layers.1.self_attn.o_proj"
        assert (matrix.format, matrix.group) == (("f32", 1) if is_plain else (format, group))
        assert (info.format, info.group, info.nbytes) == (
            matrix.format, matrix.group, matrix.nbytes
        )  # fmt: skip
        # The expected values are exact in float64; unpacking rounds them once.
        np.testing.assert_array_equal(_core.unpack(matrix), expected.astype(np.float32))


@pytest.mark.parametrize("case", ["fp8", "nvfp4", "mxfp4", "packed-sym-64", "awq-128", "gptq-32"])
def test_a_quantised_model_runs_in_place(case: str, tmp_path: Path) -> None:
    settings, make, *_ = CASES[case]
    _write(tmp_path, settings, make)
    model, _ = open_model(tmp_path)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = run(model, None, ids, [8])
    assert np.isfinite(whole).all()
    np.testing.assert_array_equal(whole, run(model, None, ids, [3, 1, 4]))


@pytest.mark.parametrize("case", ["fp8", "nvfp4", "packed-asym-64", "gptq-128"])
def test_convert_takes_the_real_numbers(case: str, tmp_path: Path) -> None:
    settings, make, *_ = CASES[case]
    values = _write(tmp_path / "codes", settings, make)
    tokenizer = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    _write(tmp_path / "plain", settings, make, lambda *stored: _expand(*stored, values))
    (tmp_path / "plain" / "config.json").write_text(json.dumps(CONFIG))
    made = []
    for name in ("codes", "plain"):
        text = json.dumps({"version": "1.0", "model": tokenizer})
        (tmp_path / name / "tokenizer.json").write_text(text)
        convert(tmp_path / name, tmp_path / f"{name}.hr", Recipe(dense="q4"))
        made.append((tmp_path / f"{name}.hr" / "dense.safetensors").read_bytes())
    assert made[0] == made[1]


def _expand(tensors: Tensors, dtypes: dict[str, str], values: dict[str, np.ndarray]) -> None:
    dtypes.clear()
    for name, array in values.items():
        for stored in [n for n in tensors if n.startswith(name + ".")]:
            del tensors[stored]
        tensors[name + ".weight"] = array.astype(np.float32)


def _drop(name: str) -> Callable[[Tensors, dict[str, str]], None]:
    return lambda tensors, _: tensors.__delitem__(name)


def _set(name: str, value: np.ndarray) -> Callable[[Tensors, dict[str, str]], None]:
    return lambda tensors, _: tensors.update({name: value})


Q = "model.layers.0.self_attn.q_proj."


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("awq-32", _drop(Q + "qzeros"), f"tensor is missing: {Q}qzeros"),
        ("awq-32", _set(Q + "scales", np.ones((3, 128), np.float16)), f"not supported: {Q}scales"),
        ("awq-32", _set(Q + "qzeros", np.ones((3, 16), np.int32)), f"wrong shape: {Q}qzeros"),
        ("awq-32", _set(Q + "qweight", np.ones(3, np.int32)), f"wrong shape: {Q}qweight"),
        ("awq-32", _set(Q + "qweight", np.ones((3, 4), np.int64)), f"dtype I64: {Q}qweight"),
        ("gptq-32", _set(Q + "g_idx", np.zeros(128, np.int32)), f"act-order.*{Q}weight"),
        (
            "packed-sym-32",
            _set(Q + "weight_shape", np.array([1 << 60, 4])),
            f"stated shape does not fit the codes: {Q}weight_shape",
        ),
        ("fp8", _set(Q + "weight_scale_inv", np.ones((2, 1), np.float32)), "wrong shape"),
        ("fp8", _set(Q + "weight_scale_inv", np.array([[np.nan]], np.float32)), "weight is NaN"),
        ("mxfp4", _set(Q + "weight_scale", np.full((128, 4), 255, np.uint8)), Q + "weight"),
        ("nvfp4", _set(Q + "weight_global_scale", np.zeros(1, np.float32)), Q + "weight"),
    ],
)
def test_damage_is_named(
    case: str, change: Callable[[Tensors, dict[str, str]], None], message: str, tmp_path: Path
) -> None:
    settings, make, *_ = CASES[case]
    _write(tmp_path, settings, make, change)
    with pytest.raises(EngineError, match=message) as caught:
        open_checkpoint(tmp_path, None).load_matrix(Q + "weight")
    assert isinstance(caught.value, (CheckpointError, UnsupportedModelError))


@pytest.mark.parametrize(
    "settings",
    [
        {"quant_method": "bitsandbytes"},
        {},
        {**FP8, "weight_block_size": [32, 32]},
        {**AWQ, "version": "gemv"},
        {**AWQ, "bits": 8},
        {**GPTQ, "desc_act": True},
        {**GPTQ, "checkpoint_format": "marlin"},
        _compressed("float-quantized"),
        {**_compressed("pack-quantized"), "config_groups": {"a": {"weights": {"num_bits": 8}}}},
    ],
)
def test_what_is_not_read_is_refused_with_a_list(settings: dict[str, Any], tmp_path: Path) -> None:
    _write(tmp_path, settings, CASES["fp8"][1])
    with pytest.raises(UnsupportedModelError, match=r"quantization_config.*\n(.*\n)?read are: fp8"):
        open_checkpoint(tmp_path, None)


def test_settings_that_are_no_object(tmp_path: Path) -> None:
    _write(tmp_path, [], CASES["fp8"][1])  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"malformed config\.json: quantization_config"):
        open_checkpoint(tmp_path, None)
