"""Judge the demo model as exported, and write its card.

Owns: held-out losses, routing shares, MTP agreement, stored size, samples, `card.json`, `CARD.md`.
Does not: train. It reads the bfloat16 files that are published and computes as in training: matrix
products in bfloat16, residual stream, norms, router and softmax in float32. Samples come from a
float32 pass.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpus import SOURCES
from model import LanguageModel, ModelConfig, Moe, MtpLayer, hf_tensors, load_hf_tensors
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as nnf
from train import (
    CONTEXT,
    EOS,
    LONG_CONTEXT,
    REPEATS,
    STEP_TOKENS,
    encode_pieces,
    heldout_batches,
    make_config,
)

TEMPERATURE, TOP_K = 0.7, 40
SAMPLE_TOKENS = 120
PROMPTS = (
    "<austen>Emma could not help",
    "<austen>Mr. Darcy, on entering the room,",
    "<sotu>Fellow-Citizens of the Senate and House of Representatives:\n\n",
    "<kjv>And it came to pass in those days, that",
    "<shakespeare>KING.\n",
    "Once upon a time",
    "It is a truth",
    "The people of the United States",
)
GROUP = 32  # weights that share one scale in the stored form


# --- loading --------------------------------------------------------------------------------


def load(path: Path) -> tuple[LanguageModel, MtpLayer | None]:
    """Load a Hugging Face directory that `train.py export` wrote; weights widen to float32."""
    raw = json.loads((path / "config.json").read_text())
    fields = {name: raw[name] for name in ModelConfig.__dataclass_fields__ if name in raw}
    config = ModelConfig(**{"num_experts": 0} | fields)
    model = LanguageModel(config).requires_grad_(False)
    mtp = MtpLayer(config).requires_grad_(False) if "num_nextn_predict_layers" in raw else None
    stored = load_file(path / "model.safetensors")
    tensors = {name: torch.from_numpy(array.astype(np.float32)) for name, array in stored.items()}
    load_hf_tensors(model, mtp, tensors)
    return model, mtp


def quantised(tensor: Tensor, bits: int) -> Tensor:
    """Round to `bits` signed levels, one float16 scale for each GROUP weights of a row."""
    if tensor.ndim < 2:
        return tensor
    groups = tensor.reshape(-1, GROUP)
    top = 2 ** (bits - 1) - 1
    scale = (groups.abs().amax(1, keepdim=True) / top).half().float().clamp_min(1e-8)
    return ((groups / scale).round().clamp(-top - 1, top) * scale).view(tensor.shape)


def stored_bytes(
    model: LanguageModel, mtp: MtpLayer | None, tokenizer_bytes: int
) -> dict[str, int]:
    """Count the bytes of the stored form: experts 4-bit, other matrices 8-bit, norms float16."""
    out = {"experts_4bit": 0, "other_8bit": 0, "norms_f16": 0, "tokenizer_json": tokenizer_bytes}
    for name, tensor in hf_tensors(model, mtp).items():
        if tensor.ndim < 2:
            out["norms_f16"] += 2 * tensor.numel()
        elif ".experts." in name:
            out["experts_4bit"] += tensor.numel() // 2 + 2 * (tensor.numel() // GROUP)
        else:
            out["other_8bit"] += tensor.numel() + 2 * (tensor.numel() // GROUP)
    return out | {"total": sum(out.values())}


# --- measuring ------------------------------------------------------------------------------


class Heldout:
    """Held-out pieces with their sizes in bytes and tokens."""

    def __init__(self, corpus: Path, tokenizer: Tokenizer) -> None:
        self.pieces = encode_pieces(tokenizer, corpus / "heldout.jsonl")
        self.tags = [tokenizer.token_to_id(f"<{source}>") for source in SOURCES]
        self.eos = tokenizer.token_to_id(EOS)
        self.text_bytes = [0] * len(SOURCES)
        for line in (corpus / "heldout.jsonl").read_text().splitlines():
            row = json.loads(line)
            self.text_bytes[SOURCES.index(row["source"])] += len(row["text"].encode())

    def batches(self, context: int) -> list[tuple[int, Tensor, Tensor]]:
        """Return windows of `context` tokens by source."""
        return list(heldout_batches(self.pieces, self.tags, self.eos, context))


def by_source(sums: list[float], counts: list[int], text_bytes: list[int]) -> dict[str, Any]:
    """Turn summed nats into nats a token and bits a byte, by source and as their plain mean."""
    out: dict[str, Any] = {}
    for source, total, count, size in zip(SOURCES, sums, counts, text_bytes, strict=True):
        nats, bits = total / count, total / math.log(2) / size
        out[source] = {"nats_per_token": round(nats, 4), "bits_per_byte": round(bits, 4)}
    for key in ("nats_per_token", "bits_per_byte"):
        mean = sum(out[s][key] for s in SOURCES) / len(SOURCES)
        out.setdefault("mean", {})[key] = round(mean, 4)
    return out


@torch.no_grad()
def judge(
    model: LanguageModel, mtp: MtpLayer | None, heldout: Heldout, context: int
) -> dict[str, Any]:
    """Walk the held-out windows once; every window starts without what came before it.

    Returns:
        `loss` by source; with an MTP layer also `mtp`, see `mtp_table`; for a MoE model also
        `counts`, expert choices [L][sources][E] as an array.
    """
    config = model.config
    sums, totals = [0.0] * len(SOURCES), [0] * len(SOURCES)
    drafts = [dict.fromkeys(("nll", "same", "min", "n"), 0.0) for _ in SOURCES]
    counts = np.zeros((config.num_hidden_layers, len(SOURCES), config.num_experts))
    for source, tokens, mask in heldout.batches(context):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden, _ = model(tokens[:, :-2])
            logits = model.logits(hidden)
        for index, layer in enumerate(model.layers):
            if isinstance(layer.mlp, Moe):
                ids = layer.mlp.ids[mask.reshape(-1)].reshape(-1)
                counts[index, source] += np.bincount(ids.numpy(), minlength=config.num_experts)
        nll = nnf.cross_entropy(logits[mask].float(), tokens[:, 1:-1][mask], reduction="sum")
        sums[source] += float(nll)
        totals[source] += int(mask.sum())
        if mtp is None:
            continue
        with torch.autocast("cpu", dtype=torch.bfloat16):
            embedded = nnf.embedding(tokens[:, 1:-1], model.embed)
            z, _ = mtp(hidden, embedded, model.cos, model.sin)
        # The draft at t stands against the model at t + 1, which has seen the token between.
        keep = mask[:, 1:]
        draft = model.logits(z[:, :-1][keep]).float()
        target = logits[:, 1:][keep].float()
        row = drafts[source]
        row["nll"] += float(nnf.cross_entropy(draft, tokens[:, 2:-1][keep], reduction="sum"))
        row["same"] += float((draft.argmax(-1) == target.argmax(-1)).sum())
        row["min"] += float(torch.minimum(draft.softmax(-1), target.softmax(-1)).sum())
        row["n"] += float(keep.sum())
    out: dict[str, Any] = {"loss": by_source(sums, totals, heldout.text_bytes)}
    if mtp is not None:
        out["mtp"] = mtp_table(drafts)
    if config.num_experts:
        out["counts"] = counts
    return out


def mtp_table(drafts: list[dict[str, float]]) -> dict[str, Any]:
    """Turn the sums of `judge` into rates.

    Returns:
        by source: loss against the true token t + 2 in nats, and `agreement`, the share of
        positions where the draft's best token is the one the model itself finds best once it sees
        t + 1; `expected_acceptance` is the mean of sum(min(p, q)) at temperature 1.
    """
    names = {"nats_per_token": "nll", "agreement": "same", "expected_acceptance": "min"}
    out: dict[str, Any] = {
        source: {name: round(row[key] / row["n"], 4) for name, key in names.items()}
        for source, row in zip(SOURCES, drafts, strict=True)
    }
    out["mean"] = {k: round(sum(out[s][k] for s in SOURCES) / len(SOURCES), 4) for k in names}
    return out


def unigram_losses(corpus: Path, tokenizer: Tokenizer, heldout: Heldout) -> dict[str, Any]:
    """Return the loss of token frequencies alone, counted on the training mix, plus one each."""
    counts = np.ones(tokenizer.get_vocab_size())
    for source, ids in encode_pieces(tokenizer, corpus / "train.jsonl"):
        repeat = REPEATS[SOURCES[source]]
        np.add.at(counts, ids, repeat)
        counts[heldout.eos] += repeat
    nll = torch.from_numpy(-np.log(counts / counts.sum()))
    sums, totals = [0.0] * len(SOURCES), [0] * len(SOURCES)
    for source, tokens, mask in heldout.batches(CONTEXT):
        sums[source] += float(nll[tokens[:, 1:-1][mask]].sum())
        totals[source] += int(mask.sum())
    return by_source(sums, totals, heldout.text_bytes)


def routing_shares(counts: NDArray[np.float64]) -> list[dict[str, Any]]:
    """Describe which expert the tokens of each source go to, the sources weighted equally.

    Args:
        counts: [L, sources, E], choices counted by `judge`.

    Returns:
        a dictionary for each layer: `share[source][expert]`, the part of an expert's traffic that
        comes from the source; `load[expert]` against the mean; `max_over_mean`, `min_over_mean`;
        `top_source_share`, mean over experts of their largest share (0.25 is chance); and
        `hottest[source]`, the load of the busiest expert within one source against the mean.
    """
    num_experts = counts.shape[-1]
    out = []
    for layer_counts in counts:
        within = layer_counts / layer_counts.sum(1, keepdims=True)
        load = within.mean(0) * num_experts
        share = within / np.maximum(within.sum(0, keepdims=True), 1e-12)
        hottest = within.max(1) * num_experts
        out.append(
            {
                "share": {s: [round(float(x), 3) for x in share[i]] for i, s in enumerate(SOURCES)},
                "load": [round(float(x), 3) for x in load],
                "max_over_mean": round(float(load.max()), 2),
                "min_over_mean": round(float(load.min()), 2),
                "top_source_share": round(float(share.max(0).mean()), 3),
                "hottest": {s: round(float(hottest[i]), 2) for i, s in enumerate(SOURCES)},
            }
        )
    return out


@torch.no_grad()
def sample(model: LanguageModel, tokenizer: Tokenizer, prompts: tuple[str, ...]) -> list[str]:
    """Continue each prompt by up to SAMPLE_TOKENS tokens; prompt n is drawn with seed n.

    Returns:
        the continuations, without their prompts.
    """
    eos = tokenizer.token_to_id(EOS)
    draws = [torch.Generator().manual_seed(seed) for seed in range(len(prompts))]
    starts = [tokenizer.encode(prompt).ids for prompt in prompts]
    rows = [list(ids) for ids in starts]
    alive = set(range(len(rows)))
    for _ in range(SAMPLE_TOKENS):
        width = max(len(rows[i]) for i in alive)
        order = sorted(alive)
        # Padding on the right is invisible to causal attention.
        tokens = torch.tensor([rows[i] + [eos] * (width - len(rows[i])) for i in order])
        hidden, _ = model(tokens)
        for place, i in enumerate(order):
            logits = model.logits(hidden[place, len(rows[i]) - 1])
            top, index = (logits / TEMPERATURE).topk(TOP_K)
            pick = int(index[torch.multinomial(top.softmax(-1), 1, generator=draws[i])])
            if pick == eos:
                alive.discard(i)
            else:
                rows[i].append(pick)
        if not alive:
            break
    return [
        tokenizer.decode(row[len(start) :], skip_special_tokens=False)
        for row, start in zip(rows, starts, strict=True)
    ]


def compare_runs(moe: Path, dense: Path) -> dict[str, Any]:
    """Compare two runs at the last step both logged a held-out loss while their rate was stable.

    Returns:
        `step`, `tokens`, and the held-out loss of `moe` and `dense` by source in nats a token, as
        logged in training: bfloat16, the first 32 windows of each source.
    """
    start = int((moe / "decay").read_text().split()[0])
    found: list[dict[int, dict[str, float]]] = []
    for run in (moe, dense):
        rows = (json.loads(line) for line in (run / "log.jsonl").read_text().splitlines())
        found.append({row["step"]: row for row in rows if "val" in row and row["step"] <= start})
    step = max(found[0].keys() & found[1].keys())
    out: dict[str, Any] = {"step": step, "tokens": step * STEP_TOKENS}
    for name, rows_by_step in zip(("moe", "dense"), found, strict=True):
        row = rows_by_step[step]
        out[name] = {s: {"nats_per_token": row[f"val_{s}"]} for s in SOURCES}
        out[name]["mean"] = {"nats_per_token": row["val"]}
    return out


def read_run(run: Path) -> dict[str, Any]:
    """Return steps, tokens, time and schedule of a finished run from its log."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    start, length = (int(x) for x in (run / "decay").read_text().split()[:2])
    done = next(row for row in reversed(rows) if row.get("done"))
    seconds = max(row.get("seconds", 0) for row in rows)
    curve = [[row["step"], row["val"]] for row in rows if "val" in row]
    return {
        "steps": done["step"],
        "tokens": done["step"] * STEP_TOKENS,
        "decay_start": start,
        "decay_steps": length,
        "minutes": round(seconds / 60, 1),
        "curve": curve,
    }


# --- card -----------------------------------------------------------------------------------


def loss_table(results: dict[str, dict[str, Any]], key: str) -> str:
    """Return a markdown table: a row for each result, a column for each source."""
    lines = ["| | " + " | ".join((*SOURCES, "mean")) + " |", "|---" * (len(SOURCES) + 2) + "|"]
    for name, result in results.items():
        values = (f"{result[s][key]:.3f}" for s in (*SOURCES, "mean"))
        lines.append(f"| {name} | " + " | ".join(values) + " |")
    return "\n".join(lines)


def routing_table(routing: list[dict[str, Any]]) -> str:
    """Return a markdown table of how the experts of each layer divide the sources."""
    columns = ("layer", "busiest / mean", "idlest / mean", "mean top-source share")
    columns += ("most devoted expert", "hottest expert within " + ", ".join(SOURCES))
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for index, row in enumerate(routing):
        best = max(
            ((row["share"][s][e], s, e) for s in SOURCES for e in range(len(row["load"]))),
        )
        hottest = ", ".join(f"{row['hottest'][s]:.1f}" for s in SOURCES)
        lines.append(
            f"| {index} | {row['max_over_mean']:.2f} | {row['min_over_mean']:.2f} "
            f"| {row['top_source_share']:.2f} | {best[2]}: {best[0]:.0%} {best[1]} | {hottest} |"
        )
    return "\n".join(lines)


def write_card(card: dict[str, Any], template: Path, path: Path) -> None:
    """Fill the `{{name}}` marks of the template with the numbers and tables of the card."""
    named = {
        "MoE, bfloat16": card["loss"]["moe"],
        "MoE, context 512": card["loss"]["moe_context_512"],
        "MoE, stored form (experts 4-bit, rest 8-bit)": card["loss"]["moe_stored_form"],
        "unigram": card["loss"]["unigram"],
    }
    mtp = ["| | " + " | ".join((*SOURCES, "mean")) + " |", "|---" * (len(SOURCES) + 2) + "|"]
    for key in ("nats_per_token", "agreement", "expected_acceptance"):
        cells = (f"{card['mtp'][s][key]:.3f}" for s in (*SOURCES, "mean"))
        mtp.append(f"| {key} | " + " | ".join(cells) + " |")
    samples = "\n\n".join(
        f"`{s['prompt']!r}`\n\n" + "\n".join("> " + x for x in s["text"].strip().split("\n"))
        for s in card["samples"]
    )
    text = template.read_text()
    marks = {
        "nats": loss_table(named, "nats_per_token"),
        "bits": loss_table(named, "bits_per_byte"),
        "mtp": "\n".join(mtp),
        "routing": routing_table(card["routing"]),
        "samples": samples,
    }
    equal = card["equal_steps"]
    marks["equal"] = loss_table(
        {"MoE": equal["moe"], "dense twin": equal["dense"]}, "nats_per_token"
    )
    marks |= {"equal.step": f"{equal['step']:,}", "equal.tokens": f"{equal['tokens']:,}"}
    for run in ("moe_run", "mtp_run"):
        marks |= {f"{run}.{k}": f"{v:,}" for k, v in card[run].items() if k != "curve"}
    marks |= {f"stored.{k}": f"{v:,}" for k, v in card["stored_bytes"].items()}
    marks |= {f"parameters.{k}": f"{v:,}" for k, v in card["parameters"].items()}
    for name, value in marks.items():
        text = text.replace("{{" + name + "}}", value)
    path.write_text(text)


def count_parameters(model: LanguageModel, mtp: MtpLayer | None) -> dict[str, int]:
    """Count parameters: all, those one token uses (head once, embedding row not), the MTP layer."""
    config = model.config
    total = sum(p.numel() for p in model.parameters())
    expert = 3 * config.hidden_size * config.moe_intermediate_size
    idle = config.num_experts - config.num_experts_per_tok if config.num_experts else 0
    active = total - config.num_hidden_layers * idle * expert
    return {
        "total": total,
        "active": active,
        "mtp": sum(p.numel() for p in mtp.parameters()) if mtp else 0,
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="output of corpus.py")
    parser.add_argument("--moe", type=Path, required=True, help="exported MoE model")
    parser.add_argument(
        "--runs", type=Path, required=True, help="directory of moe, mtp, dense runs"
    )
    parser.add_argument("--out", type=Path, required=True, help="directory of card.json, CARD.md")
    args = parser.parse_args()
    torch.set_num_threads(2)
    tokenizer = Tokenizer.from_file(str(args.moe / "tokenizer.json"))
    heldout = Heldout(args.corpus, tokenizer)
    model, mtp = load(args.moe)
    assert mtp is not None, f"{args.moe} has no MTP layer"
    dense = LanguageModel(make_config("dense", model.config.vocab_size))
    judged = judge(model, mtp, heldout, CONTEXT)
    texts = sample(model, tokenizer, PROMPTS)
    card: dict[str, Any] = {
        "config": model.config.to_dict(),
        "parameters": count_parameters(model, mtp)
        | {"dense_total": count_parameters(dense, None)["total"]},
        "stored_bytes": stored_bytes(model, mtp, (args.moe / "tokenizer.json").stat().st_size),
        "corpus": json.loads((args.corpus / "stats.json").read_text()),
        "moe_run": read_run(args.runs / "moe"),
        "mtp_run": read_run(args.runs / "mtp"),
        "loss": {
            "moe": judged["loss"],
            "moe_context_512": judge(model, None, heldout, LONG_CONTEXT)["loss"],
            "unigram": unigram_losses(args.corpus, tokenizer, heldout),
        },
        "mtp": judged["mtp"],
        "routing": routing_shares(judged["counts"]),
        "samples": [
            {"prompt": prompt, "seed": seed, "text": text}
            for seed, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
        ],
    }
    names = hf_tensors(model, mtp)
    stored = {n: quantised(t, 4 if ".experts." in n else 8) for n, t in names.items()}
    load_hf_tensors(model, mtp, stored)
    judged = judge(model, mtp, heldout, CONTEXT)
    card["loss"]["moe_stored_form"], card["mtp_stored_form"] = judged["loss"], judged["mtp"]
    card["equal_steps"] = compare_runs(args.runs / "moe", args.runs / "dense")
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "card.json").write_text(json.dumps(card, indent=1) + "\n")
    write_card(card, Path(__file__).with_name("card_template.md"), args.out / "CARD.md")


if __name__ == "__main__":
    main()
