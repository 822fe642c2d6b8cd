"""The places of a model that may be laid out otherwise, and how.

A place is a scope without inner scopes, or an operation outside these; backward belongs to its forward
operation, and a variable to its scope. The state that a loop carries is a place too: the loop's own. Two
places are adjacent if one reads results of the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.layout import Axes, Layout, within
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.tracing.graph import Graph

DEEPEST = 99


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
      of: node -> the path of its place.
      meet: ordered pairs of places, one of which reads results of the other.
    """

    by_path: Mapping[str, ModelPlace]
    of: Mapping[int, str]
    meet: frozenset[tuple[str, str]]

    def near(self, path: str) -> list[str]:
        """The places adjacent to one."""
        return [two if one == path else one for one, two in self.meet if path in (one, two)]

    def moves(self, mesh: Mesh) -> Iterator[AxisMove]:
        """Every move in every place."""
        for path, place in self.by_path.items():
            for axis in mesh.names:
                if mesh.size(axis) > 1:
                    yield from (AxisMove(path, axis, to) for to in (None, *place.dims))


def places(graph: Graph, depth: int = DEEPEST) -> ModelPlaces:
    """The places of the graph of a training step; `depth`: scopes with this many names are whole places."""
    return graph.remembered((places, depth), lambda: _Finder(graph, depth).found())


def levels(graph: Graph) -> list[ModelPlaces]:
    """The places of every depth, the largest first; places of several depths occur once."""
    deepest = max((n.scope.count("/") + 1 for n, _ in graph.walk() if n.scope), default=1)
    every = [places(graph, depth) for depth in range(1, deepest + 1)]
    return [
        here for i, here in enumerate(every) if i == 0 or here.by_path.keys() != every[i - 1].by_path.keys()
    ]


def without(layout: Layout, *paths: str) -> Layout:
    """A layout less its rules of some places."""
    return layout.refined_by({p: dict(rules) for p, rules in layout.refined if p not in paths})


def regions(layout: Layout, graph: Graph) -> list[tuple[str, ...]]:
    """The places with rules of their own; adjacent places form one region."""
    found, root = places(graph), {path: path for path, _ in layout.refined}

    def around(path: str) -> str | None:
        here = max((part for part in root if within(path, part)), key=len, default=None)
        while here is not None and root[here] != here:
            here = root[here]
        return here

    for one, other in sorted(found.meet):
        here, there = around(one), around(other)
        if here is not None and there is not None:
            root[there] = here
    joined: dict[str | None, list[str]] = defaultdict(list)
    for path in root:
        joined[around(path)].append(path)
    return [tuple(paths) for paths in joined.values()]


class _Finder:
    def __init__(self, graph: Graph, depth: int) -> None:
        self.graph, self.depth = graph, depth
        self.nodes = [n for n, _ in graph.walk() if not _outside(n)]
        scopes = {n.scope for n in self.nodes if n.phase == Phase.FORWARD}
        self.leaves = {s for s in scopes if s and not any(o.startswith(f"{s}/") for o in scopes)}
        self.forward = {self._path(n) for n in self.nodes if n.phase == Phase.FORWARD}
        self.counted = {b.dim.name for b in graph.blocks if b.dim is not None}
        self.origins: dict[int, set[str]] = defaultdict(set)
        self.meet: set[tuple[str, str]] = set()

    def found(self) -> ModelPlaces:
        dims: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
        of: dict[int, str] = {}
        for node in self.nodes:
            path = self._path(node)
            if path not in self.forward:
                continue
            of[node.index] = path
            for t in (*node.inputs, *self._made(node)):
                for d in self.graph.tensor(t).shape:
                    if d.name not in self.counted and d.size > 1:
                        dims[path][d.name].add(d.size)
        for _ in range(2):  # what a loop carries is known when its body has been seen
            self._visit(self.graph.blocks[0])
        known = {
            path: ModelPlace(path, {n: frozenset(sizes) for n, sizes in found.items()})
            for path, found in dims.items()
        }
        return ModelPlaces(known, of, frozenset(p for p in self.meet if p[0] in known and p[1] in known))

    def _path(self, node: Node) -> str:
        names = node.scope.split("/")
        if len(names) >= self.depth and node.scope:
            return "/".join(names[: self.depth])
        return node.scope if node.scope in self.leaves else node.path

    def _made(self, node: Node) -> tuple[int, ...]:
        """What a node makes itself: a loop, its final carries."""
        return node.outputs if node.body is None else node.outputs[: len(node.body.carry_in)]

    def _visit(self, block: Block) -> None:
        for node in block.nodes:
            if _outside(node) and not node.op.converts:
                continue
            path, body = self._path(node), node.body
            if node.op.converts:
                self.origins[node.outputs[0]] |= self.origins[node.inputs[0]]
                continue
            self._met(path, node.inputs)
            if body is None:
                for o in node.outputs:
                    self.origins[o].add(path)
                continue
            for outer, inner in body.sliced:
                self.origins[inner] |= self.origins[outer]
            for inner in body.carry_in:
                self.origins[inner].add(path)
            self._visit(body)
            self._met(path, body.carry_out)
            for outer in self._made(node):
                self.origins[outer].add(path)
            for inner, outer in (*body.stacked, *body.summed, *body.saved.items()):
                self.origins[outer] |= self.origins[inner]

    def _met(self, path: str, tensors: Iterable[int]) -> None:
        for tensor in tensors:
            for other in self.origins[tensor] - {path}:
                self.meet.add((min(path, other), max(path, other)))


def _outside(node: Node) -> bool:
    """Whether no rule is about a node: it is placed as a variable, an input or what it converts."""
    return node.phase == Phase.UPDATE or node.op.converts or isinstance(node.op, Read | Assign | Feed)
