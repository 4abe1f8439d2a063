"""Training form of the demo model: a small Qwen3-MoE and its dense twin, for two CPU cores.

Owns: the network, its hand-written autograd functions, and the names it has on disk.
Does not: read data, optimise, or serve; the engine itself never imports this file.

Shapes: B sequences, S positions, N = B * S, D hidden, H query heads, K kv heads, Dh head dim,
E experts, A experts per token, F expert inner dim, V vocabulary, L layers.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

import torch
import torch.nn.functional as nnf
from torch import Tensor, nn

CAPACITY_STEP = 256  # bmm shapes must repeat: oneDNN builds a kernel for every new shape
GROUP = 8  # experts per bmm
LOSS_ROWS = 512  # rows of logits alive at once


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the model, named as Hugging Face names them; `num_experts` 0 means dense."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    num_experts: int = 32
    num_experts_per_tok: int = 4
    moe_intermediate_size: int = 128
    intermediate_size: int = 512
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1024

    def to_dict(self) -> dict[str, int | float]:
        """Return the fields as a plain dictionary."""
        return asdict(self)


# Elementwise work, not matrix products, bounds a step. Compiled, the backward pass of SwiGLU on
# 32 x 1536 rows takes 6 to 12 ms instead of 40 to 60, its forward 2.5 ms instead of 11.


@torch.compile(dynamic=True)
def swiglu_forward(hidden: Tensor, slot_weight: Tensor) -> Tensor:
    """Return silu(gate) * up * weight, [R, F] bfloat16.

    Args:
        hidden: [R, 2F] bfloat16, gate then up.
        slot_weight: [R, 1] float32, routing weight of the row's token.
    """
    gate, up = hidden.chunk(2, -1)
    return (nnf.silu(gate.float()) * up.float() * slot_weight).bfloat16()


@torch.compile(dynamic=True)
def swiglu_backward(
    hidden: Tensor, grad: Tensor, slot_weight: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Undo `swiglu_forward`.

    Args:
        hidden: [R, 2F] bfloat16, gate then up.
        grad: [R, F] bfloat16, gradient of the weighted result.
        slot_weight: [R, 1] float32.

    Returns:
        the weighted result again [R, F] bfloat16, the gradient of the weights [R] float32,
        and that of `hidden` [R, 2F] bfloat16.
    """
    gate, up = (t.float() for t in hidden.chunk(2, -1))
    sig = torch.sigmoid(gate)
    act = gate * sig
    inner = act * up
    grad_weight = (grad.float() * inner).sum(-1)
    grad_inner = grad.float() * slot_weight
    # d silu(g) = s + silu(g) * (1 - s), s the sigmoid.
    grad_gate = grad_inner * up * (sig + act * (1 - sig))
    grad_hidden = torch.cat([grad_gate.bfloat16(), (grad_inner * act).bfloat16()], -1)
    return (inner * slot_weight).bfloat16(), grad_weight, grad_hidden


@torch.compile(dynamic=True)
def softmax_forward(scores: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Return softmax(scores * scale + bias) over the last dimension, bfloat16."""
    return (scores.float() * scale + bias).softmax(-1).bfloat16()


@torch.compile(dynamic=True)
def softmax_backward(probs: Tensor, grad: Tensor, scale: float) -> Tensor:
    """Return the gradient of the scores of `softmax_forward`, bfloat16."""
    p, g = probs.float(), grad.float()
    return (p * (g - (p * g).sum(-1, keepdim=True)) * scale).bfloat16()


@torch.compile(dynamic=True)
def fused_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return the RMS norm of x over its last dimension, bfloat16."""
    y = x.float()
    return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight).bfloat16()


@torch.compile(dynamic=True)
def fused_norm_rope(x: Tensor, weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Norm each head of x [B, S, heads, Dh], then rotate it; returns bfloat16."""
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + eps) * weight
    a, b = y.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1).bfloat16()


class CausalAttention(torch.autograd.Function):
    """Plain causal attention in bfloat16; at 256 positions it beats the fused CPU kernel's backward
    pass (36 ms a layer against 15 ms uncompiled)."""

    @staticmethod
    def forward(ctx, q, k, v):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        """Attend; q, k, v and the result are [B * H, S, Dh] bfloat16."""
        length = q.shape[1]
        bias = torch.full((length, length), -torch.inf).triu(1)
        ctx.scale = q.shape[-1] ** -0.5
        probs = softmax_forward(torch.bmm(q, k.transpose(1, 2)), bias, ctx.scale)
        ctx.save_for_backward(q, k, v, probs)
        return torch.bmm(probs, v)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        """Return the gradients of q, k and v."""
        q, k, v, probs = ctx.saved_tensors
        grad_v = torch.bmm(probs.transpose(1, 2), grad)
        grad_scores = softmax_backward(probs, torch.bmm(grad, v.transpose(1, 2)), ctx.scale)
        return torch.bmm(grad_scores, k), torch.bmm(grad_scores.transpose(1, 2), q), grad_v


class RoutedFfn(torch.autograd.Function):
    """SwiGLU experts over rows sorted by expert and padded; drops no token.

    Experts are ranked by load and run GROUP at a time, each group padded to the capacity of its
    busiest member: with uneven routing a single capacity would pad two to four times as much.
    """

    @staticmethod
    def forward(ctx, x, ids, weights, gate_up, down):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        """Compute y = sum over A of weight * down(silu(gate(x)) * up(x)).

        Args:
            ctx: autograd context.
            x: [N, D] bfloat16, normed hidden states.
            ids: [N, A] int64, chosen experts.
            weights: [N, A] float32, their weights.
            gate_up: [E, 2F, D] float32, gate rows then up rows.
            down: [E, D, F] float32.

        Returns:
            [N, D] bfloat16.
        """
        num_rows, top_k = ids.shape
        num_experts = gate_up.shape[0]
        flat = ids.reshape(-1)
        order = torch.argsort(flat, stable=True)
        counts = torch.bincount(flat, minlength=num_experts)
        groups = []  # (experts of the group, first slot, capacity)
        base = torch.empty(num_experts, dtype=torch.int64)
        num_slots = 0
        for group in counts.argsort(descending=True).split(GROUP):
            capacity = max(1, math.ceil(int(counts[group[0]]) / CAPACITY_STEP)) * CAPACITY_STEP
            base[group] = num_slots + torch.arange(len(group)) * capacity
            groups.append((group, num_slots, capacity))
            num_slots += len(group) * capacity
        sorted_experts = flat[order]
        starts = counts.cumsum(0) - counts
        slot_of_sorted = base[sorted_experts] + torch.arange(flat.numel()) - starts[sorted_experts]
        slots = torch.empty_like(flat)
        slots[order] = slot_of_sorted
        # The row past the end is zero: unused slots read it.
        source = torch.full((num_slots,), num_rows, dtype=torch.int64)
        source[slot_of_sorted] = order // top_k
        slot_weight = torch.zeros(num_slots, dtype=torch.float32)
        slot_weight[slots] = weights.reshape(-1)
        slot_weight = slot_weight[:, None]

        rows = torch.cat([x, x.new_zeros(1, x.shape[1])]).index_select(0, source)
        gate_up16, down16 = gate_up.bfloat16(), down.bfloat16()
        pre = x.new_empty(num_slots, gate_up.shape[1])
        for group, first, capacity in groups:
            part = slice(first, first + len(group) * capacity)
            shape = (len(group), capacity, -1)
            weight = gate_up16[group].transpose(1, 2)
            torch.bmm(rows[part].view(shape), weight, out=pre[part].view(shape))
        inner = swiglu_forward(pre, slot_weight)
        y = torch.empty_like(rows)
        for group, first, capacity in groups:
            part = slice(first, first + len(group) * capacity)
            shape = (len(group), capacity, -1)
            weight = down16[group].transpose(1, 2)
            torch.bmm(inner[part].view(shape), weight, out=y[part].view(shape))
        slots = slots.view(num_rows, top_k)
        ctx.save_for_backward(rows, pre, source, slots, slot_weight, gate_up16, down16)
        ctx.groups = groups
        return nnf.embedding_bag(slots, y, mode="sum")

    @staticmethod
    def backward(ctx, grad_out):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        """Return the gradients of x, weights, gate_up and down; ids has none."""
        rows, pre, source, slots, slot_weight, gate_up16, down16 = ctx.saved_tensors
        padded = torch.cat([grad_out, grad_out.new_zeros(1, rows.shape[1])])
        grad_rows = padded.index_select(0, source)
        grad_scaled = pre.new_empty(len(rows), down16.shape[2])
        for group, first, capacity in ctx.groups:
            part = slice(first, first + len(group) * capacity)
            shape = (len(group), capacity, -1)
            torch.bmm(grad_rows[part].view(shape), down16[group], out=grad_scaled[part].view(shape))
        scaled, grad_weight, grad_pre = swiglu_backward(pre, grad_scaled, slot_weight)
        grad_gate_up = torch.empty(gate_up16.shape, dtype=torch.float32)
        grad_down = torch.empty(down16.shape, dtype=torch.float32)
        grad_x_rows = torch.empty_like(rows)
        for group, first, capacity in ctx.groups:
            part = slice(first, first + len(group) * capacity)
            shape = (len(group), capacity, -1)
            outer = grad_rows[part].view(shape).transpose(1, 2)
            grad_down[group] = torch.bmm(outer, scaled[part].view(shape)).float()
            grad = grad_pre[part].view(shape)
            outer = grad.transpose(1, 2)
            grad_gate_up[group] = torch.bmm(outer, rows[part].view(shape)).float()
            torch.bmm(grad, gate_up16[group], out=grad_x_rows[part].view(shape))
        grad_x = nnf.embedding_bag(slots, grad_x_rows, mode="sum")
        grad_weights = grad_weight.index_select(0, slots.view(-1)).view(slots.shape)
        return grad_x, None, grad_weights, grad_gate_up, grad_down


class ChunkedLoss(torch.autograd.Function):
    """Cross entropy of a tied head that never holds more than LOSS_ROWS rows of logits."""

    @staticmethod
    def forward(ctx, hidden, embedding, targets, teacher, mix):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        """Compute the mean loss and, in the same walk, its gradients.

        Args:
            ctx: autograd context.
            hidden: [N, D] bfloat16, states after the final norm.
            embedding: [V, D] float32, used as the head.
            targets: [N] int64, next tokens.
            teacher: [N, D] bfloat16 or None, states whose distribution to imitate.
            mix: share of the teacher in the target distribution, 0..1.

        Returns:
            the mean loss in nats of the mixed target, and that of `targets` alone.
        """
        num_rows = hidden.shape[0]
        weight = embedding.detach().bfloat16()
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        total, total_hard = 0.0, 0.0
        for at in range(0, num_rows, LOSS_ROWS):
            h = hidden[at : at + LOSS_ROWS]
            goal = targets[at : at + LOSS_ROWS, None]
            logp = (h @ weight.t()).float().log_softmax(-1)
            hard = -float(logp.gather(1, goal).sum())
            total_hard += hard
            total += (1 - mix) * hard
            ones = torch.full(goal.shape, mix - 1.0)
            if teacher is None:
                grad = logp.exp_()
            else:
                soft = (teacher[at : at + LOSS_ROWS] @ weight.t()).float().softmax(-1)
                total -= mix * float((soft * logp).sum())
                grad = logp.exp_().sub_(soft, alpha=mix)
            grad.scatter_add_(1, goal, ones)
            grad16 = grad.bfloat16()
            grad_hidden[at : at + LOSS_ROWS] = grad16 @ weight
            if embedding.requires_grad:
                grad_weight += grad16.t() @ h
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.num_rows = num_rows
        return hidden.new_tensor(total / num_rows, dtype=torch.float32), total_hard / num_rows

    @staticmethod
    def backward(ctx, grad_loss, _):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN205
        """Scale the stored gradients; targets, teacher and mix have none."""
        grad_hidden, grad_weight = ctx.saved_tensors
        scale = float(grad_loss) / ctx.num_rows
        return grad_hidden * scale, grad_weight * scale, None, None, None


class Norm(nn.Module):
    """RMS norm over the last dimension; float32 inside, bfloat16 out under autocast."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Return x / sqrt(mean(x^2) + eps) * weight."""
        if torch.is_autocast_enabled("cpu"):
            return fused_norm(x, self.weight, self.eps)
        return nnf.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_table(length: int, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [length, head_dim / 2] float32, for half-split rope."""
    pair = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angle = torch.arange(length, dtype=torch.float32)[:, None] * theta**-pair
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (i, i + Dh/2) of x [B, S, heads, Dh] by the angles of their position."""
    cos, sin = cos[: x.shape[1], None].to(x.dtype), sin[: x.shape[1], None].to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Attention(nn.Module):
    """Causal grouped-query attention with normed queries and keys."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = Norm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Norm(c.head_dim, c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Attend within each sequence; x and result are [B, S, D]."""
        c = self.config
        num, length, _ = x.shape
        shape = (num, length, -1, c.head_dim)
        q, k = self.q_proj(x).view(shape), self.k_proj(x).view(shape)
        v = self.v_proj(x).view(shape).transpose(1, 2)
        group = c.num_attention_heads // c.num_key_value_heads
        if torch.is_autocast_enabled("cpu"):
            cos, sin = cos[:length], sin[:length]
            q = fused_norm_rope(q, self.q_norm.weight, c.rms_norm_eps, cos, sin).transpose(1, 2)
            k = fused_norm_rope(k, self.k_norm.weight, c.rms_norm_eps, cos, sin).transpose(1, 2)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            y = CausalAttention.apply(q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1))
            y = y.view(num, c.num_attention_heads, length, c.head_dim)
        else:
            q = rotate(self.q_norm(q), cos, sin).transpose(1, 2)
            k = rotate(self.k_norm(k), cos, sin).transpose(1, 2)
            k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
            y = nnf.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(num, length, -1))


class Moe(nn.Module):
    """Softmax router, top A renormalised, over stacked SwiGLU experts."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = self.config = config
        self.router = nn.Parameter(torch.empty(c.num_experts, c.hidden_size))
        inner, hidden = c.moe_intermediate_size, c.hidden_size
        self.gate_up = nn.Parameter(torch.empty(c.num_experts, 2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(c.num_experts, hidden, inner))
        self.counts = torch.zeros(c.num_experts)
        self.ids = torch.empty(0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the FFN output [B, S, D] and the balance loss E * sum(f * p); 1 is even."""
        c = self.config
        flat = x.reshape(-1, c.hidden_size)
        with torch.autocast("cpu", enabled=False):
            probs = (flat.float() @ self.router.t()).softmax(-1)
            weights, ids = probs.topk(c.num_experts_per_tok, dim=-1)
            weights = weights / weights.sum(-1, keepdim=True)
            self.ids = ids
            self.counts = torch.bincount(ids.reshape(-1), minlength=c.num_experts).float()
            share = self.counts / ids.numel()
            balance = c.num_experts * (share * probs.mean(0)).sum()
            if flat.dtype == torch.bfloat16:
                y = RoutedFfn.apply(flat, ids, weights, self.gate_up, self.down)
            else:
                y = self.exact(flat, ids, weights)
        return y.view(x.shape), balance

    def exact(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Run the experts one by one in float32: for evaluation, where shapes vary anyway."""
        y = torch.zeros_like(flat)
        for expert in ids.unique().tolist():
            row, slot = (ids == expert).nonzero(as_tuple=True)
            gate, up = (flat[row] @ self.gate_up[expert].t()).chunk(2, -1)
            part = (nnf.silu(gate) * up) @ self.down[expert].t()
            y.index_add_(0, row, part * weights[row, slot, None])
        return y


class Dense(nn.Module):
    """One SwiGLU FFN as wide as the A active experts together."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        inner, hidden = config.intermediate_size, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(2 * inner, hidden))
        self.down = nn.Parameter(torch.empty(hidden, inner))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the FFN output [B, S, D] and a zero balance loss."""
        gate, up = nnf.linear(x, self.gate_up).chunk(2, -1)
        return nnf.linear(nnf.silu(gate) * up, self.down), x.new_zeros((), dtype=torch.float32)


class Layer(nn.Module):
    """Pre-norm attention and FFN with two residual adds; the residual stays float32."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.input_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.mlp: Moe | Dense = Moe(config) if config.num_experts else Dense(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Return the new residual stream [B, S, D] float32 and the balance loss."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        y, balance = self.mlp(self.post_attention_layernorm(x))
        return x + y, balance


class LanguageModel(nn.Module):
    """Embedding, L layers and final norm; the head is the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Parameter(torch.empty(config.vocab_size, config.hidden_size))
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Norm(config.hidden_size, config.rms_norm_eps)
        cos, sin = rope_table(config.max_position_embeddings, config.head_dim, config.rope_theta)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states after the final norm [B, S, D] and the mean balance loss."""
        x = nnf.embedding(tokens, self.embed)
        balances = []
        for layer in self.layers:
            x, balance = layer(x, self.cos, self.sin)
            balances.append(balance)
        return self.norm(x), torch.stack(balances).mean()

    def logits(self, hidden: Tensor) -> Tensor:
        """Apply the tied head to [..., D] states."""
        return hidden @ self.embed.to(hidden.dtype).t()


class MtpLayer(nn.Module):
    """DeepSeek-style multi-token prediction layer: predicts token t + 2 from h_t and e_{t+1}.

    Source:
        DeepSeek-V3 report, section 2.2; the Hugging Face names of its layer 61.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.enorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.hnorm = Norm(config.hidden_size, config.rms_norm_eps)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.block = Layer(config)
        self.head_norm = Norm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Tensor, embedded: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draft one token further.

        Args:
            hidden: [B, S, D], states of the model after its final norm, position t.
            embedded: [B, S, D], embeddings of the tokens at t + 1.
            cos: rope table of the model.
            sin: rope table of the model.

        Returns:
            states after shared_head.norm [B, S, D] and the balance loss.
        """
        u = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        g, balance = self.block(u.float(), cos, sin)
        return self.head_norm(g), balance


def initialise(module: nn.Module, num_layers: int, seed: int) -> None:
    """Draw all matrices: std 0.02, the projections into the residual divided by sqrt(2L)."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in module.named_parameters():
        if parameter.ndim < 2:
            continue
        std = 0.02
        if name.endswith(("o_proj.weight", "down")):
            std /= math.sqrt(2 * num_layers)
        with torch.no_grad():
            parameter.normal_(0.0, std, generator=generator)


def layer_tensors(layer: Layer, index: int) -> dict[str, Tensor]:
    """Name the tensors of one layer as transformers saves Qwen3-MoE (or Qwen3, when dense)."""
    prefix = f"model.layers.{index}."
    out = {
        prefix + name: parameter.detach()
        for name, parameter in layer.named_parameters()
        if not name.startswith("mlp.")
    }
    mlp = layer.mlp
    gate, up = mlp.gate_up.detach().chunk(2, dim=-2)
    if isinstance(mlp, Moe):
        out[prefix + "mlp.gate.weight"] = mlp.router.detach()
        for e in range(mlp.down.shape[0]):
            expert = f"{prefix}mlp.experts.{e}."
            out[expert + "gate_proj.weight"] = gate[e]
            out[expert + "up_proj.weight"] = up[e]
            out[expert + "down_proj.weight"] = mlp.down.detach()[e]
    else:
        out[prefix + "mlp.gate_proj.weight"] = gate
        out[prefix + "mlp.up_proj.weight"] = up
        out[prefix + "mlp.down_proj.weight"] = mlp.down.detach()
    return out


def hf_tensors(model: LanguageModel, mtp: MtpLayer | None) -> dict[str, Tensor]:
    """Return every tensor under its Hugging Face name; the MTP layer follows the last layer."""
    out = {"model.embed_tokens.weight": model.embed.detach()}
    for index, layer in enumerate(model.layers):
        out.update(layer_tensors(layer, index))  # type: ignore[arg-type]
    out["model.norm.weight"] = model.norm.weight.detach()
    if mtp is not None:
        index = model.config.num_hidden_layers
        out.update(layer_tensors(mtp.block, index))
        prefix = f"model.layers.{index}."
        out[prefix + "enorm.weight"] = mtp.enorm.weight.detach()
        out[prefix + "hnorm.weight"] = mtp.hnorm.weight.detach()
        out[prefix + "eh_proj.weight"] = mtp.eh_proj.weight.detach()
        out[prefix + "shared_head.norm.weight"] = mtp.head_norm.weight.detach()
    return out


def load_hf_tensors(model: LanguageModel, mtp: MtpLayer | None, tensors: dict[str, Tensor]) -> None:
    """Copy tensors named as `hf_tensors` names them back into the training form."""
    stored = hf_tensors(model, mtp)
    missing = stored.keys() - tensors.keys()
    if missing:
        raise ValueError(f"checkpoint lacks {len(missing)} tensors, e.g. {min(missing)}")
    # The views of hf_tensors share memory with the parameters, so copying into them is enough.
    for name, view in stored.items():
        view.copy_(tensors[name].float())
