"""What a node holds besides its operands and results where dimensions are split along which it moves data:
gathered operands, pieces with their neighbours' borders.

The node alone is lowered under every split of these dimensions, and what is alive while its operation runs is
read off (`costmodels.liveness`). Other dimensions make all of it smaller in proportion. The exchange before
is not counted, nor what follows, which passes may move: this is a lower bound.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodels.liveness import alive
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import AllReduce, Local, Program, ReduceScatter
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.base import Lowering
from mesh_tf_core.tracing.graph import Graph

Holds = Mapping[tuple[str, ...], float]
"""Bytes (negative: of what is gone) of values, by the names of their dimensions that are not moved along."""


@dataclass(frozen=True)
class Moves:
    """A node that moves data along split dimensions. Equal ones hold the same.

    Attributes:
      types: of its operands and results.
      dying: which of its operands nothing reads later.
      counted: its results are counted where it runs.
      fuses: the compiler makes kernels of several operations.
      dims: the dimensions along which it moves data.
    """

    op: Op
    types: tuple[TensorType, ...]
    dying: tuple[bool, ...]
    counted: bool
    fuses: bool
    dims: tuple[str, ...]
    node: Node = field(compare=False, repr=False)

    @property
    def shapes(self) -> tuple[tuple[str, ...], ...]:
        return tuple(t.shape.names for t in self.types)

    def holds(self, graph: Graph, mesh: Mesh, splits: Mapping[str, Axes]) -> Holds:
        """What it holds where its dimensions are split over these axes and no others are; nothing if that is
        not legal."""
        try:
            low = _lowered(graph, mesh, self.node, splits)
        except LayoutError:
            return {}
        code = low.code
        ends = [i for i, instr in enumerate(code) if isinstance(instr, AllReduce | ReduceScatter)]
        runs = [i for i, instr in enumerate(code[: ends[0] if ends else None]) if isinstance(instr, Local)]
        if len(code) == 1 or not runs:
            return {}
        at = runs[-1]
        results = [low.env[o] for o in self.node.outputs]
        named = {f"result {i}": r for i, r in enumerate(results)}
        program = Program(mesh, low.layout, tuple(low.values), tuple(code), {}, {}, named, graph)
        found: Counter[tuple[str, ...]] = Counter()

        def count(value: int, times: int) -> None:
            v = program.values[value]
            found[tuple(n for n in v.shape.names if n not in self.dims)] += times * v.local_bytes(mesh)

        made = set(code[at].outputs)
        for value in alive(program, self.fuses)[at].values:
            if value not in made or self.counted:
                count(value, 1)
        if self.counted:
            for value in results:
                count(value, -1)
        read = set(code[at].inputs)
        for tensor, dies in dict(zip(self.node.inputs, self.dying, strict=True)).items():
            if low.env[tensor] not in read and (dies or _gathered(low, low.env[tensor])):
                count(low.env[tensor], -1)
        return {names: size for names, size in found.items() if size}


def moved_dims(graph: Graph, node: Node) -> tuple[str, ...]:
    """The dimensions along which a node moves data where they are split."""
    types = [graph.tensor(t).type for t in (*node.inputs, *node.outputs)]
    if node.op.free or (node.op.expands() and not node.op.lowers()):
        return ()
    if not node.op.lowers():
        return tuple(node.op.roles(*types[: len(node.inputs)]).whole)
    if len(_lowered(graph, Mesh([("device", 1)]), node, {}).code) > 1:
        return ()
    names = dict.fromkeys(n for t in types for n in t.shape.names)
    return tuple(n for n in names if _moves_along(graph, node, n, [t.shape for t in types]))


def _moves_along(graph: Graph, node: Node, name: str, shapes: list[Shape]) -> bool:
    least = min(shape.dim(name).size for shape in shapes if name in shape.names)
    ways = next((n for n in range(2, least + 1) if least % n == 0), 1)
    try:
        low = _lowered(graph, Mesh([("device", ways)]), node, {name: ("device",)})
    except LayoutError:
        return True
    return len([instr for instr in low.code if not isinstance(instr, AllReduce)]) > 1


def _lowered(graph: Graph, mesh: Mesh, node: Node, splits: Mapping[str, Axes]) -> Lowering:
    """One node, its operands given."""
    subgraph = Subgraph(frozenset({node.index}), frozenset())
    low = Lowering(graph, mesh, Layout({n: axes for n, axes in splits.items() if axes}), subgraph=subgraph)
    for tensor in node.inputs:
        low.value_of(tensor)
    low.node(node)
    return low


def _gathered(low: Lowering, value: int) -> bool:
    """Whether others may share a moved copy of a value, and not read it any more."""
    return any(source == value for source, _ in low.moved)
