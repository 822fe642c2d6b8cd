"""What replicas do when they meet (`tracing.replicas`): a graph for every fragment of the variables, of its
own beside that of the step.

  came = mean over replicas of (before - now)
  m = mu m + came      before = now = before - rate (came + mu m)

In few bits (`ops.few_bits`) a replica's part of the mean is (before - now + lost), rounded, and what rounding
loses of it is lost the next time. Codes and scales are gathered, so every replica sees the same mean.

Of a stack, a fragment has every so manyth layer (`diloco.fragments_of`): [layers, ...] is seen as
[layers / fragments, fragments, ...], and one element of that dimension is read and written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import ZEROS, Initializer, Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Constant
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.few_bits import WHOLE, coded, packed, unpacked
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.ops.shape import rename, reshape
from mesh_tf_core.tracing.diloco import DiLoCo, Part, fragments_of
from mesh_tf_core.tracing.graph import Graph

BEFORE, MOMENTUM, LOST = "outer", "outer_momentum", "outer_lost"
"""Names, below a variable's own, of what all replicas began from, of the outer momentum, and of what rounding
lost of each."""
SENDER = "sender"
"""The dimension of replicas where a device has all of them."""


@dataclass(frozen=True)
class Named(Initializer):
    """What the variable of another name begins with."""

    name: str
    one: Initializer

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        return self.one.piece(self.name, sizes, begin, extent)


def outer_steps(graph: Graph, inner: Graph, diloco: DiLoCo) -> tuple[Graph, ...]:
    """The graphs in which the fragments meet, in their turn.

    Args:
      graph: of a whole step; inner: what `replicas.inner_step` made of it.

    Raises:
      UserError: the fragments do not divide the layers of a stack.
    """
    trained = [v for v in graph.variables.values() if v.trainable]
    parts = fragments_of(trained, diloco.fragments)
    for v in trained:
        count, layers = diloco.fragments, v.shape.sizes[0] if v.stacked else 0
        if layers >= count and layers % count:
            raise UserError(
                f"diloco: {count} fragments do not divide the {layers} layers of {v.name!r}; choose a divisor"
            )
    known = {v.name: v for v in trained}
    return tuple(_outer_step(f"{graph.name}/outer", known, inner, own, diloco) for own in parts)


def _outer_step(
    name: str, trained: Mapping[str, Variable], inner: Graph, parts: Mapping[str, Part], diloco: DiLoCo
) -> Graph:
    new = Graph(name)
    for variable, part in ((trained[n], part) for n, part in parts.items()):
        wide = "float64" if variable.dtype == "float64" else "float32"
        stack = variable.shape.names[0] if isinstance(part, slice) else ""
        copies = _Taken(new, inner.variables[variable.name], part, stack)
        named = Named(variable.name, variable.initializer)
        kept = replace(variable, initializer=named, trainable=False, slot_of=variable.name)
        began = _Taken(new, replace(kept, name=f"{variable.name}/{BEFORE}"), part, stack)
        still = replace(kept, name=f"{variable.name}/{MOMENTUM}", dtype=wide, initializer=ZEROS)
        moving = _Taken(new, still, part, stack)
        with new.phase("update", variable.name):
            before = began.read()
            start = before.cast(wide)
            now = copies.read()
            if diloco.bits == WHOLE:
                came = start - reduce_mean(now.cast(wide), REPLICA)
            else:
                left = replace(copies.variable, name=f"{variable.name}/{LOST}", trainable=False)
                left = replace(left, dtype=wide, initializer=ZEROS, slot_of=variable.name)
                came = _rounded(start, now, _Taken(new, left, part, stack), diloco.bits)
            momentum = moving.read() * diloco.momentum + came
            after = start - (came + momentum * diloco.momentum) * diloco.learning_rate
            after = after.cast(variable.dtype)
            moving.write(momentum)
            began.write(after)
            copies.write(broadcast(after, now.shape))
    return new


def _rounded(start: Tensor, now: Tensor, lost: _Taken, bits: int) -> Tensor:
    """How far the replicas came in their mean, as their codes say it."""
    wide, row = start.dtype, start.shape.dims[-1] if len(start.shape) else None
    came = broadcast(start, now.shape) - now.cast(wide) + lost.read()
    codes, scales = coded(came, row, bits)
    lost.write(came - (codes * scales).cast(wide))
    sent = rename(packed(codes, row, bits), **{REPLICA: SENDER})
    all_scales = rename(scales, **{REPLICA: SENDER})
    return reduce_mean((unpacked(sent, row, bits) * all_scales).cast(wide), SENDER)


@dataclass(frozen=True)
class _Taken:
    """What a fragment has of a variable.

    Attributes:
      stack: the dimension of its layers, of which `part` has some.
    """

    graph: Graph
    variable: Variable
    part: Part
    stack: str

    def __post_init__(self) -> None:
        self.graph.declare(self.variable)

    def read(self) -> Tensor:
        """[layers / fragments, ...]; all of a variable that is in no stack."""
        whole = self.graph.read(self.variable)
        return whole if self.part is ... else dynamic_slice(self._apart(whole), self._place, self._phase)

    def write(self, value: Tensor) -> None:
        if self.part is not ...:
            whole = self._apart(self.graph.read(self.variable))
            value = reshape(dynamic_update(whole, value, self._place, self._phase), self.variable.shape)
        self.graph.assign(self.variable, value)

    def _apart(self, whole: Tensor) -> Tensor:
        assert isinstance(self.part, slice)
        dims, at = whole.shape.dims, whole.shape.index(self.stack)
        few = Dim(self.stack, dims[at].size // self.part.step)
        return reshape(whole, [*dims[:at], few, Dim(self._phase, self.part.step), *dims[at + 1 :]])

    @property
    def _phase(self) -> str:
        return f"{self.stack}_phase"

    @property
    def _place(self) -> Tensor:
        assert isinstance(self.part, slice)
        place: Tensor = self.graph.apply(Constant(self.part.start, "int32"))
        return place
