"""Rows of the host link: saved and read values on the hosts move while the products of the loops' bodies run.

A body of n iterations hides its transfers except the part that takes longer than its products, and the
transfers of one iteration (`costmodels.pricing.overlap`). So the step waits n w seconds, where

    sum_c m_c (L_c(x) - (1 - 1/n) P_c(x)) <= w

L_c: seconds of the transfers of cluster c in one iteration, P_c: of its products; both read off the cluster
as it was lowered for its price, without its transfers. Where stages are programs of their own, transfers are
those that count (`costmodels.stage_times`), and products hide as if the largest share in the body did. There
is a row for a loop in forward, which stores, and one for its backward, which loads the same bytes again and
runs the products of second runs too. Each of them loads the weights on the hosts. w is a variable of the
problem, with discrete steps; each step costs the previous step's value, so no layout costs more than its
program.

The row of the hosts' memory: bytes of a device on its host, at any time.

    host(x) = sum over the clusters c of m_c H_c(x)

H_c is read off the cluster as it was lowered for its price, so the row counts just the bytes that the program
has there (`Program.host_bytes`), and forbids a layout if and only if the hardware's hosts have less. Of
variables a cluster has those that it writes: others may read them too; of what nobody writes, those that it
reads; of an outer step, those that no step before it writes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.kernels.quantities import of_local
from costmodels.pricing.itemise import share_of
from costmodels.pricing.items import Computed
from costmodels.pricing.pricer import Pricer
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.lowering_cache import LoweredCluster
from layoutopt.formulation.makers import OpCluster
from layoutopt.formulation.outer_step_context import OuterStepContext
from layoutopt.formulation.tables import Index, Table
from layoutopt.solver import ChoiceVariable, Problem, ResourceRow, RowTerm, Sparse, Term
from mesh_tf_core.ir.blocks import loop_name
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import HostLoad, Local, Loop, Program, Transfer, WriteVariable
from mesh_tf_core.ir.values import local_type
from mesh_tf_core.lower.nodes import assigned


def host_row(
    tables: Sequence[Table], index: Index, limit: float, meetings: Sequence[OuterStepContext] = ()
) -> Iterator[ResourceRow]:
    """The row; none if no choice keeps more than `limit` bytes there.

    Args:
      meetings: the outer steps: host memory that only they use is always counted.
    """
    entries, most = [], 0.0
    known: dict[tuple[int, Mesh, str], int] = {}
    kept = {id(c): each.kept_of(n) for each in meetings for n, c in enumerate(each.clusters)}

    def held(program: Program | None, mesh: Mesh | None, only: str) -> int:
        if program is None or mesh is None:
            return 0
        # A program is lowered once for axes of any sizes.
        key = id(program), mesh, only
        if key not in known:
            own = {only} if only else {i.variable for i in program.code if isinstance(i, WriteVariable)}
            others = () if only else assigned(program.outline)
            variables = {n: s for n, s in program.variables.items() if n in own or not (only or n in others)}
            known[key] = replace(program, variables=variables, mesh=mesh).host_bytes
        return known[key]

    for table in tables:
        values = np.zeros(len(table.entries))
        for only, times in kept.get(id(table.cluster), {"": table.cluster.multiplicity}).items():
            each = [
                sum(held(part.program, e.mesh, only) for part in e.lowered) for e in table.entries.values()
            ]
            values += times * np.array(each, float)
        if values.any():
            entries.append(RowTerm(index.scope(table.names), Sparse(index.listed(table), values)))
            most += values.max()
    if most > limit:
        yield ResourceRow("host memory", limit, tuple(entries))


WHOLE = 1e12
"""Rows count whole units of this part of a second: solvers take whole numbers as they are."""
STEPS, FINEST = 32, 1e-3
"""The steps of the grid of a loop's waiting time, and the first of them as a fraction of the largest."""
LinkDirection = tuple[int, str]
"""A loop by the block of its forward, and its run: the first (""), its `BACKWARD`, or its second run in the
backward of a surrounding loop (`Subgraph.again`)."""
BACKWARD = "backward"


@dataclass(frozen=True)
class Waits:
    """The seconds that one loop waits.

    Attributes:
      steps: of its variable: `WHOLE` units in one iteration, of all that it may keep there.
      runs: number of iterations in a step.
      row: without its variable.
    """

    name: str
    steps: np.ndarray
    runs: float
    row: ResourceRow

    def into(self, problem: Problem) -> Problem:
        """A problem with its variable, the last one."""
        v, least = len(problem.variables), np.concatenate([[0.0, 0.0], self.steps[1:-1]])
        entry = RowTerm((v,), -self.steps)
        return replace(
            problem,
            variables=(*problem.variables, ChoiceVariable(self.name, len(self.steps))),
            terms=(*problem.terms, Term((v,), self.runs * least / WHOLE, self.name)),
            rows=(*problem.rows, replace(self.row, entries=(*self.row.entries, entry))),
        )

    def step(self, choices: Sequence[int]) -> int:
        """The first step with which choices of all else keep the row."""
        kept = self.row.use(choices) - self.steps <= self.row.limit
        return int(kept.argmax()) if kept.any() else len(kept) - 1


class HostLink:
    """Computes the waiting times of the loops of one problem."""

    def __init__(self, dependencies: Dependencies, prices: Pricer, index: Index) -> None:
        self.dependencies, self.prices, self.index = dependencies, prices, index
        self._loop = {n.body.id: n.index for n, _ in dependencies.graph.walk() if n.body is not None}
        self._body = {n.index: n.body for n, _ in dependencies.graph.walk() if n.body is not None}
        self._known: dict[tuple[int, Mesh], dict[tuple[int, float, bool], float]] = {}
        self._stages = prices.itemiser.compiler.stages(dependencies.graph.outline())

    def waits(self, tables: Sequence[Table]) -> tuple[Waits, ...]:
        """For each loop that may keep something on the hosts, or read it there, and for its backward."""
        entries: dict[LinkDirection, list[RowTerm]] = defaultdict(list)
        runs: dict[LinkDirection, float] = {}
        for table in tables:
            of_way: dict[LinkDirection, np.ndarray] = {}
            for i, entry in enumerate(table.entries.values()):
                for way, seconds, often in self._of(table.cluster, entry.lowered, entry.mesh):
                    of_way.setdefault(way, np.zeros(len(table.entries)))[i] += seconds
                    runs.update({way: often} if often else {})
            for way, found in of_way.items():
                table_of = Sparse(self.index.listed(table), np.rint(WHOLE * found))
                entries[way].append(RowTerm(self.index.scope(table.names), table_of))
        every = ((way, sum(e.most for e in entries[way]), often) for way, often in sorted(runs.items()))
        # Products of the same cluster may hide all that it moves.
        return tuple(self._wait(way, entries[way], most, often) for way, most, often in every if most > 0)

    def _wait(self, way: LinkDirection, entries: Sequence[RowTerm], most: float, runs: float) -> Waits:
        block, run = way
        name = f"host link of block {block}{f' in {run}' * bool(run)}"
        steps = np.concatenate([[0.0], np.rint(np.geomspace(FINEST * most, most, STEPS))])
        # Each entry is rounded.
        return Waits(name, steps, runs, ResourceRow(name, float(len(entries)), tuple(entries)))

    def _of(
        self, cluster: OpCluster, lowered: Sequence[LoweredCluster], mesh: Mesh | None
    ) -> Iterator[tuple[LinkDirection, float, float]]:
        """What a cluster adds to rows under one assignment: seconds, and of transfers how often they run."""
        for part in lowered:
            assert part.program is not None and mesh is not None
            for (loop, times_a_step, loads), seconds in self._seconds(part.program, mesh).items():
                for own, times in self._alike(cluster, loop).items():
                    block = self._body[own]
                    often = (block.dim.size - 1) / block.dim.size
                    first, run = block.forward or block, part.subgraph.again
                    own_run = block.forward is not None or loop_name(block, self.dependencies.graph) == run
                    run = BACKWARD if own_run else run
                    if loads:
                        yield (first.id, run), times * seconds, times_a_step
                    elif times_a_step:
                        yield (first.id, run), times * seconds, times_a_step
                        yield (first.id, BACKWARD), times * seconds, times_a_step
                    else:
                        yield (first.id, run), -often * times * seconds * self._most(own), 0.0

    def _seconds(self, program: Program, mesh: Mesh) -> dict[tuple[int, float, bool], float]:
        """Of one iteration of each loop of a program: of what it stores on hosts, or loads, with how often it
        runs, and of its products (0). An operation's own loops hide nothing."""
        key = id(program), mesh
        if key not in self._known:
            found: dict[tuple[int, float, bool], float] = defaultdict(float)
            local, find = partial(_piece, program, mesh), program.values.__getitem__
            every = ((each, times) for each, times in program.expected() if isinstance(each, Loop))
            loops = ((each, times) for each, times in every if each.origin.node in self._body)
            for loop, instr, times in ((each, i, times) for each, times in loops for i in each.body):
                if isinstance(instr, Transfer):
                    (item,) = self.prices.itemiser.items(instr, None, find, local, mesh)
                    moved = loop.origin.node, times * loop.times, isinstance(instr, HostLoad)
                    share = share_of(instr, times * loop.times, self._stages, program)
                    found[moved] += share * self.prices.seconds_of(item)[0]
                elif isinstance(instr, Local) and instr.op.kind in MATMUL_CLASSES:
                    product = Computed(of_local(instr, local), 0.0)
                    found[loop.origin.node, 0.0, False] += self.prices.seconds_of(product)[0]
            self._known[key] = found
        return self._known[key]

    def _most(self, loop: int) -> float:
        """The largest share of what may be in the body of a loop."""
        if (stages := self._stages) is None:
            return 1.0
        inside = (node.index for node in self._body[loop].nodes)
        return max(max(stages.nodes.get(i, 1.0), stages.again.get(i, 0.0)) for i in (loop, *inside))

    def _alike(self, cluster: OpCluster, loop: int) -> Mapping[int, int]:
        """The loops in which the members of a cluster are, as the first one in a loop: how many in each."""
        first = cluster.members[0] if cluster.members else ()
        if loop in first:
            return Counter(member[first.index(loop)] for member in cluster.members)
        if not first:
            return {loop: 1}
        around = self._around(first[0])
        if loop not in around:  # what reads variables stands before the loops that have parts of them
            return {loop: len(cluster.members)}
        depth = around.index(loop)
        return Counter(self._around(member[0])[depth] for member in cluster.members)

    def _around(self, node: int) -> list[int]:
        """The loops that a node is in, the innermost first."""
        around = self.dependencies.graph.around(self.dependencies.block_of[node])
        return [self._loop[block.id] for block in around]


def _piece(program: Program, mesh: Mesh, value: int) -> TensorType:
    v = program.values[value]
    return local_type(v.shape, v.dtype, v.splits, mesh)
