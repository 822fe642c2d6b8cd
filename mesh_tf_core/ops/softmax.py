"""Softmax, log-sum-exp and cross-entropy, also where their dimension is split over the mesh."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float, itemsize
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import cast, stop_gradient
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.einsum import einsum
from mesh_tf_core.ops.index import Pick, local_ids
from mesh_tf_core.ops.kinds import (
    AlongWhole,
    Elementwise,
    FirstDerivative,
    Reduction,
    aligned,
    dim_name,
    listing,
)
from mesh_tf_core.ops.math import exp, is_finite, log, maximum
from mesh_tf_core.ops.reduce import reduce_max, reduce_sum


def _check(op: str, dim: str, x: TensorType) -> None:
    x.shape.index(dim)
    if not is_float(x.dtype):
        raise UserError(
            f"{op} of {x}: the tensor must have a float dtype; cast it first, e.g. with .cast('float32')"
        )


@dataclass(frozen=True)
class Softmax(AlongWhole, Reduction):
    """exp(x) / sum(exp(x)) along one dimension."""

    why: ClassVar[str] = "every element is divided by the sum over the whole dimension"
    element_flops: ClassVar[float] = 12.0

    def infer(self, *inputs: TensorType) -> TensorType:
        _check("softmax", self.dim, inputs[0])
        return inputs[0]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.softmax(slices[0], at.inputs[0].shape.index(self.dim))

    def expand(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        x, dtype = _wide(x), x.dtype
        e = exp(x - reduce_max(x, self.dim))
        return (e / reduce_sum(e, self.dim)).cast(dtype)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(SoftmaxGrad(self.dim), dy, output),)


@dataclass(frozen=True)
class SoftmaxGrad(FirstDerivative, AlongWhole, Reduction):
    """y (dy - sum(y dy)) for the softmax y."""

    why: ClassVar[str] = "the gradient subtracts a sum over the whole dimension"

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[1]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        dy, y = aligned(k, at, slices)
        axis = at.outputs[0].shape.index(self.dim)
        sizes = [1 if i == axis else s for i, s in enumerate(at.outputs[0].shape.sizes)]
        inner = k.reshape(k.reduce("sum", k.binary("mul", dy, y), [axis]), sizes)
        return k.binary("mul", y, k.binary("sub", dy, inner))

    def flops(self, *local: TensorType) -> float:
        return 4.0 * local[1].shape.size

    def expand(self, *inputs: Tensor) -> Tensor:
        dy, y = inputs
        return y * (dy - einsum([dy, y], y.shape.without(self.dim)))


@dataclass(frozen=True)
class LogSumExp(AlongWhole, Reduction):
    """log(sum(exp(x))) along one dimension, which disappears."""

    why: ClassVar[str] = "the sum runs over the whole dimension"
    element_flops: ClassVar[float] = 11.0

    def infer(self, *inputs: TensorType) -> TensorType:
        _check("logsumexp", self.dim, inputs[0])
        return TensorType(inputs[0].shape.without(self.dim), inputs[0].dtype)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return k.logsumexp(slices[0], at.inputs[0].shape.index(self.dim))

    def expand(self, *inputs: Tensor) -> Tensor:
        (x,) = inputs
        x, dtype = _wide(x), x.dtype
        top = reduce_max(x, self.dim)
        # Of infinities nothing can be subtracted; then the sum is one, or nothing.
        top = where(is_finite(top), top, 0.0)
        return (log(reduce_sum(exp(x - top), self.dim)) + top).cast(dtype)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (exp(inputs[0] - output) * dy,)


@dataclass(frozen=True)
class CrossEntropy(AlongWhole, Reduction):
    """logsumexp - logits[target] from (logits, target ids, logsumexp of the logits).

    The logits get the whole gradient, softmax(logits) - one_hot(target), and the log-sum-exp none, so one
    pass over the logits suffices and a device stores only its own part of them.
    """

    why: ClassVar[str] = "the target's logit may be anywhere in the dimension"
    kind: ClassVar[str] = "gather"

    def infer(self, *inputs: TensorType) -> TensorType:
        logits, targets, lse = inputs
        _check("cross_entropy", self.dim, logits)
        if set(targets.shape.dims) != set(logits.shape.without(self.dim).dims):
            raise UserError(
                f"cross_entropy of {listing(inputs)}: the targets must have the dimensions of the logits "
                f"except {self.dim!r}"
            )
        return lse

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        logits, targets, lse = slices
        return k.binary("sub", lse, Pick(self.dim).kernel(k, at, logits, targets))

    def flops(self, *local: TensorType) -> float:
        return 4.0 * local[1].shape.size

    def labels(self, *inputs: TensorType) -> tuple[int, Dim, bool]:
        return 1, inputs[0].shape.dim(self.dim), False

    def expand(self, *inputs: Tensor) -> Tensor:
        logits, targets, lse = inputs
        return lse - logits.graph.apply(Pick(self.dim), logits, targets)

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return (dy.graph.apply(CrossEntropyGrad(self.dim), inputs[0], inputs[1], inputs[2], dy), None, None)


@dataclass(frozen=True)
class CrossEntropyGrad(FirstDerivative, Elementwise):
    """(softmax(logits) - one_hot(targets)) * dy from (logits, targets, logsumexp, dy)."""

    dim: str
    of: ClassVar[str] = "cross_entropy"
    element_flops: ClassVar[float] = 12.0

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        logits, targets, lse, dy = aligned(k, at, slices)
        shape, others = at.outputs[0].shape, at.outputs[0].shape.without(self.dim).sizes
        axis = shape.index(self.dim)
        p = k.exp_less(logits, lse, axis, self.dim not in at.split)
        place, inside = local_ids(k, at, k.reshape(targets, others), self.dim, shape.sizes[axis])
        target = k.unary("neg", k.cast(inside, at.outputs[0].dtype))
        return k.binary("mul", k.add_at(p, target, place, axis), dy)


def _wide(x: Tensor) -> Tensor:
    """x with sums in mind: those of 16 bits would lose small terms."""
    return cast(x, "float32") if itemsize(x.dtype) == 2 else x


def softmax(x: Tensor, dim: Dim | str, extra_logit: Tensor | float | None = None) -> Tensor:
    """exp(x) / sum(exp(x)) along `dim`, which may be split; `extra_logit` adds its exponential to the sum."""
    if extra_logit is not None:
        return exp(log_softmax(x, dim, extra_logit))
    return x.graph.apply(Softmax(dim_name(dim)), x)


def logsumexp(x: Tensor, dim: Dim | str, extra_logit: Tensor | float | None = None) -> Tensor:
    """log(sum(exp(x))) along `dim`, which disappears; `extra_logit` counts as one more element."""
    total: Tensor = x.graph.apply(LogSumExp(dim_name(dim)), x)
    if extra_logit is None:
        return total
    top = stop_gradient(maximum(total, extra_logit))
    return top + log(exp(total - top) + exp(extra_logit - top))


def log_softmax(x: Tensor, dim: Dim | str, extra_logit: Tensor | float | None = None) -> Tensor:
    """x - logsumexp(x) along `dim`."""
    return x - logsumexp(x, dim, extra_logit)


def masked_softmax(
    x: Tensor, mask: Tensor | None, dim: Dim | str, extra_logit: Tensor | float | None = None
) -> Tensor:
    """Softmax over the positions where `mask` is True (None: all); 0 at the other positions and in rows
    without any.
    """
    if mask is None:
        return softmax(x, dim, extra_logit)
    return where(mask, softmax(masked(x, mask), dim, extra_logit), 0.0)


_HIDDEN = {"float64": -1.7e308, "float16": -6.5e4}
"""The lowest numbers; of other dtypes, -3.3e38."""


def masked(logits: Tensor, mask: Tensor) -> Tensor:
    """The logits, and where `mask` is False the lowest number, which has no weight in any softmax with other
    numbers."""
    return where(mask, logits, _HIDDEN.get(logits.dtype, -3.3e38))


def softmax_cross_entropy(logits: Tensor, targets: Tensor, dim: Dim | str, z_loss: float = 0.0) -> Tensor:
    """-log softmax(logits)[target] for every position, computed in float32.

    Args:
      logits: [..., dim]; if `dim` is split, no device gathers it.
      targets: int32 [...], indices into `dim`.
      z_loss: weight of the squared log-sum-exp, which keeps logits near zero (Mesh-TensorFlow's z_loss).

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph, batch, vocab = mtf.Graph("loss"), mtf.Dim("batch", 8), mtf.Dim("vocab", 32)
      >>> logits = graph.input("logits", [batch, vocab], "float32")
      >>> print(mtf.softmax_cross_entropy(logits, graph.input("targets", [batch]), vocab).shape)
      batch:8
    """
    logits = cast(logits, "float32") if logits.dtype != "float64" else logits
    lse = logsumexp(logits, dim)
    loss = logits.graph.apply(CrossEntropy(dim_name(dim)), logits, targets, stop_gradient(lse))
    return loss + lse * lse * z_loss if z_loss else loss
