"""Memory rows of the integer program: what every point of a step holds, as tables over the decisions.

A row counts the values that live at a point under any layout: variables, optimizer state, saved activations, gradients,
temporaries. Copies that only some layouts need (operands gathered whole) are not in it, so it never forbids a layout that fits;
`mesh_search` checks the exact peak of what the solver returns.

  variable v       as stored at its stage                                                 decisions: its dims, its class
  gradient of v    from stage 2 on as the state is split, from stage 1 on while v is updated                     likewise
  part of v        a layer's piece or a cast: from stage 3 on as the state is split                              likewise
  gathered v       a whole copy from stage 3 on, from its first reader to its last                               likewise
  update of v      from stage 1 on as the state is split                                                         likewise
  saved by a loop  gone when the loop is recomputed                                        its dims, the loop's recompute
  anything else    as the layout says                                                                            its dims
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from costmodels.memory import Alive, alive
from layoutopt.coupling import Coupling
from layoutopt.decisions import Choice, Decisions, recompute_name, storage_class
from layoutopt.problem import Entry, Row, Sparse
from layoutopt.tables import assignments
from mesh_tf_core.dims import Shape
from mesh_tf_core.dtypes import itemsize
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.graph import Graph
from mesh_tf_core.lower.storage import shard_layout, stage_number
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.program import Program, Value
from mesh_tf_core.structure import Variable

Key = TypeVar("Key", bound=Hashable)
Share = tuple[tuple[int, ...], np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """What a value's bytes depend on.

    Attributes:
      names: its dimensions.
      variable: the variable whose storage class matters, with the stage from which it is split further.
      loop: the recompute decision that makes it disappear.
      gathered: a whole copy that exists only from the stage on.
    """

    names: tuple[str, ...]
    variable: str | None = None
    stage: int = 0
    loop: str | None = None
    gathered: bool = False


def rows(
    graph: Graph,
    program: Program,
    decided: Decisions,
    names: Sequence[str],
    coupling: Coupling,
    memory: float,
) -> Iterator[Row]:
    """One row for every point of `program` (lowered with nothing split) that no other point dominates.

    Args:
      names: the decisions with a choice, in the order of the problem's variables.
    """
    yield from _Rows(graph, program, decided, names, coupling).rows(memory)


class _Rows:
    def __init__(
        self,
        graph: Graph,
        program: Program,
        decided: Decisions,
        names: Sequence[str],
        coupling: Coupling,
    ) -> None:
        self.graph, self.program, self.decided, self.coupling = graph, program, decided, coupling
        self.mesh: Mesh = program.mesh
        self.number = {n: i for i, n in enumerate(names)}
        self.saved = {
            outer: recompute_name(b.dim.name) for b in graph.blocks if b.dim for outer in b.saved.values()
        }
        for block in graph.blocks:
            self.saved.update(
                {inner: self.saved[outer] for outer, inner in block.sliced if outer in self.saved}
            )
        self.origin = {o: i.origin for i, _ in program.walk() for o in i.outputs}
        self._shares: dict[tuple[Kind, Shape], Share] = {}

    def rows(self, memory: float) -> Iterator[Row]:
        base: Counter[tuple[Kind, Shape, str]] = Counter()
        for stored in self.program.variables.values():
            v = stored.variable
            owner, stage = (v.slot_of, 1) if v.slot_of else (v.name, 3)
            base[Kind(v.shape.names, owner if self._classed(owner) else None, stage), v.shape, v.dtype] += 1
        points: list[tuple[str, Counter[tuple[Kind, Shape, str]]]] = []
        trace = alive(self.program)
        gathered = self._gathered(trace)
        for point in trace:
            updating = point.scope if point.phase == "update" else None
            held = base + Counter(self._kind(self.program.values[i], updating) for i in point.values)
            held.update(gathered[point.position])
            points.append((f"memory at {point.name} #{point.position}", held))
        kept = undominated(points)
        for name, held in kept:
            sizes: Counter[tuple[Kind, Shape]] = Counter()
            for (kind, shape, dtype), count in held.items():
                unit = Shape(d for d in shape) if kind.variable else Shape()
                sizes[kind, unit] += count * itemsize(dtype) * (1 if kind.variable else shape.size)
            yield Row(name, memory, tuple(self._entry(k, s, n) for (k, s), n in sizes.items()))

    def _gathered(self, trace: Sequence[Alive]) -> list[list[tuple[Kind, Shape, str]]]:
        """For every point the gathered copies of variables: from the first to the last reader in their block."""
        found: list[list[tuple[Kind, Shape, str]]] = [[] for _ in trace]
        runs: dict[int, list[int]] = {}
        for point in trace:
            runs.setdefault(point.node, []).append(point.position)
        for name, variable in self.graph.variables.items():
            if not self._classed(name):
                continue
            for (_, tensor), readers in self.coupling.homes(name).items():
                positions = [p for r in readers for p in runs.get(r.index, ())]
                t = self.graph.tensor(tensor)
                kind = Kind(t.shape.names, variable.name, 3, gathered=True)
                for position in range(min(positions, default=0), max(positions, default=-1) + 1):
                    found[position].append((kind, t.shape, t.dtype))
        return found

    def _classed(self, name: str | None) -> bool:
        variable = self.graph.variables.get(name or "")
        return variable is not None and storage_class(variable) in self.decided.classes

    def _kind(self, value: Value, updating: str | None) -> tuple[Kind, Shape, str]:
        names = value.shape.names
        origin = self.origin.get(value.id)
        part_of = self.coupling.owner.get(value.tensor)
        if part_of is not None and self._classed(part_of):
            return Kind(names, part_of, 3), value.shape, value.dtype
        owner = self.graph.gradient_of.get(value.tensor)
        if owner is not None and self._classed(owner):
            return Kind(names, owner, 1 if owner == updating else 2), value.shape, value.dtype
        if origin is not None and origin.phase == "update" and self._classed(origin.scope) and names:
            return Kind(names, origin.scope, 1), value.shape, value.dtype
        return Kind(names, loop=self.saved.get(value.tensor)), value.shape, value.dtype

    def _entry(self, kind: Kind, shape: Shape, size: int) -> Entry:
        """Bytes for every assignment of the decisions that matter. `size`: bytes in all, or per element of `shape`."""
        if (kind, shape) not in self._shares:
            self._shares[kind, shape] = self._share(kind, shape)
        scope, listed, shares = self._shares[kind, shape]
        return Entry(scope, Sparse(listed, shares * (size * shape.size)))

    def _share(self, kind: Kind, shape: Shape) -> Share:
        """The part of the whole that a device holds, for every assignment."""
        variable = self.graph.variables[kind.variable] if kind.variable else None
        dims = variable.shape.names if variable else kind.names
        wanted = [*dims]
        if variable:
            wanted.append(storage_class(variable))
        if kind.loop:
            wanted.append(kind.loop)
        free = tuple(n for n in dict.fromkeys(wanted) if n in self.number)
        listed, values = [], []
        for assignment in assignments(free, [dims], self.decided.options):
            chosen = dict(zip(free, assignment, strict=True))
            found = self._held(kind, variable, shape, chosen)
            if found is not None:
                listed.append([self.decided.options[n].index(c) for n, c in chosen.items()])
                values.append(found)
        rows = np.array(listed, np.int64).reshape(len(listed), len(free))
        return tuple(self.number[n] for n in free), rows, np.array(values, float)

    def _held(
        self, kind: Kind, variable: Variable | None, shape: Shape, chosen: Mapping[str, Choice]
    ) -> float | None:
        if kind.loop and chosen.get(kind.loop):
            return 0.0
        layout = self.decided.read(chosen)[0]
        if variable is None:
            return 1.0 / self.mesh.group_size(a for n in kind.names for a in layout.axes(n))
        stage = chosen.get(storage_class(variable), ())
        split = bool(stage) and stage_number(stage[0]) >= kind.stage
        try:
            further = shard_layout(variable, layout, self.mesh) if split else layout
            if kind.gathered and further.splits(variable.shape, "") == layout.splits(variable.shape, ""):
                return 0.0
            if not kind.gathered:
                layout = further
            splits = layout.splits(shape, "value")
        except LayoutError:
            return None
        return 1.0 / self.mesh.group_size(a for axes in splits for a in axes)


def undominated(points: Sequence[tuple[str, Counter[Key]]]) -> list[tuple[str, Counter[Key]]]:
    """The points that hold something which no other single point holds as well."""
    order = {key: i for i, key in enumerate({k: None for _, held in points for k in held})}
    counts = np.zeros((len(points), len(order)), np.int64)
    for row, (_, held) in enumerate(points):
        for key, count in held.items():
            counts[row, order[key]] = count
    kept: list[int] = []
    for row in np.argsort(-counts.sum(axis=1), kind="stable"):
        if not (counts[kept] >= counts[row]).all(axis=1).any():
            kept.append(int(row))
    return [points[row] for row in kept]
