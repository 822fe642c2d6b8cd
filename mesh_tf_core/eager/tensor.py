"""Tensors that hold their value, one piece on every device."""

from typing import Any

import numpy as np

from mesh_tf_core.eager.machine import EagerMachine
from mesh_tf_core.engines.pieces import DevicePieces
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.tensor import Builder, Tensor

MANY = 64
"""Elements up to which a tensor is printed whole."""


class EagerTensor(Tensor):
    """A tensor of an eager step. `print` shows dimensions, dtype, splits and values.

    Attributes:
      graph: the step that computed it; machine: the devices that the step runs on.
      pieces: shards by device; None for values that a loop has not stored yet.
    """

    __slots__ = ("machine", "pieces")

    def __init__(self, graph: Builder, machine: EagerMachine, id: int, type: TensorType) -> None:
        super().__init__(graph, id, type, 0)
        self.machine = machine
        self.pieces: DevicePieces | None = None

    @property
    def layout(self) -> Layout:
        """The part of the layout that splits this tensor."""
        rules = self.machine.layout
        return Layout({n: rules.axes(n) for n in self.shape.names})

    def numpy(self) -> Any:
        """The whole array."""
        return self.machine.joined(self._held(), self.type)

    def shards(self) -> dict[tuple[int, ...], Any]:
        """Every device's piece: coordinates on the mesh, in the order of its axes -> array."""
        mesh = self.machine.mesh
        return {tuple(mesh.coordinates(rank).values()): np.array(x) for rank, x in enumerate(self._held())}

    def _held(self) -> DevicePieces:
        assert self.pieces is not None, f"{self!r} was not computed"
        return self.pieces

    def _scalar(self) -> Any:
        if self.shape.size != 1:
            raise UserError(
                f"{self!r} has {self.shape.size} elements, so it cannot be converted to one number or bool; "
                "reduce it first (mtf.reduce_any, mtf.reduce_all, mtf.reduce_max, …) or call .numpy()"
            )
        return self.numpy().item()

    def __float__(self) -> float:
        return float(self._scalar())

    def __int__(self) -> int:
        return int(self._scalar())

    def __bool__(self) -> bool:
        return bool(self._scalar())

    def __repr__(self) -> str:
        return f"Tensor(%{self.id} {self.machine.value(self.type)})"

    def __str__(self) -> str:
        title = str(self.machine.value(self.type))
        array = self.numpy()
        if not self.shape:
            return f"{title} {float(array):.6g}" if is_float(self.dtype) else f"{title} {array}"
        shown = np.array2string(array, threshold=MANY, edgeitems=2, precision=4, suppress_small=True)
        return f"{title} on mesh {self.machine.mesh}{_summary(array)}\n{shown}"


def _summary(array: Any) -> str:
    """Smallest, mean and largest element of many numbers, and how many are not finite."""
    if array.size <= MANY or array.dtype == bool:
        return ""
    finite = np.isfinite(array.astype(np.float64))
    good = array[finite].astype(np.float64)
    text = f", min {good.min():.4g}, mean {good.mean():.4g}, max {good.max():.4g}" if good.size else ""
    return text if finite.all() else f"{text}, {int((~finite).sum())} of {array.size} not finite"
