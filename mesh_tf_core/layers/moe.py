"""Mixtures of experts: every token goes to the one or two feed-forward blocks that a router chooses.

Lepikhin et al. 2021, "GShard", algorithm 1, and Fedus et al. 2022, "Switch Transformer", section 2, as in
Mesh-TensorFlow's `moe.py`. With groups of S tokens, E experts, k choices and the capacity C:

  (1)  p = softmax(x w)                             [group, token, router]
  (2)  choice j of a token: the largest p, without the choices before it
  (3)  its place in the expert's buffer: how many earlier choices of the group went there; places from C on
       are dropped (the token then only has its residual)
  (4)  C = ceil(S k capacity_factor / E)
  (5)  gate: p of the choice; of several choices, divided by their sum
  (6)  load-balance loss: E sum over experts of (fraction of tokens whose first choice it is) (mean p),
       1 if both are even

Tokens stay in the dimensions of the group until they are dispatched, then two dimensions are renamed: the
group to `expert_<group>` and `router` to the experts' own. A layout that splits the group and the experts
over one mesh axis makes this an all-to-all, as in GShard; one that splits the experts over an axis that does
not split the group makes it a slice, and the results are gathered.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.dims import Dim, Shape
from mesh_tf_core.errors import UserError
from mesh_tf_core.initializers import Normal
from mesh_tf_core.layers.base import activation, check_rate
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.cumulative import cumsum
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import one_hot
from mesh_tf_core.ops.order import argmax
from mesh_tf_core.ops.random import dropout
from mesh_tf_core.ops.reduce import reduce_mean, reduce_sum
from mesh_tf_core.ops.shape import rename, transpose
from mesh_tf_core.ops.softmax import softmax
from mesh_tf_core.tensor import Tensor


@dataclass(frozen=True)
class MixtureOfExperts:
    """A feed-forward block per expert, of which a token uses `chosen`.

    Attributes:
      experts: how many, and the name by which they are split.
      d_ff: hidden dimension of an expert.
      chosen: experts per token, 1 (Switch) or 2 (GShard), at most all.
      capacity_factor: room in the experts' buffers, relative to an even distribution.
      activation, gated, dropout: of every expert, as of `FeedForward`.
      group: dimension whose elements are dispatched apart, so that it can be split; often the batch.
      token: dimension along which the tokens of a group lie.
    """

    experts: Dim
    d_ff: Dim
    chosen: int = 1
    capacity_factor: float = 1.25
    activation: str = "relu"
    gated: bool = False
    dropout: float = 0.0
    group: str = "batch"
    token: str = "length"
    d_model: str = "d_model"
    name: str = "experts"

    def __post_init__(self) -> None:
        activation(self.activation)
        check_rate(self, self.dropout)
        if not 1 <= self.chosen <= self.experts.size:
            raise UserError(
                f"MixtureOfExperts: chosen={self.chosen} must be from 1 to the {self.experts.size} experts"
            )
        if not self.capacity_factor > 0:
            raise UserError(
                f"MixtureOfExperts: capacity_factor must be positive, found {self.capacity_factor}"
            )

    def capacity(self, tokens: int) -> int:
        """Places per expert and group (equation 4), at most one per token."""
        even = tokens * self.chosen / self.experts.size
        return min(tokens, max(1, math.ceil(even * self.capacity_factor)))

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [group, token, d_model] -> (the same dimensions, load-balance loss as a float32 scalar)."""
        if set(x.shape.names) != {self.group, self.token, self.d_model}:
            raise UserError(
                f"MixtureOfExperts: needs the dimensions {self.group}, {self.token}, {self.d_model}; "
                f"found [{x.shape}]"
            )
        with x.graph.scope(self.name):
            combine, dispatch, loss = self.route(x)
            return self._through_experts(x, combine.cast(x.dtype), dispatch.cast(x.dtype)), loss

    def route(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Equations 1 to 6.

        Returns:
          combine and dispatch, float32 [group, token, router, capacity]: a token's gate, or 1, where it lies
          in a buffer; the load-balance loss.
        """
        g, d, s = x.graph, x.dim(self.d_model), x.dim(self.token)
        router, capacity = Dim("router", self.experts.size), Dim("capacity", self.capacity(s.size))
        w = g.variable("router", [d, router], Normal(1 / math.sqrt(d.size)))
        shape = Shape([x.dim(self.group), s, router])
        # In float32 whatever the activations: the choice must not depend on their rounding (Fedus et al.).
        p = softmax(einsum([x.cast("float32"), w], shape), router)
        masks, left = [], p
        for _ in range(self.chosen):
            masks.append(one_hot(argmax(left, router), router))
            left = left * (1.0 - masks[-1])
        gates = [einsum([p, mask], shape.without("router")) for mask in masks]
        total = add_n(gates) + 1e-9
        gates = [gate / total for gate in gates] if self.chosen > 1 else gates
        combine, dispatch = [], []
        taken: Tensor | None = None
        for mask, gate in zip(masks, gates, strict=True):
            place = cumsum(mask, s, exclusive=True)
            place = place if taken is None else place + taken
            taken = reduce_sum(mask, s) if taken is None else taken + reduce_sum(mask, s)
            # Ids from the capacity on have no one-hot: these tokens are dropped.
            where = one_hot(reduce_sum(place * mask, router).cast("int32"), capacity)
            there = mask * where
            dispatch.append(there)
            combine.append(there * gate)
        full = [*shape, capacity]
        first = reduce_mean(masks[0], s) * reduce_mean(p, s)
        loss = reduce_mean(first) * float(router.size**2)
        return transpose(add_n(combine), full), transpose(add_n(dispatch), full), loss

    def _through_experts(self, x: Tensor, combine: Tensor, dispatch: Tensor) -> Tensor:
        """Tokens to buffers, buffers through the experts, results back to the tokens."""
        d = x.dim(self.d_model)
        b, router, capacity = (combine.dim(n) for n in (self.group, "router", "capacity"))
        sent = einsum([dispatch, x], [b, router, capacity, d])
        there = {self.group: f"expert_{self.group}", "router": self.experts.name}
        h = self._experts(rename(sent, **there))
        back = rename(h, **{new: old for old, new in there.items()})
        return einsum([combine, back], x.shape)

    def _experts(self, x: Tensor) -> Tensor:
        """Every expert's block on its buffers [expert_group, experts, capacity, d_model]."""
        g, d, e, f = x.graph, x.dim(self.d_model), self.experts, self.d_ff
        rest = [n for n in x.shape if n != d]

        def weight(name: str, inner: Dim, outer: Dim) -> Tensor:
            stddev = Normal(1 / math.sqrt(inner.size))
            return g.variable(name, [e, inner, outer], stddev, activation_dtype=x.dtype)

        h = activation(self.activation)(einsum([x, weight("wi", d, f)], [*rest, f]))
        if self.gated:
            h = h * einsum([x, weight("wg", d, f)], [*rest, f])
        return einsum([dropout(h, self.dropout), weight("wo", f, d)], x.shape)
