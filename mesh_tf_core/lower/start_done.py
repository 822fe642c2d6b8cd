"""Pass `start and done`: which messages start before they are waited for, and where the device waits.

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
from dataclasses import replace
from functools import cached_property, partial

from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.builder import inside
from mesh_tf_core.ir.instructions import GRADIENT, HOST, PARAMETER, STEP
from mesh_tf_core.ir.op import PRODUCTS
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower.nodes import stored_tensors


def start_and_done(program: ir.Program) -> ir.Program:
    """Applies the rules of the module's text."""
    if next(program.every(ir.Message), None) is None:
        return program
    return replace(program, code=_Placing(program).block(program.code, False))


class _Placing:
    def __init__(self, program: ir.Program) -> None:
        self.program = program

    @cached_property
    def stored(self) -> set[int]:
        return _stored(self.program)

    @cached_property
    def written(self) -> set[int]:
        return _written(self.program)

    @cached_property
    def needed(self) -> set[int]:
        return _needed(self.program)

    def block(self, code: Sequence[ir.Instr], looped: bool) -> tuple[ir.Instr, ...]:
        """A block with its messages started, and done."""
        out: list[ir.Instr] = []
        going: dict[int, ir.Message] = {}
        waits = _without_products(code)
        for instr in code:
            if going and not going.keys().isdisjoint(instr.inputs):
                for message in dict.fromkeys(going[i] for i in instr.inputs if i in going):
                    out.append(_done(message))
                    for o in message.outputs:
                        del going[o]
            if isinstance(instr, ir.Loop):
                instr = inside(instr, partial(self.block, looped=True))
            elif isinstance(instr, ir.Message):
                if not instr.rule:
                    instr = self.started(instr, looped)
                    going.update(dict.fromkeys(instr.outputs if instr.rule else (), instr))
                elif not waits.isdisjoint(instr.outputs):
                    instr = replace(instr, rule="")
            elif isinstance(instr, ir.Done) and waits:
                left = tuple(i for i in instr.inputs if i not in waits)
                if not left:
                    continue
                instr = instr if left == instr.inputs else replace(instr, inputs=left)
            out.append(instr)
        out += map(_done, dict.fromkeys(going.values()))
        return tuple(out)

    def started(self, message: ir.Message, looped: bool) -> ir.Message:
        """A message with its rule, if there is one for it."""
        if isinstance(message, ir.Transfer):
            return replace(message, rule=HOST, pipelined=True) if looped else message
        late = message.origin.phase == Phase.UPDATE
        if isinstance(message, ir.AllGather):
            if self.written.issuperset(message.outputs) if late else self.stored.issuperset(message.inputs):
                return replace(message, rule=PARAMETER, pipelined=True)
            return message
        summed = (
            isinstance(message, ir.AllReduce | ir.ReduceScatter)
            and getattr(message, "combine", "sum") == "sum"
        )
        if summed and not late and self.needed.isdisjoint(message.outputs):
            return replace(message, rule=GRADIENT, pipelined=looped)
        return message


def _done(message: ir.Message) -> ir.Done:
    return ir.Done(message.outputs, (), message.origin, message.name)


def _without_products(code: Iterable[ir.Instr]) -> set[int]:
    """What comes in steps of a decomposed collective while no product runs."""
    idle: set[int] = set()
    found: set[int] = set()
    for instr in code:
        if isinstance(instr, ir.Message) and instr.rule == STEP:
            idle.update(instr.outputs)
        elif isinstance(instr, ir.Done):
            found.update(idle.intersection(instr.inputs))
        elif isinstance(instr, ir.Local) and instr.op.kind in PRODUCTS:
            idle.clear()
    return found


# -- what messages are for -----------------------------------------------------------------------------------


def _stored(program: ir.Program) -> set[int]:
    """Values that are variables, or parts or casts of them."""
    tensors = stored_tensors(program.outline)
    stored = {v.id for v in program.values if v.tensor in tensors}
    for instr, _ in program.walk():
        taken = instr.inputs and stored.issuperset(instr.inputs)
        if taken and instr.origin.phase != Phase.UPDATE and _moves(instr):
            stored.update(instr.outputs)
    return stored


def _written(program: ir.Program) -> set[int]:
    """Values that become variables as they are, or when they were moved or cast."""
    written: set[int] = set()
    for instr in reversed(program.code):
        if isinstance(instr, ir.WriteVariable) or (_moves(instr) and written.intersection(instr.outputs)):
            written.update(instr.inputs)
    return written


def _moves(instr: ir.Instr) -> bool:
    """Whether an instruction passes a value on."""
    if isinstance(instr, ir.Local):
        return instr.op.converts or instr.op.free
    return isinstance(instr, ir.AllGather | ir.AllReduce | ir.ReduceScatter | ir.Slice)


def _needed(program: ir.Program) -> set[int]:
    """Values that something before the update computes with."""
    needed = set(program.results.values())

    def visit(code: Sequence[ir.Instr]) -> None:
        for instr in reversed(code):
            if isinstance(instr, ir.Loop):
                needed.update(instr.inputs[: len(instr.carried) + len(instr.sliced)])
                needed.update(c.leave for c in instr.carried)
                needed.update(r.inner for r in instr.results if r.outer in needed)
                visit(instr.body)
            elif isinstance(instr, ir.Done):
                continue
            elif _moves(instr):
                if needed.intersection(instr.outputs):
                    needed.update(instr.inputs)
            elif instr.origin.phase != Phase.UPDATE:
                needed.update(instr.inputs)

    visit(program.code)
    return needed
