"""What each architecture's tensors are called in a Hugging Face checkpoint.

A model file speaks of roles (`q_proj` of layer 3); a name table turns a role into the tensor's
name. Our container and the GGUF reader keep these names, so this is the only such table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class ExpertNames:
    """How the matrices of one expert are called.

    `pattern` holds `{layer}`, `{expert}` and `{proj}`; `gate`, `up` and `down` are the values of
    `{proj}`.
    """

    pattern: str
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def name(self, layer: int, expert: int, proj: str) -> str:
        """The tensor's full name; `proj` is `gate`, `up` or `down`."""
        projection = {"gate": self.gate, "up": self.up, "down": self.down}[proj]
        return self.pattern.format(layer=layer, expert=expert, proj=projection)


@dataclass(frozen=True)
class NameTable:
    """Names by role.

    Attributes:
        whole: roles that exist once.
        layer: roles of every layer, each name following `model.layers.{layer}.`.
        experts: the routed experts, or None in a dense model.
        ignored: patterns (as `fnmatch`) of tensors that the main model leaves unread.
    """

    layer: Mapping[str, str]
    experts: ExpertNames | None = None
    whole: Mapping[str, str] = field(
        default_factory=lambda: {
            "embed_tokens": "model.embed_tokens.weight",
            "norm": "model.norm.weight",
            "lm_head": "lm_head.weight",
        }
    )
    prefix: str = "model.layers.{layer}."
    # Old files store the rope frequencies, which follow from the config; `mtp.` holds extra
    # prediction layers.
    ignored: tuple[str, ...] = ("model.layers.*.self_attn.rotary_emb.inv_freq", "mtp.*")

    def name(self, role: str, layer: int | None = None) -> str:
        """The name of the tensor that plays `role`, in `layer` if the role is a layer's."""
        if layer is None:
            return self.whole[role]
        return self.prefix.format(layer=layer) + self.layer[role]


_ATTENTION = {
    "input_norm": "input_layernorm.weight",
    "q_proj": "self_attn.q_proj.weight",
    "k_proj": "self_attn.k_proj.weight",
    "v_proj": "self_attn.v_proj.weight",
    "o_proj": "self_attn.o_proj.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
}
_QK_NORM = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
_DENSE = {
    "gate_proj": "mlp.gate_proj.weight",
    "up_proj": "mlp.up_proj.weight",
    "down_proj": "mlp.down_proj.weight",
}
_ROUTER = {"router": "mlp.gate.weight"}
_EXPERTS = ExpertNames("model.layers.{layer}.mlp.experts.{expert}.{proj}.weight")

LLAMA = NameTable({**_ATTENTION, **_DENSE})
QWEN3 = NameTable({**_ATTENTION, **_QK_NORM, **_DENSE})
QWEN3_MOE = NameTable({**_ATTENTION, **_QK_NORM, **_DENSE, **_ROUTER}, _EXPERTS)
OLMOE = NameTable({**_ATTENTION, **_QK_NORM, **_ROUTER}, _EXPERTS)
MIXTRAL = NameTable(
    {**_ATTENTION, "router": "block_sparse_moe.gate.weight"},
    ExpertNames(
        "model.layers.{layer}.block_sparse_moe.experts.{expert}.{proj}.weight",
        gate="w1",
        up="w3",
        down="w2",
    ),
)
