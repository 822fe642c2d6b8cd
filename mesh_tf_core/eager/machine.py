"""Runs single operations: each lowered alone under one mesh and layout, and run on every device at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh_tf_core.engines import prepare
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.engines.pieces import DevicePieces, per_device, region
from mesh_tf_core.errors import LayoutError, UserError, known_names
from mesh_tf_core.ir.blocks import Node, reads
from mesh_tf_core.ir.kernel import Kernel
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import Program, Value
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.lower.base import Lowering
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.placement import Placement
from mesh_tf_core.tracing.graph import Graph

KINDS = ("auto", "local", "lockstep")
KEPT = 4096
"""Number of cached lowered operations: code that multiplies by another number in every step makes new
ones."""


class PlacedEngine(LockstepEngine):
    """The lockstep engine with TensorFlow's kernels, every device's work on a device of TensorFlow's."""

    def __init__(self, program: Program, kernel: Kernel, devices: Sequence[str]) -> None:
        super().__init__(program, kernel)
        self.names = tuple(devices)

    def on(self, rank: int) -> AbstractContextManager[Any]:
        import tensorflow as tf

        return tf.device(self.names[rank])


@dataclass(frozen=True)
class LoweredOperation:
    """An operation lowered alone.

    Attributes:
      engine: of its program.
      inputs, outputs: (tensor id, value id).
    """

    engine: LockstepEngine
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...]

    def run(self, inputs: Sequence[DevicePieces]) -> list[DevicePieces]:
        """DevicePieces of the outputs."""
        env = {value: x for (_, value), x in zip(self.inputs, inputs, strict=True)}
        self.engine.run_code(self.engine.program.code, env, {}, {})
        return [env[value] for _, value in self.outputs]


class EagerMachine:
    """The devices of one mesh, and how tensors lie on them.

    Args:
      kind: `local` runs TensorFlow's kernels on this process's devices, `lockstep` NumPy's; `auto` is
        `local`.

    Attributes:
      sent: bytes that a device has sent so far, per mesh axis (axes that act together are joined by '+').
    """

    def __init__(self, mesh: Mesh, layout: Layout, kind: str) -> None:
        if kind not in KINDS:
            raise UserError(f"unknown eager engine {kind!r}; {known_names(kind, KINDS)}")
        for name, axes in layout.items():
            for axis in axes:
                if axis not in mesh.names:
                    raise LayoutError(
                        f"layout {layout}: {name!r} is split over {axis!r}, but mesh {mesh} has no axis "
                        f"of that name; {known_names(axis, mesh.names)}"
                    )
        self.mesh, self.layout, self.kind = mesh, layout, "local" if kind == "auto" else kind
        self.sent: dict[str, float] = dict.fromkeys(mesh.names, 0.0)
        self._open = LockstepEngine if kind == "lockstep" else self._tensorflow()
        self._rules = Lowering(Graph("placement"), Oracle(Placement(mesh, layout, {})))
        self._pieces = self._open(Program(mesh, layout, (), ()))
        self._known: dict[tuple[Op, tuple[TensorType, ...]], LoweredOperation] = {}

    def _tensorflow(self) -> Callable[[Program], LockstepEngine]:
        names = prepare(self.mesh.devices, "local")
        from mesh_tf_core.kernels.tf_kernel import TfKernel

        return lambda program: PlacedEngine(program, TfKernel(), names)

    # -- placement -------------------------------------------------------------------------------------------

    def value(self, type: TensorType, what: str = "") -> Value:
        """The splits that the layout gives a tensor; LayoutError if it cannot."""
        return Value(-1, type.shape, type.dtype, self._rules.natural(type.shape, what))

    def placed(self, array: Any, type: TensorType, what: str) -> DevicePieces:
        """A global array cut into every device's piece."""
        v, engine = self.value(type, what), self._pieces
        sizes, array = v.local(self.mesh).shape.sizes, np.asarray(array, np_dtype(type.dtype))
        ranks = range(self.mesh.devices)
        parts = per_device(v, self.mesh, ranks, lambda begin: np.array(array[region(begin, sizes)]))
        out = []
        for rank, part in zip(ranks, parts, strict=True):
            with engine.on(rank):
                out.append(engine.k.cast(part, type.dtype))
        return out

    def joined(self, pieces: DevicePieces, type: TensorType) -> Any:
        """The global array of all pieces."""
        return self._pieces.join(pieces, self.value(type))

    # -- operations ------------------------------------------------------------------------------------------

    def run(self, graph: Graph, node: Node, pieces: Callable[[int], DevicePieces]) -> dict[int, DevicePieces]:
        """Runs one node of block 0; returns the shards of its results, including a loop's saved values.

        Args:
          pieces: tensor id -> its shards.
        """
        if node.body is not None:
            found = self._alone(graph, node)
            ids = [tensor for tensor, _ in found.inputs]
        else:
            found, ids = self._cached(graph, node), list(node.inputs)
        engine = found.engine
        engine.communication_bytes = self.sent
        made = found.run([pieces(i) for i in ids])
        outputs = node.outputs if node.body is None else [tensor for tensor, _ in found.outputs]
        return dict(zip(outputs, made, strict=True))

    def _cached(self, graph: Graph, node: Node) -> LoweredOperation:
        """An operation without a body, lowered once for all inputs of the same types."""
        types = tuple(graph.tensor(i).type for i in node.inputs)
        key = node.op, types
        if key not in self._known:
            if len(self._known) >= KEPT:
                self._known.clear()
            scratch = Graph(node.op.name)
            scratch.apply(node.op, *(scratch.new_tensor(t, scratch.blocks[0]) for t in types))
            self._known[key] = self._alone(scratch, scratch.nodes[0])
        return self._known[key]

    def _alone(self, graph: Graph, node: Node) -> LoweredOperation:
        low = Lowering(graph, Oracle(Placement(self.mesh, self.layout, graph.variables)))
        outside = sorted(i for i in {*node.inputs, *reads(node)} if not graph.tensor(i).block)
        for i in outside if node.body is not None else node.inputs:
            t = graph.tensor(i)
            low.env[i] = low.new(t.type, low.natural(t.shape))
        inputs = tuple(low.env.items())
        low.node(node)
        outputs = tuple((o, low.env[o]) for o in dict.fromkeys(node.made))
        program = Program(self.mesh, self.layout, tuple(low.values), tuple(low.code))
        return LoweredOperation(self._open(program), inputs, outputs)
