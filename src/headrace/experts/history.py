"""Which experts earlier runs used: routed counts that warm the next start.

Owns one small file beside the model or in the user's cache directory, bound to the checkpoint's
fingerprint. It is advice: a file that is missing, damaged or of another model is put aside with a
logged warning and never stops a run. It reads no weights and decides nothing.
"""

import contextlib
import errno
import hashlib
import json
import logging
import os
import tempfile
from pathlib import Path

import numpy as np
import numpy.typing as npt
import platformdirs

from headrace.arrays import Int64
from headrace.config import HISTORY_MODES
from headrace.errors import ConfigError

_log = logging.getLogger(__name__)

FILE_NAME = "headrace-history.json"
FORMAT = "headrace history"
FORMAT_VERSION = 1
HALF_LIFE_TOKENS = 100_000
"""Tokens after which a saved count weighs half: long against a conversation, short against a change
of use. A choice, not a measurement; it only orders what is warmed first."""
_MAX_FILE_BYTES = 256 << 20
_PACKAGE = Path(__file__).resolve().parents[1]


def default_path(model: Path, fingerprint: str) -> Path:
    """Return where a history lives: beside the model if that can be written, else in the cache.

    The demo's lives in the cache, too: an installed package is no place for a user's data.

    Args:
        model: the checkpoint, a directory or a file.
        fingerprint: identity of the checkpoint.
    """
    folder = model if model.is_dir() else model.parent
    beside = folder / FILE_NAME if model.is_dir() else folder / f"{model.name}.{FILE_NAME}"
    is_ours = folder.resolve().is_relative_to(_PACKAGE)
    if not is_ours and os.access(beside if beside.exists() else folder, os.W_OK):
        return beside
    name = hashlib.sha256(fingerprint.encode()).hexdigest()[:32]
    return Path(platformdirs.user_cache_dir("headrace")) / "history" / f"{name}.json"


class History:
    """Routed counts [Lm, E] with a half-life, for one checkpoint.

    `counts` holds decayed routed tokens per record, `num_tokens` the decayed number of tokens that
    were routed: their quotient is how often a token wants the record.
    """

    def __init__(
        self, path: Path, *, fingerprint: str, layers: tuple[int, ...], num_experts: int, mode: str
    ) -> None:
        """Read the file if the mode says so and it fits; start empty otherwise.

        Args:
            path: the file, which need not exist.
            fingerprint: identity of the checkpoint; a file of another is refused with a warning.
            layers: layer numbers of the record table.
            num_experts: E.
            mode: "write" reads and saves, "read" only reads, "off" does neither.

        Raises:
            ConfigError: the mode is none of these.
        """
        if mode not in HISTORY_MODES:
            raise ConfigError(
                f"unknown history mode\nexpected {' | '.join(HISTORY_MODES)}, got {mode!r}"
            )
        self.path = path
        self.mode = mode
        self.num_tokens = 0.0
        self.counts: npt.NDArray[np.float64] = np.zeros((len(layers), num_experts))
        self._identity = {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "fingerprint": fingerprint,
            "layers": list(layers),
            "num_experts": num_experts,
        }
        if mode != "off":
            self._read()

    def _read(self) -> None:
        try:
            if self.path.stat().st_size > _MAX_FILE_BYTES:
                raise ValueError(f"larger than {_MAX_FILE_BYTES} bytes")
            content = json.loads(self.path.read_bytes())
            self._adopt(content)
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            _log.warning("expert history ignored: %s: %s", self.path, error)

    def _adopt(self, content: object) -> None:
        """Take over a parsed file; ValueError says why not."""
        if not isinstance(content, dict):
            raise ValueError("not a JSON object")
        for key, expected in self._identity.items():
            if content.get(key) != expected:
                raise ValueError(f"{key} differs: it belongs to another model or version")
        try:
            counts = np.asarray(content["counts"], np.float64)
            num_tokens = float(content["num_tokens"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"counts are missing or not numbers ({error})") from error
        if counts.shape != self.counts.shape:
            raise ValueError(f"expected counts of shape {self.counts.shape}, got {counts.shape}")
        numbers = np.append(counts.ravel(), num_tokens)
        if not np.isfinite(numbers).all() or (numbers < 0).any():
            raise ValueError("a count is negative or not finite")
        self.counts, self.num_tokens = counts, num_tokens

    @property
    def routing_path(self) -> Path:
        """Where the routing of the last tokens is kept: beside the counts."""
        return self.path.with_name(self.path.name.removesuffix(".json") + ".trace")

    def add(self, counts: Int64, num_tokens: int) -> None:
        """Add a run's routed counts [Lm, E] after letting the older ones decay by its tokens."""
        decay = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        self.counts = self.counts * decay + counts
        self.num_tokens = self.num_tokens * decay + num_tokens

    def save(self) -> None:
        """Write the file atomically, if the mode is "write" and there is something to say.

        A directory that cannot be written is a logged warning.
        """
        if self.mode != "write" or self.num_tokens == 0:
            return
        content = self._identity | {
            "num_tokens": round(self.num_tokens, 3),
            "counts": [[round(float(value), 3) for value in row] for row in self.counts],
        }
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self.path, json.dumps(content).encode())
        except OSError as error:
            _log.warning("expert history not saved: %s: %s", self.path, error)

    def frequencies(self, half_life_tokens: float) -> npt.NDArray[np.float64]:
        """Return the decayed counts [Lm, E] that a steady use at these rates would have led to.

        Args:
            half_life_tokens: of the counts wanted.

        A rate of r routed tokens per token, decayed with half-life h, settles at r * h / ln 2.
        """
        settled = min(half_life_tokens / np.log(2.0), self.num_tokens)
        return self.counts * (settled / self.num_tokens) if self.num_tokens > 0 else self.counts

    def hottest(self, limit: int) -> list[tuple[int, int]]:
        """Return at most `limit` (layer, expert) pairs by descending count, none with a zero."""
        flat = self.counts.ravel()
        order = np.argsort(-flat, kind="stable")[:limit]
        layers = self._identity["layers"]
        assert isinstance(layers, list)
        num_experts = self.counts.shape[1]
        return [
            (int(layers[record // num_experts]), int(record % num_experts))
            for record in order
            if flat[record] > 0
        ]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file by one of this content, or leave it as it is.

    A link stays a link: the file that it names is replaced.

    Raises:
        OSError: the file cannot be written, or is a device or directory, never to be replaced.
    """
    path = path.resolve()
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise
