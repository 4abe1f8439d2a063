"""What `plan` says of records that are packed as they are read, and of tables in codes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coded_models import EXPERT_FORMATS, tiny_config, write_coded_model
from gguf_models import write_model
from stored_codes import CASES
from tiny_models import make_case

from headrace import _core
from headrace.checkpoint import GgufCheckpoint, open_checkpoint
from headrace.checkpoint.gguf_blocks import FLOATING, QUANTISED
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE
from headrace.errors import ShapeError
from headrace.experts.repack import measure_repack
from headrace.models.registry import expert_names, load_spec
from headrace.plan import measure_sizes


@pytest.mark.parametrize("case", EXPERT_FORMATS)
def test_every_stored_format_is_measured(case: str, tmp_path: Path) -> None:
    settings, make, *_ = CASES[case]
    config = tiny_config("qwen3_moe") | {"quantization_config": settings}
    write_coded_model(tmp_path, config, make, lambda name: ".experts." in name)
    table = open_checkpoint(tmp_path, expert_names(load_spec(config))).records
    assert table is not None
    rate = measure_repack(table)
    assert rate is not None
    assert rate > 0


@pytest.mark.parametrize("type", sorted({*QUANTISED, *FLOATING}))
def test_every_gguf_type_is_measured(type: str, tmp_path: Path) -> None:
    table = GgufCheckpoint(write_model(tmp_path / "a.gguf", "qwen3_moe", "F32", type)).records
    assert table is not None
    rate = measure_repack(table)
    assert rate is not None
    assert rate > 0


@pytest.mark.parametrize("format", ["bf16", "f16", "f32"])
def test_rows_are_packed_as_pack_does(format: str) -> None:
    values = np.random.default_rng(1).standard_normal((37, 24)).astype(np.float32)
    if format == "bf16":
        plain = (values.view(np.uint32) >> 16).astype(np.uint16)
    else:
        plain = values.astype(np.float16 if format == "f16" else np.float32)
    data = np.ascontiguousarray(plain).view(np.uint8).reshape(-1)
    packed = _core.aligned_empty(_core.packed_bytes(format, 37, 24, 1))
    _core.repack_rows(data, format, 37, 24, packed)
    np.testing.assert_array_equal(packed, _core.pack(plain, format, 1))
    with pytest.raises(ShapeError, match="rows of a floating format"):
        _core.repack_rows(data[:-1], format, 37, 24, packed)
    with pytest.raises(ShapeError, match=f"expected {packed.size} bytes to fill"):
        _core.repack_rows(data, format, 37, 24, packed[1:])


def test_the_plan_says_it(cli: Any, tmp_path: Path) -> None:
    make_case("qwen3_moe", "default", tmp_path / "model")
    convert(tmp_path / "model", tmp_path / "out", KEPT_WHOLE)
    options = ("--memory", "4GiB", "--context", "64")
    for name, is_packed in (("model", False), ("out", True)):
        status, out, _ = cli("plan", tmp_path / name, *options)
        assert status == 0
        assert ("packing what is read" in out) != is_packed
        status, out, _ = cli("plan", tmp_path / name, *options, "--json")
        assert (json.loads(out)["repack_bytes_per_s"] is None) == is_packed


@pytest.mark.parametrize(("type", "grows"), [("Q5_0", True), ("Q4_0", False)])
def test_the_plan_says_what_a_record_takes_in_the_file(
    cli: Any, tmp_path: Path, type: str, grows: bool
) -> None:
    model = write_model(tmp_path / "a.gguf", "qwen3_moe", type, type)
    out = cli("plan", model, "--memory", "4GiB", "--context", "64")[1]
    assert (" in the files)" in out) == grows


@pytest.mark.parametrize(("type", "has_rows"), [("Q6_K", False), ("F16", True), ("BF16", True)])
def test_a_gguf_table_in_codes_counts(type: str, has_rows: bool, tmp_path: Path) -> None:
    source = GgufCheckpoint(write_model(tmp_path / "a.gguf", "qwen3_moe", type, "Q8_0"))
    sizes = measure_sizes(load_spec(source.config), source, "f16")
    name = "model.embed_tokens.weight"
    assert sizes.embedding_bytes == source.info(name).nbytes > 0
    assert sizes.embedding_has_rows == has_rows
    table = source.embedding(name, resident=False)
    assert (table.data is None) == has_rows
    ids = np.array([5, 0, 119], np.int32)
    np.testing.assert_array_equal(table(ids), source.embedding(name, resident=True)(ids))
