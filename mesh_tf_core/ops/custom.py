"""Gradients that the model writes itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import StopGradient, constant_like, stop_gradient
from mesh_tf_core.ops.kinds import Move
from mesh_tf_core.ops.math import maximum, sqrt, square
from mesh_tf_core.ops.reduce import reduce_mean


@dataclass(frozen=True)
class LibraryKernels(Move):
    """The identity, which says what the kernels of a library move that make its operand, or the gradients
    that follow on it.

    Attributes:
      kernels: for each element bytes, FLOPs of products, steps that wait in turn, FLOPs of vector units.
    """

    kernels: tuple[tuple[float, float, int, float], ...]
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return [dy]

    def describe(self) -> str:
        return f"library({len(self.kernels)} kernels)"


GradientOf = Callable[[list["Tensor | None"], list["Tensor"], list["Tensor"]], "Sequence[Tensor | None]"]


@dataclass(frozen=True)
class CustomGradient(Move):
    """Returns the first `count` inputs; a function of the model computes the gradient, which goes to the
    others.

    The graph stores the function under this number. An operation with the function itself would keep the
    graph alive wherever operations are cached.
    """

    count: int
    function: int = field(compare=False)
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def roles(self, *inputs: TensorType) -> Roles:
        return Roles(parallel=tuple(dict.fromkeys(n for t in inputs[: self.count] for n in t.shape.names)))

    def infer(self, *inputs: TensorType) -> TensorType | tuple[TensorType, ...]:
        return inputs[0] if self.count == 1 else inputs[: self.count]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0] if self.count == 1 else slices[: self.count]

    def lower(self, low: Emitter, inputs: Sequence[int], types: Sequence[TensorType]) -> list[int]:
        """The values under other names, each separately."""
        pairs = zip(self.operands(inputs), types, strict=True)
        return [low.local(StopGradient(), [i], [t], [low.values[i].splits])[0] for i, t in pairs]

    def operands(self, inputs: Sequence[int]) -> Sequence[int]:
        return inputs[: self.count]

    def gradient(self, dy: Any, inputs: Sequence[Tensor], output: Any) -> Sequence[Tensor | None]:
        dys = [dy] if self.count == 1 else list(dy)
        ys = [output] if self.count == 1 else list(output)
        xs = list(inputs[self.count :])
        made: Any = inputs[0].graph.gradient_functions[self.function](dys, xs, ys)
        found = list(made) if isinstance(made, Sequence) else []
        if any(dx is not None and not isinstance(dx, Tensor) for dx in found):
            raise UserError(
                "custom_gradient: the gradient function must return a tensor or None for each input, found "
                f"{made!r}"
            )
        for x, dx in zip(xs, found, strict=False):
            if (dx is not None and dx.type.dtype != x.type.dtype) or (
                dx is not None and set(dx.shape) != set(x.shape)
            ):
                raise UserError(
                    f"custom_gradient: the gradient of {x!r} must have the same type as the input, found "
                    f"{dx!r}"
                )
        if len(found) != len(xs):
            raise UserError(
                f"custom_gradient: the gradient function must return {len(xs)} gradients, one for each "
                f"input, found {len(found)}: {made!r}; return a list or a tuple"
            )
        return [*[None] * self.count, *found]

    def describe(self) -> str:
        return f"custom_gradient({self.count})"


def custom_gradient(
    forward: Callable[..., Any], backward: GradientOf, inputs: Sequence[Tensor]
) -> Tensor | tuple[Tensor, ...]:
    """Computes forward(*inputs) and differentiates it by `backward` instead of by its operations.

    Args:
      forward: returns a tensor or a tuple of tensors.
      backward: backward(gradients of the outputs, inputs, outputs) -> one gradient per input (None: no
        gradient). A gradient of an output is None if nothing needs it. Tensors that `forward` reads besides
        its inputs get no gradient.
    """
    if not inputs:
        raise UserError("custom_gradient: found no inputs; pass at least one tensor")
    made = forward(*(stop_gradient(x) for x in inputs))
    ys = list(made) if isinstance(made, tuple) else [made]
    functions = inputs[0].graph.gradient_functions
    functions.append(backward)
    out: Any = inputs[0].graph.apply(CustomGradient(len(ys), len(functions) - 1), *ys, *inputs)
    return out if isinstance(made, tuple) and len(ys) > 1 else (out,) if isinstance(made, tuple) else out


def clip_activation_gradient(x: Tensor, clip_rms: float = 1.0) -> Tensor:
    """Returns x and limits the root mean square of its gradient to `clip_rms`."""
    if not clip_rms > 0:
        raise UserError(f"clip_activation_gradient: clip_rms must be positive, found {clip_rms}")

    def backward(dys: list[Tensor | None], xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        (dy,) = dys
        assert dy is not None  # else nothing would ask
        rms = sqrt(reduce_mean(square(dy)))
        return [dy * (constant_like(rms, clip_rms) / maximum(rms, clip_rms))]

    out: Tensor = custom_gradient(lambda t: t, backward, [x])  # type: ignore[assignment]
    return out
