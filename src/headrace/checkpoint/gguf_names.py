"""What each architecture is called in a GGUF file, and what its tensors are called there.

One table for both directions: the reader finds Hugging Face names with it, the writer GGUF names.
The routed experts of a layer are merged there into one tensor [E, N, K] for each of their three
matrices.

Source:
    llama.cpp, `gguf-py/gguf/constants.py` and `tensor_mapping.py`; which models have their q and k
    rewritten for rope over neighbouring dimensions: `llama_model_rope_type`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from headrace.arrays import Int64


@dataclass(frozen=True)
class GgufArchitecture:
    """One architecture in the words of GGUF.

    Attributes:
        name: `general.architecture`, and the prefix of the model's own metadata.
        layer: names of a layer's dense tensors, Hugging Face -> GGUF, each without its prefix.
        has_paired_rope: q and k are stored for rope over dimensions 2i and 2i + 1 of a head, not i
            and i + Dh / 2.
    """

    name: str
    layer: Mapping[str, str]
    has_paired_rope: bool = False

    @property
    def has_experts(self) -> bool:
        """Whether layers are mixtures, with a router each."""
        return "ffn_gate_inp.weight" in self.layer.values()

    def gguf_name(self, name: str) -> str | None:
        """The GGUF name of a dense tensor, or None if the architecture has none of that name."""
        if name in _WHOLE:
            return _WHOLE[name]
        number, _, rest = name.removeprefix(_LAYER_PREFIX).partition(".")
        if not name.startswith(_LAYER_PREFIX) or rest not in self.layer:
            return None
        return f"blk.{number}.{self.layer[rest]}"

    def hugging_face_name(self, name: str) -> str:
        """The Hugging Face name of a dense tensor; an unknown one keeps its name."""
        parts = name.split(".", 2)
        if parts[0] == "blk" and len(parts) == 3:
            found = {gguf: own for own, gguf in self.layer.items()}.get(parts[2])
            return name if found is None else f"{_LAYER_PREFIX}{parts[1]}.{found}"
        return {gguf: own for own, gguf in _WHOLE.items()}.get(name, name)


EXPERT_ROLES: Mapping[str, str] = {
    "gate": "ffn_gate_exps.weight",
    "up": "ffn_up_exps.weight",
    "down": "ffn_down_exps.weight",
}
"""A layer's merged experts by role, each name following `blk.{layer}.`."""
ROPE_FACTORS = "rope_freqs.weight"
"""By what each rope frequency is divided, where that differs from dimension to dimension."""

_LAYER_PREFIX = "model.layers."
_WHOLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_ATTENTION = {
    "input_layernorm.weight": "attn_norm.weight",
    "self_attn.q_proj.weight": "attn_q.weight",
    "self_attn.k_proj.weight": "attn_k.weight",
    "self_attn.v_proj.weight": "attn_v.weight",
    "self_attn.o_proj.weight": "attn_output.weight",
    "post_attention_layernorm.weight": "ffn_norm.weight",
}
_QK_NORM = {
    "self_attn.q_norm.weight": "attn_q_norm.weight",
    "self_attn.k_norm.weight": "attn_k_norm.weight",
}
_DENSE = {
    "mlp.gate_proj.weight": "ffn_gate.weight",
    "mlp.up_proj.weight": "ffn_up.weight",
    "mlp.down_proj.weight": "ffn_down.weight",
}
_ROUTER = {"mlp.gate.weight": "ffn_gate_inp.weight"}

ARCHITECTURES: Mapping[str, GgufArchitecture] = {
    "llama": GgufArchitecture("llama", {**_ATTENTION, **_DENSE}, has_paired_rope=True),
    "mixtral": GgufArchitecture(
        "llama",
        {**_ATTENTION, "block_sparse_moe.gate.weight": "ffn_gate_inp.weight"},
        has_paired_rope=True,
    ),
    "olmoe": GgufArchitecture("olmoe", {**_ATTENTION, **_QK_NORM, **_ROUTER}),
    "qwen3": GgufArchitecture("qwen3", {**_ATTENTION, **_QK_NORM, **_DENSE}),
    "qwen3_moe": GgufArchitecture("qwen3moe", {**_ATTENTION, **_QK_NORM, **_ROUTER}),
}
"""By `model_type`."""


def paired_rows(rows: int, num_heads: int) -> Int64:
    """Where each row of a q or k matrix stands in a file with paired rope: [rows] int64.

    Within a head, row i of the first half and row i of the second half are rows 2i and 2i + 1
    there. Row r in the order of Hugging Face is row `paired_rows(...)[r]` of the file.
    """
    return np.arange(rows).reshape(num_heads, -1, 2).swapaxes(1, 2).reshape(-1)
