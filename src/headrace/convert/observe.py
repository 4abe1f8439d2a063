"""Sees what the linears of a model are given, at the level of ops, while it runs as it always does.

For as long as `observed` lasts, the few ops that models multiply with are replaced by ones that
look at their inputs first and then do the same. Nothing is there otherwise, and no result changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace import ops
from headrace.arrays import Float32
from headrace.checkpoint import Matrix
from headrace.convert.importance import Importance
from headrace.experts import ExpertStore
from headrace.ops import reference


@dataclass
class Observer:
    """Who looks, and at what: importance, the scores of the head, or both."""

    names: Mapping[int, str]
    """Hugging Face name of each dense matrix, by the `id` of its object."""
    head: str
    """Name of the matrix that scores the vocabulary."""
    store: ExpertStore | None = None
    importance: Importance | None = None
    see_logits: Callable[[Float32], None] = field(default=lambda _: None)
    """Takes the scores of some rows, [R, V], in the order of tokens."""

    def see_input(self, matrices: Sequence[Matrix], x: Float32) -> None:
        """Note the input x [T, K] of some dense matrices."""
        if self.importance is not None:
            for matrix in matrices:
                self.importance.add_dense(self.names[id(matrix)], x)

    def is_head(self, matrix: Matrix) -> bool:
        """Whether a matrix scores the vocabulary."""
        return self.names.get(id(matrix)) == self.head


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Let `observer` see the ops of every model of this process."""
    replaced = _Ops(observer).table()
    plain = {name: getattr(ops, name) for name in replaced}
    for name, op in replaced.items():
        setattr(ops, name, op)
    try:
        yield
    finally:
        for name, op in plain.items():
            setattr(ops, name, op)


class _Ops:
    """The ops, with somebody looking on."""

    def __init__(self, observer: Observer) -> None:
        self.observer = observer
        self.plain = {name: getattr(ops, name) for name in _REPLACED}

    def table(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in _REPLACED}

    def linear(self, x: Float32, w: Matrix) -> Float32:
        self.observer.see_input((w,), x)
        return self._scores(w, self.plain["linear"](x, w))

    def linears(self, x: Float32, matrices: Sequence[Matrix]) -> tuple[Float32, ...]:
        self.observer.see_input(matrices, x)
        outs: tuple[Float32, ...] = self.plain["linears"](x, matrices)
        return outs

    def norm_linears(
        self, x: Float32, weight: Float32, eps: float, matrices: Sequence[Matrix]
    ) -> tuple[Float32, ...]:
        if self.observer.importance is not None:
            self.observer.see_input(matrices, ops.rms_norm(x, weight, eps))
        outs: tuple[Float32, ...] = self.plain["norm_linears"](x, weight, eps, matrices)
        for matrix, out in zip(matrices, outs, strict=True):
            self._scores(matrix, out)
        return outs

    def linear_add(self, x: Float32, w: Matrix, y: Float32) -> Float32:
        self.observer.see_input((w,), x)
        out: Float32 = self.plain["linear_add"](x, w, y)
        return out

    def swiglu_ffn(self, x: Float32, gate: Matrix, up: Matrix, down: Matrix) -> Float32:
        if self.observer.importance is not None:
            self.observer.see_input((gate, up), x)
            opened, passed = self.plain["linears"](x, (gate, up))
            self.observer.see_input((down,), reference.silu(opened) * passed)
        out: Float32 = self.plain["swiglu_ffn"](x, gate, up, down)
        return out

    def routed_ffn(
        self,
        x: Float32,
        router: Matrix,
        source: Any,
        layer: int,
        *,
        top_k: int,
        renormalize: bool,
        following: Any = None,
    ) -> Float32:
        store, importance = self.observer.store, self.observer.importance
        if store is None or importance is None:
            plain: Float32 = self.plain["routed_ffn"](
                x, router, source, layer,
                top_k=top_k, renormalize=renormalize, following=following,
            )  # fmt: skip
            return plain
        ids, weights = ops.router_topk(x, router, top_k=top_k, renormalize=renormalize)
        with store.acquire(layer, ids) as lease:
            out, activations = ops.moe_activations(x, ids, weights, lease)
        importance.add_experts(layer, router.rows, ids, x, activations)
        return out

    def _scores(self, matrix: Matrix, out: Float32) -> Float32:
        if self.observer.is_head(matrix):
            self.observer.see_logits(out)
        return out


_REPLACED = ("linear", "linears", "norm_linears", "linear_add", "swiglu_ffn", "routed_ffn")
