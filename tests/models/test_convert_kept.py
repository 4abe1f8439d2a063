"""GGUF files converted: the same numbers and text, and the same bytes after a kill."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_models import (
    MIXTURES,
    mixed_types,
    model_metadata,
    model_tensors,
    write_model,
    write_split_model,
)
from tiny_gguf import pack_file
from tiny_models import logits_of, require_same_logits

from headrace import EngineConfig, ExpertConfig
from headrace.checkpoint import ContainerCheckpoint, GgufCheckpoint, open_checkpoint
from headrace.checkpoint.gguf_blocks import (
    FLOATING,
    QUANTISED,
    dequantize,
)
from headrace.checkpoint.gguf_names import ARCHITECTURES
from headrace.checkpoint.gguf_split import read_model
from headrace.checkpoint.layout import MANIFEST_NAME, Rule, describe_layout
from headrace.checkpoint.records import make_record_layout
from headrace.convert import GgufRecipe, Recipe, convert, convert_to_gguf
from headrace.convert.plan import make_plan
from headrace.convert.recipe import KEPT_WHOLE, PRESETS, default_for, preset_for
from headrace.errors import CheckpointError, ConfigError, EngineError
from headrace.experts import ExpertStore
from headrace.inspect import verify
from headrace.mirror import plan_mirror, stage, verify_mirror
from headrace.models.registry import REGISTRY
from headrace.tokenizer import Tokenizer

TYPES = sorted({*QUANTISED, *FLOATING})


def opened(path: Path) -> ContainerCheckpoint:
    checkpoint = open_checkpoint(path, None)
    assert isinstance(checkpoint, ContainerCheckpoint)
    return checkpoint


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


@pytest.mark.parametrize("model_type", sorted(ARCHITECTURES))
@pytest.mark.parametrize("type", TYPES)
def test_the_container_gives_the_files_logits(tmp_path: Path, model_type: str, type: str) -> None:
    source = write_model(tmp_path / "tiny.gguf", model_type, type, type)
    report = convert(source, tmp_path / "out", KEPT_WHOLE)
    assert not report.losses
    assert not report.requantised
    require_same_logits(source, tmp_path / "out")
    held, made = GgufCheckpoint(source), opened(tmp_path / "out")
    if held.records is not None and made.records is not None:
        assert held.records.layouts == made.records.layouts


def test_mixed_types_and_several_parts(tmp_path: Path) -> None:
    types = {
        (0, "gate"): "Q4_K", (0, "up"): "Q4_0", (0, "down"): "Q6_K",
        (1, "gate"): "Q8_0", (1, "up"): "MXFP4", (1, "down"): "Q5_0",
    }  # fmt: skip
    mixed = write_model(tmp_path / "mixed.gguf", "qwen3_moe", "Q5_K", types)
    convert(mixed, tmp_path / "mixed", KEPT_WHOLE)
    require_same_logits(mixed, tmp_path / "mixed")
    first = write_split_model(tmp_path, "mixtral", "Q4_1")
    convert(first.with_name("tiny-00002-of-00003.gguf"), tmp_path / "split", KEPT_WHOLE)
    require_same_logits(first, tmp_path / "split")


def test_text_is_rebuilt(tmp_path: Path) -> None:
    template = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}"
    metadata = {**model_metadata("qwen3_moe"), "tokenizer.chat_template": template}
    source = tmp_path / "tiny.gguf"
    source.write_bytes(pack_file(metadata, model_tensors("qwen3_moe", "Q8_0", "Q8_0")))
    convert(source, tmp_path / "out", KEPT_WHOLE)
    held, made = GgufCheckpoint(source), opened(tmp_path / "out")
    assert made.config == held.config
    assert made.generation_config == held.generation_config
    ours, theirs = Tokenizer.of(made), Tokenizer.of(held)
    text = "<s>abc ab, c</s>!"
    assert ours.encode(text) == theirs.encode(text)
    assert ours.decode(ours.encode("abcab")) == "abcab"
    assert (ours.eos_id, ours.special_id("bos")) == (theirs.eos_id, theirs.special_id("bos"))
    assert ours.chat_template == template


def test_floating_embedding_can_stay_on_the_drive_and_a_coded_one_is_kept(tmp_path: Path) -> None:
    ids = np.array([7, 0, 119], np.int32)
    for type, kind in (("F16", "rows"), ("Q6_K", "matrix")):
        source = write_model(tmp_path / f"{type}.gguf", "qwen3", type)
        convert(source, tmp_path / type, KEPT_WHOLE)
        made = opened(tmp_path / type)
        name = "model.embed_tokens.weight"
        assert made.dense[name].kind == kind
        wanted = GgufCheckpoint(source).embedding(name, True)(ids)
        np.testing.assert_array_equal(made.embedding(name, False)(ids), wanted)


# What a recipe means for a source in codes


def test_defaults_of_a_quantised_source_keep_it(tmp_path: Path) -> None:
    coded = open_checkpoint(write_model(tmp_path / "q.gguf", "qwen3", "Q4_K"), None)
    plain = open_checkpoint(write_model(tmp_path / "f.gguf", "qwen3", "F16"), None)
    assert default_for(coded) == preset_for("faithful", coded) == KEPT_WHOLE
    assert preset_for("small", coded) == PRESETS["small"]
    assert default_for(plain) == Recipe(scales="search")
    assert preset_for("faithful", plain) == PRESETS["faithful"]


def test_what_is_asked_for_is_quantised_again_and_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q8_0", "Q6_K")
    recipe = Recipe("q4", "q8", 32, rules=(Rule("experts.down", "keep", 1),), scales="search")
    report = convert(source, tmp_path / "out", recipe)
    # q8 of 32 is what Q8_0 is: its codes are kept as they are.
    twice = dict.fromkeys(("experts.gate", "experts.up"), "q6k in groups of 16")
    assert report.requantised == make_plan(source, recipe).requantised == twice
    assert "experts.gate: quantised twice: the source holds codes, q6k in groups" in caplog.text
    assert set(report.losses) == {"experts.gate", "experts.up"}
    made, held = opened(tmp_path / "out"), GgufCheckpoint(source)
    name = "model.layers.1.self_attn.k_proj.weight"
    assert made.load_bytes(name).tobytes() == held.load_matrix(name).data.tobytes()
    assert made.records is not None
    formats = [(m.format, m.group) for m in made.records.shape.matrices]
    assert formats == [("q4", 32), ("q4", 32), ("q6k", 16)]
    assert np.isfinite(logits_of(tmp_path / "out")).all()


def test_codes_and_the_same_values_in_f32_are_quantised_alike(tmp_path: Path) -> None:
    recipe = Recipe("q4", "q4", 32, scales="search")
    made = []
    for name, widen in (("codes", False), ("values", True)):
        tensors = model_tensors("mixtral", "Q5_1", "Q5_1")
        if widen:
            tensors = {n: _widened(*tensor) for n, tensor in tensors.items()}
        source = tmp_path / f"{name}.gguf"
        source.write_bytes(pack_file(model_metadata("mixtral"), tensors))
        convert(source, tmp_path / name, recipe)
        made.append(tmp_path / name)
    for layer in range(2):
        file = f"experts-{layer:03}.safetensors"
        assert (made[0] / file).read_bytes() == (made[1] / file).read_bytes()
    name = "model.layers.0.self_attn.q_proj.weight"
    assert opened(made[0]).dense_checksums[name] == opened(made[1]).dense_checksums[name]


@pytest.mark.parametrize("type", TYPES)
def test_f32_holds_the_values_of_any_type(tmp_path: Path, type: str) -> None:
    held = model_tensors("qwen3_moe", type, type)
    for name, tensors in (
        ("held", held),
        ("widened", {n: _widened(*tensor) for n, tensor in held.items()}),
    ):
        source = tmp_path / f"{name}.gguf"
        source.write_bytes(pack_file(model_metadata("qwen3_moe"), tensors))
        report = convert(source, tmp_path / name, Recipe("f32", "f32"))
        assert not report.requantised
    table = "model.embed_tokens.weight"  # by row, as the source has it
    made = [opened(tmp_path / name).dense_checksums for name in ("held", "widened")]
    assert {n: s for n, s in made[0].items() if n != table} == {
        n: s for n, s in made[1].items() if n != table
    }
    for layer in range(2):
        file = f"experts-{layer:03}.safetensors"
        assert (tmp_path / "held" / file).read_bytes() == (tmp_path / "widened" / file).read_bytes()


def _widened(type: str, shape: Any, raw: bytes) -> tuple[str, Any, bytes]:
    if type == "F32":
        return type, shape, raw
    rows = np.frombuffer(raw, np.uint8).reshape(int(np.prod(shape[:-1])), -1)
    return "F32", shape, dequantize(rows, type).tobytes()


def test_a_bad_scale_is_named(tmp_path: Path) -> None:
    tensors = model_tensors("qwen3_moe", "Q8_0", "Q8_0")
    type, shape, raw = tensors["blk.1.ffn_down_exps.weight"]
    at = (2 * 256 + 9) * 272 + 34 * 3  # expert 2, row 9, block 3
    tensors["blk.1.ffn_down_exps.weight"] = (type, shape, raw[:at] + b"\0\x7c" + raw[at + 2 :])
    source = tmp_path / "tiny.gguf"
    source.write_bytes(pack_file(model_metadata("qwen3_moe"), tensors))
    with pytest.raises(EngineError, match=r"^[^:]*: layer 1, expert 2, matrix down"):
        convert(source, tmp_path / "out", KEPT_WHOLE)
    assert not (tmp_path / "out").exists()
    # Layer 0 is done and bound to the old file; the mended one at its place starts anew.
    tensors["blk.1.ffn_down_exps.weight"] = (type, shape, raw)
    source.write_bytes(pack_file(model_metadata("qwen3_moe"), tensors))
    convert(source, tmp_path / "out", KEPT_WHOLE)
    require_same_logits(source, tmp_path / "out")


def test_a_cut_file_is_named(tmp_path: Path) -> None:
    source = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q8_0", "Q8_0")
    source.write_bytes(source.read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match=r"tiny\.gguf"):
        convert(source, tmp_path / "out", KEPT_WHOLE)
    assert list(tmp_path.iterdir()) == [source]


# Out again


@pytest.mark.parametrize("model_type", sorted(REGISTRY))
@pytest.mark.parametrize("type", TYPES)
def test_out_again_as_gguf(tmp_path: Path, model_type: str, type: str) -> None:
    """Every byte comes back."""
    metadata, tensors = model_metadata(model_type), model_tensors(model_type, type, type)
    source, made, back = tmp_path / "a.gguf", tmp_path / "out", tmp_path / "b.gguf"
    source.write_bytes(pack_file(metadata, tensors))
    convert(source, made, KEPT_WHOLE)
    convert_to_gguf(made, back, GgufRecipe())
    require_bytes(back, tensors)
    is_mixture = ARCHITECTURES[model_type].has_experts
    convert_to_gguf(made, tmp_path / "c.gguf", GgufRecipe("f32" if is_mixture else None, "f32"))
    require_bytes(tmp_path / "c.gguf", {n: _widened(*tensor) for n, tensor in tensors.items()})


def require_bytes(path: Path, tensors: Mapping[str, tuple[str, Sequence[int], bytes]]) -> None:
    found = read_model(path).tensors
    assert set(found) == set(tensors)
    for name, (kind, shape, raw) in tensors.items():
        tensor = found[name]
        assert (tensor.type.name, list(tensor.shape)) == (kind, list(shape))
        assert np.fromfile(path, np.uint8, tensor.nbytes, offset=tensor.offset).tobytes() == raw


@pytest.mark.parametrize("case", MIXTURES)
def test_a_mixture_comes_out_again_byte_by_byte(tmp_path: Path, case: str) -> None:
    metadata, tensors = (
        model_metadata("qwen3_moe"),
        model_tensors("qwen3_moe", "Q8_0", mixed_types(case)),
    )
    source, made, back = tmp_path / "a.gguf", tmp_path / "out", tmp_path / "b.gguf"
    source.write_bytes(pack_file(metadata, tensors))
    convert(source, made, KEPT_WHOLE)
    require_same_logits(source, made)
    records = opened(made).records
    assert records is not None
    assert records.layouts[0] != records.layouts[1]
    assert verify(made).is_sound
    convert_to_gguf(made, back, GgufRecipe())
    require_bytes(back, tensors)


def test_a_mirror_of_a_mixture(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", "qwen3_moe", "Q8_0", mixed_types("values and codes"))
    made, folder = tmp_path / "out", tmp_path / "mirror"
    convert(source, made, KEPT_WHOLE)
    config = EngineConfig(context=32, experts=ExpertConfig(history="off"))
    plan = plan_mirror(made, folder, config, bytes_per_s=(1e9, 1e9))
    assert len(set(plan.record_bytes.values())) == 2
    assert stage(plan) == plan.mirror_bytes
    assert verify_mirror(made, folder).is_good
    records = open_checkpoint(made, None, (folder,)).records
    assert records is not None
    assert len(records.copies) == plan.num_chosen
    with ExpertStore(records, num_slots=2, readers=config.experts) as store:
        for layer in records.layers:
            for expert in range(records.num_experts):
                with store.acquire(layer, np.array([[expert]], np.int32)) as lease:
                    assert lease.next_ready() == [0]
        assert all(drive.bytes_read > 0 for drive in store.drives())
        assert sum(drive.failed_copies for drive in store.drives()) == 0


def test_a_layers_own_layout_is_checked(tmp_path: Path) -> None:
    source = write_model(tmp_path / "a.gguf", "qwen3_moe", "Q8_0", mixed_types("what Q4_K_M is"))
    convert(source, tmp_path / "out", KEPT_WHOLE)
    file = tmp_path / "out" / MANIFEST_NAME
    good = json.loads(file.read_bytes())
    assert "layout" not in good["experts"]["layers"]["0"]
    own = good["experts"]["layers"]["1"]["layout"]
    broken = {
        r"layers\.1\.layout, .*\nexpected an object, got 7": 7,
        r"layers\.1\.layout\.down, .*\nexpected a format": {**own, "down": {"format": "q9"}},
        r"layers\.1\.layout, .*\nexpected {": {**own, "record_bytes": 4096},
        r"layers\.1\.layout, .*\nexpected matrices of": describe_layout(
            make_record_layout(512, 256, "q4k", 32)
        ),
        r"layers\.1\.layout\.down\.type, .*\nexpected a GGUF type that q4k of 32": {
            **own,
            "down": {**own["down"], "type": "Q5_0"},
        },
        r"record is misplaced: layers\.1": good["experts"]["layout"],
    }
    for message, layout in broken.items():
        bad = json.loads(json.dumps(good))
        bad["experts"]["layers"]["1"]["layout"] = layout
        file.write_text(json.dumps(bad))
        with pytest.raises(CheckpointError, match=message):
            opened(tmp_path / "out")


# The journal


def test_a_killed_conversion_goes_on(tmp_path: Path) -> None:
    source = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q4_K", "Q4_K")
    convert(source, tmp_path / "whole", KEPT_WHOLE)
    script = """
import os, signal, sys
from pathlib import Path
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE

def progress(p):
    if p.done_bytes >= int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

convert(Path(sys.argv[1]), Path(sys.argv[2]), KEPT_WHOLE, progress)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    total = sum(make_plan(source, KEPT_WHOLE).file_bytes().values())
    kept = 0
    for share in (0.1, 0.7, 0.95):
        dest = tmp_path / f"out{share}"
        command = [sys.executable, "-c", script, source, dest, str(int(share * total))]
        done = subprocess.run(command, env=env, check=False, capture_output=True)
        assert done.returncode == -signal.SIGKILL
        assert dest.with_name(dest.name + ".partial").is_dir()
        kept += convert(source, dest, KEPT_WHOLE).kept_files
        assert contents(dest) == contents(tmp_path / "whole")
    assert kept > 0


def test_a_full_drive_leaves_what_can_be_resumed(tmp_path: Path) -> None:
    pytest.importorskip("resource")
    source = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q4_K", "Q4_K")
    script = """
import resource, sys
from pathlib import Path
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE
from headrace.errors import EngineError

resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
try:
    convert(Path(sys.argv[1]), Path(sys.argv[2]), KEPT_WHOLE)
except EngineError as error:
    print(error)
    raise SystemExit(1)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-c", script, source, tmp_path / "out"]
    done = subprocess.run(command, env=env, check=False, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "no space left for" in done.stdout
    assert not list(tmp_path.rglob("*.tmp"))
    convert(source, tmp_path / "out", KEPT_WHOLE)
    require_same_logits(source, tmp_path / "out")


def test_another_quantiser_does_not_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "F16", "F16")
    recipe = Recipe("q4", "q8", 32, scales="search")

    class Stop(Exception):
        pass

    def stop(progress: Any) -> None:
        if progress.file == "experts-001.safetensors":
            raise Stop

    with pytest.raises(Stop):
        convert(source, tmp_path / "out", recipe, stop)
    monkeypatch.setattr("headrace.convert.run.SEARCH_VERSION", 10**6)
    with pytest.raises(ConfigError, match="unfinished container with another quantiser"):
        convert(source, tmp_path / "out", recipe)
    # Where nothing is searched the version does not count: another recipe is what differs.
    with pytest.raises(ConfigError, match="unfinished container with another recipe"):
        convert(source, tmp_path / "out", replace(recipe, scales="largest"))
    monkeypatch.undo()
    assert convert(source, tmp_path / "out", recipe).kept_files == 2
    manifest = json.loads((tmp_path / "out" / "headrace.json").read_bytes())
    assert "quantiser" not in manifest


# The command


def test_the_command_keeps_codes_unless_asked(cli: Any, tmp_path: Path) -> None:
    source = write_model(tmp_path / "tiny.gguf", "qwen3_moe", "Q4_K", "Q4_K")
    status, out, _ = cli("convert", source, tmp_path / "kept", "--json")
    assert (status, json.loads(out)["requantised"]) == (0, {})
    assert opened(tmp_path / "kept").recipe == KEPT_WHOLE
    status, out, err = cli("convert", source, tmp_path / "again", "--experts", "q4", "--dry-run")
    assert status == 0
    assert "experts.down: quantised twice" in out + err
    status, out, _ = cli("convert", source, tmp_path / "again", "--experts", "q4", "--json")
    assert set(json.loads(out)["requantised"]) == {"experts.gate", "experts.up", "experts.down"}
    recipe = opened(tmp_path / "again").recipe
    assert (recipe.experts, recipe.dense, recipe.scales) == ("q4", "keep", "search")
    status, _, err = cli("convert", source, tmp_path / "x", "--scales", "search")
    assert status == 2
    assert "--scales does nothing: no weight is rounded" in " ".join(err.split())
    status, _, err = cli("synth", "qwen3-30b-a3b", tmp_path / "x", "--experts", "keep")
    assert status != 0
    assert "no source whose formats could be kept" in " ".join(err.split())
