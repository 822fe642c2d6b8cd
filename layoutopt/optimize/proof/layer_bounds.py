"""Bounds from few tables, of pipelines without their graphs: layers of a stage take at least their part of
the same layers without stages (P = 1), under the best splits over the axes that stages leave.

A stage of P runs, for each of M microbatches, L / P layers with the splits that the other axes allow. The
same step without stages has these layers in loops over all L, with the same operations on pieces of the same
sizes. So with T_s the seconds of all L layers in it that a slot of kind s runs (forward, backward, gradients
of weights), and r_s how often a step counts such slots as a multiple of M times L / P layers
(`Evaluator.slot_runs`), no layout of the pipeline takes less than

    min over splits of (sum_s r_s T_s + G) / P  +  messages between stages  +  a device's share outside layers

where one program runs all stages. Else what is outside runs beside other stages' layers; of it the head
counts as often as the longest way passes the last stage (`StageTimes.ends`), if no axis of stages may split
it.

T counts what every first run of a layer has, however variables are stored, whatever is kept for backward and
whatever is recomputed: kernels, and messages about activations. Other writes to stacks, messages about
weights, moves to hosts and second runs come on top, so the decisions about these (`Decision.beside`) are
plain, and the tables are small. Every microbatch adds to the gradients of all layers, which reads and writes
as much as the storage of each leaves on a device; G are messages about them, of which one program sends each
at least once, and of those that scatter what each microbatch adds, one for each. Of all this together counts
the storage with which it takes least. One set of tables bounds every schedule and every recomputed part;
where pieces cost no less than their share of the whole, also every multiple of its microbatches.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from costmodels.kernels.groups import Group
from costmodels.kernels.partition import FusedKernel
from costmodels.pricing.overlap import loads_or_stores
from costmodels.pricing.units import Stack, Unit, first_of
from costmodels.stage_times import HEAD, UNALIGNED, Slots, StageTimes, head_of, outside, slots_of, stage_times
from layoutopt.formulation.extract import Draft
from layoutopt.formulation.makers import OpCluster
from layoutopt.formulation.tables import Entry, Table
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import BoundSource, OptionCosts
from layoutopt.optimize.problems.subproblems import Subproblem, SubproblemKey, beside
from layoutopt.optimize.proof.fixing import fix_options, removed
from layoutopt.solver import eliminate
from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import Choice
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, loop_dims
from mesh_tf_core.ir.instructions import GRADIENT as SENT
from mesh_tf_core.ir.instructions import PARAMETER
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Instr, Local, Loop, Program, ReduceScatter, Transfer
from mesh_tf_core.ir.schedules import KINDS
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, STAGES, splits
from mesh_tf_core.ops.kinds import Move

SlotKinds = frozenset[int]
ONCE: SlotKinds = frozenset()
"""The kinds of slots of what a step has once at least, in whatever slot."""
SlotsByProgram = dict[int, tuple[Program, list[SlotKinds | None]]]
"""By the ids of programs: the kinds of slots that surely run each part of its cost; none: `ONCE`."""
SlotSeconds = Mapping[SlotKinds, float]
"""Seconds of kernels and messages, by the kinds of slots that may run them."""
SENDING, ADDING = frozenset({HEAD + 1}), frozenset({HEAD + 2})
STORED = (ONCE, SENDING, ADDING)
"""The kinds that depend on storage: `SENDING` gradients for each microbatch, `ADDING` to them, backward."""


@dataclass
class _Layers:
    """The tables of the layers of one dimension.

    Attributes:
      seconds: of every entry of a table, with each way to store what it has gradients of.
    """

    draft: Draft
    tables: list[tuple[Table, list[list[SlotSeconds]]]]

    def least(self, runs: Sequence[float], once: float, more: float) -> float:
        """The least seconds of all layers, their slots counted so often, and messages about gradients;
        `more`: how often there are as many microbatches."""
        known = {ONCE: once, SENDING: once * more, ADDING: min(runs[1:HEAD]) * more}

        def often(where: SlotKinds) -> float:
            return known[where] if where in known else min(runs[i] for i in where)

        def counted(seconds: SlotSeconds) -> float:
            return sum(s * often(where) for where, s in seconds.items())

        every = []
        for table, seconds in self.tables:
            least = (Entry(min(map(counted, ways))) for ways in seconds)
            every.append(replace(table, entries=dict(zip(table.entries, least, strict=True))))
        return eliminate(self.draft.times(every)).bound


class LayerBounds:
    """Proves bounds of pipelines of one model on one piece of hardware."""

    def __init__(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._layers: dict[tuple[Mesh, int, str, Axes], _Layers | None] = {}
        self._slots: dict[str, SlotsByProgram] = {}
        self._seconds: dict[tuple[Mesh, int, str, Axes, tuple[float, ...], float], float] = {}
        self._first: dict[SubproblemKey, tuple[float, OptionCosts]] = {}

    def prove(self, subproblem: Subproblem, enough: float, shortly: bool = False) -> None:
        """Proves the bound of a problem by its layers, from the tables of as few microbatches as show that
        it takes `enough` seconds, then by `FirstRuns`; `shortly`: from the fewest of several alone."""
        plain = subproblem.unstaged or subproblem
        pieces = self.evaluator.prices(subproblem.mesh).pieces_cost_more
        if subproblem.space.diloco is not None or plain.given is not None:  # tables are kept by mesh
            return
        several, key = len(subproblem.space.recompute) > 1, subproblem.key._replace(again=frozenset())
        # Pieces of two microbatches cost no less than the whole, and there are sums to add to.
        every = (*(plain.fewer if pieces else ()), plain)
        every = every[1:] or every * (not shortly or plain.microbatches > 1)
        exactly = self.evaluator.apart(subproblem.mesh) and self._unknown(subproblem, shortly)
        for of in every[:1] if shortly else every:
            try:
                subproblem.bounds.prove(self._bound(subproblem, of, exactly), BoundSource.LAYERS)
            except UserError:
                if exactly and subproblem.refused:
                    subproblem.bounds.prove(math.inf, BoundSource.REFUSED)
            if subproblem.bounds.lower().value >= enough:
                return
        if shortly or not (several and key.stages) or math.isinf(enough):
            return
        first = replace(subproblem, key=key, space=subproblem.space.but(again=frozenset()))
        if key not in self._first:
            self._first[key] = 0.0, {}
            with suppress(UserError):  # such stages may be refused without recomputation
                asked = self.evaluator.model, key.mesh, first.unrestricted, self.evaluator.prices(key.mesh)
                bound = fix_options(draft := FirstRuns(*asked), enough, lambda *_: math.inf)
                if not draft.unsplit:
                    self._first[key] = min(bound, enough), removed(draft, first.unrestricted, enough)
        bound, costs = self._first[key]
        bound = min(bound, enough)
        if exactly and (bound or costs):
            bound *= (kept := self._kept(subproblem, first))
            costs = costs if kept == 1 else {}
        # A layout takes no less than the first runs under its splits and storage, if nothing else is chosen.
        subproblem.bounds.costs = subproblem.bounds.costs or costs
        subproblem.bounds.prove(bound, BoundSource.FIRST_RUNS)

    def _unknown(self, of: Subproblem, shortly: bool) -> bool:
        """True if only the graph of a pipeline tells its `_runs`, or how often its head runs, unless
        `shortly`."""
        every = list[tuple[float, ...]]()
        with suppress(UserError):  # layers that are given to stages may be too few
            every = [self._runs(of, dim) for dim in of.plans]
        return not all(runs[0 if shortly else HEAD] for runs in every)

    def _kept(self, of: Subproblem, first: Subproblem) -> float:
        """The part of the seconds of a pipeline without recomputation, that its first runs take in one that
        recomputes: where each stage is a program of its own, the longest way may be another one."""
        own, plain = ((*times.layers, *times.ends) for times in map(self._times, (of, first)))
        return min(1.0, *(new / old for new, old in zip(own, plain, strict=True) if old))

    def _bound(self, subproblem: Subproblem, plain: Subproblem, exactly: bool) -> float:
        """The bound by the layers in a step without stages; `exactly`: with the runs of slots in the graph of
        the pipeline, where stages are programs of their own."""
        mesh, evaluator, found = subproblem.mesh, self.evaluator, [0.0]
        for dim, axes in subproblem.key.stages or [(dim, ()) for dim in loop_dims(evaluator.model.graph)]:
            outside = evaluator.alone() - sum(evaluator.layers(dim, ()))
            more = subproblem.microbatches / plain.microbatches
            if not axes:
                seconds = self._least(plain, dim, axes, (1.0,) * len(StageAction), more)
                found.append(seconds + outside / mesh.devices)
                continue
            plan = subproblem.plans[dim]
            equal = self._runs(subproblem, dim)
            runs = self._counted(subproblem, dim) if exactly else equal
            seconds = self._least(plain, dim, axes, runs, more) / plan.stages
            seconds += self._handed(subproblem, dim, axes, equal)
            found.append(seconds if evaluator.apart(mesh) else seconds + outside / mesh.devices)
        return max(found)

    def _runs(self, of: Subproblem, dim: str) -> tuple[float, ...]:
        """As `Evaluator.slot_runs`, and of the `HEAD`: for each microbatch, where stages have as many layers
        and nothing else outside of these takes as long; 0: not known."""
        graph, plan = self.evaluator.model.step_graph, of.plans[dim]
        runs = self.evaluator.slot_runs(of.mesh, dim, plan)
        equal = runs[0] and self.evaluator.apart(of.mesh) and not KINDS[plan.kind].split
        head, others = graph.remembered((outside, dim), partial(outside, graph, dim)) if equal else (0.0, 0.0)
        leads = head > UNALIGNED * plan.microbatches * others
        return *runs, float(plan.stages * leads)

    def _handed(self, of: Subproblem, dim: str, axes: Axes, runs: Sequence[float]) -> float:
        """Seconds of messages between stages, in every slot that counts but the first: what loops carry."""
        prices, plan, graph = self.evaluator.prices(of.mesh), of.plans[dim], self.evaluator.model.step_graph
        if not (KINDS[plan.kind].one_way and prices.pieces_cost_more):
            return 0.0
        seconds, pieces = 0.0, plan.microbatches * of.mesh.devices // plan.stages
        for block in (b for b in graph.blocks if b.dim.name == dim and b.nodes):
            slot = StageAction.FORWARD if block.nodes[0].phase == Phase.FORWARD else StageAction.BACKWARD
            carried = sum(graph.tensor(i).type.bytes for i in block.carry_in) // pieces
            price = prices.message_seconds(axes, carried, late=True, kind="permute")
            seconds += max(runs[slot] * plan.works - 1, 0) * price
        return seconds

    def _counted(self, of: Subproblem, dim: str) -> tuple[float, ...]:
        """As `_runs`, from the graph of the pipeline."""
        plan, times = of.plans[dim], self._times(of)
        whole = plan.microbatches * max(self.evaluator.model.graph.dims()[dim]) / plan.stages
        layers = (times.layers[min(slot, plan.last)] / whole for slot in StageAction)
        return *layers, times.ends[-1] / plan.microbatches * plan.stages

    def _times(self, of: Subproblem) -> StageTimes:
        key, model = of.key, self.evaluator.model
        step = model.training_step(key.microbatches, of.stages, key.schedule, key.again)
        found = stage_times(step.graph.outline())
        assert found is not None
        return found

    def _least(self, plain: Subproblem, dim: str, axes: Axes, runs: tuple[float, ...], more: float) -> float:
        key = plain.mesh, plain.microbatches, dim, axes
        if key not in self._layers:
            self._layers[key] = None  # also where these layers are refused
            self._layers[key] = self._made(plain, dim, axes)
        layers = self._layers[key]
        if layers is None or not runs[0]:  # nothing is known, or a stage has no layers
            return 0.0
        if (*key, runs, more) not in self._seconds:
            alone = axes and self.evaluator.apart(plain.mesh)
            once = float(not alone and self.evaluator.prices(plain.mesh).pieces_cost_more)
            self._seconds[*key, runs, more] = layers.least(runs, once, more)
        return self._seconds[*key, runs, more]

    def _made(self, plain: Subproblem, dim: str, axes: Axes) -> _Layers | None:
        """None where a table would be too large."""
        decided = beside(plain.unrestricted, axes)
        stored = {n: _scattered(decided.options[n], plain.mesh, axes) for n in decided.of(Storage)}
        decided = decided.within({d.name: [()] for d in decided.every if d.beside})
        draft = Draft(self.evaluator.model, plain.mesh, decided, self.evaluator.prices(plain.mesh))
        slots = dict(slots_of(draft.context.graph, dim))
        tied = any(isinstance(relation, Degrees) for relation in plain.space.restriction.relations)
        if axes and tied and self.evaluator.apart(plain.mesh):
            slots |= dict.fromkeys(head_of(draft.context.graph, dim), HEAD)
        draft.left = [c for c in draft.left if c.members and slots.keys() >= {*c.members[0]}]
        made = [draft.make(cluster) for cluster in [*draft.left]]
        known = self._slots.setdefault(dim, {})
        found = [(table, [*_certain(draft, table, slots, known, stored)]) for table in made]
        return None if draft.unsplit else _Layers(draft, found)


def _scattered(options: Iterable[Choice], mesh: Mesh, axes: Axes) -> list[Choice]:
    """The ways to store a variable of a stage further that differ in what becomes of gradients, over the same
    axes: zero1, which scatters their sum in no more time than all get it, or zero2, which adds up scattered
    ones."""
    found = list[Choice]()
    for option in filter(None, options):
        over = [a for a in option[1:] or mesh.names if a not in axes]
        stages = STAGES[1 : 2 + splits(STAGES.index(option[0]), GRADIENT, BACKWARD)]
        found += [(stage, *over) for stage in stages if over]
    return [*dict.fromkeys(found)] or [()]


def _certain(
    draft: Draft, table: Table, slots: Slots, known: SlotsByProgram, stored: Mapping[str, Sequence[Choice]]
) -> Iterator[list[SlotSeconds]]:
    """The seconds of what every first run has, of every entry of a table; `stored`: as `_scattered`."""
    fixed, names = draft.decided.fixed, [n for n in table.cluster.switches if n in stored]

    def seconds(entry: Entry, chosen: Mapping[str, Choice]) -> SlotSeconds:
        prices, found = draft.tabler.prices_of(table.cluster, chosen), defaultdict[SlotKinds, float](float)
        cost, program = entry.lowered[0].cost, entry.lowered[0].program
        assert cost is not None and program is not None
        if id(program) not in known:
            units = (unit for unit, *_ in prices.itemiser.units(replace(program, results={})))
            kinds = _slots((unit for unit in units if not loads_or_stores(unit)), slots, program)
            known[id(program)] = program, [*kinds]
        for each, where in zip(cost, known[id(program)][1], strict=True):
            if where is not None:
                found[where] += prices.total((each,))
        small = [draft.pricer.message_seconds(k.axes, b) for k, of in entry.small.items() for b in of]
        for sent in {ONCE, SENDING} & found.keys():  # what may travel with others is not counted
            found[sent] = max(found[sent] - sum(small), 0.0)
        return found

    for assignment, entry in table.entries.items():
        chosen = {**fixed, **dict(zip(table.names, assignment, strict=True))}
        ways = {tuple(map((found := seconds(entry, chosen)).get, STORED)): found}
        for choices in itertools.product(*(stored[n] for n in names)) if any(map(found.get, STORED)) else ():
            other = {**chosen, **dict(zip(names, choices, strict=True))}
            if (held := draft.entry(table.cluster, other)) is not None:
                its = tuple(map(seconds(held, other).get, STORED))
                ways[its] = {**found, **{kinds: x or 0.0 for kinds, x in zip(STORED, its, strict=True)}}
        yield [*ways.values()]


def _slots(units: Iterable[Unit], slots: Slots, program: Program) -> Iterator[SlotKinds | None]:
    """The kinds of slots that surely run each unit; None if it depends on storage, but for gradients."""
    added, loops = program.added, [*program.every(Loop)]
    back = [loop for loop in loops if loop.origin.phase == Phase.BACKWARD]
    every = [each for loop in back for each in loop.stacked if each.outer in added]
    parts, stacks = {e.inner for e in every}, {program.joined.get(added[e.outer], e.outer) for e in every}
    often = [each for loop in loops if loop.dim.name == MICROBATCH for each in _within(loop)]
    for unit in units:
        adds = isinstance(unit, Local) and unit.outputs == unit.inputs[-1:] and unit.outputs[0] in parts
        if adds or (isinstance(unit, Stack) and unit.value in stacks):
            yield ADDING
        elif isinstance(unit, AllReduce | ReduceScatter) and unit.rule == SENT:
            yield SENDING if unit in often else ONCE
        else:
            own = _nodes(unit)
            yield frozenset([slots[node] for node in own]) if own and slots.keys() >= own else None


def _within(loop: Loop) -> Iterator[Instr]:
    """The instructions of a loop, and of those in it."""
    for each in loop.body:
        yield from _within(each) if isinstance(each, Loop) else (each,)


def _nodes(unit: Unit) -> set[int]:
    """The operations that a unit is of; none if it depends on storage, or on what is kept for backward."""
    if isinstance(unit, FusedKernel | Group):
        return {instr.origin.node for instr in unit.instrs}
    if isinstance(unit, Stack):
        return set()
    first = first_of(unit)
    moves = isinstance(first, Transfer) or getattr(first, "rule", "") in (SENT, PARAMETER)
    return set() if moves else {first.origin.node}


class FirstRuns(Draft):
    """A pipeline whose stages recompute nothing, without what they save for backward: whatever stages
    recompute takes no less, as second runs come on top. What is kept differs in moves on a device, and in
    writes to stacks that are no sums."""

    def __init__(self, *asked: Any) -> None:
        super().__init__(*asked)
        self._counted: dict[int, tuple[Program, list[bool]]] = {}

    def make(self, cluster: OpCluster) -> Table:
        table, fixed = super().make(cluster), self.decided.fixed
        entries = {
            a: self._first(cluster, entry, fixed | dict(zip(table.names, a, strict=True)))
            for a, entry in table.entries.items()
        }
        self.tables[-1] = replace(table, entries=entries)
        return self.tables[-1]

    def entry(self, cluster: OpCluster, chosen: Mapping[str, Choice]) -> Entry | None:
        entry = super().entry(cluster, chosen)
        return None if entry is None else self._first(cluster, entry, chosen)

    def _first(self, cluster: OpCluster, entry: Entry, chosen: Mapping[str, Choice]) -> Entry:
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
