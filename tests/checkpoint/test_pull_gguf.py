"""GGUF models of a repository: found by label, planned by their headers, pulled, converted."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from gguf_models import write_model, write_split_model
from hub_server import HubServer, serve

from headrace import LLM, SamplingParams, hub_gguf
from headrace import pull as pull_module
from headrace.checkpoint.layout import Recipe
from headrace.cli.app import _run
from headrace.config import EngineConfig
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE
from headrace.errors import CheckpointError
from headrace.hub import find_pulled, is_hub_id, open_repository, pulled_folder
from headrace.hub_gguf import gguf_models, matching
from headrace.inspect import describe
from headrace.llm import plan_model, resolve_model
from headrace.pull import pull, pull_converted, remote_headers

REPO = "owner/tiny"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One model in three types, one of them in three files, and what else such folders hold."""
    folder = tmp_path / "source"
    (folder / "BF16").mkdir(parents=True)
    write_model(folder / "Tiny-v0.1-Q4_0.gguf", "qwen3_moe", "Q4_0", "Q4_0")
    write_model(folder / "Tiny-v0.1-UD-Q4_K_XL.gguf", "qwen3_moe", "Q8_0", "Q4_K")
    first = write_split_model(folder / "BF16", "qwen3_moe", "BF16")
    for path in first.parent.iterdir():
        path.rename(path.with_name(path.name.replace("tiny", "Tiny-v0.1-BF16")))
    (folder / "mmproj-F16.gguf").write_bytes(b"eyes")
    (folder / "Tiny-v0.1.imatrix.gguf").write_bytes(b"means")
    (folder / "config.json").write_text("{}")
    (folder / "README.md").write_text("read me")
    return folder


@pytest.fixture
def server(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(pull_module, "MARGIN_BYTES", 0)
    with serve({REPO: source}) as state:
        monkeypatch.setenv("HF_ENDPOINT", state.endpoint)
        yield state


@pytest.mark.parametrize(
    ("names", "labels"),
    [
        ("Qwen3-30B-Q4_K_M Qwen3-30B-UD-Q4_K_XL Qwen3-30B-Q8_0", "Q4_K_M Q8_0 UD-Q4_K_XL"),
        ("m.Q4_0", "Q4_0"),
        ("model", "model"),
        ("Q4/m Q8/m", "Q4-m Q8-m"),
        ("x-Q4_K_M x-Q4_K_M-imat", "Q4_K_M Q4_K_M-imat"),
        ("x x-y", "x x-y"),
        ("x-Q4_K_M x-Q4_K_S", "Q4_K_M Q4_K_S"),
        ("B/x-B-00001-of-00002 B/x-B-00002-of-00002 x-Q8_0", "B Q8_0"),
        ("mixtral-8x7b-v0.1.Q2_K mixtral-8x7b-v0.1.Q4_K_M", "Q2_K Q4_K_M"),
        ("", ""),
    ],
)
def test_models_are_called_by_what_tells_their_names_apart(names: str, labels: str) -> None:
    found = gguf_models(f"{name}.gguf" for name in names.split())
    assert sorted(found) == labels.split()
    assert sum(len(files.names) for files in found.values()) == len(names.split())


@pytest.mark.parametrize(
    ("tag", "labels"),
    [
        ("q8_0", "Q8_0"),
        ("UD-Q8_0", "UD-Q8_0"),
        ("q4_k_xl", "UD-Q4_K_XL"),
        ("m-Q8_0", "Q8_0"),
        ("m-Q8_0.gguf", "Q8_0"),
        ("UD", "UD-Q8_0 UD-Q4_K_XL"),
        ("Q8", ""),
        ("", "Q8_0 UD-Q8_0 UD-Q4_K_XL"),
    ],
)
def test_what_a_tag_means(tag: str, labels: str) -> None:
    stems = {label: f"m-{label}" for label in ("Q8_0", "UD-Q8_0", "UD-Q4_K_XL")}
    assert matching(tag, stems) == labels.split()


def test_ids_with_a_label() -> None:
    assert is_hub_id("owner/tiny:Q4_K_M") and is_hub_id("owner/tiny:tiny-Q4_0.gguf")
    for text in ("owner/tiny:", "owner:tiny/Q4", "C:/models/tiny", "owner/tiny: hello"):
        assert not is_hub_id(text), text


def test_one_of_several_is_pulled(server: HubServer, source: Path) -> None:
    seen: list[tuple[int, int]] = []
    repository = open_repository(f"{REPO}:q4_0")
    assert repository.model_id == f"{REPO}:Q4_0"
    folder = pulled_folder(repository.model_id)
    report = pull(repository, folder, lambda _, *amount: seen.append(amount))
    name = "Tiny-v0.1-Q4_0.gguf"
    assert list(server.served) == [name]  # nothing else was asked for
    assert report.path == folder / name
    assert report.path.read_bytes() == (source / name).read_bytes()
    assert seen[-1] == (repository.total_bytes, repository.total_bytes)
    for model in (f"{REPO}:Q4_0", f"{REPO}:q4_0", f"{REPO}:tiny-v0.1-q4_0", REPO):
        assert resolve_model(model) == report.path, model
    assert find_pulled(f"{REPO}:Q8_0") is None
    assert pull(repository, folder).already_there
    pull(other := open_repository(f"{REPO}:Q4_K_XL"), pulled_folder(other.model_id))
    assert find_pulled(f"{REPO}:Q4_K_XL") == find_pulled(f"{REPO}:UD-Q4_K_XL")
    with pytest.raises(CheckpointError, match=rf"several.*\n.* {REPO}:Q4_0, {REPO}:UD-Q4_K_XL"):
        resolve_model(REPO)


def test_a_split_model_is_pulled_and_runs(server: HubServer, source: Path) -> None:
    repository = open_repository(f"{REPO}:BF16")
    assert len(repository.shards) == 3
    report = pull(repository, pulled_folder(repository.model_id))
    assert (
        describe(report.path)["fingerprint"]
        == describe(source / repository.shards[0])["fingerprint"]
    )
    with LLM(f"{REPO}:bf16", context=32) as llm, LLM(source / repository.shards[0]) as same:
        params = SamplingParams(temperature=0.0, max_tokens=4)
        assert llm.generate("hi", params).ids == same.generate("hi", params).ids


def test_the_plan_of_remote_headers_is_the_plan_of_the_files(
    server: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_gguf, "FIRST_BYTES", 64)  # headers take many answers
    config = EngineConfig(memory=256 << 20, context=64)
    for label in ("Q4_0", "BF16"):
        repository = open_repository(f"{REPO}:{label}")
        with remote_headers(repository) as path:
            remote = plan_model(path, config).as_dict()
        local = plan_model(source / repository.shards[0], config).as_dict()
        for key in ("floor_bytes", "num_slots", "num_records", "record_bytes"):
            assert remote[key] == local[key]
        assert not path.exists()
    assert sum(server.served.values()) < sum(p.stat().st_size for p in source.rglob("*.gguf")) / 2


def test_the_commands(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--memory", "4GiB", "--context", "64")
    assert _run(["plan", f"{REPO}:Q4_0", "--json", *memory]) == 0
    assert json.loads(capsys.readouterr().out)["num_records"] > 0
    assert _run(["pull", f"{REPO}:Q4_0", "--offline"]) == 1
    assert "was not pulled yet" in capsys.readouterr().err
    assert _run(["run", f"{REPO}:Q4_0", "hi"]) == 1
    assert f"run `headrace pull {REPO}:Q4_0`" in " ".join(capsys.readouterr().err.split())
    assert _run(["pull", f"{REPO}:Q4_0", *memory]) == 0
    shown = capsys.readouterr()
    assert f"memory of {REPO}:Q4_0" in shown.out
    assert f"{REPO}:Q4_0 pulled" in shown.err
    server.errors[REPO] = (500, "")  # from here on nothing is asked
    assert _run(["pull", f"{REPO}:Q4_0", "--offline", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["already_there"] is True and report["total_bytes"] > 0
    assert _run(["inspect", REPO]) == 0


@pytest.mark.parametrize(
    ("label", "recipe"), [("Q4_0", KEPT_WHOLE), ("BF16", Recipe(experts="q4", dense="q8"))]
)
def test_converted_on_the_way_is_the_same_container(
    label: str, recipe: Recipe, server: HubServer, source: Path, tmp_path: Path
) -> None:
    repository = open_repository(f"{REPO}:{label}")
    folder = pulled_folder(repository.model_id)
    left = folder.with_name(folder.name + ".pulling") / "BF16"
    left.mkdir(parents=True)  # by a killed call
    report = pull_converted(repository, folder, recipe)
    convert(source / repository.shards[0], tmp_path / "whole", recipe)
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in report.path.iterdir()) == names
    for name in names:
        assert (report.path / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert resolve_model(f"{REPO}:{label}") == report.path
    assert not left.parent.exists()


def test_a_download_that_was_cut_is_incomplete(server: HubServer, source: Path) -> None:
    repository = open_repository(f"{REPO}:BF16")
    last = repository.shards[-1]
    (source / last).rename(source / "gone")
    with pytest.raises(CheckpointError, match="no such file in owner/tiny"):
        pull(repository, pulled_folder(repository.model_id))
    with pytest.raises(CheckpointError, match=r"incomplete.*\n.*headrace pull owner/tiny:BF16"):
        resolve_model(f"{REPO}:BF16")
    (source / "gone").rename(source / last)
    assert not pull(repository, pulled_folder(repository.model_id)).already_there
    assert resolve_model(f"{REPO}:BF16").name.endswith("-00001-of-00003.gguf")


def test_names_that_fit_none_or_several(server: HubServer, source: Path) -> None:
    listed = rf"\nexpected {REPO}:LABEL with one of BF16 \(.*B\), Q4_0 \(.*, UD-Q4_K_XL \("
    with pytest.raises(CheckpointError, match=rf"3 of 3 GGUF models fit: {REPO}{listed}"):
        open_repository(REPO)
    with pytest.raises(CheckpointError, match=rf"fits none of 3 GGUF models: {REPO}{listed}"):
        open_repository(f"{REPO}:Q5_1")
    for path in source.rglob("*.gguf"):
        if "Q4_0" not in path.name:
            path.unlink()
    assert open_repository(REPO).model_id == f"{REPO}:Q4_0"  # the only one needs no label
    (source / "model.safetensors").write_bytes(b"")
    assert open_repository(REPO).shards == ("model.safetensors",)
    assert open_repository(f"{REPO}:Q4_0").shards == ("Tiny-v0.1-Q4_0.gguf",)
    (source / "Tiny-v0.1-Q4_0.gguf").unlink()
    with pytest.raises(CheckpointError, match=r"no GGUF model.*\nhint: leave out `:Q4_0`"):
        open_repository(f"{REPO}:Q4_0")


def test_a_header_that_goes_on_forever_is_refused(
    server: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_gguf, "FIRST_BYTES", 64)
    monkeypatch.setattr(hub_gguf, "MAX_HEADER_BYTES", 1000)
    with (
        pytest.raises(CheckpointError, match=r"too long: .*Q4_0.gguf of owner/tiny\n.*most 1000"),
        remote_headers(open_repository(f"{REPO}:Q4_0")),
    ):
        pass
    assert sum(server.served.values()) <= 2048


def test_a_file_that_is_no_gguf_is_refused_before_it_is_fetched(
    server: HubServer, source: Path
) -> None:
    path = source / "Tiny-v0.1-Q4_0.gguf"
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\n" + bytes(1 << 22))
    repository = open_repository(f"{REPO}:Q4_0")
    with (
        pytest.raises(CheckpointError, match=r"not a checkpoint: .*Q4_0.gguf"),
        remote_headers(repository),
    ):
        pass
    assert server.served[path.name] <= hub_gguf.FIRST_BYTES
    with pytest.raises(CheckpointError, match=r"not a checkpoint: .*Q4_0.gguf"):
        pull(repository, pulled_folder(repository.model_id))
    assert not (pulled_folder(repository.model_id) / "headrace-pull.json").exists()
