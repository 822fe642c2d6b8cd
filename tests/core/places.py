"""The places of a model that may be laid out otherwise, and how.

A place is a scope without inner scopes, or an operation outside these; backward belongs to its forward
operation, and a variable to its scope. The state that a loop carries is a place too: the loop's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.ir.blocks import Assign, Feed, Node, Read
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class ModelPlace:
    """A part of a model.

    Attributes:
      path: as a layout's rules name it.
      dims: name -> sizes, of the dimensions that may be placed otherwise there.
    """

    path: str
    dims: Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class AxisMove:
    """One mesh axis, in one place, off every dimension and on another one; or on none."""

    path: str
    axis: str
    to: str | None

    def of(self, place: ModelPlace, layout: Layout, mesh: Mesh, allowed: SearchSpace) -> Layout | None:
        """The layout with it; None where that changes nothing, does not divide, or is not allowed."""
        here, rules = layout.at(place.path), dict[str, Axes]()
        if self.axis in allowed.apart:
            return None
        if self.to is not None and self.axis in allowed.forbid.get(self.to, ()):
            return None
        for name, sizes in place.dims.items():
            wanted = {*here.axes(name)} - {self.axis} | ({self.axis} if name == self.to else set())
            if wanted != {*here.axes(name)}:
                rules[name] = tuple(a for a in mesh.names if a in wanted)
                if name in allowed.pins or any(size % mesh.group_size(rules[name]) for size in sizes):
                    return None
        return placed(layout, place.path, rules) if rules else None


def placed(layout: Layout, path: str, rules: Mapping[str, Axes]) -> Layout:
    """A layout with other rules in one place, less those there that change nothing."""
    parts = {part: dict(found) for part, found in layout.refined}
    here = {**parts.pop(path, {}), **rules}
    without = layout.refined_by(parts)
    around = without.at(path)
    here = {name: axes for name, axes in here.items() if axes != around.axes(name)}
    return layout.refined_by({**parts, path: here})


@dataclass(frozen=True)
class ModelPlaces:
    """All places of a graph.

    Attributes:
      by_path: the places.
    """

    by_path: Mapping[str, ModelPlace]

    def moves(self, mesh: Mesh) -> Iterator[AxisMove]:
        """Every move in every place."""
        for path, place in self.by_path.items():
            for axis in mesh.names:
                if mesh.size(axis) > 1:
                    yield from (AxisMove(path, axis, to) for to in (None, *place.dims))


def places(graph: Graph) -> ModelPlaces:
    """The places of the graph of a training step."""
    return _Finder(graph).found()


class _Finder:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.nodes = [n for n, _ in graph.walk() if not _outside(n)]
        scopes = {n.scope for n in self.nodes if n.phase == Phase.FORWARD}
        self.leaves = {s for s in scopes if s and not any(o.startswith(f"{s}/") for o in scopes)}
        self.forward = {self._path(n) for n in self.nodes if n.phase == Phase.FORWARD}
        self.counted = {b.dim.name for b in graph.blocks}

    def found(self) -> ModelPlaces:
        dims: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        for node in self.nodes:
            path = self._path(node)
            if path not in self.forward:
                continue
            # What a loop makes itself: its final carries.
            made = node.outputs if node.body is None else node.outputs[: len(node.body.carry_in)]
            for t in (*node.inputs, *made):
                for d in self.graph.tensor(t).shape:
                    if d.name not in self.counted and d.size > 1:
                        dims[path][d.name].add(d.size)
        return ModelPlaces(
            {
                path: ModelPlace(path, {n: frozenset(sizes) for n, sizes in found.items()})
                for path, found in dims.items()
            }
        )

    def _path(self, node: Node) -> str:
        return node.scope if node.scope in self.leaves else node.path


def _outside(node: Node) -> bool:
    """Whether no rule is about a node: it is placed as a variable, an input or what it converts."""
    return node.phase == Phase.UPDATE or node.op.converts or isinstance(node.op, Read | Assign | Feed)
