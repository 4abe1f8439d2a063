"""The tiny checkpoints of tests/fixtures, opened and run without the engine."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.arrays import Float32
from headrace.checkpoint import Checkpoint, open_checkpoint, read_config
from headrace.config import ExpertConfig
from headrace.experts import ExpertStore
from headrace.models.decoder import Decoder
from headrace.models.registry import build_model, expert_names, load_spec
from headrace.state import KVPool, StepRows, make_kv_pool

FIXTURES = Path(__file__).parent.parent / "fixtures"

# The largest difference of a logit from transformers in float32, by how keys and values are stored.
# Logits have a standard deviation near 0.7. With float32 pages, what is left is the order of
# summation (transformers itself differs by 1e-6 from float64); half-precision pages round each key
# and value to 11 bits.
LOGIT_TOLERANCE = {"f32": 5e-6, "f16": 4e-3}
# The same of the median row, for pages so coarse that a router may choose another expert: that row
# is then off by up to a half, and those that attend to it by a tenth of that.
TYPICAL_TOLERANCE = {"bf16": 4e-2, "q8": 4e-2}


def list_cases() -> list[tuple[str, str]]:
    """Every (fixture, case) that has expected values."""
    paths = sorted(FIXTURES.glob("*/expected.*.npz"))
    return [(path.parent.name, path.name.split(".")[1]) for path in paths]


def read_case_config(name: str, case: str) -> dict[str, Any]:
    """The config of a case, with old names."""
    file = "config.json" if case == "default" else f"config.{case}.json"
    content: dict[str, Any] = json.loads((FIXTURES / name / file).read_text())
    return content


def read_expected(name: str, case: str) -> dict[str, np.ndarray]:
    """`ids` [T], `logits` [T, V] and `greedy` [N] as transformers gave them."""
    with np.load(FIXTURES / name / f"expected.{case}.npz") as arrays:
        return {key: arrays[key] for key in arrays.files}


def make_case(name: str, case: str, folder: Path) -> Path:
    """A checkpoint folder for a case: the fixture's weights beside the case's config."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in FIXTURES.joinpath(name).glob("*.safetensors*"):
        (folder / path.name).symlink_to(path.resolve())
    (folder / "config.json").write_text(json.dumps(read_case_config(name, case)))
    # Fixtures hold none; `convert` asks for one.
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    return folder


def open_model(folder: Path) -> tuple[Decoder, Checkpoint]:
    """Load the dense part of a checkpoint."""
    spec = load_spec(read_config(folder))
    checkpoint = open_checkpoint(folder, expert_names(spec))
    return build_model(spec, checkpoint), checkpoint


@contextmanager
def open_store(
    checkpoint: Checkpoint, num_slots: int | None = None
) -> Iterator[ExpertStore | None]:
    """A store over the checkpoint's experts, all resident unless `num_slots` says less."""
    table = checkpoint.records
    if table is None:
        yield None
        return
    if num_slots is None:
        num_slots = len(table.layers) * table.num_experts
    with ExpertStore(table, num_slots=num_slots, readers=ExpertConfig()) as store:
        yield store


def run(
    model: Decoder,
    store: ExpertStore | None,
    ids: Sequence[int],
    chunks: Iterable[int],
    dtype: str = "f32",
) -> Float32:
    """Feed `ids` in steps of the given sizes; returns the logits of every row, [T, V]."""
    kv = model.make_state(num_pages=2, dtype=dtype)
    return run_in_pool(model, store, ids, chunks, kv, pages=[1, 0])


def logits_of(path: Path, num_slots: int | None = None) -> Float32:
    """Logits after a fixed prompt; all experts resident unless `num_slots` says less."""
    model, checkpoint = open_model(path)
    ids = list(range(3, 20))
    with open_store(checkpoint, num_slots) as store:
        return run(model, store, ids, [len(ids)])


def require_same_logits(source: Path, made: Path) -> None:
    """Equal bits in place and converted, with all experts resident and with the fewest slots.

    Of a prompt, and of tokens decoded after it.
    """
    logits = logits_of(source)
    assert logits.std() > 0.01
    wanted = logits.view(np.uint32)
    for path, num_slots in ((source, 2), (made, None), (made, 2)):
        np.testing.assert_array_equal(logits_of(path, num_slots).view(np.uint32), wanted)
    ids = {tuple(greedy_ids(path, n)) for path in (source, made) for n in (2, None)}
    assert len(ids) == 1


def greedy_ids(path: Path, num_slots: int | None = None) -> list[int]:
    """Six tokens after a fixed prompt; slots as of `logits_of`."""
    model, checkpoint = open_model(path)
    with open_store(checkpoint, num_slots) as store:
        return generate_greedily(model, store, [3, 1, 4, 1, 5], 6)


def run_in_pool(
    model: Decoder,
    store: ExpertStore | None,
    ids: Sequence[int],
    chunks: Iterable[int],
    kv: KVPool,
    pages: Sequence[int],
) -> Float32:
    """As `run`, in the given pages of a pool."""
    logits, start = [], 0
    for size in chunks:
        part = np.array(ids[start : start + size], np.int32)
        rows = StepRows.for_sequence(start, size, pages)
        logits.append(model(part, rows, kv, store, np.arange(size, dtype=np.int32)))
        start += size
    assert start == len(ids), "the chunks do not add up to the sequence"
    return np.concatenate(logits)


def make_small_pages(model: Decoder, num_pages: int, page_tokens: int, dtype: str) -> KVPool:
    """A pool with smaller pages than the engine uses."""
    spec = model.spec
    return make_kv_pool(
        spec.num_hidden_layers,
        num_pages,
        spec.num_key_value_heads,
        spec.head_dim,
        dtype,
        page_tokens,
    )


def generate_greedily(
    model: Decoder, store: ExpertStore | None, prompt: Sequence[int], num_tokens: int
) -> list[int]:
    """Prefill the prompt in one step, then decode token by token, taking the best each time."""
    kv = model.make_state(num_pages=2, dtype="f32")
    ids, out = list(prompt), []
    start = 0
    for _ in range(num_tokens):
        part = np.array(ids[start:], np.int32)
        rows = StepRows.for_sequence(start, len(part), [0, 1])
        last = np.array([len(part) - 1], np.int32)
        logits = model(part, rows, kv, store, last)
        start = len(ids)
        out.append(int(logits[0].argmax()))
        ids.append(out[-1])
    return out
