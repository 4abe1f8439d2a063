"""Checkpoints that no other test converts whole: floats, and dense models in codes."""

from pathlib import Path

import numpy as np
import pytest
from coded_models import tiny_config, write_coded_model
from safetensors_files import Tensors
from stored_codes import CASES
from tiny_models import require_same_logits

from headrace.checkpoint import open_checkpoint
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE
from headrace.models.registry import REGISTRY, expert_names, load_spec

FLOATS = ("bf16", "f16", "f32")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("model", sorted(REGISTRY))
def test_a_checkpoint_of_floats_is_kept(model: str, dtype: str, tmp_path: Path) -> None:
    def narrow(tensors: Tensors, dtypes: dict[str, str]) -> None:
        for name, values in tensors.items():
            if dtype == "f16":
                tensors[name] = values.astype(np.float16)
            elif dtype == "bf16":
                tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
                dtypes[name] = "BF16"

    config, make = tiny_config(model), CASES["mxfp4"][1]
    write_coded_model(tmp_path / "model", config, make, lambda _: False, narrow, 2)
    convert(tmp_path / "model", tmp_path / "out", KEPT_WHOLE)
    made = open_checkpoint(tmp_path / "out", expert_names(load_spec(config)))
    assert made.info("model.layers.1.self_attn.k_proj.weight").format == dtype
    if made.records is not None:
        assert {m.format for m in made.records.shape.matrices} == {dtype}
    require_same_logits(tmp_path / "model", tmp_path / "out")


@pytest.mark.parametrize("case", sorted(CASES))
@pytest.mark.parametrize("model", ["llama", "qwen3"])
def test_a_dense_model_in_codes_is_kept(model: str, case: str, tmp_path: Path) -> None:
    settings, make, format, group = CASES[case]
    config = tiny_config(model) | {"quantization_config": settings}
    if case.endswith("-128"):
        config["intermediate_size"] = 256
    write_coded_model(tmp_path / "model", config, make, lambda _: True)
    convert(tmp_path / "model", tmp_path / "out", KEPT_WHOLE)
    info = open_checkpoint(tmp_path / "out", None).info("model.layers.1.mlp.down_proj.weight")
    assert (info.format, info.group) == (format, group)
    require_same_logits(tmp_path / "model", tmp_path / "out")
