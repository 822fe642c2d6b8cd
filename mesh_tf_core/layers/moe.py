"""Mixtures of experts: every token goes to the few feed-forward blocks that a router chooses.

Lepikhin et al. 2021, "GShard"; Fedus et al. 2022, "Switch Transformer"; as in Mesh-TensorFlow's `moe.py`.
The routers and their equations are in `routing`.

Tokens stay in the dimensions of the group until they are dispatched; at the experts, the group is called
`expert_<group>`. A layout that splits the group and the experts over one mesh axis makes this an all-to-all;
one that splits the experts over an axis that does not split the group makes it a slice, and the results are
added up. Of `TopExperts`, each expert multiplies the tokens that chose it (`ops.experts`). The other routers
have buffers of a capacity, as GShard has: products with ones and zeros fill and empty them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, SparseDim
from mesh_tf_core.ir.initializers import ZEROS, Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.base import activation, check_rate, gated, project, weighted
from mesh_tf_core.layers.dense import FeedForward
from mesh_tf_core.layers.routing import SWITCH, Router
from mesh_tf_core.layers.top_experts import TopExperts
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.experts import expert_product, from_experts, to_experts
from mesh_tf_core.ops.float8 import float8_expert_product
from mesh_tf_core.ops.math import sigmoid
from mesh_tf_core.ops.random import dropout
from mesh_tf_core.ops.shape import rename, reshape, transpose

GATED = ("hidden", "inputs", "results")


@dataclass(frozen=True)
class MixtureOfExperts:
    """A feed-forward block per expert; a router chooses the experts of a token.

    Attributes:
      experts: dimension of the experts, which layouts may split.
      d_ff: hidden dimension of an expert.
      router: `TokenChoice`, `TopExperts` or `ExpertChoice`.
      activation, gated, dropout: of every expert, as of `FeedForward`.
      up: with `TopExperts`, the activation of a gated expert's other product; shared_as: these two of the
        shared block, if they differ.
      bias: with `TopExperts`, adds biases to the experts' products.
      gates: with `TopExperts`, of `GATED`: gates multiply the experts' inputs (Llama 4), their hidden units
        (Megatron), or their results, which are kept for the gates' gradient then (transformers, MaxText).
      shared: hidden dimension of a block for every token, in addition to its experts (DeepSeek-V2 2024,
        section 2.2: shared experts, side by side, are one block of their widths' sum); None: no such block.
      shared_gate: that block's output is multiplied by a sigmoid of a learned map of the token (Qwen-MoE).
      group: dimension whose elements are dispatched separately, so that it can be split; often the batch.
      token: dimension along which the tokens of a group lie.
    """

    experts: Dim
    d_ff: Dim
    router: Router = SWITCH
    activation: str = "relu"
    gated: bool = False
    dropout: float = 0.0
    group: str = "batch"
    token: str = "length"
    d_model: str = "d_model"
    name: str = "experts"
    shared: Dim | None = None
    shared_gate: bool = False
    up: str = "linear"
    bias: bool = False
    gates: str = "hidden"
    shared_as: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        activation(self.activation)
        check_rate(self, self.dropout)
        self.router.check(self.experts.size)
        if self.dropout and isinstance(self.router, TopExperts):
            raise UserError(
                "MixtureOfExperts: dropout inside the experts cannot be combined with TopExperts; set "
                "dropout=0 and apply mtf.dropout to the result"
            )
        if self.gates not in GATED:
            raise UserError(
                f"MixtureOfExperts: gates={self.gates!r} is unknown; {known_names(self.gates, GATED)}"
            )
        more = self.bias or self.gates != "hidden" or self.up != "linear"
        if more and not isinstance(self.router, TopExperts):
            raise UserError(
                "MixtureOfExperts: up, bias and gates need the router TopExperts; use it, or leave them"
            )
        if self.shared_gate and self.shared is None:
            raise UserError(
                "MixtureOfExperts: shared_gate needs `shared`, the hidden dimension of the shared expert; "
                "set it, or remove shared_gate"
            )

    def __call__(
        self, x: Tensor, importance: Tensor | None = None, seen: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x [group, token, d_model] -> (the same dimensions, the router's loss as a float32 scalar).

        Args:
          importance: [group, token]; 0 leaves a token out (padding), as `Router` says.
          seen: [group, token, any d_model], what the router sees, with `TopExperts`; None: x.
        """
        names = (self.group, self.token, self.d_model)
        if set(x.shape.names) != set(names):
            raise UserError(
                f"MixtureOfExperts: the input must have the dimensions {', '.join(names)}, found "
                f"[{x.shape}]; reshape or rename its dimensions"
            )
        with x.graph.scope(self.name):
            if isinstance(self.router, TopExperts):
                y, loss = self._chosen(x, self.router, importance, x if seen is None else seen)
            else:
                y, loss = through(x, self.router, self.experts, self.feed_forward, names, importance)
            return (y if self.shared is None else y + self._shared(x, self.shared)), loss

    def _shared(self, x: Tensor, d_ff: Dim) -> Tensor:
        """The block that all tokens go through."""
        act, up = self.shared_as or (self.activation, self.up)
        y = FeedForward(d_ff, act, self.gated, False, self.dropout, self.d_model, "shared", up)(x)
        if not self.shared_gate:
            return y
        return y * sigmoid(project(x, "shared_gate", [x.dim(self.d_model)], []))

    def _chosen(
        self, x: Tensor, router: TopExperts, importance: Tensor | None, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Every token through its experts."""
        d, count, tokens = x.dim(self.d_model), self.experts.size, (self.group, self.token)
        found = router.choices(seen, Dim("router", count), self.token, d.name, importance)
        limits = router.groups, router.groups_chosen
        few = SparseDim(self.experts.name, count, router.chosen, count, router.imbalance, *limits)
        ids, gates = (
            to_experts(each, few, found.choice, tokens) for each in (found.ids, found.gates.cast(x.dtype))
        )
        rows, one = to_experts(x, few, found.choice, tokens, [d.name]), Dim("bias", 1)
        even = gates * 0.0 + 1.0
        rows = rows * gates if self.gates == "inputs" else rows
        inside = [gates] if self.gates == "hidden" else []

        def product(
            x: Tensor, name: str, inner: Dim, outer: Dim, times: Tensor, again: Tensor | None = None
        ) -> Tensor:
            w, recipe = expert_weight(x, f"w{name}", [self.experts], inner, outer), x.graph.in_float8
            y = float8_expert_product(x, w, ids, recipe, again) if recipe else expert_product(x, w, ids)
            if not self.bias:
                return y
            b = x.graph.variable(f"b{name}", [self.experts, one, outer], ZEROS, activation_dtype=x.dtype)
            return y + expert_product(reshape(times, [*times.shape, one]), b, ids)

        def unit(*given: Tensor) -> Tensor:
            h = activation(self.activation)(given[0])
            h = h * activation(self.up)(given[1]) if self.gated else h
            return h * given[-1] if inside else h

        parts = [product(rows, name, d, self.d_ff, even) for name in ("i", "g")[: 1 + self.gated]]
        h, again = gated(unit, parts, self.d_ff.name, inside)
        y = product(h, "o", self.d_ff, d, gates if inside else even, again)
        y = y * gates if self.gates == "results" else y
        return transpose(from_experts(y, found.choice, tokens, [d.name]), x.shape), found.loss

    def feed_forward(self, x: Tensor, filled: float) -> Tensor:
        """Every expert's block on its buffers [expert_group, experts, capacity, d_model]."""
        form = self.d_model, self.activation, self.gated, self.dropout
        return blocks(x, [self.experts], self.d_ff, *form, filled)


def through(
    x: Tensor,
    router: Router,
    experts: Dim,
    work: Callable[[Tensor, float], Tensor],
    names: tuple[str, str, str],
    importance: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Tokens to buffers, buffers through the experts, results back to the tokens.

    Args:
      work: [expert_<group>, experts, capacity, d_model], and the share of places with tokens -> [the first
        three, any others].
      names: of x's group, token and features.

    Returns:
      [group, token, any others], and the router's loss.
    """
    if type(router).assigned is Router.assigned:
        raise UserError(
            f"the router {type(router).__name__} assigns no places in buffers of experts, which this layer "
            "needs; use TokenChoice or ExpertChoice"
        )
    group, token, d_model = names
    choice, d, b = Dim("router", experts.size), x.dim(d_model), x.dim(group)
    there = {b.name: f"expert_{b.name}", choice.name: experts.name}
    routed = router(x, choice, token, d.name, importance=importance)
    places = routed.dispatch.dim("capacity")
    sent = einsum([routed.dispatch.cast(x.dtype), x], [b, choice, places, d], chooses=True)
    back = rename(work(rename(sent, **there), routed.filled), **{new: old for old, new in there.items()})
    made = [d for d in x.shape if d.name != d_model] + [d for d in back.shape if d not in (b, choice, places)]
    return einsum([routed.combine.cast(x.dtype), back], made, chooses=True), routed.loss


def blocks(
    x: Tensor, over: Sequence[Dim], d_ff: Dim, d_model: str, act: str, gated: bool, rate: float, filled: float
) -> Tensor:
    """A feed-forward block per element of the dimensions `over` of x, with variables wi, wg and wo;
    `filled`: the share of x that is tokens."""
    d = x.dim(d_model)
    rest = [n for n in x.shape if n != d]

    def weight(name: str, inner: Dim, outer: Dim) -> Tensor:
        return expert_weight(x, name, over, inner, outer)

    h = activation(act)(weighted(x, weight("wi", d, d_ff), [*rest, d_ff], filled))
    if gated:
        h = h * weighted(x, weight("wg", d, d_ff), [*rest, d_ff], filled)
    return weighted(dropout(h, rate), weight("wo", d_ff, d), x.shape, filled)


def expert_weight(x: Tensor, name: str, experts: Sequence[Dim], inner: Dim, outer: Dim) -> Tensor:
    """A variable [experts, inner, outer] for products with x."""
    stddev = Normal(1 / math.sqrt(inner.size))
    return x.graph.variable(name, [*experts, inner, outer], stddev, activation_dtype=x.dtype)
