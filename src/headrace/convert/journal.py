"""What a conversion has finished, so that a killed one goes on where it stopped.

While it runs, the container is the directory `DEST.partial`, and `DEST.partial/journal` holds one
note that binds recipe and source, and one per finished file with its checksums, written after the
file. The order of the last steps is manifest, removal of the journal, rename: a directory with a
manifest is complete.
"""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint.jsonfile import read_object
from headrace.checkpoint.layout import MANIFEST_NAME, format_checksum
from headrace.checkpoint.writer import TEMPORARY_SUFFIX, sync_directory, write_json
from headrace.errors import CheckpointError, ConfigError

PARTIAL_SUFFIX = ".partial"
_JOURNAL = "journal"
_BINDING = "conversion.json"


class Journal:
    """The notes beside a container that is being written."""

    def __init__(self, dest: Path) -> None:
        self.dest = dest
        self.partial = dest.with_name(dest.name + PARTIAL_SUFFIX)
        self.directory = self.partial / _JOURNAL

    @property
    def is_complete(self) -> bool:
        """Whether all files are written and only the rename is missing."""
        return (self.partial / MANIFEST_NAME).is_file()

    def begin(self, binding: dict[str, Any]) -> bool:
        """Create the directory, or accept the one that an earlier run of the same conversion left.

        Args:
            binding: what makes two conversions the same: recipe, source, format version.

        Returns:
            whether earlier work is resumed.

        Raises:
            ConfigError: the directory belongs to another conversion, or to something else.
        """
        if self.is_complete:
            manifest = read_object(self.partial / MANIFEST_NAME)
            self._require_same({key: manifest.get(key) for key in binding}, binding)
            return True
        if (self.directory / _BINDING).is_file():
            self._require_same(read_object(self.directory / _BINDING), binding)
            self._remove_temporary()
            return True
        if self.partial.exists():
            strange = [p.name for p in self.partial.iterdir() if p.name != _JOURNAL]
            if strange:
                raise ConfigError(
                    f"directory exists and is no unfinished conversion: {self.partial}\n"
                    f"found {strange[0]}\nhint: remove it, or choose another destination"
                )
        self.directory.mkdir(parents=True, exist_ok=True)
        self._remove_temporary()
        write_json(self.directory / _BINDING, binding)
        sync_directory(self.partial)
        sync_directory(self.partial.parent)
        return False

    def _require_same(self, found: dict[str, Any], binding: dict[str, Any]) -> None:
        if found == binding:
            return
        key = next(k for k in binding if found.get(k) != binding[k])
        raise ConfigError(
            f"an unfinished conversion with another {key} exists: {self.partial}\n"
            f"expected {binding[key]}, got {found.get(key)}\n"
            f"hint: give the options of that run to finish it, or remove {self.partial.name}"
        )

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

    def finish(self, name: str, checksums: Sequence[int]) -> None:
        """Note that a file is complete and on the drive."""
        content = {"checksums": [format_checksum(c) for c in checksums]}
        write_json(self.directory / f"{name}.json", content)

    def publish(self, manifest: dict[str, Any]) -> None:
        """Write the manifest, drop the journal and give the container its name."""
        if not self.is_complete:
            write_json(self.partial / MANIFEST_NAME, manifest)
        if self.directory.exists():
            shutil.rmtree(self.directory)
        self._remove_temporary()
        sync_directory(self.partial)
        if self.dest.is_dir():
            self.dest.rmdir()  # empty: begin refused anything else
        self.partial.rename(self.dest)
        sync_directory(self.dest.parent)
