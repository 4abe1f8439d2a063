"""The history of routed counts: saved, warmed from, and never in the way."""

import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest

import headrace
from headrace.errors import ConfigError
from headrace.experts import History
from headrace.experts.history import (
    FILE_NAME,
    HALF_LIFE_TOKENS,
    default_path,
    write_atomically,
)

from .conftest import Records, read_all


def make(path: Path, *, mode: str = "write", fingerprint: str = "abc", experts: int = 8) -> History:
    return History(path, fingerprint=fingerprint, layers=(1, 2, 5), num_experts=experts, mode=mode)


def counts_of(*records: tuple[int, int, int]) -> np.ndarray:
    counts = np.zeros((3, 8), np.int64)
    for row, expert, count in records:
        counts[row, expert] = count
    return counts


def test_what_is_saved_is_read(tmp_path: Path) -> None:
    path = tmp_path / "sub" / FILE_NAME
    history = make(path)
    history.add(counts_of((0, 3, 10), (2, 7, 40)), 50)
    history.save()
    again = make(path)
    assert again.num_tokens == 50
    assert again.hottest(9) == [(5, 7), (1, 3)]
    assert again.hottest(1) == [(5, 7)]
    assert [entry.name for entry in path.parent.iterdir()] == [FILE_NAME]  # nothing half written


def test_counts_decay(tmp_path: Path) -> None:
    history = make(tmp_path / FILE_NAME)
    history.add(counts_of((0, 0, 100)), 100)
    history.add(counts_of((0, 1, 60)), HALF_LIFE_TOKENS)
    assert history.counts[0, :2].tolist() == [50, 60]
    assert history.num_tokens == 50 + HALF_LIFE_TOKENS


def test_frequencies_settle_at_the_rate(tmp_path: Path) -> None:
    history = make(tmp_path / FILE_NAME)
    history.add(counts_of((0, 0, 5_000)), 10_000)
    assert history.frequencies(100.0)[0, 0] == pytest.approx(0.5 * 100 / np.log(2))
    assert history.frequencies(1e9)[0, 0] == pytest.approx(5_000)  # never more than was seen


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1, 2]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"format": "headrace history"}',
        "counts: strings",
        "counts: shape",
        "counts: negative",
        "counts: nan",
        "counts: missing",
    ],
)
def test_a_damaged_file_is_ignored_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: bytes | str
) -> None:
    path = tmp_path / FILE_NAME
    if isinstance(content, str):
        history = make(path)
        history.add(counts_of((0, 0, 1)), 1)
        history.save()
        data = json.loads(path.read_text())
        value: object = {
            "strings": [["a"] * 8] * 3,
            "shape": [[1.0] * 8] * 2,
            "negative": [[-1.0] * 8] * 3,
            "nan": [[float("nan")] * 8] * 3,
            "missing": None,
        }[content.split(": ")[1]]
        data["counts"] = value
        content = json.dumps(data).encode()
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        history = make(path)
    assert history.num_tokens == 0
    assert history.hottest(5) == []
    assert "expert history ignored" in caplog.text


def test_another_models_file_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / FILE_NAME
    history = make(path)
    history.add(counts_of((0, 0, 1)), 1)
    history.save()
    with caplog.at_level(logging.WARNING):
        assert make(path, fingerprint="other").num_tokens == 0
        assert make(path, experts=9).num_tokens == 0
    assert caplog.text.count("belongs to another model") == 2


def test_modes(tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    history = make(path)
    history.add(counts_of((0, 0, 1)), 1)
    history.save()
    before = path.read_bytes()
    reader = make(path, mode="read")
    assert reader.num_tokens == 1
    reader.add(counts_of((0, 0, 9)), 9)
    reader.save()
    assert path.read_bytes() == before
    assert make(path, mode="off").num_tokens == 0
    with pytest.raises(ConfigError, match="'sometimes'"):
        make(path, mode="sometimes")


def test_an_unwritable_place_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("")
    history = make(blocker / FILE_NAME)
    history.add(counts_of((0, 0, 1)), 1)
    with caplog.at_level(logging.WARNING):
        history.save()
    assert "not saved" in caplog.text


def test_default_path_is_beside_the_model_or_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert default_path(tmp_path, "abc") == tmp_path / FILE_NAME
    file = tmp_path / "model.gguf"
    file.write_text("")
    assert default_path(file, "abc") == tmp_path / f"model.gguf.{FILE_NAME}"
    monkeypatch.setattr(os, "access", lambda *_: False)
    cached = default_path(tmp_path, "abc")
    assert cached.parent.name == "history"
    assert cached != default_path(tmp_path, "abd")


def test_the_demo_keeps_its_history_out_of_the_package() -> None:
    package = Path(headrace.__file__).parent
    assert package not in default_path(package / "demo", "abc").parents


def test_a_store_warms_from_its_history_and_adds_to_it(records: Records, tmp_path: Path) -> None:
    path = tmp_path / FILE_NAME
    with records.open(4, history=make(path)) as store:
        for _ in range(5):
            read_all(store, 2, [0, 6])
    with records.open(4, history=make(path)) as store:
        while store.stats().prefetch_bytes < 2 * store.record_bytes:
            pass
        read_all(store, 2, [0, 6])
        stats = store.stats()
        assert (stats.misses, stats.prefetch_hits) == (0, 2)
    assert make(path).counts[1, [0, 6]].tolist() == pytest.approx([6, 6], abs=0.01)


def test_a_link_stays_a_link_and_a_device_a_device(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    link, file, pipe = (tmp_path / name for name in ("link", "file", "pipe"))
    link.symlink_to(file)
    history = make(link)
    history.add(counts_of((0, 3, 10)), 50)
    history.save()
    assert link.is_symlink() and make(file).num_tokens == 50
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="not a regular file"):
        write_atomically(pipe, b"")
    assert pipe.is_fifo() and sorted(p.name for p in tmp_path.iterdir()) == ["file", "link", "pipe"]
