"""Reads a checkpoint's `quantization_config`, and accounts for every field of it.

As with a `config.json`, a field that nobody knows may be the one that changes the values (a
rotation, a pattern of zeros), so it is refused by name. What exceptions a config lists is not
needed: the tensors tell which matrices are in codes.

Source:
    The configs that compressed-tensors, AutoAWQ, AutoGPTQ and GPTQModel, TensorRT Model Optimizer,
    and the publishers of FP8 weights write.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.errors import CheckpointError, UnsupportedModelError

FP8_TILE = 128
COMPRESSED_FORMATS = ("pack-quantized", "nvfp4-pack-quantized", "mxfp4-pack-quantized")

_E4M3 = ("e4m3", "float8_e4m3fn")
_NEUTRAL: tuple[Any, ...] = (None, False, "", [], {})
"""Whatever a field means, with one of these it asks for nothing."""
_KNOWN = {
    # How activations and the cache would be rounded elsewhere is no part of the weights.
    "compressed-tensors": (
        "format config_groups ignore version quantization_status global_compression_ratio "
        "kv_cache_scheme sparsity_config"
    ),
    "fp8": (
        "fmt weight_block_size scale_fmt activation_scheme modules_to_not_convert ignored_layers "
        "kv_cache_scheme"
    ),
    "awq": (
        "bits group_size version zero_point modules_to_not_convert backend do_fuse modules_to_fuse "
        "fuse_max_seq_len exllama_config"
    ),
    "gptq": (
        "bits group_size sym desc_act static_groups true_sequential checkpoint_format format "
        "lm_head damp_percent damp_auto_increment dynamic meta pack_dtype dataset tokenizer "
        "model_name_or_path model_file_base_name model_seqlen block_name_to_quantize "
        "module_name_preceding_first_block modules_in_block_to_quantize batch_size pad_token_id "
        "use_exllama disable_exllama exllama_config max_input_length use_cuda_fp16 "
        "cache_block_outputs backend mse"
    ),
    "modelopt": (
        "quant_algo producer config_groups ignore exclude_modules group_size kv_cache_scheme "
        "kv_cache_quant_algo"
    ),
    "mxfp4": "modules_to_not_convert",
}
"""Method -> fields that are read, or cannot change what a weight is worth."""


def require_known(settings: Mapping[str, Any], method: str) -> None:
    """Check that every field of a method's settings is known, or asks for nothing.

    Raises:
        UnsupportedModelError: one is not, with its name and value.
    """
    known = {"quant_method", *_KNOWN[method].split()}
    for name, value in settings.items():
        if name not in known and value not in _NEUTRAL:
            raise UnsupportedModelError(
                f"quantization_config has an unknown field: {name} = {str(value)[:200]}\n"
                f"expected, with quant_method {method}: {', '.join(sorted(known))}\n"
                "hint: it may change what the weights are worth, so it is not left out"
            )


def read_method(settings: Any) -> tuple[str, int]:
    """Return how matrices are stored, and what is added to their zero points.

    Args:
        settings: the value of `quantization_config`, of any method but gpt-oss's "mxfp4".

    Returns:
        "fp8", "awq", "gptq", "modelopt", or a format of compressed-tensors.

    Raises:
        CheckpointError: not an object.
        UnsupportedModelError: a method, or an option of it, that is not read.
    """
    if not isinstance(settings, dict):
        raise CheckpointError(
            "malformed config.json: quantization_config\n"
            f"expected an object, got {str(settings)[:100]}"
        )
    method = str(settings.get("quant_method"))
    _require(settings, "", method in _METHODS)
    stored, zero_offset = _METHODS[method](settings)
    require_known(settings, method)
    return stored, zero_offset


def _compressed(settings: Mapping[str, Any]) -> tuple[str, int]:
    stored = settings.get("format")
    _require(settings, "pack-quantized", stored in COMPRESSED_FORMATS)
    for group in _objects(settings.get("config_groups")):
        _require(settings, f"format {stored} in each group", group.get("format") in (None, stored))
        weights = group.get("weights") or {}
        is_read = (weights.get("num_bits"), weights.get("type")) == (4, "int")
        _require(settings, "weights of 4 bits, type int", stored != "pack-quantized" or is_read)
    sparsity = settings.get("sparsity_config")
    is_dense = not sparsity or (isinstance(sparsity, dict) and sparsity.get("format") == "dense")
    _require(settings, "sparsity_config of format dense", is_dense)
    return str(stored), 0


def _modelopt(settings: Mapping[str, Any]) -> tuple[str, int]:
    _require(settings, "quant_algo NVFP4", settings.get("quant_algo") == "NVFP4")
    return "modelopt", 0


def _fp8(settings: Mapping[str, Any]) -> tuple[str, int]:
    tile = settings.get("weight_block_size")
    _require(settings, "weight_block_size [128, 128]", tile == [FP8_TILE, FP8_TILE])
    _require(settings, "fmt e4m3", settings.get("fmt", "e4m3") in _E4M3)
    return "fp8", 0


def _awq(settings: Mapping[str, Any]) -> tuple[str, int]:
    _require(settings, "bits 4", settings.get("bits") == 4)
    _require(settings, "version gemm", str(settings.get("version", "gemm")).lower() == "gemm")
    _require(settings, "zero_point true", settings.get("zero_point", True) is True)
    return "awq", 0


def _gptq(settings: Mapping[str, Any]) -> tuple[str, int]:
    _require(settings, "bits 4", settings.get("bits") == 4)
    _require(settings, "desc_act false", not settings.get("desc_act"))
    stored = settings.get("checkpoint_format") or settings.get("format") or "gptq"
    _require(settings, "checkpoint_format gptq or gptq_v2", stored in ("gptq", "gptq_v2"))
    return "gptq", 1 if stored == "gptq" else 0


_METHODS = {
    "compressed-tensors": _compressed, "fp8": _fp8, "awq": _awq, "gptq": _gptq,
    "modelopt": _modelopt,
}  # fmt: skip


def _objects(value: Any) -> list[dict[str, Any]]:
    values = value.values() if isinstance(value, dict) else ()
    return [item for item in values if isinstance(item, dict)]


def _require(settings: Mapping[str, Any], what: str, is_so: bool) -> None:
    if is_so:
        return
    got = {k: v for k, v in settings.items() if isinstance(v, str | int | bool | list)}
    raise UnsupportedModelError(
        f"quantization_config is not supported: {str(got)[:300]}\n"
        + (f"expected {what}\n" if what else "")
        + "read are: fp8 (128 x 128 blocks), awq (gemm, 4 bits), gptq (4 bits, without desc_act), "
        "modelopt (NVFP4), and of compressed-tensors pack-quantized (4 bits), nvfp4-pack-quantized "
        "and mxfp4-pack-quantized"
    )
