"""A model whose experts encode their own identity, and a run of it that keeps every logit.

Expert e of layer l writes a vector of its own into the residual stream, and each of its matrices is
drawn from a generator seeded by (l, e): a stale, swapped, torn or half-read record changes the
logits.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from headrace.arrays import Float32, Int32
from headrace.config import EngineConfig, ExpertConfig, SamplingParams, resolve_sampling
from headrace.engine.loop import EngineLoop
from headrace.engine.sequence import State
from headrace.experts import DriveUse, ExpertStore, History
from headrace.inspect import open_model
from headrace.models.registry import build_model
from headrace.pressure import TRIAL_TOKENS, Moves, PressureWatch

LAYERS, EXPERTS, ACTIVE, HIDDEN, WIDTH, VOCAB = 3, 8, 2, 64, 64, 96
NUM_RECORDS = LAYERS * EXPERTS

CONFIG = {
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": HIDDEN,
    "intermediate_size": WIDTH,
    "moe_intermediate_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": EXPERTS,
    "num_experts_per_tok": ACTIVE,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "use_sliding_window": False,
    "torch_dtype": "float32",
}


def _tensors() -> dict[str, Float32]:
    rng = np.random.default_rng(11)

    def draw(*shape: int, std: float = 0.2) -> Float32:
        return rng.normal(0, std, shape).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": draw(VOCAB, HIDDEN, std=1.0),
        "lm_head.weight": draw(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}."
        for name, rows, cols in (("q", 64, HIDDEN), ("k", 32, HIDDEN), ("v", 32, HIDDEN)):
            tensors[f"{at}self_attn.{name}_proj.weight"] = draw(rows, cols)
        tensors[f"{at}self_attn.o_proj.weight"] = draw(HIDDEN, 64)
        for name in ("self_attn.q_norm", "self_attn.k_norm"):
            tensors[f"{at}{name}.weight"] = np.ones(16, np.float32)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}{name}.weight"] = np.ones(HIDDEN, np.float32)
        # Router rows of unequal length: some experts are wanted much more often than others.
        scale = np.linspace(0.2, 0.6, EXPERTS, dtype=np.float32)[:, None]
        tensors[f"{at}mlp.gate.weight"] = draw(EXPERTS, HIDDEN, std=1.0) * scale
        for expert in range(EXPERTS):
            tensors |= _expert(layer, expert)
    return tensors


def _expert(layer: int, expert: int) -> dict[str, Float32]:
    rng = np.random.default_rng([layer, expert])
    at = f"model.layers.{layer}.mlp.experts.{expert}."
    identity = rng.choice([-1.0, 1.0], (HIDDEN, 1))
    return {
        f"{at}gate_proj.weight": rng.normal(0, 0.2, (WIDTH, HIDDEN)).astype(np.float32),
        f"{at}up_proj.weight": rng.normal(0, 0.2, (WIDTH, HIDDEN)).astype(np.float32),
        f"{at}down_proj.weight": (0.1 * identity + rng.normal(0, 0.2, (HIDDEN, WIDTH))).astype(
            np.float32
        ),
    }


def write_checkpoint(folder: Path) -> Path:
    """Write the model as a Hugging Face directory of one float32 safetensors file."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}  # `convert` asks for one
    (folder / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    tensors = _tensors()
    header: dict[str, object] = {}
    offset = 0
    for name, value in tensors.items():
        end = offset + value.nbytes
        header[name] = {"dtype": "F32", "shape": value.shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        for value in tensors.values():
            file.write(value.tobytes())
    return folder


PROMPTS = (
    [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6],
    [70, 71, 72, 73, 74, 75, 76],
)
NUM_GENERATED = 12


@dataclass
class Setting:
    """Everything that may change speed and must not change a token."""

    num_slots: int = NUM_RECORDS
    chunk: int = 64
    experts: ExpertConfig = field(default_factory=lambda: ExpertConfig(history="off"))
    warm: History | None = None
    prefetch: bool = False
    lie: bool = False  # lookahead is told what no router said
    together: bool = False  # both prompts in the same steps
    resize: tuple[int, ...] = ()  # slots after each step, in turn
    pressure: Path | None = None  # a folder for a fake /proc whose memory comes and goes
    harm: Callable[[int], None] = lambda step: None  # called before each step with its number


@dataclass
class Run:
    """What came out: the ids and the bytes of every logit, per prompt; and the store's counters."""

    ids: list[list[int]]
    logits: list[bytes]
    stats: object
    drives: list[DriveUse]
    errors: list[Exception | None]
    moves: Moves = field(default_factory=Moves)


class _Recorder:
    """A model that notes the logits of each sequence by the first token of its prompt."""

    def __init__(self, model: object, store: ExpertStore, setting: Setting) -> None:
        self._model = model
        self._store = store
        self._setting = setting
        self.rows: list[Float32] = []
        self.steps = 0
        self.watch = None if setting.pressure is None else self._make_watch(setting.pressure)

    def _make_watch(self, root: Path) -> PressureWatch:
        return PressureWatch(
            self._store,
            slot_bytes=1 << 20,
            least_slots=2,
            headroom_bytes=64 << 20,
            root=root,
            clock=lambda: 1000.0 * self.steps,
        )

    def _squeeze(self, watch: PressureWatch, root: Path) -> None:
        """Every third step memory is short by a few slots; else there is plenty, and all is fast.

        One look takes slots again, the next says that they may stay.
        """
        available = (28 << 20) if self.steps % 3 == 0 else (4 << 30)
        (root / "proc").mkdir(parents=True, exist_ok=True)
        (root / "proc/meminfo").write_text(f"MemAvailable: {available // 1024} kB\n")
        for _ in range(2):
            watch.note(10 * TRIAL_TOKENS, 1.0)
            watch.look()

    def __call__(
        self, ids: Int32, rows: object, kv: object, experts: object, logits_rows: Int32
    ) -> Float32:
        if self.watch is not None and self._setting.pressure is not None:
            self._squeeze(self.watch, self._setting.pressure)
        if self._setting.prefetch:
            # Advice of every kind: right, wrong, repeated. None of it may show in the logits.
            for layer in range(LAYERS):
                wanted = (np.arange(3, dtype=np.int32) + self.steps + layer) % EXPERTS
                self._store.prefetch(layer, wanted[None].astype(np.int32))
        if self._setting.lie:
            for layer in range(LAYERS):
                named = (np.arange(2, dtype=np.int32) * 3 + self.steps + layer) % EXPERTS
                self._store.look_ahead(layer, named[None].astype(np.int32))
        if self._setting.resize:
            self._store.resize(self._setting.resize[self.steps % len(self._setting.resize)])
        self._setting.harm(self.steps)
        self.steps += 1
        logits = self._model(ids, rows, kv, experts, logits_rows)  # type: ignore[operator]
        self.rows.append(logits.copy())
        return logits


def run(path: Path, setting: Setting) -> Run:
    """Generate greedily from both prompts and keep the logits."""
    spec, checkpoint = open_model(path, setting.experts.drive)
    assert checkpoint.records is not None
    model = build_model(spec, checkpoint)
    config = EngineConfig(sequences=2, experts=setting.experts)
    params = resolve_sampling(
        SamplingParams(max_tokens=NUM_GENERATED, temperature=0.0, logprobs=0), {}
    )
    with ExpertStore(
        checkpoint.records,
        num_slots=setting.num_slots,
        readers=setting.experts,
        history=setting.warm,
    ) as store:
        recorder = _Recorder(model, store, setting)
        loop = EngineLoop(
            recorder,
            model.make_state(16, config.kv),
            store,
            num_pages=16,
            context=256,
            max_sequences=2 if setting.together else 1,
            chunk=setting.chunk,
            max_logits_rows=16,
        )
        sequences = [loop.submit(list(prompt), params, seed=0) for prompt in PROMPTS]
        while any(sequence.state is not State.FINISHED for sequence in sequences):
            loop.step()
        store.debug_check()
        logprobs = [
            np.array([event.logprob.logprob for event in sequence.events if event.logprob])
            for sequence in sequences
        ]
        every = np.concatenate([np.empty((0, VOCAB), np.float32), *recorder.rows])
        # Alone, rows come prompt after prompt and can be compared whole; together they interleave,
        # so their multiset is compared.
        order = np.lexsort(every.T[::-1])
        return Run(
            ids=[list(sequence.tokens) for sequence in sequences],
            logits=[every[order].tobytes(), *(values.tobytes() for values in logprobs)],
            stats=store.stats(),
            drives=store.drives(),
            errors=[sequence.error for sequence in sequences],
            moves=Moves() if recorder.watch is None else recorder.watch.moves,
        )


def with_experts(**options: object) -> ExpertConfig:
    """Reader options without history."""
    return replace(ExpertConfig(history="off"), **options)  # type: ignore[arg-type]
