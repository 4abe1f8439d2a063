"""Pulling from a server on this machine: what is fetched, what a cut does, what is refused."""

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint_helpers import Shape, write_checkpoint
from coded_models import tiny_config, write_coded_model
from hub_server import COMMIT, HubServer, serve
from stored_codes import CASES

from headrace import disk_bench, hub
from headrace import pull as pull_module
from headrace.checkpoint import Checkpoint, open_checkpoint
from headrace.checkpoint.container import is_container
from headrace.checkpoint.layout import Recipe
from headrace.checkpoint.records import ExpertNames
from headrace.cli.app import _run
from headrace.config import EngineConfig
from headrace.convert import convert
from headrace.convert.recipe import KEPT_WHOLE
from headrace.errors import CheckpointError, ConfigError, UnsupportedModelError
from headrace.experts import drive_cache, probe
from headrace.hub import Repository, find_pulled, open_repository, pulled_folder
from headrace.inspect import describe
from headrace.llm import plan_model, resolve_model
from headrace.pull import pull, pull_converted, remote_headers

REPO = "owner/tiny"
SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    write_checkpoint(folder, Shape(layers=3, vocab=600), shards=3)
    (folder / "pytorch_model.bin").write_bytes(b"not needed")
    (folder / "original").mkdir()
    (folder / "original" / "model.safetensors").write_bytes(b"not needed")
    return folder


@pytest.fixture
def server(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path / "models"))
    monkeypatch.setattr(pull_module, "MARGIN_BYTES", 0)
    with serve({REPO: source}) as state:
        monkeypatch.setenv("HF_ENDPOINT", state.endpoint)
        yield state


def _same_files(folder: Path, source: Path, names: list[str]) -> None:
    for name in names:
        assert (folder / name).read_bytes() == (source / name).read_bytes(), name


def test_pull_fetches_what_a_checkpoint_needs(server: HubServer, source: Path) -> None:
    repository = open_repository(REPO)
    seen: list[tuple[int, int]] = []
    report = pull(
        repository, pulled_folder(REPO), lambda _, done, total: seen.append((done, total))
    )
    names = sorted(p.name for p in source.iterdir() if p.is_file() and p.suffix != ".bin")
    assert sorted(repository.files) == names
    assert sorted(server.served) == names  # nothing else was asked for
    _same_files(report.path, source, names)
    assert seen[-1] == (repository.total_bytes, repository.total_bytes)
    assert resolve_model(REPO) == report.path
    assert describe(report.path)["fingerprint"] == describe(source)["fingerprint"]
    before = dict(server.served)
    assert pull(repository, report.path).already_there
    assert server.served == before


def test_what_else_lies_in_a_cache_folder_stays(server: HubServer) -> None:
    folder = pulled_folder(REPO)
    other = folder / ".cache" / "huggingface" / "hub" / "weights"
    other.parent.mkdir(parents=True)
    other.write_text("another program's")
    with pytest.raises(ConfigError, match="no unfinished pull"):
        pull(open_repository(REPO), folder)
    (folder / ".cache/huggingface/download").mkdir()
    report = pull(open_repository(REPO), folder)
    assert other.read_text() == "another program's"
    assert not (folder / ".cache/huggingface/download").exists()
    shutil.rmtree(folder)
    pull(open_repository(REPO), folder)
    assert not (report.path / ".cache").exists()


def test_a_folder_of_another_revision_is_not_taken_for_this_one(server: HubServer) -> None:
    folder = pulled_folder(REPO)
    pull(open_repository(REPO), folder)
    note = folder / hub.PULLED_NAME
    note.write_text(note.read_text().replace(COMMIT, "0" * 40))
    with pytest.raises(ConfigError, match=rf"another model or revision.*\nexpected .*{COMMIT}"):
        pull(open_repository(REPO), folder)


def test_a_cut_download_goes_on_where_it_was(
    server: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 12)
    size = (source / SHARD).stat().st_size
    server.cuts[SHARD] = [size // 2]
    report = pull(open_repository(REPO), pulled_folder(REPO))
    _same_files(report.path, source, [SHARD])
    assert server.served[SHARD] < size + size // 4  # the first half came once
    ranges = [r for method, name, r in server.requests if method == "GET" and name == SHARD]
    assert len(ranges) == 2
    assert ranges[1].startswith("bytes=")


def test_a_pull_that_failed_is_incomplete_until_called_again(
    server: HubServer, source: Path
) -> None:
    repository = open_repository(REPO)
    first, *names = sorted(repository.shards, key=lambda name: repository.files[name])
    for name in names:
        shutil.move(source / name, source / (name + ".gone"))
    with pytest.raises(CheckpointError, match="no such file in owner/tiny"):
        pull(repository, pulled_folder(REPO))
    with pytest.raises(CheckpointError, match=r"incomplete.*\n.*headrace pull owner/tiny"):
        resolve_model(REPO)
    for name in names:
        shutil.move(source / (name + ".gone"), source / name)
    before = server.served[first]
    assert not pull(repository, pulled_folder(REPO)).already_there
    assert server.served[first] == before
    assert find_pulled(REPO) == pulled_folder(REPO)


def test_the_plan_of_remote_headers_is_the_plan_of_the_files(
    server: HubServer, source: Path
) -> None:
    config = EngineConfig(memory=256 << 20, context=64)
    with remote_headers(open_repository(REPO)) as path:
        remote = plan_model(path, config).as_dict()
        shards = [p for p in path.iterdir() if p.suffix == ".safetensors"]
        assert sum(p.stat().st_size for p in shards) == sum(
            p.stat().st_size for p in source.glob("*.safetensors")
        )
    local = plan_model(source, config).as_dict()
    assert remote["num_records"] == 12
    for key in ("floor_bytes", "num_slots", "num_records", "record_bytes"):
        assert remote[key] == local[key]
    assert not path.exists()


def test_headers_of_a_killed_plan_go_away_and_those_in_use_stay(
    server: HubServer, tmp_path: Path
) -> None:
    left = tmp_path / "headrace-headers-left"
    (left / "tiny").mkdir(parents=True)
    with remote_headers(open_repository(REPO)) as one:
        assert one.is_relative_to(tmp_path) and not left.exists()
        with remote_headers(open_repository(REPO)) as other:
            assert other != one and (one / "config.json").is_file()
    assert not list(tmp_path.glob("headrace-*"))


def test_the_models_may_lie_behind_links(
    server: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drive" / "tiny").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "drive")
    monkeypatch.setenv("HEADRACE_MODELS", str(tmp_path / "link" / "models"))
    with remote_headers(open_repository(REPO)) as path:
        assert describe(path)["fingerprint"]
    assert pull(open_repository(REPO), pulled_folder(REPO)).path == resolve_model(REPO)
    assert convert(source, tmp_path / "link" / "out", Recipe()).total_bytes > 0
    elsewhere = tmp_path / "elsewhere"
    elsewhere.symlink_to(tmp_path / "drive" / "tiny")
    pull(open_repository(REPO), elsewhere)
    assert (tmp_path / "drive" / "tiny" / "config.json").is_file()


def test_two_pulls_of_a_model_do_not_take_each_others_files(
    server: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, other = pulled_folder(REPO), pulled_folder("owner/other")
    refused = []

    def meanwhile(*_: object) -> None:
        if refused:
            return
        for call in (
            lambda: pull(open_repository(REPO), folder),
            lambda: pull_converted(open_repository(REPO), other, "small"),
        ):
            with pytest.raises(ConfigError) as error:
                call()
            refused.append(str(error.value))

    with pull_module._alone_in(other.with_name("other.pulling")):
        pull(open_repository(REPO), folder, meanwhile)
    assert len(refused) == 2
    assert all("another process is pulling this model" in text for text in refused)
    _same_files(folder, source, ["config.json", SHARD])
    pull_converted(open_repository(REPO), other, "small", meanwhile)
    assert [p.name for p in other.parent.iterdir() if p.name.startswith("other")] == ["other"]


def test_the_commands(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    memory = ("--memory", "4GiB", "--context", "64")
    assert _run(["plan", REPO, "--json", *memory]) == 0
    assert json.loads(capsys.readouterr().out)["num_records"] == 12
    assert not pulled_folder(REPO).exists()
    assert _run(["pull", REPO, "--offline"]) == 1
    assert "was not pulled yet" in capsys.readouterr().err
    assert _run(["pull", REPO, "--convert", "tiny"]) == 2
    assert "expected small, balanced, faithful" in capsys.readouterr().err
    assert _run(["pull", REPO, *memory]) == 0
    shown = capsys.readouterr()
    assert "memory of owner/tiny" in shown.out
    assert "owner/tiny pulled" in shown.err
    server.errors[REPO] = (500, "")  # from here on nothing is asked
    assert _run(["pull", REPO, "--offline", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["already_there"] is True
    assert _run(["inspect", REPO]) == 0
    made = pulled_folder(REPO).parent / "made"
    assert _run(["convert", REPO, str(made)]) == 0
    assert is_container(made)
    assert _run(["convert", "nobody/nothing", str(made)]) != 0
    assert "run `headrace pull nobody/nothing`" in " ".join(capsys.readouterr().err.split())


def test_the_command_converts(server: HubServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run(["pull", REPO, "--convert", "faithful", "--json", "--memory", "4GiB"]) == 0
    path = Path(json.loads(capsys.readouterr().out)["path"])
    assert path == find_pulled(REPO)
    assert (path / "headrace.json").is_file()


@pytest.mark.parametrize("cut", [None, 10_000])
def test_converted_on_the_way_is_the_same_container(
    cut: int | None,
    server: HubServer,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hub, "FIRST_BYTES", 64)  # headers take a second answer
    if cut is not None:
        server.cuts[SHARD] = [0, cut, cut]
    recipe = Recipe(experts="q4", dense="q8")
    report = pull_converted(open_repository(REPO), pulled_folder(REPO), recipe)
    convert(source, tmp_path / "whole", recipe)
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in report.path.iterdir()) == names
    _same_files(report.path, tmp_path / "whole", names)
    assert resolve_model(REPO) == report.path
    assert not report.path.with_name("tiny.pulling").exists()


def test_converting_never_holds_the_source_whole(
    server: HubServer, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_checkpoint(source, Shape(layers=4, experts=8, hidden=256, inner=256), shards=3)
    most = 0
    bring = pull_module.RemoteSupply.bring

    def measure(self: pull_module.RemoteSupply, entries: list) -> None:  # type: ignore[type-arg]
        nonlocal most
        bring(self, entries)
        held = sum(p.stat().st_blocks * 512 for p in {e.path for e in entries})
        most = max(most, held)

    monkeypatch.setattr(pull_module.RemoteSupply, "bring", measure)
    pull_converted(open_repository(REPO), pulled_folder(REPO), Recipe())
    whole = sum(p.stat().st_size for p in source.glob("*.safetensors"))
    assert 0 < most < whole / 2


def test_a_stopped_conversion_keeps_finished_files(server: HubServer, source: Path) -> None:
    names = [p.name for p in source.glob("*.safetensors")]

    class Stop(Exception):
        pass

    def stop(file: str, *_: object) -> None:
        if file.startswith("experts-002"):
            raise Stop

    with pytest.raises(Stop):
        pull_converted(open_repository(REPO), pulled_folder(REPO), Recipe(), stop)
    first = sum(server.served[name] for name in names)
    pull_converted(open_repository(REPO), pulled_folder(REPO), Recipe())
    second = sum(server.served[name] for name in names) - first
    assert second < first  # the dense file and two layers were not fetched again
    assert resolve_model(REPO) == pulled_folder(REPO)


def test_a_plan_measures_the_drive_that_the_model_would_lie_on(
    server: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    asked: list[tuple[Path, int]] = []

    def measured(folder: Path, record_bytes: int, *_: object) -> object:
        asked.append((folder, record_bytes))
        drive = disk_bench.find_drive(folder)
        rate = probe.Probed(probe.ReadSetting(2, 1 << 20, True), 2e9, 2e9, 2e9, record_bytes)
        entry = drive_cache.remembered(rate, drive)
        drive_cache.DriveCache().remember(drive, entry)
        return entry

    monkeypatch.setattr(disk_bench, "measure_drive", measured)
    options = ("--context", "64", "--slots", "8", "--json")
    assert _run(["plan", REPO, *options, "--drive-bytes-per-s", "1GB/s"]) == 0
    assert not asked, "the caller knows"
    capsys.readouterr()
    assert _run(["plan", REPO, *options]) == 0
    made = json.loads(capsys.readouterr().out)
    assert made["drive_bytes_per_s"] == 2e9 and made["predicted_tokens_per_s"] > 0
    assert asked[0][0].parent == tmp_path and asked[0][1] * made["num_records"] > 0
    assert _run(["plan", REPO, *options]) == 0
    assert len(asked) == 1, "it is remembered"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))

    def full(*_: object) -> object:
        raise ConfigError("too little free space")

    monkeypatch.setattr(disk_bench, "measure_drive", full)
    capsys.readouterr()
    assert _run(["plan", REPO, *options[:-1]]) == 0
    assert "drive not measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ((403, "GatedRepo"), r"repository is gated: owner/tiny.*\n.*HF_TOKEN"),
        ((401, "RepoNotFound"), "no such repository, or a private one: owner/tiny"),
        ((500, ""), r"cannot read owner/tiny from the hub.*\n.*500"),
    ],
)
def test_refusals_of_the_hub(error: tuple[int, str], message: str, server: HubServer) -> None:
    server.errors[REPO] = error
    with pytest.raises(CheckpointError, match=message):
        open_repository(REPO)


def test_unknown_names(server: HubServer) -> None:
    with pytest.raises(CheckpointError, match="no such repository"):
        open_repository("owner/other")
    with pytest.raises(CheckpointError, match="no such revision of owner/tiny"):
        open_repository(REPO, "v9")
    for name in ("a/b/c", "tiny", "owner/tiny.gguf"):
        with pytest.raises(CheckpointError, match=f"no repository id: {name}\n.*OWNER/NAME"):
            open_repository(name)


def test_no_network(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the port that discards
    with pytest.raises(CheckpointError, match=r"cannot read .*127.0.0.1:9.*\n.*\n.*network"):
        open_repository(REPO)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(CheckpointError, match="HF_HUB_OFFLINE forbids"):
        open_repository(REPO)


@pytest.mark.parametrize("status", [500, 503, 429, 401])
def test_no_message_shows_the_credentials_of_the_address(
    status: int, server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = server.endpoint.removeprefix("http://")
    monkeypatch.setenv("HF_ENDPOINT", f"http://user:secret@{address}")
    server.errors[REPO] = (status, "")
    with pytest.raises(
        CheckpointError, match=rf"http://\*\*\*@{address}\n.*http://\*\*\*@"
    ) as error:
        open_repository(REPO)
    assert "secret" not in str(error.value)


def test_neither_does_a_warning_of_the_client(server: HubServer, tmp_path: Path) -> None:
    server.cuts[SHARD] = [20_000] * 5  # four for the header, one for the client
    address = server.endpoint.replace("://", "://user:secret@")
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "pull", REPO, "--to", tmp_path / "to"],
        capture_output=True, check=False, text=True, env={**os.environ, "HF_ENDPOINT": address},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Error while downloading from http://***@127.0.0.1" in done.stderr
    assert "secret" not in done.stderr


@pytest.mark.parametrize(
    "address",
    [
        "user:secret@host", "ftp://user:secret@host", "http://user:secret@host:99999",
        "http://user:sec/ret@host", "http://host?token=secret", "http://", "secret",
    ],
)  # fmt: skip
def test_an_endpoint_that_is_no_address_is_refused_and_not_shown(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError, match="HF_ENDPOINT is no address of a hub") as error:
        open_repository(REPO)
    assert "secret" not in str(error.value) and "sec/" not in str(error.value)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HTTP_PROXY", "foo://user:secret@127.0.0.1:9", "check HF_TOKEN and the proxy"),
        ("HTTP_PROXY", "http://user:secret@127.0.0.1:x", "check HF_TOKEN and the proxy"),
        ("HF_TOKEN", "hf_secr\u00e9t", "check HF_TOKEN and the proxy"),
        ("HF_HUB_DOWNLOAD_TIMEOUT", "secret", "those that begin with HF_"),
    ],
)
def test_a_malformed_variable_of_the_client_is_no_bug_of_ours(
    variable: str, value: str, message: str
) -> None:
    program = "from headrace.cli import main; main()"
    given = {"HF_ENDPOINT": "http://127.0.0.1:9", "NO_PROXY": "", variable: value}
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "owner/never-pulled"],
        capture_output=True, check=False, text=True, env={**os.environ, **given},
    )  # fmt: skip
    assert done.returncode == 1
    assert message in done.stderr and "this is a bug" not in done.stderr
    assert "user:secret" not in done.stderr and "hf_secr" not in done.stderr


def test_no_safetensors(server: HubServer, source: Path) -> None:
    for path in source.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match=r"no checkpoint.*\n.*got pytorch_model.bin"):
        open_repository(REPO)


def test_a_shard_that_the_index_names_is_missing(server: HubServer, source: Path) -> None:
    (source / SHARD).unlink()
    with pytest.raises(CheckpointError, match=f"1 of 3 shards are missing.*\n.*{SHARD}"):
        open_repository(REPO)


def test_an_absurd_header_is_refused_before_it_is_fetched(server: HubServer, source: Path) -> None:
    data = (source / SHARD).read_bytes()
    (source / SHARD).write_bytes((1 << 60).to_bytes(8, "little") + data[8:])
    with (
        pytest.raises(CheckpointError, match=f"header does not fit its file: {SHARD}"),
        remote_headers(open_repository(REPO)),
    ):
        pass


def test_a_server_without_ranges_is_named(server: HubServer) -> None:
    server.ignores_ranges = True
    with (
        pytest.raises(CheckpointError, match="whole files only"),
        remote_headers(open_repository(REPO)),
    ):
        pass


def test_a_connection_that_brings_nothing_is_given_up(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.hub.time.sleep", lambda _: None)
    server.cuts["config.json"] = [0] * 100
    with (
        pytest.raises(CheckpointError, match=r"cannot read owner/tiny.*\n.*\n.*goes on"),
        remote_headers(open_repository(REPO)),
    ):
        pass


def test_space_is_checked_before_anything_is_downloaded(
    server: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1, 1, 1000))
    repository = open_repository(REPO)
    server.served.clear()
    with pytest.raises(CheckpointError, match=r"not enough space for the download.*\n.*got 1000"):
        pull(repository, pulled_folder(REPO))
    assert server.served == {}
    with pytest.raises(CheckpointError, match="not enough space for owner/tiny converted"):
        pull_converted(repository, pulled_folder(REPO), Recipe())


def test_a_folder_of_something_else_is_left_alone(server: HubServer, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(ConfigError, match="not empty"):
        pull(open_repository(REPO), tmp_path / "mine")


def test_a_model_that_nothing_computes_is_refused_from_its_headers(
    server: HubServer, source: Path
) -> None:
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "other"}))
    with (
        pytest.raises(UnsupportedModelError, match="other"),
        remote_headers(open_repository(REPO)) as path,
    ):
        plan_model(path, EngineConfig())


def test_repository_states_its_commit(server: HubServer) -> None:
    repository = open_repository(REPO, "main")
    assert isinstance(repository, Repository)
    assert repository.commit == COMMIT


@pytest.mark.parametrize("case", ["nvfp4", "modelopt", "fp8", "gptq-64", "packed-asym-32"])
def test_experts_in_codes_are_converted_on_the_way(
    case: str, server: HubServer, source: Path, tmp_path: Path
) -> None:
    """Tensors of a matrix lie in three files; some share a number that no range of codes holds."""
    for path in source.glob("model*"):
        path.unlink()
    settings, make, *_ = CASES[case]
    config = tiny_config("qwen3_moe") | {"quantization_config": settings}
    write_coded_model(source, config, make, lambda name: ".experts." in name, shards=3)
    convert(source, tmp_path / "whole", KEPT_WHOLE)
    report = pull_converted(open_repository(REPO), pulled_folder(REPO), "faithful")
    names = sorted(p.name for p in (tmp_path / "whole").iterdir())
    assert sorted(p.name for p in report.path.iterdir()) == names
    _same_files(report.path, tmp_path / "whole", names)


def test_headers_of_a_source_are_opened_once(
    server: HubServer, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    def open_counted(path: Path, names: ExpertNames | None) -> Checkpoint:
        opened.append(path)
        return open_checkpoint(path, names)

    monkeypatch.setattr("headrace.convert.source.open_checkpoint", open_counted)
    pull_converted(open_repository(REPO), pulled_folder(REPO), "small")
    assert len(opened) == 1
    assert _run(["convert", str(source), str(tmp_path / "out"), "--preset", "small"]) == 0
    assert opened[1:] == [source]
