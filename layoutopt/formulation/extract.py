r"""From a model to a problem in the general form (`layoutopt.solver`), for one mesh.

Variables
  x_d       for every decision d (see `decisions`): which of its options is chosen
  y_k       for every group k = (axes, dtype) of small gradient messages: whether any message of it is sent
  z_a       for every mesh axis a: whether any part of the norm of all gradients is summed over it
  w_l       for every loop l that may keep or read something on the hosts: how long it waits for their link

Objective
  (1) sum_c m_c T_c(x)       time of cluster c with multiplicity m_c                     `_time_terms`
  (2) sum_k alpha_k y_k      the latency that the messages of a group share                 `_message_terms`
      + alpha(z)             the one sum of a scalar that the norm takes                    `_message_terms`
Constraints
  (3) y_k = 1 if some cluster sends a small message of group k under x; so for z_a          `_message_terms`
  (4) assignments that lowering refuses are not in a cluster's table                        `_time_terms`
  (5) sum_v bytes_v(x) over the values alive at point t <= memory, for every point t that can be the peak
                                                                                            `memory_constraints`
  (6) sum_c m_c H_c(x) <= host memory, where some choice keeps more on the hosts            `host_memory`
  (7) what loops have there moves while their products run, or w_l says how long loop l waits `host_link`
  (8) decisions that a restriction couples have one of its combinations of options           `couplings`
An option of x_d with which every layout is slower than one that is known leaves its domain       `fixing`
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from costmodels.pricing.pricer import Pricer
from layoutopt.formulation.couplings import Combinations, coupled
from layoutopt.formulation.cuts import MOST_LOWERED, PendingSum, most_cells
from layoutopt.formulation.default_memory import NaturalMemory
from layoutopt.formulation.makers import OpCluster
from layoutopt.formulation.memory_constraints import MemoryConstraints
from layoutopt.formulation.outer_step_context import meetings
from layoutopt.formulation.shared import shared_context
from layoutopt.formulation.tables import Entry, Index, Table, Tabler, is_large, legal
from layoutopt.solver import ChoiceVariable, Problem, ResourceRow, Sparse, Term
from layoutopt.solver.join_tree import Relation
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice
from layoutopt.space.offload import OffloadDecision, Weights
from layoutopt.space.recompute import HOST, Recompute
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.messages import BucketKey
from mesh_tf_core.model import Model

if TYPE_CHECKING:
    from layoutopt.formulation.host_link import Waits


@dataclass(frozen=True)
class Extraction:
    """A model's problem on one mesh, and the conversion of choices to layouts.

    Attributes:
      names: variable i of the problem is the decision `names[i]`; message groups follow, then `waits`.
      tables: the priced clusters.
      problem: variables, times, and rows of host memory.
      memory: the rows of the devices' memory.
      unsplit: dimensions that stay whole because a table would be too large; the bounds of the problem then
        do not bound the request.
      waits: waiting times of loops for the host link: the last variables.
    """

    mesh: Mesh
    decided: Decisions
    names: tuple[str, ...]
    tables: tuple[Table, ...]
    groups: tuple[BucketKey, ...]
    problem: Problem
    memory: MemoryConstraints | NaturalMemory
    unsplit: tuple[str, ...] = ()
    waits: tuple[Waits, ...] = ()

    def read(self, choices: Sequence[int]) -> tuple[Layout, Options]:
        """The layout and options of the solver's choices."""
        options = self.decided.options
        return self.decided.read({n: options[n][c] for n, c in zip(self.names, choices, strict=False)})

    def choices(self, layout: Layout, options: Options) -> tuple[int, ...] | None:
        """The solver's choices for a layout and options; None if they are not among those allowed."""
        wanted, every = self.decided.write(layout, options), self.decided.options
        sums = [n for n in self.decided.of(PendingSum) if n in self.names]
        if any(wanted[n] not in every[n] for n in self.names if n not in sums):
            return None
        if not all(each.allows(wanted) for each in self.decided.couplings):
            return None
        entries = self._entries(wanted, sums)
        if entries is None:
            return None
        sent = {key for entry in entries for key in entry.small}
        picked = (every[n].index(wanted[n]) for n in self.names)
        found = (*picked, *(int(k in sent) for k in self.groups))
        return (*found, *(each.step(found) for each in self.waits))

    def _entries(self, wanted: dict[str, Choice], sums: Sequence[str]) -> list[Entry] | None:
        """Each table's entry of the choices wanted, with those pending sums that lowering lets wait: they are
        filled in, the first ones first."""
        name, *others = sums or ("",)
        found = []
        for table in self.tables:
            if set(sums).isdisjoint(table.names):
                entry = table.entries.get(tuple(wanted[n] for n in table.names))
                if entry is None:
                    return None
                found.append(entry)
        for choice in self.decided.options[name][::-1] if name else ():
            wanted[name] = choice
            if (entries := self._entries(wanted, others)) is not None:
                return entries
        return None if name else found


def legal_problem(model: Model, mesh: Mesh, decided: Decisions, pricer: Pricer) -> Extraction:
    """The problem without seconds: legal assignments, and their memory."""
    draft = Draft(model, mesh, decided, pricer)
    for cluster in draft.left:
        draft.bound(cluster)
    decided = decided.within({n: draft.decided.options[n] for n in decided.options})
    draft.tables, draft.left = [legal(cluster, decided) for cluster in draft.left], []
    return draft.extraction(NaturalMemory(draft.context, mesh, decided, decided.free))


def extract(model: Model, mesh: Mesh, decided: Decisions, pricer: Pricer) -> Extraction:
    """The problem of a model on a mesh; `decided` has the options."""
    draft = Draft(model, mesh, decided, pricer)
    for cluster in draft.left:
        draft.make(cluster)
    return draft.extraction()


class Draft:
    """A problem whose tables are not complete yet.

    Args:
      whole: only single entries of clusters are needed, so none is cut.

    Attributes:
      decided: the options (`fixing` removes some), and the variables of cut clusters; `tables` are over
        these.
      left: clusters without a table.
      together: remaining combinations of options (`restrict`).
    """

    def __init__(
        self, model: Model, mesh: Mesh, decided: Decisions, pricer: Pricer, whole: bool = False
    ) -> None:
        self.model, self.mesh, self.decided, self.pricer = model, mesh, decided, pricer
        self.together: Combinations | None = None
        if (
            decided.diloco is not None and decided.diloco.delay
        ):  # what does not fit beside them, see `outer_step_context`
            self.pricer = pricer = pricer.without(decided.diloco.axis)
        self.context = shared_context(model, decided.structure(mesh))
        if not whole:
            self.context = self.context.bounded(decided)
            sums = (PendingSum.at(node, mesh) for node in sorted(self.context.cut))
            if self.context.cut:
                self.decided = decided = replace(decided, every=(*decided.every, *sums))
        if decided.couplings:
            self.together = self._agreeing()
        self.program = replace(self.context.program(), mesh=mesh)
        self.meetings = meetings(model, mesh, decided)
        # What meets is updated by the meetings, too, so less of it may be padded.
        padded = self.meetings[0].padded if self.meetings else None
        apart = (decided.diloco.axis,) if decided.diloco is not None else ()
        self.tabler = self.context.tabler(mesh, pricer, padded, apart)
        self._met = {id(cluster): each for each in self.meetings for cluster in each.clusters}
        self.left = [*self.context.clusters, *(c for each in self.meetings for c in each.clusters)]
        self.tables, self.unsplit = list[Table](), list[str]()

    def bound(self, cluster: OpCluster) -> None:
        """Leaves a cluster's smallest dimensions whole, then its other decisions plain, until its table is
        small enough."""
        others, most = (*cluster.sums, *cluster.switches), MOST_LOWERED // len(cluster.subgraph.nodes)
        sizes = self.tabler_of(cluster).sizes
        dims = sorted(cluster.dims, key=lambda n: max(sizes.get(n, {0})))
        decided = self.decided
        for name in (*dims, *others):
            options = decided.options
            if most_cells(cluster.dims, others, cluster.shapes, options) <= most:
                break
            if not is_large(cluster, decided, most):
                break
            if len(options.get(name, ())) > 1:
                plain = () if () in options[name] else options[name][0]
                decided = decided.within({name: (plain,)})
                self.unsplit.append(name)
        if decided is not self.decided:
            self.restrict(decided)

    def tabler_of(self, cluster: OpCluster) -> Tabler:
        """The table maker of a cluster: of the step, or of an outer step."""
        met = self._met.get(id(cluster))
        return self.tabler if met is None else met.tabler(self.mesh, self.pricer)

    def entry(self, cluster: OpCluster, chosen: Mapping[str, Choice]) -> Entry | None:
        """The price of a cluster under one choice of everything; None if that is not legal."""
        return self.tabler_of(cluster).entry(cluster, self.decided, chosen)

    def make(self, cluster: OpCluster) -> Table:
        """The table of a cluster that has none."""
        self.bound(cluster)
        self.left = [c for c in self.left if c is not cluster]
        only = () if self.together is None else (self.together.of,)
        self.tables.append(self.tabler_of(cluster).table(cluster, self.decided, *only))
        return self.tables[-1]

    def read(self, choices: Sequence[int]) -> tuple[Layout, Options]:
        """The layout and options of choices of `times`."""
        options = self.decided.options
        return self.decided.read({n: options[n][c] for n, c in zip(self.decided.free, choices, strict=True)})

    def restrict(self, decided: Decisions, rows: Sequence[Relation] | None = None) -> None:
        """Removes options; those of `decided` remain.

        Args:
          rows: remaining rows of the terms of `times`; later tables contain only assignments that agree with
            them.
        """
        if rows is not None:
            self.together = self._agreeing(rows)
            self.tables = [self.together.of(t) for t in self.tables]
        lost = {n for n, found in self.decided.options.items() if len(decided.options[n]) < len(found)}
        self.tables = [t if lost.isdisjoint(t.names) else t.within(decided) for t in self.tables]
        self.decided = decided

    def _agreeing(self, rows: Sequence[Relation] = ()) -> Combinations:
        """What rows, and couplings, leave of combinations of options."""
        index = Index(self.decided.free, self.decided)
        return Combinations(index, (*rows, *coupled(self.decided, index)))

    def times(self, tables: Sequence[Table] | None = None) -> Problem:
        """The problem with the existing tables, or with these alone, without shared latencies of messages."""
        index, made = Index(self.decided.free, self.decided), self.tables if tables is None else tables
        terms = _time_terms(made, _groups(made), index, self.pricer)
        return self._problem(terms, (), self.fixed_seconds if tables is None else 0.0)

    @property
    def fixed_seconds(self) -> float:
        """The fixed seconds of a step under every layout."""
        met = (self.pricer.fixed_seconds(each.program()) / each.period for each in self.meetings)
        return sum(met, self.pricer.fixed_seconds(self.program))

    def _problem(self, terms: list[Term], groups: tuple[BucketKey, ...], fixed: float) -> Problem:
        variables = [
            ChoiceVariable.of(n, ["+".join(c) or "-" for c in self.decided.options[n]])
            for n in self.decided.free
        ]
        variables += [ChoiceVariable.of(_named(key), ["no", "yes"]) for key in groups]
        if fixed:
            start = Sparse(np.zeros((1, 0), np.int64), np.array([fixed]))
            terms = [*terms, Term((), start, "the start of a step")]
        for each in coupled(self.decided, Index(self.decided.free, self.decided)):
            terms = [*terms, Term(each.scope, Sparse(each.cells, np.zeros(len(each))), "what is coupled")]
        return Problem(f"{self.model.name} on {self.mesh}", tuple(variables), tuple(terms))

    def extraction(self, memory: NaturalMemory | None = None) -> Extraction:
        """The problem with all its tables; `memory`: its rows, if they do not follow from the tables."""
        assert not self.left
        decided, names = self.decided, self.decided.free
        groups, index = _groups(self.tables), Index(names, decided)
        terms = _time_terms(self.tables, groups, index, self.pricer)
        terms += _message_terms(self.tables, groups, index, self.pricer)
        rows = memory or MemoryConstraints(
            self.context, decided, names, self.tables, self.tabler, self.meetings
        )
        problem, waits = self._problem(terms, groups, self.fixed_seconds), self._waits(index)
        for each in waits:
            problem = each.into(problem)
        problem = replace(problem, rows=(*problem.rows, *self._host_rows(index)))
        tables, unsplit = tuple(self.tables), tuple(self.unsplit)
        return Extraction(self.mesh, decided, names, tables, groups, problem, rows, unsplit, waits)

    @property
    def _keeps(self) -> bool:
        """Whether loops may keep something on the hosts, or read it there."""
        kept = (c for n in self.decided.of(Recompute) for c in self.decided.options[n])
        return any(HOST in c for c in kept) or bool(self.decided.of(Weights))

    def _waits(self, index: Index) -> tuple[Waits, ...]:
        if not self._keeps:
            return ()
        from layoutopt.formulation.host_link import HostLink

        return HostLink(self.context.dependencies, self.pricer, index).waits(self.tables)

    def _host_rows(self, index: Index) -> Iterable[ResourceRow]:
        limit = self.pricer.hardware.host_memory_bytes
        if limit is None or not (self._keeps or self.decided.of(OffloadDecision)):
            return ()
        from layoutopt.formulation.host_link import host_row

        return host_row(self.tables, index, limit, self.meetings)


def _groups(tables: Sequence[Table]) -> tuple[BucketKey, ...]:
    return tuple(dict.fromkeys(k for t in tables for e in t.entries.values() for k in e.small))


def _named(key: BucketKey) -> str:
    what = "norm" if key.late else "messages"
    return f"{what} over {'+'.join(key.axes)} in {key.dtype}"


def latency(key: BucketKey, pricer: Pricer) -> float:
    """Latency of a group's message: the price of its first byte."""
    return pricer.message_seconds(key.axes, 1)


def shared_seconds(keys: Collection[BucketKey], pricer: Pricer) -> float:
    """The seconds that all messages of some groups pay once."""
    early = sum(latency(key, pricer) for key in keys if not key.late)
    late = {a: key.dtype for key in keys if key.late for a in key.axes}
    if not late:
        return early
    axes = tuple(a for a in pricer.placement.mesh.names if a in late)
    return early + pricer.message_seconds(axes, itemsize(late[axes[0]]), late=True)


def own_seconds(entry: Entry, shared: Mapping[BucketKey, float], pricer: Pricer) -> float:
    """The seconds of a cluster without the latency that its messages share with others."""
    if not entry.small:
        return entry.seconds
    small = (
        pricer.message_seconds(k.axes, b) - shared[k] for k, payloads in entry.small.items() for b in payloads
    )
    return entry.seconds + sum(small)


def _time_terms(
    tables: Sequence[Table], groups: Sequence[BucketKey], index: Index, pricer: Pricer
) -> list[Term]:
    """(1) and (4): tables over the same decisions are added up; each small message pays its bytes here."""
    alpha = {k: latency(k, pricer) for k in groups if not k.late}
    joined: dict[tuple[str, ...], dict[tuple[Choice, ...], float]] = {}
    for t in tables:
        order = tuple(sorted(t.names, key=index.number.__getitem__))
        swap = [t.names.index(n) for n in order]
        costs = {}
        for assignment, entry in t.entries.items():
            seconds = own_seconds(entry, alpha, pricer)
            costs[tuple([assignment[i] for i in swap])] = t.cluster.multiplicity * seconds
        known = joined.get(order)
        # An assignment that either table refuses is refused.
        joined[order] = costs if known is None else {a: known[a] + c for a, c in costs.items() if a in known}
    terms = []
    for names, costs in joined.items():
        rows = np.array(index.rows(names, costs), np.int64).reshape(len(costs), len(names))
        table = Sparse(rows, np.array(list(costs.values())))
        terms.append(Term(index.scope(names), table, "time of " + (", ".join(names) or "the rest")))
    return terms


def _message_terms(
    tables: Sequence[Table], groups: Sequence[BucketKey], index: Index, pricer: Pricer
) -> list[Term]:
    """(2) and (3)."""
    terms = []
    late = [i for i, key in enumerate(groups) if key.late]
    if late:
        told = itertools.product((False, True), repeat=len(late))
        costs = [shared_seconds([groups[i] for i in itertools.compress(late, each)], pricer) for each in told]
        scope = tuple(len(index.number) + i for i in late)
        terms.append(Term(scope, np.reshape(costs, (2,) * len(late)), "sum of the norm"))
    for i, key in enumerate(groups):
        y = len(index.number) + i
        if not key.late:
            terms.append(Term((y,), np.array([0.0, latency(key, pricer)]), f"latency of group {i}"))
        seen: set[tuple[tuple[str, ...], frozenset[tuple[Choice, ...]]]] = set()
        for t in tables:
            sending = frozenset(a for a, e in t.entries.items() if key in e.small)
            if not sending or (t.names, sending) in seen:
                continue
            seen.add((t.names, sending))
            listed = [
                (*row, sent)
                for a, row in zip(t.entries, index.rows(t.names, t.entries), strict=True)
                for sent in ((1,) if a in sending else (0, 1))
            ]
            table = Sparse(np.array(listed, np.int64), np.zeros(len(listed)))
            terms.append(Term((*index.scope(t.names), y), table, f"group {i} sent by {t.cluster.name}"))
    return terms
