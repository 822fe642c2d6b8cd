"""The work of kernels that a library has for many operations together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.kinds import Move


@dataclass(frozen=True)
class LibraryKernels(Move):
    """The identity, which says what a library's kernels move that make its operand, or the gradients that
    follow on it.

    Attributes:
      kernels: kernel by kernel, bytes and FLOPs for each element of the operand, and steps that wait for each
        other.
    """

    kernels: tuple[tuple[float, float, int], ...]
    free: ClassVar[bool] = True
    linear: ClassVar[bool] = True

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        return slices[0]

    def gradient(self, dy: Tensor, inputs: Sequence[Tensor], output: Tensor) -> Sequence[Tensor | None]:
        return [dy]

    def describe(self) -> str:
        return f"library({len(self.kernels)} kernels)"
