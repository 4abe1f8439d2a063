"""Routed experts stored in codes, run in place: the same bits as from records packed beforehand."""

import json
from pathlib import Path

import numpy as np
import pytest
from coded_models import (
    EXPERT_FORMATS,
    EXPERTS,
    HIDDEN,
    INNER,
    LAYERS,
    MIXTURES,
    Change,
    expert_module,
    tiny_config,
    write_coded_model,
)
from safetensors_files import Tensors
from stored_codes import CASES
from tiny_models import open_model, open_store, run

from headrace import _core
from headrace.checkpoint import HuggingFaceCheckpoint, open_checkpoint
from headrace.checkpoint.records import EXPERT_ROLES, RecordTable
from headrace.config import ExpertConfig
from headrace.convert.source import read_records
from headrace.errors import CheckpointError, ExpertReadError, UnsupportedModelError
from headrace.experts import ExpertStore
from headrace.models.registry import expert_names, load_spec
from headrace.plan import measure_sizes

Values = dict[tuple[int, int, str], np.ndarray]


def _write(
    folder: Path, model: str, case: str, change: Change = lambda *_: None, shards: int = 1
) -> Values:
    """A model whose experts are in codes, router and attention in float32; returns the values."""
    settings, make, *_ = CASES[case]
    config = tiny_config(model) | {"quantization_config": settings}
    values = write_coded_model(folder, config, make, lambda n: ".experts." in n, change, shards)
    return {
        (layer, expert, role): values[expert_module(model, layer, expert, role)]
        for layer in range(LAYERS)
        for expert in range(EXPERTS)
        for role in EXPERT_ROLES
    }


def _open(folder: Path) -> HuggingFaceCheckpoint:
    names = expert_names(load_spec(json.loads((folder / "config.json").read_text())))
    checkpoint = open_checkpoint(folder, names)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    return checkpoint


def _packed_table(checkpoint: HuggingFaceCheckpoint, file: Path) -> RecordTable:
    """Records of the same codes, decoded with NumPy and packed beforehand."""
    table = checkpoint.records
    assert table is not None
    size, shape = table.record_bytes, (LAYERS, EXPERTS, 1)
    with file.open("wb") as out:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                record = np.zeros(size, np.uint8)
                by_role = checkpoint.coded_experts[layer][expert]
                for role, m in zip(EXPERT_ROLES, table.shape.matrices, strict=True):
                    record[m.offset : m.offset + m.nbytes] = by_role[role].load().data
                out.write(record.tobytes())
    return RecordTable(
        files=(file,), layers=table.layers, num_experts=EXPERTS, layouts=table.layouts, repack=None,
        file=np.zeros(shape, np.int32),
        offset=np.arange(LAYERS * EXPERTS, dtype=np.int64).reshape(shape) * size,
        length=np.full(shape, size, np.int64), checksum=None,
    )  # fmt: skip


def _records(table: RecordTable) -> dict[tuple[int, int], np.ndarray]:
    found = {}
    with ExpertStore(table, num_slots=2, readers=ExpertConfig()) as store:
        for layer in table.layers:
            for i, record in enumerate(read_records(store, layer)):
                found[layer, i] = record.copy()
    return found


@pytest.mark.parametrize("case", EXPERT_FORMATS)
def test_records_hold_the_values_the_format_defines(case: str, tmp_path: Path) -> None:
    values = _write(tmp_path, "qwen3_moe", case, shards=3)
    checkpoint = _open(tmp_path)
    table = checkpoint.records
    assert table is not None and table.coded
    assert table.read_bytes == sum(
        checkpoint.entries[name].nbytes
        for name in checkpoint.entries
        if ".layers.0.mlp.experts.0." in name
        and not name.endswith(("weight_shape", "global_scale", "scale_2", "input_scale"))
    )
    assert (table.shape.gate.format, table.shape.gate.group) == CASES[case][2:]
    packed = _packed_table(checkpoint, tmp_path / "records")
    expected, got = _records(packed), _records(table)
    for (layer, expert), record in got.items():
        for role, m in zip(EXPERT_ROLES, table.shape.matrices, strict=True):
            data = record[m.offset : m.offset + m.nbytes]
            assert np.array_equal(data, expected[layer, expert][m.offset : m.offset + m.nbytes])
            aligned = _core.aligned_empty(m.nbytes)
            aligned[:] = data
            matrix = _core.Matrix(aligned, m.format, m.rows, m.cols, m.group)
            wanted = values[layer, expert, role].astype(np.float32)
            np.testing.assert_array_equal(_core.unpack(matrix), wanted)


@pytest.mark.parametrize("case", EXPERT_FORMATS)
@pytest.mark.parametrize("model", MIXTURES)
def test_the_model_gives_the_bits_of_packed_records(model: str, case: str, tmp_path: Path) -> None:
    _write(tmp_path, model, case)
    decoder, checkpoint = open_model(tmp_path)
    assert isinstance(checkpoint, HuggingFaceCheckpoint)
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    table = _packed_table(checkpoint, tmp_path / "records")
    with ExpertStore(table, num_slots=LAYERS * EXPERTS, readers=ExpertConfig()) as store:
        expected = run(decoder, store, ids, [8])
    assert np.isfinite(expected).all()
    for num_slots in (2, LAYERS * EXPERTS):
        with open_store(checkpoint, num_slots) as store:
            np.testing.assert_array_equal(run(decoder, store, ids, [3, 1, 4]), expected)


E = "model.layers.1.mlp.experts.2.down_proj."


def _drop(name: str) -> Change:
    return lambda tensors, _: tensors.__delitem__(name)


def _set(name: str, value: np.ndarray, dtype: str | None = None) -> Change:
    def change(tensors: Tensors, dtypes: dict[str, str]) -> None:
        tensors[name] = value
        if dtype:
            dtypes[name] = dtype

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("fp8", _drop(E + "weight_scale_inv"), f"tensor is missing: {E}weight_scale_inv"),
        ("modelopt", _drop(E + "weight_scale"), f"tensor is missing: {E}weight_scale"),
        ("modelopt", _drop(E + "weight_scale_2"), f"tensor is missing: {E}weight_scale_2"),
        ("awq-64", _drop(E + "scales"), f"tensor is missing: {E}scales"),
        ("gptq-64", _drop(E + "g_idx"), f"tensor is missing: {E}g_idx"),
        ("gptq-64", _set(E + "scales", np.ones((3, 8), np.float16)), f"wrong shape: {E}scales"),
        ("gptq-64", _set(E + "scales", np.ones((3, 128), np.float32)), "not stored alike: " + E),
        ("awq-64", _set(E + "scales", np.ones((3, 128), np.int32)), f"dtype I32: {E}scales"),
        ("awq-64", _set(E + "scales", np.ones((6, 128), np.float16)), "wrong shape|not stored"),
        (
            "packed-sym-64",
            _set(E + "weight_packed", np.ones((64, 24), np.int32)),
            f"wrong shape: {E}weight_scale",
        ),
    ],
)
def test_bad_headers_are_refused_by_name(
    case: str, change: Change, message: str, tmp_path: Path
) -> None:
    _write(tmp_path, "qwen3_moe", case, change)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=message):
        _open(tmp_path)


def _poke(name: str, index: tuple[int, ...], value: float) -> Change:
    def change(tensors: Tensors, _: dict[str, str]) -> None:
        tensors[name] = tensors[name].copy()
        tensors[name][index] = value

    return change


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("fp8", _poke(E + "weight_scale_inv", (0, 1), np.nan), r"not finite: PLACE.*\[0, 1\]"),
        ("fp8", _poke(E + "weight", (100, 7), 0x7F), r"not finite: PLACE.*NaN at.*\[100, 7\]"),
        ("gptq-64", _poke(E + "g_idx", (64,), 0), r"act-order.: PLACE.*\[64, 0\]"),
        ("awq-64", _poke(E + "scales", (2, 9), np.inf), r"not finite: PLACE.*\[2, 9\]"),
        ("mxfp4", _poke(E + "weight_scale", (5, 1), 255), r"not finite: PLACE.*\[5, 1\]"),
        (
            "modelopt",
            _set(E + "weight_scale_2", np.array(np.nan, np.float32)),
            r"not finite: PLACE.*share .weight_global_scale or weight_scale_2.*\[0, 0\]",
        ),
        (
            "nvfp4",
            _set(E + "weight_global_scale", np.zeros(1, np.float32)),
            r"not finite: PLACE.*share.*\[0, 0\]",
        ),
        ("nvfp4", _poke(E + "weight_scale", (5, 1), 127), r"not finite: PLACE.*\[5, 1\]"),
    ],
)
def test_bad_values_are_found_as_they_are_read(
    case: str, change: Change, message: str, tmp_path: Path
) -> None:
    _write(tmp_path, "qwen3_moe", case, change)
    table = _open(tmp_path).records
    assert table is not None
    place = "layer 1, expert 2, matrix down, file .*model.safetensors\n"
    with ExpertStore(table, num_slots=2, readers=ExpertConfig()) as store:
        for _ in range(3):  # more often than there are slots
            with (
                store.acquire(1, np.array([[2]], np.int32)) as lease,
                pytest.raises(ExpertReadError, match="(?s)" + message.replace("PLACE", place)),
            ):
                lease.next_ready()


def test_a_file_cut_off_later_is_named(tmp_path: Path) -> None:
    _write(tmp_path, "qwen3_moe", "gptq-64")
    table = _open(tmp_path).records
    assert table is not None
    file = tmp_path / "model.safetensors"
    with file.open("r+b") as cut:
        cut.truncate(int(table.offset[1, 3].max()) + 100)
    with (
        ExpertStore(table, num_slots=2, readers=ExpertConfig()) as store,
        store.acquire(1, np.array([[3]], np.int32)) as lease,
        pytest.raises(ExpertReadError, match=r"short: layer 1, expert 3, matrix down, file"),
    ):
        lease.next_ready()


@pytest.mark.parametrize(("case", "shards"), [("gptq-64", 1), ("nvfp4", 1), ("awq-32", 3)])
def test_tensors_that_lie_together_are_read_together(
    case: str, shards: int, tmp_path: Path
) -> None:
    """Bytes that come from the drive: of a read by itself also the rest of its first and last page.
    With several files an expert's tensors lie in all of them."""
    _write(tmp_path, "qwen3_moe", case, shards=shards)
    table = _open(tmp_path).records
    assert table is not None
    places = {"whole": 1 << 20, "cut": 4096}
    read, records = {}, {}
    for name, block_bytes in places.items():
        readers = ExpertConfig(block_bytes=block_bytes)
        with ExpertStore(table, num_slots=8, readers=readers) as store:
            for layer in table.layers:
                for i, record in enumerate(read_records(store, layer)):
                    records[name, layer, i] = record.copy()
            read[name] = store.stats().bytes_read
    own = sum(int(table.length[i, e].sum()) for i in range(LAYERS) for e in range(EXPERTS))
    factors = 4096 if case == "nvfp4" else 0  # they lie between the others
    most = own + LAYERS * EXPERTS * (shards * 2 * 4096 + factors)
    one_by_one = -(-(table.offset + table.length) // 4096) * 4096 - table.offset // 4096 * 4096
    assert own <= read["whole"] <= most < one_by_one.sum()
    for layer in table.layers:
        for i in range(EXPERTS):
            whole = records["whole", layer, i]
            np.testing.assert_array_equal(whole, records["cut", layer, i])


def test_experts_of_two_kinds_are_refused(tmp_path: Path) -> None:
    def plain(tensors: Tensors, dtypes: dict[str, str]) -> None:
        for name in [n for n in tensors if ".layers.1.mlp.experts." in n]:
            del tensors[name]
        for expert in range(EXPERTS):
            for proj, shape in (("gate", (192, 128)), ("up", (192, 128)), ("down", (128, 192))):
                name = f"model.layers.1.mlp.experts.{expert}.{proj}_proj.weight"
                tensors[name] = np.zeros(shape, np.float32)

    _write(tmp_path, "qwen3_moe", "awq-64", plain)
    with pytest.raises(UnsupportedModelError, match="values in layer 1 and codes in layer 0"):
        _open(tmp_path)


def test_the_plan_counts_records_as_they_are_held(tmp_path: Path) -> None:
    _write(tmp_path, "qwen3_moe", "gptq-64")
    checkpoint = _open(tmp_path)
    spec = load_spec(checkpoint.config)
    sizes = measure_sizes(spec, checkpoint, "f16")
    blocks = 2 * (INNER // 16) * (HIDDEN // 64) + (HIDDEN // 16) * (INNER // 64)
    assert sizes.record_bytes == -(-blocks * 640 // 4096) * 4096  # q4a: 640 bytes to 16 x 64
    stored = 2 * (192 * 64 + 2 * 24 * 4 + 2 * 192 * 2 + 128 * 4) + (
        128 * 96 + 3 * 16 * 4 + 3 * 128 * 2 + 192 * 4
    )
    assert sizes.record_read_bytes == stored


@pytest.mark.parametrize("case", ["nvfp4", "packed-sym-64"])
def test_headers_without_data_are_enough_for_a_plan(case: str, tmp_path: Path) -> None:
    _write(tmp_path, "qwen3_moe", case)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    with file.open("r+b") as data:
        data.truncate(8 + int.from_bytes(content[:8], "little"))
        data.truncate(len(content))  # a hole, as `pull` makes it
    checkpoint = _open(tmp_path)
    assert measure_sizes(load_spec(checkpoint.config), checkpoint, "f16").num_records == 8
