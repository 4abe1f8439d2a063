"""The random model: which weights make routing behave as it does in trained models.

Trained routers favour some experts, and a token's experts resemble its neighbour's. Plain random
weights do neither. Three devices make both, without touching the engine:

- *A constant part of the hidden state.* The first CONSTANT_WIDTH entries of every embedding row are
  one constant. Nothing later writes to them (those rows of `o_proj` and of every expert's down
  matrix are zero), so every router sees them. A router row holds there the expert's popularity,
  -skew * ln(rank) with ranks shuffled in each layer, and noise elsewhere. A skew of 0 makes all
  experts equally popular: the worst case of a cache.
- *Local attention.* Queries and keys have a part that is the same for all tokens; under rope its
  score depends on the distance alone and falls off with it. So attention adds a moving average of
  the last tokens, which neighbours share.
- *A blind head.* The head's columns over the constant entries are zero, or the same token would
  always win. The end token's row is zero: greedy decoding never chooses it.

Weights have zero mean and are scaled so that each layer adds a fixed share of variance.

Measured on qwen3-30b-a3b cut to 4 layers, 128 random printable bytes and 64 greedy tokens: the most
popular tenth of a layer's experts takes 39 to 40 % of the routed tokens (10 % if uniform), and 30
to 32 % of a token's experts are its predecessor's too (6 % if uniform; 40 % is reported for OLMoE
with 8 of 64); all 64 tokens differ. Refuted: windows of 4 to 32 tokens (attention keeps to one or
two tokens; overlap 23 %), and equal shares of context in all layers (28 %).
"""

import numpy as np

from headrace.arrays import Bytes, Float32, UInt16
from headrace.checkpoint.records import RecordLayout
from headrace.synth.bits import BF16_STD, BitSource, generator
from headrace.synth.shapes import SynthShape

CONSTANT_WIDTH = 64
CONSTANT_SHARE = 0.25
"""Power of the constant entries, relative to that of all others in the embedding."""
DEFAULT_SKEW = 0.6
"""Exponent of Zipf's law for the popularity of experts, before the noise."""
ROUTER_NOISE = 1.5
"""Standard deviation of the part of a router's score that depends on the token."""
LOCAL_SHARE = 0.5
"""Share of a query's and a key's power that depends on the position alone."""
WINDOW_TOKENS = (32, 64, 128, 256)
"""Over which distances that part falls off; key-value heads take turns."""
CONTEXT_POWER = 8.0
"""Variance that all attention layers together add to a state."""
FIRST_CONTEXT_SHARE = 0.5
"""Part of it that the first layer adds: else the first routers would see single tokens only."""
EXPERT_POWER = 1.0
"""Variance that all mixtures together add to a state."""
ATTENTION_SHRINK = 0.25
"""Variance of attention's average over values of variance 1."""
MIXTURE_SHRINK = 0.06
"""Variance of a weighted sum of experts' outputs, before the gain of the down matrix."""
LOGIT_STD = 4.0

_Q, _K, _V, _O, _ROUTER, _EXPERT, _HEAD, _EMBEDDING = range(8)


class SynthModel:
    """Weights of a shape, any of them on request and in any order; a function of the arguments."""

    def __init__(self, shape: SynthShape, seed: int, skew: float = DEFAULT_SKEW) -> None:
        """Prepare the random bits.

        Args:
            shape: dimensions; `hidden_size` and `moe_intermediate_size` are multiples of 64.
            seed: 0 or more.
            skew: how uneven the experts' popularity is, 0 or more.
        """
        self.shape, self.seed, self.skew = shape, seed, skew
        self.bits = BitSource(seed)
        rest = shape.hidden_size - CONSTANT_WIDTH
        value = np.sqrt(CONSTANT_SHARE * rest * BF16_STD**2 / CONSTANT_WIDTH)
        # Five leading bits: exact in bf16.
        self.constant = float(np.round(value * 8) / 8)

    def _rng(self, kind: int, *index: int) -> np.random.Generator:
        return generator(self.seed, 3, kind, *index)

    def _power(self, layer: int, after_attention: bool) -> float:
        """Return the expected variance of the varying entries where a norm reads them."""
        num_layers = self.shape.num_hidden_layers
        attention = sum(self._context_power(i) for i in range(layer + after_attention))
        return BF16_STD**2 + attention + layer * EXPERT_POWER / num_layers

    def _context_power(self, layer: int) -> float:
        """Return the variance that the attention of one layer adds."""
        if self.shape.num_hidden_layers == 1:
            return CONTEXT_POWER
        if layer == 0:
            return CONTEXT_POWER * FIRST_CONTEXT_SHARE
        return CONTEXT_POWER * (1 - FIRST_CONTEXT_SHARE) / (self.shape.num_hidden_layers - 1)

    def _gains(self, layer: int, after_attention: bool) -> tuple[float, float]:
        """Return what a norm makes of the constant entry, and of one unit of the others' std."""
        power = self._power(layer, after_attention)
        rest = self.shape.hidden_size - CONSTANT_WIDTH
        total = CONSTANT_WIDTH * self.constant**2 + rest * power
        rms = float(np.sqrt(total / self.shape.hidden_size))
        return self.constant / rms, float(np.sqrt(power)) / rms

    def attention(self, role: str, layer: int) -> Float32:
        """Return `q_proj`, `k_proj`, `v_proj` or `o_proj` of a layer, [N, K] float32."""
        shape = self.shape
        width = shape.head_dim * (
            shape.num_attention_heads if role in ("q_proj", "o_proj") else shape.num_key_value_heads
        )
        if role == "o_proj":
            std = np.sqrt(self._context_power(layer) / ATTENTION_SHRINK / width)
            weight = self._normal(_O, layer, shape.hidden_size, width, float(std))
            weight[:CONSTANT_WIDTH] = 0
            return weight
        constant, varying = self._gains(layer, after_attention=False)
        rest = shape.hidden_size - CONSTANT_WIDTH
        share = 0.0 if role == "v_proj" else LOCAL_SHARE
        kind = {"q_proj": _Q, "k_proj": _K, "v_proj": _V}[role]
        std = np.sqrt((1 - share) / rest) / varying
        weight = self._normal(kind, layer, width, shape.hidden_size, float(std))
        local = np.sqrt(share) * self._local(width // shape.head_dim)
        weight[:, :CONSTANT_WIDTH] = local[:, None] / (CONSTANT_WIDTH * constant)
        return weight

    def _local(self, num_heads: int) -> Float32:
        """Return the position-dependent direction of all heads, [num_heads * Dh], of unit power."""
        shape = self.shape
        half = shape.head_dim // 2
        frequency = shape.rope_theta ** (-np.arange(half) / half)
        rows = np.zeros((num_heads, shape.head_dim), np.float32)
        for head in range(num_heads):
            group = head * shape.num_key_value_heads // num_heads
            window = WINDOW_TOKENS[group % len(WINDOW_TOKENS)]
            chosen = np.flatnonzero(frequency >= 1 / window)
            rows[head, chosen] = np.sqrt(shape.head_dim / len(chosen))
        return rows.reshape(-1)

    def _normal(self, kind: int, layer: int, rows: int, cols: int, std: float) -> Float32:
        values = self._rng(kind, layer).standard_normal((rows, cols), np.float32)
        values *= np.float32(std)
        return values

    def router(self, layer: int) -> Float32:
        """Return a router, [E, D] float32."""
        shape = self.shape
        constant, varying = self._gains(layer, after_attention=True)
        rest = shape.hidden_size - CONSTANT_WIDTH
        std = ROUTER_NOISE / np.sqrt(rest) / varying
        weight = self._normal(_ROUTER, layer, shape.num_experts, shape.hidden_size, float(std))
        ranks = 1 + self._rng(_ROUTER, layer, 1).permutation(shape.num_experts)
        popularity = -self.skew * np.log(ranks)
        weight[:, :CONSTANT_WIDTH] = popularity[:, None] / (CONSTANT_WIDTH * constant)
        return weight

    def _expert_std(self, role: str) -> float:
        shape = self.shape
        if role == "down":
            gain = EXPERT_POWER / shape.num_hidden_layers / MIXTURE_SHRINK
            return float(np.sqrt(gain / shape.moe_intermediate_size))
        return float(1 / np.sqrt(shape.hidden_size))

    def record(self, layer: int, expert: int, layout: RecordLayout) -> Bytes:
        """Return a packed record, [record_bytes] uint8."""
        record = np.zeros(layout.record_bytes, np.uint8)
        rng = self._rng(_EXPERT, layer, expert)
        for role, m in zip(("gate", "up", "down"), layout.matrices, strict=True):
            packed = self.bits.packed(
                rng, m.format, m.group, m.rows, m.cols, self._expert_std(role)
            )
            if role == "down":
                packed[: CONSTANT_WIDTH // 16] = _zero_group(m.format, packed.shape[-1])
            record[m.offset : m.offset + m.nbytes] = packed.reshape(-1)
        return record

    def expert_rows(self, layer: int, expert: int) -> tuple[UInt16, UInt16, UInt16]:
        """Return gate, up [F, D] and down [D, F] of an expert, row-major bf16."""
        hidden, inner = self.shape.hidden_size, self.shape.moe_intermediate_size
        rng = self._rng(_EXPERT, layer, expert)
        gate = self.bits.rows(rng, inner, hidden, self._expert_std("gate"))
        up = self.bits.rows(rng, inner, hidden, self._expert_std("up"))
        down = self.bits.rows(rng, hidden, inner, self._expert_std("down"))
        down[:CONSTANT_WIDTH] = 0
        return gate, up, down

    def embedding(self) -> UInt16:
        """Return the embedding table, [V, D] row-major bf16."""
        shape = self.shape
        table = self.bits.rows(self._rng(_EMBEDDING), shape.vocab_size, shape.hidden_size, BF16_STD)
        table[:, :CONSTANT_WIDTH] = np.float32(self.constant).view(np.uint32) >> 16
        return table

    def head(self, format: str, group: int) -> Bytes:
        """Return the packed head of [V, D]."""
        shape = self.shape
        std = LOGIT_STD / np.sqrt(shape.hidden_size)
        packed = self.bits.packed(
            self._rng(_HEAD), format, group, shape.vocab_size, shape.hidden_size, float(std)
        )
        packed[:, : CONSTANT_WIDTH // group] = _zero_group(format, packed.shape[-1])
        # The end token is the last one, in the last lane of the last block.
        last = packed[-1, :, -2:] if format != "mxfp4" else packed[-1, :, -1:]
        last[...] = 0
        return packed.reshape(-1)

    def head_rows(self) -> UInt16:
        """Return the head, [V, D] row-major bf16."""
        shape = self.shape
        std = LOGIT_STD / np.sqrt(shape.hidden_size)
        rows = self.bits.rows(self._rng(_HEAD), shape.vocab_size, shape.hidden_size, float(std))
        rows[:, :CONSTANT_WIDTH] = 0
        rows[-1] = 0
        return rows


def _zero_group(format: str, group_bytes: int) -> Bytes:
    """Return the bytes of a group whose sixteen outputs are all zero."""
    group = np.zeros(group_bytes, np.uint8)
    if format == "q4":
        group[:-32] = 0x88
    return group
