"""Every arithmetic step of a model, as functions over NumPy arrays.

One module per family of ops; each op is one call into the native kernels and has a plain NumPy
version of the same name and signature in `reference.py`, which is its specification and equals it
to the bit. An op knows nothing of models, checkpoints or where an expert's bytes come from."""

from headrace._core import KVPool, LatentPool, Matrix
from headrace.ops.attention import (
    StepRowsLike,
    kv_write,
    latent_attention,
    latent_write,
    paged_attention,
    rotary_attention,
)
from headrace.ops.elementwise import add, clamp
from headrace.ops.embedding import embedding
from headrace.ops.ffn import moe_activations, moe_ffn, routed_ffn, swiglu_ffn
from headrace.ops.linear import linear, linear_add, linears, norm_linears
from headrace.ops.machine import (
    available_isas,
    can_interleave,
    isa,
    lock_memory,
    memory_nodes,
    num_threads,
    pool_bytes,
    pool_trim,
    set_isa,
    set_threads,
    trim_memory,
)
from headrace.ops.norm import rms_norm
from headrace.ops.rope import rope, rope_angles
from headrace.ops.router import router_topk
from headrace.ops.sampling import apply_penalties, log_softmax, sample

__all__ = [
    "KVPool",
    "LatentPool",
    "Matrix",
    "StepRowsLike",
    "add",
    "apply_penalties",
    "available_isas",
    "can_interleave",
    "clamp",
    "embedding",
    "isa",
    "kv_write",
    "latent_attention",
    "latent_write",
    "linear",
    "linear_add",
    "linears",
    "lock_memory",
    "log_softmax",
    "memory_nodes",
    "moe_activations",
    "moe_ffn",
    "norm_linears",
    "num_threads",
    "paged_attention",
    "pool_bytes",
    "pool_trim",
    "rms_norm",
    "rope",
    "rope_angles",
    "rotary_attention",
    "routed_ffn",
    "router_topk",
    "sample",
    "set_isa",
    "set_threads",
    "swiglu_ffn",
    "trim_memory",
]
