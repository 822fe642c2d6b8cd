"""What a collective is for. Hardware files say per class which part of its time runs under compute.

  gradient    sums of gradients that only the update of variables reads: the rest of backward runs meanwhile
  parameter   gathers of variables that are stored split, before their use or after their update: the layer
              before, or the next step's forward, runs meanwhile
  ring        what goes round while a device attends in its turn (`mesh_tf_core.ops.context`), or multiplies
             (`mesh_tf_core.lower.collective_matmul`)
  activation  everything else: what follows waits for it
The hidden part of a collective is a fraction of its own time, so prices of collectives add up, as the search
needs; that there is enough compute to hide it under is not checked here. A class that a file does not name is
exposed. Local to what a collective's value is made from and read by, so parts of a program have its classes.

Of a ring (`Permute.beside`) it is known what runs meanwhile: the attention or the products of one turn,
lowered as one, so nothing of other parts of the program. They hide as much as they take, shared between the
messages by their bytes. In the loop of turns and around it the TPU compiler begins to send keys, values,
their gradients and chunks before the kernels of a turn and waits behind them (v5e:2x4, one layer of 16,384
tokens, 2026-11-23; products of a gather and a scatter, 2026-11-24). Nothing hides what is brought home at the
end.

So it is of what loops keep on the hosts. An iteration's state is stored while its products run, and the part
of the next one is loaded meanwhile: the TPU compiler begins both as an iteration begins, and takes the first
load out of the loop (v5e:2x2, eight layers, 2026-11-23). The products of a body hide as much as they take, in
all iterations but one, shared between the transfers by the bytes that the link carries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.kernels.fusion import fusion_of
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    Collective,
    Instr,
    Local,
    Loop,
    Permute,
    Program,
    ReduceScatter,
    Slice,
    Transfer,
    WriteVariable,
)

GRADIENT, PARAMETER, ACTIVATION = "gradient", "parameter", "activation"
CLASSES = (GRADIENT, PARAMETER, ACTIVATION)
RING = "ring"


@dataclass(frozen=True, slots=True, eq=False)
class Beside:
    """A message, and the kernels that run meanwhile: `share` of their time is for it."""

    instr: Collective | Transfer
    kernels: tuple[Local, ...]
    share: float


def beside(program: Program) -> dict[int, Beside]:
    """The messages of rings that something runs beside, by the value that they make: the attention and the
    products up to the next ones, or to what they bring."""
    found: dict[int, Beside] = {}
    sent: list[Permute] = []
    kernels: list[Local] = []
    brought: set[int] = set()

    def ends() -> None:
        sizes = [program.values[i.outputs[0]].local_bytes(program.mesh) for i in sent]
        if kernels:
            shares = (size / sum(sizes) for size in sizes)
            each = (Beside(i, tuple(kernels), share) for i, share in zip(sent, shares, strict=True))
            found.update((b.instr.outputs[0], b) for b in each)
        for known in (sent, kernels, brought):
            known.clear()

    def block(code: Sequence[Instr]) -> None:
        for instr in code:
            if isinstance(instr, Permute) and instr.beside:
                if kernels or (sent and instr.origin != sent[0].origin):
                    ends()
                sent.append(instr)
                brought.update(instr.outputs)
            elif isinstance(instr, Loop):
                ends()
                block(instr.body)
                ends()
            elif isinstance(instr, Local) and sent:
                waits, own = not brought.isdisjoint(instr.inputs), instr.origin == sent[0].origin
                attends = sent[0].beside == "attention"
                if instr.op.kind == sent[0].beside and not waits and (own or not attends):
                    kernels.append(instr)
                elif attends and own and waits and instr.op.kind != "attention":
                    brought.update(instr.outputs)
                elif waits or (attends and not own) or instr.op.kind == "attention":
                    ends()

    block(program.code)
    ends()
    return found


def beside_loops(program: Program, carried: Callable[[Transfer], float]) -> dict[int, Beside]:
    """What loops move between devices and hosts beside their products, by the value that it makes; `carried`:
    the bytes of it on the link."""
    found: dict[int, Beside] = {}
    for loop, _ in program.walk():
        moved = [i for i in loop.body if isinstance(i, Transfer)] if isinstance(loop, Loop) else []
        if not moved or not isinstance(loop, Loop):
            continue
        kernels = tuple(i for i in loop.body if isinstance(i, Local) and i.op.kind in MATMUL_CLASSES)
        sizes = [carried(i) for i in moved]
        often = (loop.dim.size - 1) / loop.dim.size
        for instr, size in zip(moved, sizes, strict=True):
            found[instr.outputs[0]] = Beside(instr, kernels, often * size / sum(sizes))
    return found


def classes(program: Program) -> dict[int, str]:
    """Class of every collective, by the first value that it makes."""
    stored = _stored(program)
    needed = _needed(program)
    written = _written(program)
    found = {}
    for instr, _ in program.walk():
        if isinstance(instr, Collective):
            found[instr.outputs[0]] = _class(instr, stored, needed, written)
    return found


def _class(instr: Collective, stored: set[int], needed: set[int], written: set[int]) -> str:
    if isinstance(instr, AllGather):
        late = instr.origin.phase == "update"
        whole = written.issuperset(instr.outputs) if late else stored.issuperset(instr.inputs)
        return PARAMETER if whole else ACTIVATION
    summed = isinstance(instr, AllReduce | ReduceScatter) and getattr(instr, "combine", "sum") == "sum"
    late = instr.origin.phase != "update" and needed.isdisjoint(instr.outputs)
    return GRADIENT if summed and late else ACTIVATION


def _stored(program: Program) -> set[int]:
    """Values that are variables, or parts or casts of them."""
    tensors = fusion_of(program).stored
    stored = {v.id for v in program.values if v.tensor in tensors}
    for instr, _ in program.walk():
        taken = instr.inputs and stored.issuperset(instr.inputs)
        if taken and _moves(instr) and instr.origin.phase != "update":
            stored.update(instr.outputs)
    return stored


def _written(program: Program) -> set[int]:
    """Values that become variables as they are, or when they were moved or cast."""
    written: set[int] = set()
    for instr in reversed(program.code):
        if isinstance(instr, WriteVariable) or (_moves(instr) and written.intersection(instr.outputs)):
            written.update(instr.inputs)
    return written


def _moves(instr: Instr) -> bool:
    """Whether an instruction passes a value on."""
    if isinstance(instr, Local):
        return instr.op.converts or instr.op.free
    return isinstance(instr, AllGather | AllReduce | ReduceScatter | Slice)


def _needed(program: Program) -> set[int]:
    """Values that something before the update computes with."""
    needed = set(program.results.values())

    def visit(code: Sequence[Instr]) -> None:
        for instr in reversed(code):
            if isinstance(instr, Loop):
                needed.update(instr.inputs[: len(instr.carried) + len(instr.sliced)])
                needed.update(c.leave for c in instr.carried)
                needed.update(r.inner for r in instr.results if r.outer in needed)
                visit(instr.body)
            elif _moves(instr):
                if needed.intersection(instr.outputs):
                    needed.update(instr.inputs)
            elif instr.origin.phase != "update":
                needed.update(instr.inputs)

    visit(program.code)
    return needed
