"""What a collective is for. Hardware files say per class which part of its time runs under compute.

  gradient    sums of gradients that only the update of variables reads: the rest of backward runs meanwhile
  parameter   gathers of variables that are stored split, before their use or after their update: the layer
              before, or the next step's forward, runs meanwhile
  activation  everything else: what follows waits for it
The hidden part of a collective is a fraction of its own time, so prices of collectives add up, as the search
needs; that there is enough compute to hide it under is not checked here. A class that a file does not name is
exposed. Local to what a collective's value is made from and read by, so parts of a program have its classes.
"""

from __future__ import annotations

from collections.abc import Sequence

from costmodels.kernels.fusion import fusion_of
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    Collective,
    Instr,
    Local,
    Loop,
    Program,
    ReduceScatter,
    Slice,
    WriteVariable,
)

GRADIENT, PARAMETER, ACTIVATION = "gradient", "parameter", "activation"
CLASSES = (GRADIENT, PARAMETER, ACTIVATION)


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
