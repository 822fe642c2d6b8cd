"""Memory rows of the integer program: the bytes at every point of a step (`memory_points`). Each value is a
table over the decisions of the cluster that computes it, read off that cluster's lowered program.

    use_t(x) = sum over the values h alive at t of bytes_h(x_c(h))

Decisions that do not affect a value are removed from its table, equal tables are merged, and a point that
never holds more than another is dropped. With recomputed loops other values are alive at other points, so
every set of recomputed loops has its own rows, which are 0 if the set is not chosen. Values that exist only
in some layouts, or only inside an operation, are not counted, so a row never forbids a layout that fits;
`lazy_cuts` adds them where needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layoutopt.formulation.held_bytes import HeldBytes, PointKey, undominated
from layoutopt.formulation.lifetimes import ClusterMemory
from layoutopt.formulation.memory_points import ProgramPoints
from layoutopt.formulation.outer_step_context import OuterStepContext
from layoutopt.formulation.shared import SharedContext
from layoutopt.formulation.tables import Table, Tabler
from layoutopt.solver import ResourceRow, RowTerm, Sparse
from layoutopt.space.decisions import Decisions
from layoutopt.space.recompute import RunsAgain, again_in


class MemoryConstraints:
    """The rows of one problem, for every set of loops that may run again.

    Args:
      names: the decisions with a choice, in the order of the problem's variables.
      tables: the priced clusters, over these decisions.
      meetings: outer steps of replicas.
    """

    def __init__(
        self,
        context: SharedContext,
        decided: Decisions,
        names: Sequence[str],
        tables: Sequence[Table],
        tabler: Tabler,
        meetings: Sequence[OuterStepContext] = (),
    ) -> None:
        self.context, self.dependencies = context, context.dependencies
        self.decided, self.names = decided, tuple(names)
        self.always = again_in(decided.read({})[1])
        self.rules = tabler.pricer.itemiser.compiler.memory
        self._bytes = _Bytes(context, decided, self.names, tables, tabler)
        self.met = Counter[RowTerm]()
        for meeting in meetings:
            met = _Bytes(meeting, decided, self.names, tables, meeting.tabler(tabler.mesh, tabler.pricer))
            self.met.update(filter(None, map(met.entry, meeting.variables())))
        self._made: dict[RunsAgain, tuple[ResourceRow, ...]] = {}
        self._scaled: dict[tuple[RowTerm, int], RowTerm] = {}

    def rows(self, again: RunsAgain = frozenset()) -> tuple[ResourceRow, ...]:
        """One row for every point of the step that no other point dominates; they hold nothing where a loop
        of `again` does not run again, or keeps something else. No limits are set."""
        again |= self.always
        if again not in self._made:
            points = self.context.points(again, self.rules)
            base = self._entries(points.variables()) + self.met
            entries, counts = self._counts(points)
            found = []
            for point in undominated(counts):
                held = Counter({entries[i]: int(counts[point, i]) for i in np.flatnonzero(counts[point])})
                found.append(self._only(self._row(points, point, base + held), again - self.always))
            self._made[again] = tuple(found)
        return self._made[again]

    def point(
        self, again: RunsAgain, node: int, phase: str, choices: Sequence[int]
    ) -> tuple[ResourceRow, dict[PointKey, float]] | None:
        """The row of the point at which a node runs, and its bytes under some choices besides the variables;
        None if there is no such point. (Of several, the one that holds most.)"""
        points = self.context.points(again | self.always, self.rules)
        found = []
        for point in points.running(node, phase):
            things = [*points.variables(), *(thing for _, thing in points.at(point))]
            found.append((self._row(points, point, self._entries(things) + self.met), point))
        if not found:
            return None
        row, at = max(found, key=lambda f: f[0].use(choices))
        counted: dict[PointKey, float] = {}
        for key, thing in points.at(at):
            entry = self._bytes.entry(thing)
            counted[key] = counted.get(key, 0.0) + (0.0 if entry is None else entry.use(choices))
        return self._only(row, again - self.always), counted

    def _counts(self, points: ProgramPoints) -> tuple[list[RowTerm], np.ndarray]:
        """Different tables, and how often each point holds each, of shape (points, tables)."""
        number: dict[RowTerm, int] = {}
        spans: list[tuple[int, int, int]] = []
        for counted in points.counted:
            entry = self._bytes.entry(counted.thing)
            if entry is not None:
                spans.append((number.setdefault(entry, len(number)), counted.first, counted.last + 1))
        changes = np.zeros((len(points.instrs) + 1, len(number)), np.int64)
        if spans:
            tables, first, after = np.array(spans).T
            np.add.at(changes, (first, tables), 1)
            np.add.at(changes, (after, tables), -1)
        return list(number), changes.cumsum(axis=0)[:-1]

    def _entries(self, things: Iterable[HeldBytes]) -> Counter[RowTerm]:
        return Counter(entry for thing in things if (entry := self._bytes.entry(thing)) is not None)

    def _row(self, points: ProgramPoints, point: int, held: Mapping[RowTerm, int]) -> ResourceRow:
        name = f"memory at {points.instrs[point].name} #{point}"
        return ResourceRow(name, math.inf, tuple(self._times(entry, n) for entry, n in held.items()))

    def _times(self, entry: RowTerm, n: int) -> RowTerm:
        if n == 1:
            return entry
        if (entry, n) not in self._scaled:
            assert isinstance(entry.table, Sparse)
            table = Sparse(entry.table.assignments, entry.table.values * n)
            self._scaled[entry, n] = RowTerm(entry.scope, table)
        return self._scaled[entry, n]

    def _only(self, row: ResourceRow, again: RunsAgain) -> ResourceRow:
        """The row, made useless for choices that do not run these loops again."""
        if not again:
            return row
        most = sum(map(_most, row.entries))
        gates = []
        for name, chosen in sorted(again):
            table = np.array([0.0 if c == chosen else -most for c in self.decided.options[name]])
            gates.append(RowTerm((self.names.index(name),), table))
        said = ", ".join(" ".join((decision, *choice)) for decision, choice in sorted(again))
        name = f"{row.name} with {said}"
        return replace(row, name=name, entries=(*row.entries, *gates))


@dataclass(frozen=True)
class _Lowered:
    """A cluster under all its assignments.

    Attributes:
      scope, listed: numbers of its decisions, and of their options, one row for an assignment.
      parts: different programs, by the run that they are (`Subgraph.again`); `which` of them an assignment
        has.
    """

    scope: tuple[int, ...]
    listed: np.ndarray
    parts: list[dict[str, ClusterMemory]]
    which: np.ndarray


class _Bytes:
    """Tables of bytes over one problem's decisions; equal ones are one object."""

    def __init__(
        self,
        context: SharedContext,
        decided: Decisions,
        names: Sequence[str],
        tables: Sequence[Table],
        tabler: Tabler,
    ) -> None:
        self.context, self.decided, self.tabler = context, decided, tabler
        self._number = {n: i for i, n in enumerate(names)}
        self._tables = {id(table.cluster): table for table in tables}
        self._clusters: dict[int, _Lowered] = {}
        self._entries: dict[HeldBytes, RowTerm | None] = {}
        self._same: dict[Hashable, RowTerm] = {}

    def entry(self, thing: HeldBytes) -> RowTerm | None:
        """The bytes of a thing; None if it never has any."""
        if thing not in self._entries:
            found = self._cluster(thing.cluster)
            each = [
                parts[thing.run].bytes(thing.reading, thing.what, thing.more) if thing.run in parts else 0
                for parts in found.parts
            ]
            values = thing.share * np.array(each, float)
            self._entries[thing] = self._entry(found, values[found.which]) if values.any() else None
        return self._entries[thing]

    def _entry(self, found: _Lowered, values: np.ndarray) -> RowTerm:
        """A table without the decisions that do not matter to it."""
        keep = list(range(len(found.scope)))
        for column in range(len(found.scope)):
            rest = [k for k in keep if k != column]
            code = _numbered(found.listed[:, rest])
            order = np.argsort(code, kind="stable")
            same = code[order[1:]] == code[order[:-1]]
            if (values[order[1:]] == values[order[:-1]])[same].all():
                keep = rest
        first = np.unique(_numbered(found.listed[:, keep]), return_index=True)[1]
        scope, listed, sizes = (
            tuple(found.scope[k] for k in keep),
            found.listed[first][:, keep],
            values[first],
        )
        key = scope, listed.tobytes(), sizes.tobytes()
        if key not in self._same:
            self._same[key] = RowTerm(scope, Sparse(listed, sizes))
        return self._same[key]

    def _cluster(self, number: int) -> _Lowered:
        if number in self._clusters:
            return self._clusters[number]
        makers = self.context.makers
        cluster = makers.clusters[number]
        table = self._tables.get(id(cluster)) or self.tabler.table(cluster, self.decided)
        place = [{o: i for i, o in enumerate(self.decided.options[n])} for n in table.names]
        listed = [[p[o] for p, o in zip(place, assignment, strict=True)] for assignment in table.entries]
        lifetimes, rules = self.tabler.cache.lifetimes, self.tabler.pricer.itemiser.compiler.memory
        numbers: dict[Hashable, int] = {}
        parts, which = [], []
        for entry in table.entries.values():
            key = entry.mesh, *map(id, entry.lowered)
            if key not in numbers:
                numbers[key] = len(numbers)
                memories = dict[str, ClusterMemory]()
                for lowered in entry.lowered:
                    assert lowered.program is not None and entry.mesh is not None
                    found = lifetimes.of(lowered.program, makers.nodes, lowered.subgraph, rules)
                    sizes = rules.sizes(lowered.program)
                    run = lowered.subgraph.again
                    memories[run] = ClusterMemory(found, lowered.program, entry.mesh, sizes)
                parts.append(memories)
            which.append(numbers[key])
        scope = tuple(self._number[n] for n in table.names)
        shape = len(listed), len(scope)
        self._clusters[number] = _Lowered(
            scope, np.array(listed, np.int64).reshape(shape), parts, np.array(which)
        )
        return self._clusters[number]


def _numbered(listed: np.ndarray) -> np.ndarray:
    """One number for each row, equal for equal rows."""
    code = np.zeros(len(listed), np.int64)
    for column in listed.T:
        code = code * (int(column.max(initial=0)) + 1) + column
    return code


def _most(entry: RowTerm) -> float:
    values = entry.table.values if isinstance(entry.table, Sparse) else entry.table
    return float(values.max(initial=0.0))
