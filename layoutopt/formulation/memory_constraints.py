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
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from costmodels.stage_ends import StageEnd
from layoutopt.formulation.held_bytes import HeldBytes, PointKey, undominated
from layoutopt.formulation.lifetimes import ByteRule, ClusterMemory
from layoutopt.formulation.memory_points import ProgramPoints
from layoutopt.formulation.outer_step_context import OuterStepContext
from layoutopt.formulation.shared import SharedContext
from layoutopt.formulation.tables import Table, Tabler
from layoutopt.solver import ResourceRow, RowTerm, Sparse
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.decisions import Decisions
from layoutopt.space.recompute import RunsAgain, again_in

MEANWHILE = {ByteRule.INSIDE, ByteRule.RESULT, ByteRule.OPERAND}  # read off at a point's own instruction


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
        self.rules = tabler.pricer.itemiser.compiler.rules
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
            found = []
            for points in self.context.points(again, self.rules):
                base = self._variables(points)
                entries, counts = self._counts(points)
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
        found = []
        for points in self.context.points(again | self.always, self.rules):
            spans = [*self._held(points)]
            for point in points.running(node, phase):
                held = [(key, entry) for first, last, key, entry in spans if first <= point <= last]
                entries = self._variables(points) + Counter(entry for _, entry in held)
                found.append((self._row(points, point, entries), held))
        if not found:
            return None
        row, held = max(found, key=lambda f: f[0].use(choices))
        counted: dict[PointKey, float] = {}
        for key, entry in held:
            counted[key] = counted.get(key, 0.0) + entry.use(choices)
        return self._only(row, again - self.always), counted

    def _counts(self, points: ProgramPoints) -> tuple[list[RowTerm], np.ndarray]:
        """Different tables, and how often each point holds each, of shape (points, tables)."""
        number: dict[RowTerm, int] = {}
        found = self._held(points)
        spans = [(number.setdefault(entry, len(number)), first, last + 1) for first, last, _, entry in found]
        changes = np.zeros((len(points.instrs) + 1, len(number)), np.int64)
        if spans:
            tables, first, after = np.array(spans).T
            np.add.at(changes, (first, tables), 1)
            np.add.at(changes, (after, tables), -1)
        return list(number), changes.cumsum(axis=0)[:-1]

    def _held(self, points: ProgramPoints) -> Iterator[tuple[int, int, PointKey, RowTerm]]:
        """The first and last point that hold something, its key and its table. If products run in chunks,
        only what is there before and after all of them is sure to be there while each runs."""
        windows = self._windows(points)
        for first, last, key, thing in points.counted:
            pieces: list[tuple[int, int, frozenset[str]]] = []
            for begin, end, chunks in windows if thing.reading not in MEANWHILE else ():
                if first <= end and begin <= last and not (first < begin and end < last):
                    pieces += (first, begin - 1, frozenset()), (max(first, begin), min(last, end), chunks)
                    first = end + 1
            for begin, end, chunks in (*pieces, (first, last, frozenset[str]())):
                entry = self._bytes.entry(thing, points.end, chunks) if begin <= end else None
                if entry is not None:
                    yield begin, end, key, entry

    def _windows(self, points: ProgramPoints) -> list[tuple[int, int, frozenset[str]]]:
        """First and last points of products that some layout runs in chunks, and the decisions for that."""
        makers, spans = self.context.makers, dict[Hashable, tuple[int, int, frozenset[str]]]()
        decisions = frozenset(n for n in self.decided.of(CollectiveMatmul) if any(self.decided.options[n]))
        chunks = [decisions.intersection(cluster.switches) for cluster in makers.clusters]
        chunked = cache(lambda n: self._bytes.chunked(n, points.end) if chunks[n] else frozenset[int]())
        for i, origin in enumerate(instr.origin for instr in points.instrs):
            cluster, like = makers.runs.get(origin.node, (0, -1))
            if like in chunked(cluster):
                block = self.dependencies.block_of[origin.node].id
                key = id(makers.given[origin.node]), block, origin.phase
                spans[key] = spans.get(key, (i,))[0], i, chunks[cluster]
        merged: list[tuple[int, int, frozenset[str]]] = []
        for begin, end, names in spans.values():
            if merged and begin <= merged[-1][1]:
                begin, last, others = merged.pop()
                end, names = max(last, end), others | names
            merged.append((begin, end, names))
        return merged

    def _variables(self, points: ProgramPoints) -> Counter[RowTerm]:
        found = (self._bytes.entry(thing, points.end) for thing in points.variables())
        return Counter(filter(None, found)) + self.met

    def _row(self, points: ProgramPoints, point: int, held: Mapping[RowTerm, int]) -> ResourceRow:
        name = f"memory at {points.instrs[point].name} #{point}"
        name += f" of the {points.end.value} stage" if points.end in (StageEnd.LAST, StageEnd.MIDDLE) else ""
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
        most = sum(entry.most for entry in row.entries)
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
        self._clusters: dict[tuple[int, StageEnd], _Lowered] = {}
        self._entries: dict[tuple[HeldBytes, StageEnd, frozenset[str]], RowTerm | None] = {}
        self._same: dict[Hashable, RowTerm] = {}

    def entry(
        self, thing: HeldBytes, end: StageEnd = StageEnd.FIRST, unless: frozenset[str] = frozenset()
    ) -> RowTerm | None:
        """The bytes of a thing; None if it never has any.

        Args:
          end: the stage, where each is a program of its own.
          unless: decisions; 0 unless all are as by default and matter to the thing's cluster.
        """
        key = thing, end, unless
        if key not in self._entries:
            found = self._cluster(thing.cluster, end)
            what = thing.reading, thing.what, thing.more
            each = [parts[thing.run].bytes(*what) if thing.run in parts else 0 for parts in found.parts]
            values = thing.share * np.array(each, float)[found.which]
            for number in map(self._number.get, unless):
                values *= found.listed[:, found.scope.index(number)] == 0 if number in found.scope else 0
            self._entries[key] = self._entry(found, values) if values.any() else None
        return self._entries[key]

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

    def chunked(self, cluster: int, end: StageEnd) -> frozenset[int]:
        """The nodes of a cluster that run in chunks under some assignment."""
        parts = (memory for each in self._cluster(cluster, end).parts for memory in each.values())
        return frozenset(node for memory in parts for node in memory.lifetimes.chunked)

    def _cluster(self, number: int, end: StageEnd) -> _Lowered:
        if (number, end) in self._clusters:
            return self._clusters[number, end]
        makers = self.context.makers
        cluster = makers.clusters[number]
        table = self._tables.get(id(cluster)) or self.tabler.table(cluster, self.decided)
        place = [{o: i for i, o in enumerate(self.decided.options[n])} for n in table.names]
        listed = [[p[o] for p, o in zip(place, assignment, strict=True)] for assignment in table.entries]
        lifetimes, rules = self.tabler.cache.lifetimes, self.tabler.pricer.itemiser.compiler.rules
        numbers, parts, which = dict[Hashable, int](), list[dict[str, ClusterMemory]](), list[int]()
        sums = makers.alike(number, self.context.gradients) if rules.gradient_bytes else None
        for entry in table.entries.values():
            key = entry.mesh, *map(id, entry.lowered)
            if key not in numbers:
                numbers[key] = len(numbers)
                memories = dict[str, ClusterMemory]()
                for lowered in entry.lowered:
                    assert lowered.program is not None and entry.mesh is not None
                    found = lifetimes.of(lowered.program, makers.nodes, lowered.subgraph, rules)
                    sizes = rules.sizes(lowered.program, end, sums)
                    its = ClusterMemory(found, lowered.program, entry.mesh, sizes)
                    memories[lowered.subgraph.again] = its
                parts.append(memories)
            which.append(numbers[key])
        scope = tuple(self._number[n] for n in table.names)
        lies = np.array(listed, np.int64).reshape(len(listed), len(scope))
        self._clusters[number, end] = _Lowered(scope, lies, parts, np.array(which, int))
        return self._clusters[number, end]


def _numbered(listed: np.ndarray) -> np.ndarray:
    """One number for each row, equal for equal rows."""
    code = np.zeros(len(listed), np.int64)
    for column in listed.T:
        code = code * (int(column.max(initial=0)) + 1) + column
    return code
