"""The base class of operations: one class, five facets.

`roles` is the only statement about distribution. Legality, lowering, collectives, bytes and memory are read
off it.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import itemsize

if TYPE_CHECKING:
    from mesh_tf_core.kernels.protocol import At, Kernel
    from mesh_tf_core.tracing.tensor import Tensor


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and dtype of a tensor, or of the piece on one device."""

    shape: Shape
    dtype: str

    @property
    def bytes(self) -> int:
        return self.shape.size * itemsize(self.dtype)

    def __str__(self) -> str:
        return f"{self.dtype}[{self.shape}]"


@dataclass(frozen=True, slots=True)
class Roles:
    """What splitting each dimension of an operation means.

    Attributes:
      parallel: a device that holds the matching pieces of the inputs computes its piece of the outputs.
      reduced: dimensions that the output does not have; a device that holds a piece computes a partial
        result, and partial results are joined by `combine` ("sum", "max" or "min").
      whole: name -> reason; every device needs all of this dimension, so a split input is gathered first.
    """

    parallel: tuple[str, ...] = ()
    reduced: tuple[str, ...] = ()
    combine: str = "sum"
    whole: dict[str, str] = field(default_factory=dict)


class Op:
    """One operation. Subclasses are frozen dataclasses and must define every facet, else the import fails."""

    FACETS: ClassVar = ("roles", "infer", "kernel", "flops", "gradient")
    kind: ClassVar[str] = "elementwise"
    """How the work is priced: matmul, elementwise, reduce, gather, random or data (moves bytes only)."""
    free: ClassVar[bool] = False
    """True if the output is the input under another name (or a scalar): no time, no memory of its own."""
    linear: ClassVar[bool] = False
    """True if a sum of partial inputs may wait until after the operation (jointly in all its inputs)."""

    streams: ClassVar[bool] = False
    """True if a kernel may do it piece by piece between the product that makes its operand and the one that
    reads its result, and write neither (attention: Dao et al. 2022, "FlashAttention")."""

    def __init_subclass__(cls, abstract: bool = False, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        missing = [f for f in cls.FACETS if getattr(cls, f) is getattr(Op, f)]
        if missing and not abstract:
            raise TypeError(f"operation {cls.__name__} lacks the facets {', '.join(missing)}")

    regroups: ClassVar[bool] = False
    """True if an axis may split one dimension of an input and another of the output."""

    @property
    def name(self) -> str:
        """Short name in programs and reports."""
        return type(self).__name__.lower()

    def roles(self, *inputs: TensorType) -> Roles:
        """The role of every dimension."""
        raise NotImplementedError

    def infer(self, *inputs: TensorType) -> TensorType | tuple[TensorType, ...]:
        """Type of the output (several: a tuple), or a UserError that lists the operands."""
        raise NotImplementedError

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        """What one device does with its slices; `at` knows local sizes and where the slices begin."""
        raise NotImplementedError

    def flops(self, *local: TensorType) -> float:
        """Floating-point operations on inputs of the given local sizes."""
        raise NotImplementedError

    def moved(self, inputs: Sequence[TensorType], outputs: Sequence[TensorType]) -> float:
        """Bytes that a device reads and writes, by default those of all operands and results.

        Args:
          inputs, outputs: types of the local pieces.
        """
        return float(sum(t.bytes for t in (*inputs, *outputs)))

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        """Gradient with respect to every input (None: not differentiable), built from operations."""
        raise NotImplementedError

    def contraction(self, *local: TensorType) -> tuple[int, int, int, int] | None:
        """(batch, m, n, k) of the matrix product that this operation is, or None."""
        return None

    def expand(self, *inputs: Tensor) -> Tensor | None:
        """The same result from smaller operations, used when a `whole` dimension is split; None: gather
        instead."""
        return None

    @classmethod
    def expands(cls) -> bool:
        return cls.expand is not Op.expand

    def describe(self) -> str:
        """Name and parameters in one line, for programs."""
        fields = inspect.signature(type(self)).parameters
        text = ", ".join(f"{n}={_brief(getattr(self, n))}" for n in fields if hasattr(self, n))
        return f"{self.name}({text})" if text else self.name


def _brief(value: Any) -> str:
    if isinstance(value, Shape):
        return "[" + " ".join(value.names) + "]"
    if isinstance(value, tuple):
        return "(" + " ".join(map(_brief, value)) + ")"
    return getattr(value, "name", None) or str(value)
