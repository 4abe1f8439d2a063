"""Download a model from the hub, whole or converted on the way.

A plain pull fetches the checkpoint's files through the hub's client, which goes on where a cut
download stopped. A converting pull fetches, for each file of the container, only the ranges it is
made of, and gives their place back once it is written: the drive holds the container so far and the
source of one file, never both whole.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.checkpoint import gguf_header
from headrace.checkpoint.folder_lock import folder_lock
from headrace.checkpoint.huggingface import sample_offsets
from headrace.checkpoint.journal import PARTIAL_SUFFIX
from headrace.checkpoint.layout import DENSE_NAME, Recipe
from headrace.checkpoint.safetensors import TensorEntry, read_header
from headrace.checkpoint.writer import require_space
from headrace.convert import Progress, convert
from headrace.convert.plan import ConvertPlan, make_plan
from headrace.convert.recipe import preset_for
from headrace.convert.source import dense_entries, open_source, record_entries
from headrace.errors import CheckpointError, ConfigError
from headrace.hub import (
    NUM_CONNECTIONS,
    PULLING_SUFFIX,
    Repository,
    is_pulled,
    models_folder,
    note_pulled,
    require_same,
    translated,
    write_shard,
    write_skeleton,
)
from headrace.hub_gguf import SUFFIX as GGUF_SUFFIX

_HEADERS_PREFIX = "headrace-headers-"
MAX_GAP = 1 << 16
"""Bytes between two ranges that are fetched along rather than asked around."""
MAX_RANGE = 64 << 20
"""Longer ranges are cut, so that several connections share them."""
MARGIN_BYTES = 64 << 20
"""Left free on a drive beyond what is written."""
_CLIENT_FOLDER = Path(".cache/huggingface/download")
"""Where the hub's client keeps, inside the destination, what it knows of a cut download."""
Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class PullReport:
    """What a pull did."""

    path: Path
    """What is to be opened: a folder, or the first file of a GGUF model."""
    total_bytes: int
    """Of the folder's weights and small files."""
    already_there: bool


@contextlib.contextmanager
def remote_headers(repository: Repository) -> Iterator[Path]:
    """Give a folder or GGUF file that describes a repository's model, without its data.

    It lies on the drive that the model would, where that can be written: the plan states its speed.
    """
    near = next(p for p in models_folder().absolute().parents if p.exists())
    place = near if os.access(near, os.W_OK) else Path(tempfile.gettempdir())
    with _headers_folder(place) as made:
        folder = made / repository.repo_id.rpartition("/")[2]
        write_skeleton(repository, folder, with_samples=False)
        yield repository.path_in(folder)


@contextlib.contextmanager
def _headers_folder(place: Path) -> Iterator[Path]:
    """Give a folder that is removed at the end, or by the next call if this process is killed.

    The process holds a lock on it; the system drops that when the process ends, however it does.
    """
    with folder_lock(
        place, wait=True
    ):  # else another process takes one that has no lock yet for left behind
        _remove_left_behind(place)
        folder = Path(tempfile.mkdtemp(prefix=_HEADERS_PREFIX, dir=place))
        lock = contextlib.ExitStack()
        lock.enter_context(folder_lock(folder, wait=True))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Make a folder and keep other pulls out of it for a while.

    Raises:
        ConfigError: another process is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(folder_lock(folder, wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"another process is pulling this model: {folder}\n"
                "hint: wait for it, or choose another folder with --to"
            ) from None
        yield


def _remove_left_behind(place: Path) -> None:
    for folder in place.glob(f"{_HEADERS_PREFIX}*"):
        if folder.is_symlink():  # not ours
            continue
        with contextlib.suppress(OSError), folder_lock(folder, wait=False):
            shutil.rmtree(folder, ignore_errors=True)


def pull(repository: Repository, folder: Path, show: Show = lambda *_: None) -> PullReport:
    """Download a checkpoint into a folder.

    Args:
        repository: what to download.
        folder: where to; files of an earlier, cut pull in it are gone on with.
        show: called often with file, bytes done and bytes in all.

    Raises:
        CheckpointError: no space, no network, or a file that is not as the hub said.
        ConfigError: the folder holds something else.
    """
    if is_pulled(folder):
        require_same(folder, repository)
        _forget_download(folder)  # its process may have been killed before
        return PullReport(repository.path_in(folder), repository.total_bytes, already_there=True)
    _require_ours(folder)
    missing = sum(n for name, n in repository.files.items() if _size(folder / name) != n)
    begun = sum(p.stat().st_size for p in folder.glob(f"{_CLIENT_FOLDER}/**/*.incomplete"))
    _require_space(folder, max(0, missing - begun), f"the download of {repository.repo_id}")
    with _alone_in(folder):
        _fill(repository, folder, show)
    return PullReport(repository.path_in(folder), repository.total_bytes, already_there=False)


def _fill(repository: Repository, folder: Path, show: Show) -> None:
    (folder / _CLIENT_FOLDER).mkdir(parents=True, exist_ok=True)
    done = 0
    for name, size in sorted(repository.files.items(), key=lambda item: item[1]):
        _download(repository, name, folder, _Counter(show, name, done, repository.total_bytes))
        if _size(folder / name) != size:
            raise CheckpointError(
                f"file is not as the hub said: {folder / name}\n"
                f"expected {size} bytes, got {_size(folder / name)}"
            )
        done += size
    for name in repository.shards:
        header_bytes(folder / name)
    note_pulled(folder, repository)
    _forget_download(folder)


def pull_converted(
    repository: Repository, folder: Path, recipe: Recipe | str, show: Show = lambda *_: None
) -> PullReport:
    """Download a checkpoint and convert it on the way; the folder becomes the container.

    The container is the one that `convert` makes of the whole download, to the byte. Stopped, the
    same call goes on: finished files are kept.

    Args:
        repository: what to download.
        folder: the container to make.
        recipe: how weights are stored; or the name of a preset.
        show: as in `pull`.

    Raises:
        CheckpointError, UnsupportedModelError, ConfigError: as `pull` and `convert`.
    """
    source = folder.with_name(folder.name + PULLING_SUFFIX)
    with _alone_in(source), contextlib.ExitStack() as end:
        end.callback(shutil.rmtree, source, ignore_errors=True)
        for left in source.iterdir():  # of a killed call: cheaper made anew than checked
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        write_skeleton(repository, source, with_samples=True)
        opened = open_source(repository.path_in(source))
        if isinstance(recipe, str):
            recipe = preset_for(recipe, opened.checkpoint)
        plan = make_plan(opened, recipe)
        supply = RemoteSupply(repository, source)
        weights = max(0, sum(plan.file_bytes().values()) - _written_bytes(folder))
        _require_space(
            folder,
            weights + plan.other_bytes() + _largest_step(plan, supply),
            f"{repository.repo_id} converted",
        )

        def tell(progress: Progress) -> None:
            show(progress.file, progress.done_bytes, progress.total_bytes)

        report = convert(opened, folder, recipe, tell, supply=supply)
    return PullReport(folder, report.total_bytes, report.already_done)


class RemoteSupply:
    """Brings ranges of a repository's shards into files of holes, and takes them out again."""

    def __init__(self, repository: Repository, folder: Path) -> None:
        """Remember what each shard holds now: its header and the samples that identify it."""
        self.repository = repository
        self._names = {folder / name: name for name in repository.shards}
        self._kept = {path: _read_kept(path, header_bytes(path)) for path in self._names}

    def bring(self, entries: Sequence[TensorEntry]) -> None:
        """Fetch the data of tensors; see `Supply.bring`."""
        stop = threading.Event()

        def fetch(piece: tuple[Path, int, int]) -> None:
            path, offset, length = piece
            if stop.is_set():
                return
            with path.open("r+b") as file:
                file.seek(offset)
                self.repository.fetch(self._names[path], offset, length, file.write)

        with ThreadPoolExecutor(NUM_CONNECTIONS, "pull") as pool:
            try:
                for _ in pool.map(fetch, list(self.ranges(entries))):
                    pass
            finally:
                stop.set()

    def release(self, entries: Sequence[TensorEntry]) -> None:
        """Make holes again of the shards that hold these tensors; see `Supply.release`."""
        for path in sorted({entry.path for entry in entries}):
            write_shard(path, self.repository.files[self._names[path]], self._kept[path])

    def ranges(self, entries: Iterable[TensorEntry]) -> Iterator[tuple[Path, int, int]]:
        """Join neighbours and cut long runs: (file, offset, bytes), by file and offset."""
        run: tuple[Path, int, int] | None = None
        for entry in sorted(entries, key=lambda e: (e.path, e.offset)):
            if run and run[0] == entry.path and entry.offset - (run[1] + run[2]) <= MAX_GAP:
                run = (run[0], run[1], max(run[2], entry.offset + entry.nbytes - run[1]))
                continue
            yield from _cut(run)
            run = (entry.path, entry.offset, entry.nbytes)
        yield from _cut(run)


def header_bytes(path: Path) -> int:
    """Check the header of a safetensors or GGUF file, and return its length."""
    if path.suffix == GGUF_SUFFIX:
        return gguf_header.read_header(path).header_bytes
    return read_header(path).data_start


def _cut(run: tuple[Path, int, int] | None) -> Iterator[tuple[Path, int, int]]:
    if run is None:
        return
    path, offset, length = run
    for at in range(0, length, MAX_RANGE):
        yield path, offset + at, min(MAX_RANGE, length - at)


def _read_kept(path: Path, data_start: int) -> dict[int, bytes]:
    kept = {}
    with path.open("rb") as file:
        for offset, length in [(0, data_start), *sample_offsets(data_start, path.stat().st_size)]:
            file.seek(offset)
            kept[offset] = file.read(length)
    return kept


def _largest_step(plan: ConvertPlan, supply: RemoteSupply) -> int:
    """Return the most bytes of the source that one file of the container is made of."""
    steps: dict[str, list[TensorEntry]] = {
        DENSE_NAME: [e for t in plan.tensors for e in dense_entries(plan.source, t.name)]
    }
    for layer in plan.layouts:
        steps[str(layer)] = record_entries(plan.source, layer)
    return max(sum(n for _, _, n in supply.ranges(entries)) for entries in steps.values())


def _download(repository: Repository, name: str, folder: Path, counter: _Counter) -> None:
    from huggingface_hub import hf_hub_download

    with translated(repository.repo_id, repository.endpoint):
        hf_hub_download(
            repository.repo_id,
            name,
            revision=repository.commit,
            local_dir=folder,
            endpoint=repository.endpoint,
            tqdm_class=counter.bar_class(),
        )


@dataclass
class _Counter:
    """Turns the progress bars of the hub's client into calls of `show`."""

    show: Show
    name: str
    done: int
    total: int

    def add(self, num_bytes: float | None) -> None:
        self.done += int(num_bytes or 0)
        self.show(self.name, self.done, self.total)

    def bar_class(self) -> Any:
        client: Any = importlib.import_module("huggingface_hub.utils")  # exports without types
        base: Any = client.tqdm
        counter = self

        class Bar(base):  # type: ignore[misc]
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(*args, **{**options, "disable": True})
                counter.add(options.get("initial"))

            def update(self, n: float | None = 1) -> None:
                counter.add(n)

        return Bar


def _size(path: Path) -> int:
    return path.stat().st_size if path.is_file() else -1


def _written_bytes(folder: Path) -> int:
    """Return the bytes of weights that a converting pull, cut or finished, has written."""
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    held = partial if partial.is_dir() else folder
    return sum(path.stat().st_size for path in held.glob("*.safetensors"))


def _forget_download(folder: Path) -> None:
    """Remove what the hub's client kept of a download, and nothing else that lies beside it."""
    shutil.rmtree(folder / _CLIENT_FOLDER, ignore_errors=True)
    client = folder / _CLIENT_FOLDER.parent
    for name in (".gitignore", ".gitignore.lock", "CACHEDIR.TAG"):
        (client / name).unlink(missing_ok=True)
    for empty in (client, client.parent):
        with contextlib.suppress(OSError):  # it is not empty, so it is not only the client's
            empty.rmdir()


def _require_ours(folder: Path) -> None:
    is_begun = (folder / _CLIENT_FOLDER).is_dir()
    if not is_begun and any(not path.is_dir() for path in folder.rglob("*")):
        raise ConfigError(
            f"folder is not empty and no unfinished pull: {folder}\n"
            "hint: remove it, or choose another one with --to"
        )


def _require_space(folder: Path, need: int, what: str) -> None:
    hint = "choose a folder on another drive with --to, or use --convert"
    require_space(folder, need + MARGIN_BYTES, what, hint)
