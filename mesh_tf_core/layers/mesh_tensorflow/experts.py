"""Mixtures of experts in two levels, over two axes of the mesh, and attention with projections that are
chosen token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention
from mesh_tf_core.layers.base import activation, check_rate
from mesh_tf_core.layers.moe import blocks, through
from mesh_tf_core.layers.routing import SWITCH, TOP_2, Router, TokenChoice
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.reduce import reduce_sum
from mesh_tf_core.ops.shape import rename, reshape
from mesh_tf_core.ops.stacking import unstack

_INNER = TokenChoice(0.5, chosen=2)
"""Tokens of a row come with empty places, for which no room is needed."""


@dataclass(frozen=True)
class MixtureOfExperts2D:
    """rows x columns experts: a token goes to some rows, and there to some experts (Shazeer et al. 2017,
    "Outrageously large neural networks", appendix B; Mesh-TensorFlow's MoE2D).

    The batch has two dimensions. With layout `outer_batch:a;batch:b;rows:b;columns:a` on a mesh of axes a and
    b, tokens go to their row by all-to-alls along b, then to their expert by all-to-alls along a.

    In a row, tokens that chose it first have all their choices, the others fewer (`Router`).

    Attributes:
      rows, columns: experts in both directions, and the names by which they are split.
      outer, inner: routers of the two levels.
      outer_group, group: the dimensions of the batch; token: as of `MixtureOfExperts`.
    """

    rows: Dim
    columns: Dim
    d_ff: Dim
    outer: TokenChoice = TOP_2
    inner: Router = _INNER
    activation: str = "relu"
    gated: bool = False
    dropout: float = 0.0
    outer_group: str = "outer_batch"
    group: str = "batch"
    token: str = "length"
    d_model: str = "d_model"
    name: str = "experts"

    def __post_init__(self) -> None:
        activation(self.activation)
        check_rate(self, self.dropout)
        self.outer.check(self.rows.size)
        self.inner.check(self.columns.size)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [outer_group, group, token, d_model] -> (the same dimensions, the routers' losses, added)."""
        if set(x.shape.names) != {self.outer_group, self.group, self.token, self.d_model}:
            raise UserError(
                f"MixtureOfExperts2D: the input must have the dimensions {self.outer_group}, "
                f"{self.group}, {self.token} and {self.d_model}, found [{x.shape}]; reshape the batch "
                f"into {self.outer_group} and {self.group}"
            )
        a, b, d = (x.dim(n) for n in (self.outer_group, self.group, self.d_model))
        row = Dim("row_router", self.rows.size)
        there = {b.name: f"expert_{b.name}", row.name: self.rows.name}
        with x.graph.scope(self.name):
            routed = self.outer(x, row, self.token, d.name, names=("row_router", "row_capacity"))
            places = routed.dispatch.dim("row_capacity")
            sent = einsum([routed.dispatch.cast(x.dtype), x], [a, b, row, places, d], chooses=True)
            importance = reduce_sum(routed.dispatch, self.token)
            if self.outer.normalized:
                # Of two gates that add up to 1 the first choice's is the larger.
                gate = reduce_sum(routed.combine, self.token)
                importance = (importance + (gate >= 0.5).cast("float32")) * 0.5
            parts, which = rename(sent, **there), rename(importance, **there)
            made, loss = self._row(parts, which, places, routed.filled)
            back = rename(made, **{new: old for old, new in there.items()})
            y = einsum([routed.combine.cast(x.dtype), back], x.shape, chooses=True)
            return y, routed.loss + loss

    def _row(self, x: Tensor, importance: Tensor, places: Dim, filled: float) -> tuple[Tensor, Tensor]:
        """Every row's tokens [outer_group, expert_group, rows, places, d_model] through its experts."""
        a, b, d = (x.dim(n) for n in (self.outer_group, f"expert_{self.group}", self.d_model))
        column, tokens = Dim("column_router", self.columns.size), Dim("row_tokens", b.size * places.size)
        there = {a.name: f"expert_{a.name}", column.name: self.columns.name}
        apart = [a, self.rows, b, places]
        flat = reshape(reshape(x, [*apart, d]), [a, self.rows, tokens, d])
        which = reshape(reshape(importance, apart), [a, self.rows, tokens])
        names = "column_router", "column_capacity"
        routed = self.inner(flat, column, tokens.name, d.name, [self.rows], which, names, filled)
        few = routed.dispatch.dim("column_capacity")
        sent = einsum([routed.dispatch.cast(x.dtype), flat], [a, self.rows, column, few, d], chooses=True)
        made = blocks(
            rename(sent, **there),
            [self.rows, self.columns],
            self.d_ff,
            d.name,
            self.activation,
            self.gated,
            self.dropout,
            routed.filled,
        )
        back = rename(made, **{new: old for old, new in there.items()})
        y = einsum([routed.combine.cast(x.dtype), back], flat.shape, chooses=True)
        return reshape(reshape(y, [*apart, d]), x.shape), routed.loss


@dataclass(frozen=True)
class ExpertsAttention:
    """Attention whose queries, keys and values are computed by the expert that a router chooses for a token
    (Fedus et al. 2022, "Switch Transformer", appendix A; Mesh-TensorFlow's ExpertsSelfAttention). A token for
    which no expert has room has zeros.

    Attributes:
      attention: with as many heads of keys as of queries.
      experts: dimension of the experts, which layouts may split.
      router: as of `MixtureOfExperts`, and so is `group`.
    """

    attention: Attention
    experts: Dim
    router: Router = SWITCH
    group: str = "batch"

    def __post_init__(self) -> None:
        self.router.check(self.experts.size)
        a = self.attention
        if a.kv_dims != a.head_dims or a.shared_kv:
            raise UserError("ExpertsAttention: kv_heads and shared_kv are not supported; remove them")

    def __call__(
        self, x: Tensor, memory: Tensor | None = None, mask: Tensor | None = None, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """As of `Attention`, with the loss of the routers: one for all three projections; with a memory, one
        for the queries and one for keys and values."""
        a = self.attention
        with x.graph.scope(a.name):
            if memory is None:
                (q, k, v), loss = self._projected(x, "qkv", a.length)
                k, v = (rename(t, **{a.length: a.memory_length}) for t in (k, v))
            else:
                a.memory_of(x, memory)
                (q,), one = self._projected(x, "q", a.length)
                (k, v), other = self._projected(memory, "kv", a.memory_length)
                loss = add_n([one, other])
            if a.rotary is not None:
                q, k = a.rotary(q, a.length, a.d_kv.name), a.rotary(k, a.memory_length, a.d_kv.name)
            return a.joined(a.attended(q, k, v, x, mask, bias), x), loss

    def _projected(self, x: Tensor, names: str, token: str) -> tuple[list[Tensor], Tensor]:
        """One projection [group, token, heads, d_kv] per letter of `names`, and the router's loss."""
        a, d = self.attention, x.dim(self.attention.d_model)
        outputs = [Dim("projections", len(names)), *a.head_dims, a.d_kv]

        def work(parts: Tensor, filled: float) -> Tensor:
            stddev = Normal(1 / math.sqrt(d.size))
            dims = [self.experts, d, *outputs]
            w = x.graph.variable("weight", dims, stddev, activation_dtype=x.dtype)
            return einsum([parts, w], [*parts.shape.without(d.name), *outputs], needed=filled)

        with x.graph.scope(names):
            y, loss = through(x, self.router, self.experts, work, (self.group, token, d.name))
        return unstack(y, "projections"), loss
