"""Seconds that slots of a pipeline surely take, of the entries of tables of layers (`layer_bounds`)."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from costmodels.kernels.groups import Group
from costmodels.kernels.partition import FusedKernel
from costmodels.pricing.overlap import loads_or_stores
from costmodels.pricing.units import Stack, Unit, first_of
from layoutopt.formulation.extract import Draft
from layoutopt.formulation.tables import Entry, Table
from layoutopt.space.kind import Choice
from mesh_tf_core.ir.blocks import MICROBATCH, reads
from mesh_tf_core.ir.instructions import GRADIENT as GRADIENT_SENT
from mesh_tf_core.ir.instructions import PARAMETER
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.outline import Outline
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Instr, Local, Loop, Program, ReduceScatter, Transfer
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT, STAGES, splits
from mesh_tf_core.ops.kinds import Move
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch_order import second_half

Slots = Mapping[int, int]
"""Node -> the kind of slots that runs it (`StageAction`), or `HEAD`."""
HEAD = len(StageAction)
"""The kind of slots of what follows behind the layers, which the last stage runs."""
SlotKinds = frozenset[int]
ONCE: SlotKinds = frozenset()
"""The kinds of slots of what a step has once at least, in whatever slot."""
SlotsByProgram = dict[int, tuple[Program, list[SlotKinds | None]]]
"""By the ids of programs: the kinds of slots that surely run each part of its cost; none: `ONCE`."""
SlotSeconds = Mapping[SlotKinds, float]
"""Seconds of kernels and messages, by the kinds of slots that may run them."""
SENDING, ADDING = frozenset({HEAD + 1}), frozenset({HEAD + 2})
"""Of what sends gradients for each microbatch, or adds to them, in slots that go backward."""
STORED = (ONCE, SENDING, ADDING)
"""Of what depends on storage."""


def slots_of(graph: Graph | Outline, dim: str) -> Slots:
    """Node in loops over layers -> the kind of slots that runs it, or one that runs no more often."""
    found = dict[int, StageAction]()
    for block in (b for b in graph.blocks if b.dim.name == dim):
        late = second_half(block, graph)
        for top in block.nodes:
            back = StageAction.WEIGHTS if top.index in late else StageAction.BACKWARD
            inner = () if top.body is None else (node for node, _ in top.body.walk())
            for node in (top, *inner):
                found[node.index] = StageAction.FORWARD if node.phase == Phase.FORWARD else back
    return found


def head_of(graph: Graph, dim: str) -> Iterator[int]:
    """The nodes of a step that follow behind the layers, forward, and before they go backward."""
    for around in graph.blocks:
        after, back = set[int](), set[int]()
        for node in around.nodes:
            read, loop = reads(node), node.body is not None and node.body.dim.name == dim
            if read & back or (loop and node.phase != Phase.FORWARD):
                back.update(node.outputs)
            elif loop or (read & after and node.phase != Phase.UPDATE):
                after.update(node.outputs)
                inner = () if node.body is None else (each for each, _ in node.body.walk())
                yield from () if loop else (each.index for each in (node, *inner))


def outside(graph: Graph, dim: str) -> tuple[float, float]:
    """FLOPs of a step outside of its layers, before the update: of what follows behind these; of the rest."""
    layers, head, flops = slots_of(graph, dim), {*head_of(graph, dim)}, [0.0, 0.0]
    for node, times in graph.outline().walk():
        if node.inputs and node.body is None and node.index not in layers and node.phase != Phase.UPDATE:
            types = (graph.tensor(i).type for i in node.inputs)
            flops[node.index not in head] += times * node.op.flops(*types)
    return flops[0], flops[1]


def scattered(options: Iterable[Choice], mesh: Mesh, axes: Axes) -> list[Choice]:
    """The ways to store a variable of a stage further that differ in what becomes of gradients, over the same
    axes: zero1, which scatters their sum in no more time than all get it, or zero2, which adds up scattered
    ones."""
    found = list[Choice]()
    for option in filter(None, options):
        over = [a for a in option[1:] or mesh.names if a not in axes]
        stages = STAGES[1 : 2 + splits(STAGES.index(option[0]), GRADIENT, BACKWARD)]
        found += [(stage, *over) for stage in stages if over]
    return [*dict.fromkeys(found)] or [()]


def certain(
    draft: Draft, table: Table, slots: Slots, known: SlotsByProgram, stored: Mapping[str, Sequence[Choice]]
) -> Iterator[list[SlotSeconds]]:
    """The seconds of what every first run has, of every entry of a table; `stored`: as `scattered`."""
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
    # The sums over microbatches of what the iterations of a loop stack: by stacks, or parts of them.
    stacks = {program.joined.get(total, stack) for stack, total in added.items()}
    parts = {part for loop in back for part, stack in loop.stacked if stack in added}
    often = [each for loop in loops if loop.dim.name == MICROBATCH for each in _within(loop)]
    for unit in units:
        if isinstance(unit, Stack):
            adds = unit.loop.origin.phase == Phase.BACKWARD and unit.value in stacks
        else:
            adds = isinstance(unit, Local) and unit.outputs == unit.inputs[-1:] and unit.outputs[0] in parts
        if adds:
            yield ADDING
        elif isinstance(unit, AllReduce | ReduceScatter) and unit.rule == GRADIENT_SENT:
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
    moves = isinstance(first, Transfer) or getattr(first, "rule", "") in (GRADIENT_SENT, PARAMETER)
    return set() if moves else {first.origin.node}


def saves(unit: Unit, program: Program) -> bool:
    """True if a unit may keep something for backward, or bring it: a move on a device, or a write to a stack
    that is no sum, in a loop that is not backward's."""
    if not isinstance(unit, Stack):
        every = unit.instrs if isinstance(unit, FusedKernel | Group) else (unit,)
        return all(isinstance(each, Local) and isinstance(each.op, Move) for each in every)
    if unit.loop.origin.phase in (Phase.BACKWARD, Phase.UPDATE):
        return False
    return unit.value not in program.added and unit.value not in {total for _, total in unit.loop.summed}
