"""Attention with projections that are chosen token by token."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Normal
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.layers.attention import Attention
from mesh_tf_core.layers.moe import through
from mesh_tf_core.layers.routing import SWITCH, Router
from mesh_tf_core.ops.basic import add_n
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.shape import rename
from mesh_tf_core.ops.stacking import unstack


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
