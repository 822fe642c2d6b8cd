"""Contractions by dimension name."""

from __future__ import annotations

import math
import string
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType, Work
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.kinds import Move, align, all_parallel, joined, listing, same_dtype


@dataclass(frozen=True)
class Einsum(Op):
    """Multiplies the inputs and sums out every dimension that `output` does not keep.

    Attributes:
      needed: the share of its FLOPs that the model needs: not those of a factor of ones and zeros that only
        selects, of an expert's empty places, and of pairs that a mask hides.
    """

    output: Shape
    needed: float = 1.0
    kind: ClassVar[str] = "matmul"

    def roles(self, *inputs: TensorType) -> Roles:
        everything = joined("einsum", inputs)
        kept = tuple(n for n in everything.names if n in self.output.names)
        return Roles(parallel=kept, reduced=tuple(n for n in everything.names if n not in kept))

    def infer(self, *inputs: TensorType) -> TensorType:
        everything = joined("einsum", inputs)
        for d in self.output:
            if d not in everything.dims:
                raise UserError(
                    f"einsum of {listing(inputs)}: no operand has the output dimension {d}; "
                    f"{known_names(d.name, everything.names)}"
                )
        return TensorType(self.output, same_dtype("einsum", inputs))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        letters = dict(zip(joined("einsum", at.inputs).names, string.ascii_letters, strict=False))
        terms = ["".join(letters[n] for n in t.shape.names) for t in at.inputs]
        return k.einsum(",".join(terms) + "->" + "".join(letters[n] for n in self.output.names), *slices)

    def flops(self, *local: TensorType) -> float:
        """One multiply and one add per point of the joint space and per pair of operands."""
        return 2.0 * joined("einsum", local).size * max(1, len(local) - 1)

    def describe(self) -> str:
        return f"{self.name}(output=[{' '.join(self.output.names)}])"

    def work(self, *local: TensorType) -> Work:
        return Work(self._product(local), self.flops(*local) * (1.0 - self.needed))

    def _product(self, local: Sequence[TensorType]) -> tuple[int, int, int, int] | None:
        if len(local) != 2:
            return None
        x, y = (set(t.shape.names) for t in local)
        out = set(self.output.names)
        size = {d.name: d.size for d in joined("einsum", local)}

        def prod(names: set[str]) -> int:
            return math.prod(size[n] for n in names)

        return prod(x & y & out), prod((x - y) & out), prod((y - x) & out), prod((x | y) - out)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        grads = []
        for i, x in enumerate(inputs):
            others = [t for j, t in enumerate(inputs) if j != i]
            found = set(dy.shape.names).union(*(t.shape.names for t in others))
            dx = einsum([dy, *others], [d for d in x.shape if d.name in found], needed=self.needed)
            grads.append(broadcast(dx, x.shape))
        return grads

    def unreduced(self, dim: Dim, inputs: Sequence[Tensor]) -> Tensor | None:
        return einsum(inputs, [dim, *self.output], needed=self.needed)

    def summand(self, dim: Dim, parts: Sequence[Tensor], constant: Sequence[bool]) -> Tensor | None:
        return self.unreduced(dim, parts) if self.distributes(constant) else None

    def distributes(self, constant: Sequence[bool]) -> bool:
        return constant.count(False) == 1


@dataclass(frozen=True)
class Broadcast(Move):
    """Repeats the input along the dimensions of `output` that it lacks, and orders its axes like `output`."""

    output: Shape

    def roles(self, *inputs: TensorType) -> Roles:
        return all_parallel(TensorType(self.output, inputs[0].dtype))

    def infer(self, *inputs: TensorType) -> TensorType:
        (x,) = inputs
        for d in x.shape:
            if d not in self.output.dims:
                raise UserError(
                    f"broadcast of {x} to [{self.output}]: the target has no dimension {d}; add it to the "
                    "target, or reduce x over it"
                )
        return TensorType(self.output, x.dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        shape = at.outputs[0].shape
        t = at.inputs[0].shape
        return k.broadcast_to(align(k, slices[0], t.names, shape.names, t.sizes), shape.sizes)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (einsum([dy], inputs[0].shape),)


def einsum(
    xs: Sequence[Tensor], output: Shape | Sequence[Dim], chooses: bool = False, needed: float = 1.0
) -> Tensor:
    """Multiplies `xs` by dimension name and sums out the dimensions that `output` lacks.

    Args:
      chooses: True if one of `xs` selects elements of another, as a look-up does: it has ones (or weights)
        and zeros. Such products run but do not count as FLOPs of the model.
      needed: the share of the FLOPs that counts, if not all elements of `xs` mean something.

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph, batch = mtf.Graph("product"), mtf.Dim("batch", 8)
      >>> d_model, d_ff = mtf.Dim("d_model", 4), mtf.Dim("d_ff", 16)
      >>> x = graph.input("x", [batch, d_model], "float32")
      >>> w = graph.variable("w", [d_model, d_ff], mtf.Normal(0.1))
      >>> print(mtf.einsum([x, w], [batch, d_ff]).shape)
      batch:8 d_ff:16
    """
    if not xs:
        raise UserError("einsum: found no operands; pass at least one tensor")
    shape = Shape(output)
    if len(xs) == 1 and xs[0].shape == shape:
        return xs[0]
    return xs[0].graph.apply(Einsum(shape, 0.0 if chooses else needed), *xs)


def broadcast(x: Tensor, output: Shape | Sequence[Dim]) -> Tensor:
    """Repeats x along the dimensions that it lacks, in the order of `output`."""
    shape = Shape(output)
    return x if x.shape == shape else x.graph.apply(Broadcast(shape), x)
