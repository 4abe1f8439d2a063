"""Write the tiny checkpoints of tests/fixtures and what transformers computes from them.

Needs the extra `oracle`. Each fixture is a random model of one architecture: bf16 weights and
config as a Hugging Face checkpoint, and for each case the float32 logits of one sequence and a
greedy continuation. Weights and configs come out the same byte for byte; logits may differ in the
last bits from machine to machine.

    python scripts/make_fixtures.py            write tests/fixtures anew
    python scripts/make_fixtures.py --check    make them elsewhere and compare with those present
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

FIXTURES = Path(__file__).parent.parent / "tests" / "fixtures"
PROMPT_TOKENS = 40
GREEDY_TOKENS = 24
# Below these gaps another order of summation could choose another token or expert.
LOGIT_GAP = 2e-4
ROUTER_GAP = 2e-5


@dataclass(frozen=True)
class Fixture:
    """One tiny checkpoint and the cases computed from it.

    Attributes:
        config: the config as releases of this family state it, with old names.
        cases: what each case changes in the config; `default` changes nothing.
        seed: of the weights; chosen so that no choice is a near tie.
    """

    config: dict[str, Any]
    cases: dict[str, dict[str, Any]] = field(default_factory=dict)
    seed: int = 0


# Every size differs from the others of its model where the architecture lets it, so that a swapped
# pair cannot pass; none is a multiple of the vector width where a tail is worth testing.
COMMON = {
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "num_attention_heads": 4,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "vocab_size": 120,
}
FIXTURES_BY_NAME = {
    "llama": Fixture(
        {
            **COMMON,
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "attention_bias": False,
            "mlp_bias": False,
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 2,
            "num_key_value_heads": 1,
            "max_position_embeddings": 256,
            "pretraining_tp": 1,
            "rms_norm_eps": 1e-05,
            "rope_theta": 500000.0,
            "rope_scaling": {
                "factor": 8.0,
                "high_freq_factor": 4.0,
                "low_freq_factor": 1.0,
                "original_max_position_embeddings": 32,
                "rope_type": "llama3",
            },
            "tie_word_embeddings": True,
        },
        {"linear": {"rope_scaling": {"type": "linear", "factor": 2.0}}},
    ),
    "qwen3": Fixture(
        {
            **COMMON,
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "attention_bias": False,
            "head_dim": 20,
            "hidden_size": 40,
            "intermediate_size": 72,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "max_window_layers": 2,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        {"window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}},
    ),
    "qwen3_moe": Fixture(
        {
            **COMMON,
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "attention_bias": False,
            "decoder_sparse_step": 1,
            "head_dim": 16,
            "hidden_size": 48,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "max_window_layers": 3,
            "mlp_only_layers": [1],
            "moe_intermediate_size": 32,
            "norm_topk_prob": True,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "num_hidden_layers": 3,
            "num_key_value_heads": 2,
            "output_router_logits": False,
            "rms_norm_eps": 1e-06,
            "rope_scaling": None,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.001,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
        },
        {
            "yarn": {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            "unnormed": {"norm_topk_prob": False},
            "window": {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 0},
        },
    ),
    "olmoe": Fixture(
        {
            **COMMON,
            "architectures": ["OlmoeForCausalLM"],
            "model_type": "olmoe",
            "attention_bias": False,
            "clip_qkv": None,
            "hidden_size": 48,
            "intermediate_size": 24,
            "max_position_embeddings": 128,
            "norm_topk_prob": False,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 4,
            "output_router_logits": False,
            "pad_token_id": 1,
            "rms_norm_eps": 1e-05,
            "rope_scaling": None,
            "rope_theta": 10000.0,
            "router_aux_loss_coef": 0.01,
            "tie_word_embeddings": False,
        },
        {"clip": {"clip_qkv": 0.5}},
    ),
    "mixtral": Fixture(
        {
            **COMMON,
            "architectures": ["MixtralForCausalLM"],
            "model_type": "mixtral",
            "hidden_size": 32,
            "intermediate_size": 40,
            "max_position_embeddings": 128,
            "num_experts_per_tok": 2,
            "num_hidden_layers": 2,
            "num_key_value_heads": 2,
            "num_local_experts": 4,
            "output_router_logits": False,
            "rms_norm_eps": 1e-05,
            "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02,
            "sliding_window": None,
            "tie_word_embeddings": False,
        },
        {"window": {"sliding_window": 7}},
    ),
}


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Give every parameter values whose absence or confusion would show.

    The legacy generator of NumPy is used since its stream is frozen.
    """
    generator = np.random.RandomState(seed)
    for name, parameter in sorted(model.named_parameters()):
        noise = torch.from_numpy(generator.standard_normal(tuple(parameter.shape)))
        with torch.no_grad():
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.1 * noise)


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a config as releases do: sorted keys, two spaces, a line end."""
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def write_checkpoint(name: str, fixture: Fixture, folder: Path) -> None:
    """Write the weights, and the config in both generations of names."""
    torch.manual_seed(0)
    # A deep copy: the library normalises nested objects in place.
    config = transformers.AutoConfig.for_model(**copy.deepcopy(fixture.config))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    randomize(model, fixture.seed)
    shards = "150KB" if name == "qwen3_moe" else "1GB"
    model.save_pretrained(folder, max_shard_size=shards)
    (folder / "config.json").rename(folder / "config.new-names.json")
    write_json(folder / "config.json", fixture.config)
    (folder / "generation_config.json").unlink(missing_ok=True)
    for path in folder.iterdir():
        path.chmod(0o644)


def load_oracle(folder: Path, changes: dict[str, Any]) -> torch.nn.Module:
    """Load a fixture with transformers, computing in float32."""
    content = {**json.loads((folder / "config.json").read_text()), **copy.deepcopy(changes)}
    content["rope_parameters"] = {
        "rope_theta": content.pop("rope_theta"),
        "rope_type": "default",
        **(content.pop("rope_scaling", None) or {}),
    }
    if "type" in content["rope_parameters"]:
        content["rope_parameters"]["rope_type"] = content["rope_parameters"].pop("type")
    config = transformers.AutoConfig.for_model(**content)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model.eval()


@torch.no_grad()
def compute(model: torch.nn.Module, seed: int) -> dict[str, np.ndarray]:
    """The logits of one sequence, and what follows it greedily.

    Raises:
        SystemExit: a choice is too close to a tie to be compared between implementations.
    """
    vocab_size = model.config.vocab_size
    ids = np.random.RandomState(seed + 1).randint(3, vocab_size, PROMPT_TOKENS).tolist()
    logits = model(torch.tensor([ids])).logits[0].float().numpy()
    greedy: list[int] = []
    for _ in range(GREEDY_TOKENS):
        scores = model(torch.tensor([ids + greedy])).logits[0, -1].float().numpy()
        second, first = np.sort(scores)[-2:]
        if first - second < LOGIT_GAP:
            raise SystemExit(
                f"near tie of {first - second:.1e} between tokens: choose another seed"
            )
        greedy.append(int(scores.argmax()))
    check_routing(model, ids + greedy)
    return {
        "ids": np.array(ids, np.int32),
        "logits": logits.astype(np.float32),
        "greedy": np.array(greedy, np.int32),
    }


def check_routing(model: torch.nn.Module, ids: list[int]) -> None:
    """Refuse a fixture in which the last expert chosen is nearly tied with the next."""
    top_k = getattr(model.config, "num_experts_per_tok", None)
    if top_k is None:
        return
    logits = model(torch.tensor([ids]), output_router_logits=True).router_logits
    for scores in logits:
        ordered = scores.float().softmax(-1).sort(-1, descending=True).values
        gap = float((ordered[..., top_k - 1] - ordered[..., top_k]).min())
        if gap < ROUTER_GAP:
            raise SystemExit(f"near tie of {gap:.1e} between experts: choose another seed")


def make(name: str, root: Path) -> None:
    """Write one fixture with all its cases."""
    fixture = FIXTURES_BY_NAME[name]
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(name, fixture, folder)
    for case, changes in {"default": {}, **fixture.cases}.items():
        expected = compute(load_oracle(folder, changes), fixture.seed)
        np.savez(folder / f"expected.{case}.npz", **expected)
        if changes:
            write_json(folder / f"config.{case}.json", {**fixture.config, **changes})


def read_plain(path: Path) -> object:
    """A file's content, less the version of the library that wrote it."""
    if path.suffix != ".json":
        return path.read_bytes()
    return {**json.loads(path.read_text()), "transformers_version": None}


def compare(made: Path, present: Path) -> list[str]:
    """What differs between two fixture folders, in words."""
    differences = []
    for path in sorted(made.rglob("*.*")):
        other = present / path.relative_to(made)
        if not other.exists():
            differences.append(f"missing: {other}")
        elif path.suffix == ".npz":
            with np.load(path) as new, np.load(other) as old:
                for key in new.files:
                    if new[key].dtype != np.float32 and not np.array_equal(new[key], old[key]):
                        differences.append(f"{other}: `{key}` differs")
                    elif np.abs(new[key] - old[key]).max() > 1e-5:
                        differences.append(f"{other}: `{key}` differs by more than 1e-5")
        elif read_plain(path) != read_plain(other):
            differences.append(f"differs: {other}")
    return differences


def main() -> int:
    """Run as a script."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    check = parser.parse_args().check
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) if check else FIXTURES
        for name in FIXTURES_BY_NAME:
            make(name, root)
        differences = compare(root, FIXTURES) if check else []
    for line in differences:
        print(line, file=sys.stderr)
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
