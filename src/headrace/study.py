"""Runs models over a text to learn from them: what their linears see, how far two answers differ.

Both run as they always do, under the memory granted, one window of the text after the other; the
second of two models is opened when the first is closed. Owns the windows, the file of scores in
between, and the sums of the comparison.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from headrace.arrays import Float32
from headrace.checkpoint import Matrix
from headrace.config import EngineConfig
from headrace.convert.importance import Importance, read_importance
from headrace.convert.observe import Observer, observed
from headrace.errors import CheckpointError, ConfigError, RequestError
from headrace.llm import LLM
from headrace.models.lossy import log_softmax
from headrace.models.registry import REGISTRY

WINDOW = 512
"""Tokens that see one another; each window starts afresh."""
CALIBRATION_TOKENS = 1 << 16
"""Of a longer text the first ones count: more changes the means little, and takes hours."""
SCORE_BYTES = 2 << 30
"""Most that the scores of one model take on the drive while the other one runs."""
PERCENTILES = (50, 90, 99, 99.9)
_ROWS = 16  # compared at a time, in float64

Seen = Callable[[str, int, int], None]
"""Told what runs, tokens done, and tokens in all."""


class StudiedModel(LLM):
    """A model whose dense matrices are known by name."""

    def _load(self) -> None:
        self.names: dict[int, str] = {}
        load = self.checkpoint.load_matrix

        def load_matrix(name: str, format: str | None = None) -> Matrix:
            matrix = load(name, format)
            self.names[id(matrix)] = name
            return matrix

        self.checkpoint.load_matrix = load_matrix  # type: ignore[method-assign]
        super()._load()

    @property
    def head_name(self) -> str:
        """Name of the matrix that scores the vocabulary."""
        names = REGISTRY[self.spec.model_type].names
        return names.name("embed_tokens" if self.spec.tie_word_embeddings else "lm_head")

    def run(self, ids: list[int], observer: Observer, what: str, seen: Seen) -> None:
        """Score a text in windows, with `observer` looking on."""
        with observed(observer):
            for first in range(0, len(ids), WINDOW):
                window = ids[first : first + WINDOW]
                self.score(window)
                seen(what, first + len(window), len(ids))


@contextmanager
def _opened(path: Path, config: EngineConfig) -> Iterator[StudiedModel]:
    experts = replace(config.experts, history="off", history_path=None)
    config = replace(config, context=WINDOW, sequences=1, experts=experts)
    with StudiedModel(path, config) as model:
        yield model


def read_text(path: Path) -> str:
    """Read a text file, which must be UTF-8 and not empty.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read text {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"text is not UTF-8: {path}\n{error}") from None
    if not text.strip():
        raise ConfigError(f"text is empty: {path}")
    return text


def calibrate(
    source: Path,
    text_file: Path,
    cache: Path,
    config: EngineConfig,
    seen: Seen = lambda *_: None,
) -> Importance:
    """Collect the importance matrix of a model on a text, or take it from `cache`.

    Args:
        source: any checkpoint that runs.
        text_file: UTF-8; its first CALIBRATION_TOKENS tokens count.
        cache: the file to keep the sums in; used again for the same model and text.
        config: memory and threads of the run.
        seen: told how far it is.

    Raises:
        ConfigError: the text cannot be read.
        What running the model raises.
    """
    text = read_text(text_file)
    with _opened(source, config) as model:
        about = {
            "fingerprint": model.checkpoint.fingerprint,
            "text": hashlib.sha256(text.encode()).hexdigest(),
            "window": WINDOW,
            "most_tokens": CALIBRATION_TOKENS,
        }
        found = _cached(cache, about, model.spec.model_type)
        if found is not None:
            return found
        importance = Importance(about=about)
        observer = Observer(model.names, model.head_name, model.store, importance)
        ids = model.tokenizer.encode(text)[:CALIBRATION_TOKENS]
        model.run(ids, observer, "calibrating", seen)
    importance.save(cache)
    return importance


def _cached(cache: Path, about: dict[str, Any], model_type: str) -> Importance | None:
    if not cache.is_file():
        return None
    try:
        found = read_importance(cache, model_type)
    except CheckpointError:
        return None  # written anew
    return found if found.about == about else None


@dataclass(frozen=True)
class Comparison:
    """How a model's next-token distributions differ from those of the one it was made from."""

    num_tokens: int
    kl_mean: float
    """Kullback-Leibler divergence from source to converted, nats a token."""
    kl_percentiles: dict[str, float]
    kl_max: float
    top_1_agreement: float
    """Share of tokens after which both hold the same next one likeliest."""
    source_nats: float
    """Mean negative log-likelihood of the text's tokens."""
    converted_nats: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return asdict(self)


def compare(
    source: Path,
    converted: Path,
    text_file: Path,
    config: EngineConfig,
    seen: Seen = lambda *_: None,
) -> Comparison:
    """Run two models over a text, and compare their distributions of each next token.

    The source's scores wait in a temporary file of at most SCORE_BYTES: of a longer text the first
    tokens count.

    Raises:
        ConfigError: the text cannot be read.
        RequestError: the two have other vocabularies.
        What running the models raises.
    """
    text = read_text(text_file)
    # Beside the model, since the system's folder for temporary files may lie in memory.
    with tempfile.TemporaryFile(prefix=".headrace-scores-", dir=converted.parent) as file:
        with _opened(source, config) as model:
            vocabulary = model.spec.vocab_size
            most = SCORE_BYTES // (4 * vocabulary)
            ids = model.tokenizer.encode(text)[:most]
            observer = Observer(
                model.names, model.head_name, see_logits=lambda rows: _write(file, rows)
            )
            model.run(ids, observer, "source", seen)
        file.seek(0)
        sums = _Sums(file, ids)
        with _opened(converted, config) as model:
            if model.spec.vocab_size != vocabulary:
                raise RequestError(
                    f"vocabularies differ: {converted}\nexpected {vocabulary} entries as in "
                    f"{source}, got {model.spec.vocab_size}"
                )
            observer = Observer(model.names, model.head_name, see_logits=sums.take)
            model.run(ids, observer, "converted", seen)
    return sums.result()


def _write(file: IO[bytes], rows: Float32) -> None:
    file.write(np.ascontiguousarray(rows).data)


class _Sums:
    """Compares scores as they come with those of the file."""

    def __init__(self, file: IO[bytes], ids: list[int]) -> None:
        self.file, self.ids = file, ids
        self.kl: list[npt.NDArray[np.float64]] = []
        self.num_same, self.num_rows, self.num_targets = 0, 0, 0
        self.nats = np.zeros(2)

    def take(self, rows: Float32) -> None:
        """Compare scores [R, V] of the next R tokens."""
        for first in range(0, len(rows), _ROWS):
            self._take(rows[first : first + _ROWS])

    def _take(self, rows: Float32) -> None:
        data = self.file.read(rows.nbytes)
        before = np.frombuffer(data, np.float32).reshape(rows.shape)
        p, q = log_softmax(before), log_softmax(rows)
        self.kl.append(np.maximum(0, (np.exp(p) * (p - q)).sum(axis=1)))
        self.num_same += int((before.argmax(axis=1) == rows.argmax(axis=1)).sum())
        for row in range(len(rows)):
            following = self.num_rows + row + 1
            if following < len(self.ids) and following % WINDOW:  # the window's last has none
                target = self.ids[following]
                self.nats -= (p[row, target], q[row, target])
                self.num_targets += 1
        self.num_rows += len(rows)

    def result(self) -> Comparison:
        """Sum up."""
        kl = np.concatenate(self.kl)
        targets = max(1, self.num_targets)
        return Comparison(
            num_tokens=len(kl),
            kl_mean=float(kl.mean()),
            kl_percentiles={str(p): float(np.percentile(kl, p)) for p in PERCENTILES},
            kl_max=float(kl.max()),
            top_1_agreement=self.num_same / len(kl),
            source_nats=float(self.nats[0]) / targets,
            converted_nats=float(self.nats[1]) / targets,
        )
