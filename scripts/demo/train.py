"""Train the demo model: tokenizer, MoE model, MTP layer, dense twin, export to Hugging Face form.

Owns: token streams, optimiser, schedule, checkpoints, export. The network is in model.py, the
texts come from corpus.py, the judging is in evaluate.py. Run with the environment README.md
gives, or it is half as fast.

The schedule counts steps, never seconds: a run may be paused and resumed at any time. The end of
the stable phase can be chosen while it runs: write "START LENGTH" into `RUN_DIR/decay`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import torch
from corpus import SOURCES
from model import ChunkedLoss, LanguageModel, ModelConfig, Moe, MtpLayer, hf_tensors, initialise
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as nnf

EOS = "<eos>"
SPECIAL = (EOS, *(f"<{source}>" for source in SOURCES))
REPEATS = {"austen": 3, "sotu": 1, "kjv": 1, "shakespeare": 1}
UNTAGGED_SHARE = 0.3
MID_TAG_SHARE = 0.35
CONTEXT = 256
LONG_CONTEXT = 512
STEP_TOKENS = 8192
BALANCE_WEIGHT = 0.01
SEED = 20261201
# Muon is measured in spectral norm per step, so its rate looks large beside AdamW's.
MUON_LR, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.05
ADAM_LR, ADAM_BETAS, ADAM_DECAY = 3e-3, (0.9, 0.95), 0.01
WARMUP_STEPS = 100


# --- tokens ---------------------------------------------------------------------------------


def read_pieces(path: Path) -> list[tuple[int, str]]:
    """Read a corpus file; return (source index, text) pairs."""
    rows = (json.loads(line) for line in path.read_text().splitlines())
    return [(SOURCES.index(row["source"]), row["text"]) for row in rows]


def train_tokenizer(corpus: Path, out: Path, vocab_size: int) -> None:
    """Train a byte-level BPE and write `tokenizer.json`; ids 0..4 are the special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text for source, text in read_pieces(corpus / "train.jsonl"))
    tokenizer.train_from_iterator(texts, trainer)
    out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out), pretty=False)


def encode_pieces(tokenizer: Tokenizer, path: Path) -> list[tuple[int, NDArray[np.int64]]]:
    """Tokenize a corpus file; return (source index, ids without tag and eos) pairs."""
    pieces = read_pieces(path)
    encoded = tokenizer.encode_batch([text for _, text in pieces])
    return [
        (source, np.array(e.ids, dtype=np.int64))
        for (source, _), e in zip(pieces, encoded, strict=True)
    ]


class TokenStream:
    """Endless, seeded rows of training tokens; row n is the same whatever ran before it.

    Each epoch shuffles the pieces (austen three times), puts `[tag] text <eos>` in a row, and cuts
    it into windows of LONG_CONTEXT tokens plus two to look ahead. UNTAGGED_SHARE of the pieces
    lose their tag. In MID_TAG_SHARE of the sequences the first token is replaced by the tag of
    its source, so that a tag followed by any sentence is a familiar start.
    """

    def __init__(
        self, pieces: list[tuple[int, NDArray[np.int64]]], tags: list[int], eos: int
    ) -> None:
        self.pieces, self.tags, self.eos = pieces, tags, eos
        self.epoch = -1
        self.windows: NDArray[np.int64] = np.empty((0, LONG_CONTEXT + 2), dtype=np.int64)
        self.sources: NDArray[np.int64] = np.empty((0, LONG_CONTEXT + 2), dtype=np.int64)
        self.first = 0

    def _build(self, epoch: int) -> None:
        draw = np.random.default_rng([SEED, epoch])
        bag = [p for p in self.pieces for _ in range(REPEATS[SOURCES[p[0]]])]
        ids, sources = [], []
        for index in draw.permutation(len(bag)):
            source, text = bag[index]
            tag = [self.tags[source]] if draw.random() >= UNTAGGED_SHARE else []
            row = np.concatenate([tag, text, [self.eos]]).astype(np.int64)
            ids.append(row)
            sources.append(np.full(len(row), source))
        stream, origin = np.concatenate(ids), np.concatenate(sources)
        start = int(draw.integers(LONG_CONTEXT))
        count = (len(stream) - 2 - start) // LONG_CONTEXT
        order = draw.permutation(count)[:, None] * LONG_CONTEXT + start
        index = order + np.arange(LONG_CONTEXT + 2)
        self.windows, self.sources = stream[index], origin[index]
        self.epoch = epoch

    def _locate(self, row: int) -> int:
        """Make the epoch that holds `row` current; return the row's place in it."""
        if self.epoch < 0 or row < self.first:
            self.first = 0
            self._build(0)
        while row >= self.first + len(self.windows):
            self.first += len(self.windows)
            self._build(self.epoch + 1)
        return row - self.first

    def batch(self, step: int, context: int) -> Tensor:
        """Return the tokens of one step, [STEP_TOKENS / context, context + 2] int64."""
        rows_per_step = STEP_TOKENS // LONG_CONTEXT
        draw = np.random.default_rng([SEED, 1, step])
        rows = []
        for row in range(step * rows_per_step, (step + 1) * rows_per_step):
            at = self._locate(row)
            for start in range(0, LONG_CONTEXT, context):
                piece = self.windows[at, start : start + context + 2].copy()
                if draw.random() < MID_TAG_SHARE and piece[0] >= len(SPECIAL):
                    piece[0] = self.tags[self.sources[at, start]]
                rows.append(piece)
        return torch.from_numpy(np.stack(rows))


def heldout_batches(
    pieces: list[tuple[int, NDArray[np.int64]]], tags: list[int], eos: int, context: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield held-out windows by source: (source, tokens [B, context + 2], counted [B, context]).

    Every piece starts with its tag and ends with eos; the last window of a piece is padded, and
    `counted` is true where position t has a real next token. B is always STEP_TOKENS / context,
    filled up with uncounted rows: new shapes cost time.
    """
    num_rows = STEP_TOKENS // context
    for source in range(len(SOURCES)):
        rows, masks = [], []
        for _, text in (p for p in pieces if p[0] == source):
            row = np.concatenate([[tags[source]], text, [eos]]).astype(np.int64)
            for start in range(0, len(row) - 1, context):
                window = row[start : start + context + 2]
                mask = np.arange(context) < len(window) - 1
                rows.append(np.pad(window, (0, context + 2 - len(window)), constant_values=eos))
                masks.append(mask)
        while len(rows) % num_rows:
            rows.append(np.full(context + 2, eos))
            masks.append(np.zeros(context, dtype=bool))
        for at in range(0, len(rows), num_rows):
            part = slice(at, at + num_rows)
            tokens, counted = np.stack(rows[part]), np.stack(masks[part])
            yield source, torch.from_numpy(tokens), torch.from_numpy(counted)


# --- optimiser ------------------------------------------------------------------------------


def orthogonalise(matrices: Tensor) -> Tensor:
    """Push the singular values of stacked matrices [..., rows, cols] towards 1.

    Source:
        Keller Jordan, Muon (2024): five quintic Newton-Schulz steps in bfloat16.
    """
    x = matrices.bfloat16()
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT.contiguous() if tall else x
    x = x / (x.float().norm(dim=(-2, -1), keepdim=True) + 1e-7).bfloat16()
    for _ in range(5):
        gram = x @ x.mT
        poly = torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        x = torch.baddbmm(x, poly, x, beta=3.4445, alpha=1.0)
    return x.mT if tall else x


class Optimizer:
    """Muon for the hidden matrices, AdamW for embedding, router and norms.

    Stacked experts are orthogonalised matrix by matrix in one batch; gate and up are two matrices.
    """

    def __init__(self, modules: list[nn.Module]) -> None:
        self.muon: list[tuple[nn.Parameter, tuple[int, ...], Tensor]] = []
        adam: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, p in (item for m in modules for item in m.named_parameters()):
            if not p.requires_grad:
                continue
            if p.ndim < 2:
                plain.append(p)
            elif name.endswith(("embed", "router")):
                adam.append(p)
            else:
                rows = p.shape[-2] // (2 if name.endswith("gate_up") else 1)
                self.muon.append((p, (-1, rows, p.shape[-1]), torch.zeros_like(p)))
        self.adam = torch.optim.AdamW(
            [
                {"params": adam, "weight_decay": ADAM_DECAY},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=ADAM_LR,
            betas=ADAM_BETAS,
            fused=True,
        )
        self.adam_parameters = adam + plain

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply one update at `factor` times the peak rates and clear the gradients."""
        nn.utils.clip_grad_norm_(self.adam_parameters, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = ADAM_LR * factor
        self.adam.step()
        self.adam.zero_grad(set_to_none=True)
        for p, shape, momentum in self.muon:
            assert p.grad is not None, "a hidden matrix got no gradient"
            momentum.lerp_(p.grad, 1 - MUON_MOMENTUM)
            update = p.grad.lerp_(momentum, MUON_MOMENTUM).view(shape)
            scale = math.sqrt(max(1.0, shape[-2] / shape[-1]))
            p.mul_(1 - MUON_LR * factor * MUON_DECAY)
            p.add_(orthogonalise(update).reshape(p.shape), alpha=-MUON_LR * factor * scale)
            p.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"adam": self.adam.state_dict(), "muon": [m for _, _, m in self.muon]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back the state of `state_dict`."""
        self.adam.load_state_dict(state["adam"])
        for (_, _, momentum), saved in zip(self.muon, state["muon"], strict=True):
            momentum.copy_(saved)


def rate_factor(step: int, warmup: int, decay: tuple[int, int] | None) -> float:
    """Return the learning rate at a step as a share of its peak: warm-up, stable, linear to 0."""
    factor = min(1.0, (step + 1) / warmup)
    if decay is not None:
        factor = min(factor, max(0.0, (sum(decay) - step) / decay[1]))
    return factor


def read_decay(run: Path) -> tuple[int, int] | None:
    """Read `decay` in the run directory: first step of the decay phase and its length."""
    path = run / "decay"
    if not path.exists():
        return None
    start, length = path.read_text().split()[:2]
    return int(start), int(length)


# --- runs -----------------------------------------------------------------------------------


def make_config(kind: str, vocab_size: int) -> ModelConfig:
    """Return the sizes of the `moe` model or of its `dense` twin."""
    return ModelConfig(vocab_size=vocab_size, num_experts=32 if kind == "moe" else 0)


def save_atomic(state: dict[str, Any], path: Path) -> None:
    """Write a checkpoint beside its place, then rename: a kill leaves the old one whole."""
    partial = path.with_suffix(".partial")
    torch.save(state, partial)
    partial.replace(path)


@torch.no_grad()
def quick_losses(model: LanguageModel, batches: list[tuple[int, Tensor, Tensor]]) -> list[float]:
    """Return the held-out loss by source in nats a token, bf16, on the batches given."""
    sums, counts = [0.0] * len(SOURCES), [0.0] * len(SOURCES)
    for source, tokens, mask in batches:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = model(tokens[:, :-2])
            logp = model.logits(hidden).float().log_softmax(-1)
        nll = -logp.gather(-1, tokens[:, 1:-1, None])[..., 0]
        sums[source] += float(nll[mask].sum())
        counts[source] += float(mask.sum())
    return [s / c for s, c in zip(sums, counts, strict=True)]


class Run:
    """A training run in its own directory: log, checkpoint, decay file."""

    def __init__(self, out: Path, modules: dict[str, nn.Module], args: argparse.Namespace) -> None:
        self.out, self.modules, self.args = out, modules, args
        out.mkdir(parents=True, exist_ok=True)
        self.optimizer = Optimizer(list(modules.values()))
        self.step = 0
        self.seconds = 0.0
        path = out / "checkpoint.pt"
        if path.exists():
            state = torch.load(path, weights_only=True)
            for name, module in modules.items():
                module.load_state_dict(state[name])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step, self.seconds = state["step"], state["seconds"]
        if args.decay_start is not None and not (out / "decay").exists():
            (out / "decay").write_text(f"{args.decay_start} {args.decay_steps}\n")

    def save(self) -> None:
        """Write the checkpoint."""
        state = {name: module.state_dict() for name, module in self.modules.items()}
        state |= {"optimizer": self.optimizer.state_dict()}
        state |= {"step": self.step, "seconds": self.seconds}
        save_atomic(state, self.out / "checkpoint.pt")

    def log(self, **row: Any) -> None:
        """Append one line to `log.jsonl` and print it."""
        line = json.dumps(row)
        print(line, flush=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(line + "\n")

    def loop(self, train_step: Any, evaluate: Any) -> None:
        """Step until the decay phase has ended; log, evaluate and save on the way."""
        decay = read_decay(self.out)
        mean, saved, mark, mark_step = 0.0, time.time(), time.time(), self.step
        while decay is None or self.step < sum(decay):
            began = time.time()
            left = None if decay is None else sum(decay) - self.step
            is_long = left is not None and left <= self.args.long_steps
            loss, extra = train_step(self.step, LONG_CONTEXT if is_long else CONTEXT)
            self.optimizer.step(rate_factor(self.step, self.args.warmup_steps, decay))
            self.step += 1
            # A pause is not training: a step that took over 20 s was stopped by someone.
            spent = time.time() - began
            self.seconds += min(spent, 20.0)
            mean = loss if mean == 0.0 else 0.95 * mean + 0.05 * loss
            if self.step % 25 == 0:
                decay = read_decay(self.out)
                speed = (self.step - mark_step) * STEP_TOKENS / (time.time() - mark)
                mark, mark_step = time.time(), self.step
                self.log(
                    step=self.step,
                    tokens=self.step * STEP_TOKENS,
                    loss=round(mean, 4),
                    rate=round(rate_factor(self.step, self.args.warmup_steps, decay), 4),
                    speed=round(speed),
                    seconds=round(self.seconds),
                    **extra,
                )
            if self.step % self.args.eval_every == 0:
                self.log(step=self.step, **evaluate())
                mark, mark_step = time.time(), self.step
            if time.time() - saved > 300:
                self.save()
                saved = time.time()
                mark, mark_step = time.time(), self.step
        self.save()
        self.log(step=self.step, tokens=self.step * STEP_TOKENS, done=True, **evaluate())


class Data:
    """Tokenizer, training stream and held-out pieces that every run shares."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.tokenizer = Tokenizer.from_file(str(args.tokenizer))
        self.tags = [self.tokenizer.token_to_id(f"<{source}>") for source in SOURCES]
        self.eos = self.tokenizer.token_to_id(EOS)
        train = encode_pieces(self.tokenizer, args.corpus / "train.jsonl")
        self.heldout = encode_pieces(self.tokenizer, args.corpus / "heldout.jsonl")
        self.stream = TokenStream(train, self.tags, self.eos)
        batches = list(heldout_batches(self.heldout, self.tags, self.eos, CONTEXT))
        # One batch of 32 windows a source is enough to follow a run.
        self.quick = [next(b for b in batches if b[0] == s) for s in range(len(SOURCES))]


def train_model(args: argparse.Namespace) -> None:
    """Train the `moe` or `dense` model in `args.out`, resuming from its checkpoint."""
    data = Data(args)
    model = LanguageModel(make_config(args.kind, data.tokenizer.get_vocab_size()))
    initialise(model, model.config.num_hidden_layers, SEED)
    run = Run(args.out, {"model": model}, args)

    def train_step(step: int, context: int) -> tuple[float, dict[str, Any]]:
        tokens = data.stream.batch(step, context)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, balance = model(tokens[:, :-2])
        loss, _ = ChunkedLoss.apply(
            hidden.reshape(-1, hidden.shape[-1]),
            model.embed,
            tokens[:, 1:-1].reshape(-1),
            None,
            0.0,
        )
        (loss + BALANCE_WEIGHT * balance).backward()
        extra: dict[str, Any] = {"balance": round(float(balance.detach()), 3)}
        mlps = [layer.mlp for layer in model.layers]
        if isinstance(mlps[0], Moe):
            peaks = [float(m.counts.max() / m.counts.mean()) for m in mlps]
            extra["peak_load"] = [round(p, 2) for p in peaks]
        return float(loss.detach()), extra

    def evaluate() -> dict[str, Any]:
        losses = quick_losses(model, data.quick)
        row = {f"val_{s}": round(x, 4) for s, x in zip(SOURCES, losses, strict=True)}
        return row | {"val": round(sum(losses) / len(losses), 4)}

    run.loop(train_step, evaluate)


def load_trained(path: Path, kind: str, vocab_size: int) -> LanguageModel:
    """Load the model of a `moe` or `dense` checkpoint, frozen."""
    model = LanguageModel(make_config(kind, vocab_size))
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return model.requires_grad_(False)


def train_mtp(args: argparse.Namespace) -> None:
    """Train the MTP layer on the frozen model of `args.model`.

    Half of the target is the true token t + 2, half is the distribution of the model itself:
    a draft is judged by its agreement with the model.
    """
    data = Data(args)
    model = load_trained(args.model, "moe", data.tokenizer.get_vocab_size())
    # The exported weights are bfloat16; the layer must learn on what it will run on.
    for p in model.parameters():
        p.data = p.data.bfloat16().float()
    mtp = MtpLayer(model.config)
    initialise(mtp, model.config.num_hidden_layers, SEED + 1)
    run = Run(args.out, {"mtp": mtp}, args)

    def draft(tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return states of model and draft at t = 0..S-2, and the balance loss."""
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.no_grad():
                hidden, _ = model(tokens[:, :-1])
                embedded = nnf.embedding(tokens[:, 1:-1], model.embed)
            z, balance = mtp(hidden[:, :-1], embedded, model.cos, model.sin)
        return hidden, z, balance

    def train_step(step: int, context: int) -> tuple[float, dict[str, Any]]:
        # Other rows than the model saw last: a far offset, the same stream.
        tokens = data.stream.batch(step + args.skip_steps, context)
        hidden, z, balance = draft(tokens)
        width = hidden.shape[-1]
        loss, hard = ChunkedLoss.apply(
            z.reshape(-1, width),
            model.embed,
            tokens[:, 2:].reshape(-1),
            hidden[:, 1:].reshape(-1, width),
            0.5,
        )
        (loss + BALANCE_WEIGHT * balance).backward()
        return float(hard), {"mixed": round(float(loss.detach()), 4)}

    @torch.no_grad()
    def evaluate() -> dict[str, Any]:
        agree, nll, count = 0.0, 0.0, 0
        for _, tokens, mask in data.quick:
            hidden, z, _ = draft(tokens)
            keep = mask[:, 1:]
            ours = model.logits(z[:, :-1]).float()[keep]
            theirs = model.logits(hidden[:, 1:-1]).float()[keep]
            agree += float((ours.argmax(-1) == theirs.argmax(-1)).sum())
            goal = tokens[:, 2:-1][keep]
            nll += float(nnf.cross_entropy(ours, goal, reduction="sum"))
            count += int(keep.sum())
        return {"val_mtp": round(nll / count, 4), "agreement": round(agree / count, 4)}

    run.loop(train_step, evaluate)


# --- export ---------------------------------------------------------------------------------


def hf_config(config: ModelConfig, eos: int, num_mtp_layers: int) -> dict[str, Any]:
    """Return `config.json` of the exported model."""
    is_moe = config.num_experts > 0
    out: dict[str, Any] = {
        "architectures": ["Qwen3MoeForCausalLM" if is_moe else "Qwen3ForCausalLM"],
        "model_type": "qwen3_moe" if is_moe else "qwen3",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": eos,
        "pad_token_id": eos,
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if is_moe:
        out |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "moe_intermediate_size": config.moe_intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "output_router_logits": False,
            "router_aux_loss_coef": BALANCE_WEIGHT,
        }
    if num_mtp_layers:
        out["num_nextn_predict_layers"] = num_mtp_layers
    return out


def export(args: argparse.Namespace) -> None:
    """Write a Hugging Face directory, bfloat16, from the checkpoints of a run.

    Only `args.model` is required; with `args.mtp` the MTP layer is stored after the last layer.
    """
    tokenizer = Tokenizer.from_file(str(args.tokenizer))
    eos = tokenizer.token_to_id(EOS)
    model = load_trained(args.model, args.kind, tokenizer.get_vocab_size())
    mtp = None
    if args.mtp is not None:
        mtp = MtpLayer(model.config)
        mtp.load_state_dict(torch.load(args.mtp, weights_only=True)["mtp"])
    out: Path = args.out
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        # numpy has no bfloat16 of its own; both roundings are to nearest, ties to even.
        name: tensor.contiguous().numpy().astype(ml_dtypes.bfloat16)
        for name, tensor in hf_tensors(model, mtp).items()
    }
    partial = out / "model.safetensors.partial"
    save_file(tensors, partial, metadata={"format": "pt"})
    partial.chmod(0o644)
    partial.replace(out / "model.safetensors")
    files = {
        "config.json": hf_config(model.config, eos, 0 if mtp is None else 1),
        "generation_config.json": {
            "eos_token_id": eos,
            "pad_token_id": eos,
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 40,
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": None,
            "eos_token": EOS,
            "pad_token": EOS,
            "add_bos_token": False,
            "additional_special_tokens": list(SPECIAL[1:]),
            "clean_up_tokenization_spaces": False,
            "model_max_length": model.config.max_position_embeddings,
        },
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "tokenizer.json").write_bytes(args.tokenizer.read_bytes())


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("tokenizer", "model", "mtp", "export"):
        sub = commands.add_parser(name)
        sub.add_argument("--tokenizer", type=Path, required=True, help="tokenizer.json")
        if name != "export":
            sub.add_argument("--corpus", type=Path, required=True, help="output of corpus.py")
        if name != "tokenizer":
            sub.add_argument("--out", type=Path, required=True, help="directory to write")
        if name in ("model", "export"):
            sub.add_argument("--kind", choices=("moe", "dense"), default="moe")
        if name in ("mtp", "export"):
            sub.add_argument("--model", type=Path, required=True, help="checkpoint.pt of a model")
        if name == "export":
            sub.add_argument("--mtp", type=Path, help="checkpoint.pt of the MTP layer")
        if name in ("model", "mtp"):
            sub.add_argument("--warmup-steps", type=int, default=WARMUP_STEPS)
            sub.add_argument("--decay-start", type=int, help="first step of the decay phase")
            sub.add_argument("--decay-steps", type=int, default=600)
            sub.add_argument("--long-steps", type=int, default=0, help="last steps at context 512")
            sub.add_argument("--eval-every", type=int, default=200)
        if name == "mtp":
            sub.add_argument("--skip-steps", type=int, default=0, help="rows of the stream to skip")
    args = parser.parse_args()
    torch.set_num_threads(2)
    torch.manual_seed(SEED)
    if args.command == "tokenizer":
        train_tokenizer(args.corpus, args.tokenizer, ModelConfig().vocab_size)
    elif args.command == "model":
        train_model(args)
    elif args.command == "mtp":
        train_mtp(args)
    else:
        export(args)


if __name__ == "__main__":
    main()
