"""The passes over messages.

Pass `combine`: small all-reduces of gradients over the same axes travel as one message.

Only sums that nothing before the update reads are combined, so that waiting delays no other instruction: one
message per (axes, dtype), sent when its last member is ready.

Pass `start and done`: which messages start before they are waited for, and where the device waits.

A message overlaps the instructions between its start and its `Done`. Rules, each with where it is seen:
  ring       steps of a decomposed collective, as `ops.steps` starts them and waits for them: the TPU
             compiler begins to send keys, values, their gradients and chunks before the kernels of a step,
             and waits behind these (v5e:2x4, one layer of 16,384 tokens, 2026-11-23; products of a gather and
             a scatter, 2026-11-24). With no product between start and done, the device just waits
  gradient   sums of gradients that only the update of variables reads: the rest of backward runs meanwhile
             (Li et al. 2020, "PyTorch Distributed"; XLA's collective pipeliner, in loops)
  parameter  gathers of variables that are stored split, before their use or after their update: the layer
             before, or the next step's forward, runs meanwhile (Zhao et al. 2023, "PyTorch FSDP", section
             3.3.2; XLA's collective pipeliner)
  host link  what loops keep on the hosts, or read there: an iteration's state is stored while its products
             run, and the part of the next one is loaded meanwhile. The TPU compiler begins both as an
             iteration begins, and takes the first load out of the loop (v5e:2x2, eight layers, 2026-11-23)
The device waits for every other message. A message starts at its place, and is done before the first
instruction of its block that reads its result, or at the block's end. If done is one iteration after start,
the message is `pipelined`.

The profile of a machine decides whether messages of a rule overlap kernels (`costmodels.pricing.overlap`).
The purpose of a message follows from the origin and the readers of its value, so parts of a program have the
same rules as the whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import NamedTuple

from mesh_tf_core.ir.builder import inside
from mesh_tf_core.ir.instructions import GRADIENT, HOST, PARAMETER, STEP
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import PRODUCTS
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    Done,
    Instr,
    Local,
    Loop,
    Message,
    Program,
    ReduceScatter,
    Slice,
    Transfer,
    Value,
    WriteVariable,
)
from mesh_tf_core.ir.values import every
from mesh_tf_core.lower.nodes import stored_tensors

SMALL_BYTES = 1 << 16
"""A message below this size costs mostly latency (64 KiB: on every network of the presets the time of a
message of this size is within 2x of an empty one's)."""


class BucketKey(NamedTuple):
    """The properties that small sums need in common to travel together.

    Attributes:
      late: the update's total takes them (`lower.sums`, rule 5): they are summed over `axes`, maybe more.
    """

    axes: Axes
    dtype: str
    late: bool = False


def combine_small(program: Program) -> Program:
    """Joins the small gradient sums of the top level."""
    groups = {key: [w.sum for w in found] for key, found in together(waiting(program), program.mesh).items()}
    member = {id(r): key for key, found in groups.items() if len(found) > 1 for r in found}
    ready: dict[BucketKey, list[AllReduce]] = {}
    code: list[Instr] = []
    for instr in program.code:
        key = member.get(id(instr))
        if key is None or not isinstance(instr, AllReduce):
            code.append(instr)
            continue
        ready.setdefault(key, []).append(instr)
        if len(ready[key]) == len(groups[key]):
            found = ready[key]
            inputs = tuple(i for r in found for i in r.inputs)
            outputs = tuple(o for r in found for o in r.outputs)
            code.append(AllReduce(inputs, outputs, found[-1].origin, key.axes))
    return replace(program, code=tuple(code))


@dataclass(frozen=True)
class Waiting:
    """A sum that may travel with others if it is small.

    Attributes:
      value: the summed value.
      place, read: its position among the top level's instructions, and its first reader there.
    """

    sum: AllReduce
    value: Value
    place: int
    read: int


def waiting(program: Program) -> tuple[Waiting, ...]:
    """The top-level sums that may travel together.

    The rest of a scattered sum is taken just before its update; it would be late for the others.
    """
    if not any(isinstance(instr, AllReduce) for instr in program.code):
        return ()
    early: set[int] = set()
    scattered: set[int] = set()
    for instr in program.code:
        if isinstance(instr, Done):
            continue
        if instr.origin.phase != Phase.UPDATE:
            early.update(instr.inputs)
        if isinstance(instr, ReduceScatter):
            scattered.update(instr.outputs)
    early.update(program.results.values())
    found: list[tuple[AllReduce, int]] = []
    first: dict[int, int] = {}
    for at, instr in enumerate(program.code):
        for i in instr.inputs if not isinstance(instr, Done) else ():
            first.setdefault(i, at)
        if not isinstance(instr, AllReduce) or instr.combine != "sum" or instr.origin.phase == Phase.UPDATE:
            continue
        if instr.outputs[0] not in early and instr.inputs[0] not in scattered:
            found.append((instr, at))
    end = len(program.code)
    return tuple(Waiting(r, program.values[r.inputs[0]], at, first.get(r.outputs[0], end)) for r, at in found)


def together(found: Iterable[Waiting], mesh: Mesh) -> dict[BucketKey, list[Waiting]]:
    """Those that are small on a mesh, by axes and dtype."""
    groups: dict[BucketKey, list[Waiting]] = {}
    for w in found:
        if w.value.local_bytes(mesh) <= SMALL_BYTES:
            groups.setdefault(BucketKey(w.sum.axes, w.value.dtype), []).append(w)
    return {key: _in_time(members) for key, members in groups.items()}


def _in_time(found: list[Waiting]) -> list[Waiting]:
    """The members that nobody reads before the last of them is ready (an update may precede other
    gradients)."""
    while found:
        sent = found[-1].place
        kept = [w for w in found if w.read > sent]
        if len(kept) == len(found):
            break
        # The last member itself is read after it is sent, so a group never becomes empty here.
        found = kept
    return found


def start_and_done(program: Program) -> Program:
    """Applies the rules of the module's text."""
    if next(program.every(Message), None) is None:
        return program
    return replace(program, code=_Placing(program).block(program.code, False))


class _Placing:
    def __init__(self, program: Program) -> None:
        self.program = program

    @cached_property
    def stored(self) -> set[int]:
        """Values that are variables, or parts or casts of them."""
        tensors = stored_tensors(self.program.outline)
        stored = {v.id for v in self.program.values if v.tensor in tensors}
        for instr in every(self.program.code):
            taken = instr.inputs and stored.issuperset(instr.inputs)
            if taken and instr.origin.phase != Phase.UPDATE and _moves(instr):
                stored.update(instr.outputs)
        return stored

    @cached_property
    def written(self) -> set[int]:
        """Values that become variables as they are, or when they were moved or cast."""
        written: set[int] = set()
        for instr in reversed(self.program.code):
            if isinstance(instr, WriteVariable) or (_moves(instr) and written.intersection(instr.outputs)):
                written.update(instr.inputs)
        return written

    @cached_property
    def needed(self) -> set[int]:
        """Values that something before the update computes with."""
        needed = set(self.program.results.values())

        def visit(code: Sequence[Instr]) -> None:
            for instr in reversed(code):
                if isinstance(instr, Loop):
                    needed.update(instr.inputs[: len(instr.carried) + len(instr.sliced)])
                    needed.update(c.leave for c in instr.carried)
                    needed.update(r.inner for r in instr.results if r.outer in needed)
                    visit(instr.body)
                elif isinstance(instr, Done):
                    continue
                elif _moves(instr):
                    if needed.intersection(instr.outputs):
                        needed.update(instr.inputs)
                elif instr.origin.phase != Phase.UPDATE:
                    needed.update(instr.inputs)

        visit(self.program.code)
        return needed

    def block(self, code: Sequence[Instr], looped: bool) -> tuple[Instr, ...]:
        """A block with its messages started, and done."""
        out: list[Instr] = []
        going: dict[int, Message] = {}
        waits = _without_products(code)
        for instr in code:
            if going and not going.keys().isdisjoint(instr.inputs):
                for message in dict.fromkeys(going[i] for i in instr.inputs if i in going):
                    out.append(_done(message))
                    for o in message.outputs:
                        del going[o]
            if isinstance(instr, Loop):
                instr = inside(instr, partial(self.block, looped=True))
            elif isinstance(instr, Message):
                if not instr.rule:
                    instr = self.started(instr, looped)
                    going.update(dict.fromkeys(instr.outputs if instr.rule else (), instr))
                elif not waits.isdisjoint(instr.outputs):
                    instr = replace(instr, rule="")
            elif isinstance(instr, Done) and waits:
                left = tuple(i for i in instr.inputs if i not in waits)
                if not left:
                    continue
                instr = instr if left == instr.inputs else replace(instr, inputs=left)
            out.append(instr)
        out += map(_done, dict.fromkeys(going.values()))
        return tuple(out)

    def started(self, message: Message, looped: bool) -> Message:
        """A message with its rule, if there is one for it."""
        if isinstance(message, Transfer):
            return replace(message, rule=HOST, pipelined=True) if looped else message
        late = message.origin.phase == Phase.UPDATE
        if isinstance(message, AllGather):
            if self.written.issuperset(message.outputs) if late else self.stored.issuperset(message.inputs):
                return replace(message, rule=PARAMETER, pipelined=True)
            return message
        summed = (
            isinstance(message, AllReduce | ReduceScatter) and getattr(message, "combine", "sum") == "sum"
        )
        if summed and not late and self.needed.isdisjoint(message.outputs):
            return replace(message, rule=GRADIENT, pipelined=looped)
        return message


def _done(message: Message) -> Done:
    return Done(message.outputs, (), message.origin, message.name)


def _without_products(code: Iterable[Instr]) -> set[int]:
    """What comes in steps of a decomposed collective while no product runs."""
    idle: set[int] = set()
    found: set[int] = set()
    for instr in code:
        if isinstance(instr, Message) and instr.rule == STEP:
            idle.update(instr.outputs)
        elif isinstance(instr, Done):
            found.update(idle.intersection(instr.inputs))
        elif isinstance(instr, Local) and instr.op.kind in PRODUCTS:
            idle.clear()
    return found


def _moves(instr: Instr) -> bool:
    """Whether an instruction passes a value on."""
    if isinstance(instr, Local):
        return instr.op.converts or instr.op.free
    return isinstance(instr, AllGather | AllReduce | ReduceScatter | Slice)
