"""Bounds of all pipelines that differ in what their stages recompute, from the tables of one without
recomputation.

Whatever is recomputed, a step has the kernels and messages of every first run, of gradients, of weights and
of the update. Second runs come on top. What is kept for backward differs: these tables do not count moves on
a device, and writes to stacks that are no sums.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from costmodels.kernels.groups import Group
from costmodels.kernels.partition import FusedKernel
from costmodels.pricing.overlap import loads_or_stores
from costmodels.pricing.units import Stack, Unit
from layoutopt.formulation.cluster import Cluster
from layoutopt.formulation.extract import Draft
from layoutopt.formulation.tables import Entry, Table
from layoutopt.optimize.bounds import Source
from layoutopt.optimize.evaluator import Evaluator
from layoutopt.optimize.fixing import fix_options
from layoutopt.optimize.subproblems import Subproblem, SubproblemKey
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.kind import Choice
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Local, Program
from mesh_tf_core.ops.kinds import Move


class FirstRuns:
    """Proves bounds of pipelines of one model on one piece of hardware."""

    def __init__(self, evaluator: Evaluator, clock: Clock = UNLIMITED) -> None:
        self.evaluator, self.clock = evaluator, clock
        self._known: dict[SubproblemKey, float] = {}

    def prove(self, subproblem: Subproblem, enough: float) -> None:
        """Proves the bound of a problem by the first runs of its stages, unless it has none, or `enough`
        seconds are unknown: no bound is more."""
        again = subproblem.space.recompute != (False,)
        if not (subproblem.key.stages and again and subproblem.given is None and math.isfinite(enough)):
            return
        key = subproblem.key._replace(again=frozenset())
        if key not in self._known:
            self._known[key] = 0.0
            with suppress(UserError):  # such stages may be refused without recomputation
                self._known[key] = self._least(subproblem.without_again, enough)
        subproblem.bounds.prove(min(self._known[key], enough), Source.FIRST_RUNS)

    def _least(self, plain: Subproblem, enough: float) -> float:
        """A restriction may couple what is recomputed with the rest: it does not count."""
        mesh, evaluator = plain.mesh, self.evaluator
        draft = _Draft(evaluator.model, mesh, plain.unrestricted, evaluator.prices(mesh))
        bound = fix_options(draft, enough, lambda *_: math.inf, self.clock)
        return 0.0 if draft.unsplit else bound


class _Draft(Draft):
    """A problem whose entries do not count what saves values for backward."""

    def __init__(self, *asked: Any) -> None:
        super().__init__(*asked)
        self._counted: dict[int, tuple[Program, list[bool]]] = {}

    def make(self, cluster: Cluster) -> Table:
        table, fixed = super().make(cluster), self.decided.fixed
        entries = {
            a: self._first(cluster, entry, fixed | dict(zip(table.names, a, strict=True)))
            for a, entry in table.entries.items()
        }
        self.tables[-1] = replace(table, entries=entries)
        return self.tables[-1]

    def entry(self, cluster: Cluster, chosen: Mapping[str, Choice]) -> Entry | None:
        entry = super().entry(cluster, chosen)
        return None if entry is None else self._first(cluster, entry, chosen)

    def _first(self, cluster: Cluster, entry: Entry, chosen: Mapping[str, Choice]) -> Entry:
        first, *more = entry.lowered
        cost, program = first.cost, first.program
        assert cost is not None and program is not None
        prices = self.tabler_of(cluster).prices_of(cluster, chosen)
        if id(program) not in self._counted:
            units = prices.itemiser.units(replace(program, results={}))
            counted = [not _saves(unit, program) for unit, *_ in units if not loads_or_stores(unit)]
            self._counted[id(program)] = program, counted
        counted = self._counted[id(program)][1]
        if all(counted):
            return entry
        left = tuple([x for x, counts in zip(cost, counted, strict=True) if counts])
        seconds = max(entry.seconds - prices.total(cost) + prices.total(left), 0.0)
        return replace(entry, seconds=seconds, lowered=(replace(first, cost=left), *more))


def _saves(unit: Unit, program: Program) -> bool:
    """True if a unit may keep something for backward, or bring it: a move on a device, or a write to a stack
    that is no sum, in a loop that is not backward's."""
    if not isinstance(unit, Stack):
        every = unit.instrs if isinstance(unit, FusedKernel | Group) else (unit,)
        return all(isinstance(each, Local) and isinstance(each.op, Move) for each in every)
    if unit.loop.origin.phase in (Phase.BACKWARD, Phase.UPDATE):
        return False
    return unit.value not in program.added and unit.value not in {total for _, total in unit.loop.summed}
