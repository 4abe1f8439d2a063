"""What of a container is finished, so that a killed writer goes on where it stopped.

While it is written, the container is the directory `DEST.partial`, and `DEST.partial/journal` holds
one note that binds recipe and source, and one per finished file with its checksums, written after
the file. The order of the last steps is manifest, removal of the journal, rename: a directory with
a manifest is complete.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np

from headrace.checkpoint.container import ContainerCheckpoint, is_container
from headrace.checkpoint.folder_lock import folder_lock
from headrace.checkpoint.jsonfile import read_object
from headrace.checkpoint.layout import MANIFEST_NAME, format_checksum
from headrace.checkpoint.values import bytes_checksum, read_range
from headrace.checkpoint.writer import (
    TEMPORARY_SUFFIX,
    require_space,
    sync_directory,
    write_json,
)
from headrace.errors import CheckpointError, ConfigError, EngineError

_log = logging.getLogger(__name__)

PARTIAL_SUFFIX = ".partial"
_JOURNAL = "journal"
_BINDING = "binding.json"
_QUANTISER = "quantiser"
_PLACE = "source_path"
"""Where the source lay: beside what binds, so that a changed source is told from another one."""


def is_published(dest: Path, binding: Mapping[str, Any]) -> bool:
    """Whether `dest` is a finished container with this binding already.

    Raises:
        ConfigError: something else is there.
    """
    if not dest.exists() or (dest.is_dir() and not any(dest.iterdir())):
        return False
    if not dest.is_dir() or not is_container(dest):
        raise ConfigError(
            f"destination exists: {dest}\nhint: remove it, or choose another destination"
        )
    try:
        manifest = ContainerCheckpoint(dest).manifest
    except EngineError as error:
        raise ConfigError(
            f"destination exists and is a damaged container: {dest}\n{error}\n"
            "hint: remove it, or choose another destination"
        ) from None
    other = [key for key in binding if manifest.get(key) != binding[key]]
    if not other:
        return True
    name = "recipe" if "recipe" in other else other[0]
    raise ConfigError(
        f"destination is a container of another source or recipe: {dest}\n"
        f"expected {name} {binding[name]}, got {manifest.get(name)}\n"
        "hint: remove it, or choose another destination"
    )


class Journal:
    """The notes beside a container that is being written."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.partial = dest.with_name(dest.name + PARTIAL_SUFFIX)
        self.directory = self.partial / _JOURNAL
        self._lock: ExitStack | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Let other processes write again."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take_lock(self) -> None:
        """Keep other processes out for as long as this one lives, or is in the `with` block."""
        if self._lock is not None:
            return
        lock = ExitStack()
        try:
            lock.enter_context(folder_lock(self.partial, wait=False))
        except BlockingIOError:
            raise ConfigError(
                f"another process is writing this container: {self.partial}\n"
                "hint: wait for it, or choose another destination"
            ) from None
        self._lock = lock

    @property
    def is_complete(self) -> bool:
        """Whether all files are written and only the rename is missing."""
        return (self.partial / MANIFEST_NAME).is_file()

    def begin(
        self, binding: dict[str, Any], place: str | None = None, quantiser: int | None = None
    ) -> bool:
        """Create the directory, or accept the one that an earlier run with the same binding left.

        One of another binding is emptied, with a notice in the log, if nothing in it is finished or
        if its source, by `place`, is this one before it changed.

        Args:
            binding: what makes two containers the same, under the keys of the manifest: format
                version, recipe, source.
            place: where the source lies, if it is files.
            quantiser: version of the search for scales; files of two versions are never mixed.
                None if nothing is searched.

        Returns:
            whether earlier work is resumed.

        Raises:
            ConfigError: the directory belongs to another container, or to something else.
        """
        if self.partial.is_dir():
            self._take_lock()
        if self.is_complete:
            manifest = read_object(self.partial / MANIFEST_NAME)
            self._require_same({key: manifest.get(key) for key in binding}, binding)
            return True
        if quantiser is not None:
            binding = {**binding, _QUANTISER: quantiser}
        if (self.directory / _BINDING).is_file():
            found = read_object(self.directory / _BINDING)
            found_place = found.pop(_PLACE, None)
            if found == binding:
                self._remove_temporary()
                return True
            has_changed = place is not None and found_place == place
            self._begin_anew(found, binding, has_changed)
        elif self.partial.exists() and not self.partial.is_dir():
            raise ConfigError(
                f"no directory: {self.partial}\n"
                "expected it to be free for the unfinished container\n"
                "hint: remove it, or choose another destination"
            )
        elif self.partial.exists():
            strange = [p.name for p in self.partial.iterdir() if p.name != _JOURNAL]
            if strange:
                raise ConfigError(
                    f"directory exists and is no unfinished container: {self.partial}\n"
                    f"found {strange[0]}\nhint: remove it, or choose another destination"
                )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        self._remove_temporary()
        write_json(self.directory / _BINDING, {**binding, _PLACE: place})
        sync_directory(self.partial)
        sync_directory(self.partial.parent)
        return False

    def _require_same(self, found: dict[str, Any], binding: dict[str, Any]) -> None:
        if found == binding:
            return
        key = next((k for k in binding if found.get(k) != binding[k]), "binding")
        raise ConfigError(
            f"an unfinished container with another {key} exists: {self.partial}\n"
            f"expected {binding.get(key)}, got {found.get(key)}\n"
            "hint: finish it with the source and options it was begun with, or start anew: remove "
            f"the directory `{self.partial}` and run this command again"
        )

    def _begin_anew(
        self, found: dict[str, Any], binding: dict[str, Any], has_changed: bool
    ) -> None:
        """Empty the directory if that loses nothing; killed within, it is still what it was.

        Raises:
            ConfigError: it holds files of another source, or of another recipe.
        """
        finished = [p.name for p in self.partial.iterdir() if self.finished(p.name) is not None]
        is_other_source = found.get("source") != binding.get("source")
        is_same_otherwise = {**found, "source": None} == {**binding, "source": None}
        if finished and not (has_changed and is_other_source and is_same_otherwise):
            self._require_same(found, binding)
        reason = (
            "the source has changed since" if has_changed and finished else "nothing is finished"
        )
        _log.warning(
            "starting anew: %s: %s, %d finished files are dropped",
            self.partial, reason, len(finished),
        )  # fmt: skip
        # Files first: a note without its file means nothing, and the binding says whose all is.
        for path in self.partial.iterdir():
            if path.name != _JOURNAL:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.directory.iterdir():
            if path.name != _BINDING:
                path.unlink()

    def _remove_temporary(self) -> None:
        for directory in (self.partial, self.directory):
            for path in directory.glob(f"*{TEMPORARY_SUFFIX}"):
                path.unlink()

    def finished(self, name: str) -> list[int] | None:
        """Return the checksums noted for a finished file, or None."""
        note = self.directory / f"{name}.json"
        if not note.is_file() or not (self.partial / name).is_file():
            return None
        try:
            return [int(value, 16) for value in read_object(note)["checksums"]]
        except (CheckpointError, KeyError, TypeError, ValueError):
            return None  # a torn note: the file is written again

    def verified(
        self,
        name: str,
        header: bytes,
        lengths: Sequence[tuple[int, int]],
        advance: Callable[[int], None],
    ) -> list[int] | None:
        """Verify a file that an earlier run finished.

        Args:
            name: of the file.
            header: the bytes it must begin with.
            lengths: of each tensor, the bytes that are summed and the bytes it takes.
            advance: called with the bytes verified since the last call; with a negative number when
                the file turns out to be damaged.

        Returns:
            its checksums; None if there is no such file or it is damaged.
        """
        noted = self.finished(name)
        path = self.partial / name
        if noted is None or len(noted) != len(lengths):
            return None
        if path.stat().st_size != len(header) + sum(stored for _, stored in lengths):
            return None
        start = np.empty(len(header), np.uint8)
        read_range(path, 0, start)
        if start.tobytes() != header:
            return None
        done = at = len(header)
        advance(done)
        buffer = np.empty(max((n for n, _ in lengths), default=0), np.uint8)
        for (nbytes, stored), checksum in zip(lengths, noted, strict=True):
            read_range(path, at, buffer[:nbytes])
            if bytes_checksum(buffer[:nbytes]) != checksum:
                advance(-done)
                return None
            at += stored
            done += stored
            advance(stored)
        return noted

    def keep_or_write(
        self,
        name: str,
        header: bytes,
        lengths: Sequence[tuple[int, int]],
        advance: Callable[[int], None],
        write: Callable[[], list[int]],
    ) -> tuple[list[int], bool]:
        """Keep a file that an earlier run finished and that is still sound, or write it.

        Args:
            name: of the file.
            header: the bytes it begins with.
            lengths: as in `verified`.
            advance: called with the bytes done since the last call.
            write: writes the file, reporting all but the header; returns its checksums.

        Returns:
            its checksums, and whether it was kept.
        """
        noted = self.verified(name, header, lengths, advance)
        if noted is not None:
            return noted, True
        advance(len(header))
        checksums = write()
        self.finish(name, checksums)
        return checksums, False

    def require_space(self, file_bytes: Mapping[str, int], other_bytes: int) -> None:
        """Check that what is not finished fits on the drive; makes nothing, so that a conversion
        that is refused leaves nothing behind.

        Args:
            file_bytes: length of each weight file.
            other_bytes: what everything else takes at most.

        Raises:
            CheckpointError: it does not; says how much is needed and there.
        """
        if self.is_complete:
            return
        missing = (n for name, n in file_bytes.items() if self.finished(name) is None)
        need = sum(missing) + other_bytes
        hint = "or choose a destination on another drive"
        require_space(self.partial.parent, need, "the container", hint)

    def finish(self, name: str, checksums: Sequence[int]) -> None:
        """Note that a file is complete and on the drive."""
        content = {"checksums": [format_checksum(c) for c in checksums]}
        write_json(self.directory / f"{name}.json", content)

    def publish(self, manifest: dict[str, Any] | None) -> None:
        """Write the manifest, drop the journal and give the container its name.

        Args:
            manifest: content of headrace.json; None if it is there already.
        """
        if manifest is not None:
            write_json(self.partial / MANIFEST_NAME, manifest)
        self._drop_notes(self.directory)
        self._rename()

    def publish_plain(self) -> None:
        """Give a directory without a manifest its name, and drop the journal from it."""
        self._rename()
        self._drop_notes(self.dest / _JOURNAL)

    def _drop_notes(self, directory: Path) -> None:
        if directory.exists():
            shutil.rmtree(directory)

    def _rename(self) -> None:
        self._remove_temporary()
        sync_directory(self.partial)
        if self.dest.is_dir():
            self.dest.rmdir()  # empty: `is_published` refused anything else
        self.partial.rename(self.dest)
        sync_directory(self.dest.parent)
