"""The memory that a framework gives a number for: rules (15) to (17) of `costmodels.liveness`."""

from collections.abc import Collection, Mapping

from costmodels.kept import logits
from costmodels.stage_ends import EndWork, StageEnd
from mesh_tf_core.ir.blocks import MICROBATCH, TICK
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.liveness import ValueSize
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Collective, Instr, Local, Loop, Program, ReduceScatter, Slice
from mesh_tf_core.layers.recurrent import KERNEL
from mesh_tf_core.ops.custom import LibraryKernels


class Beside:
    """Bytes that instructions hold besides the values of the program, rules (15) and (16).

    Args:
      copies: arrays of logits at the loss and its gradient, in float32 or as a library has them.
      step: bytes of the optimizer's step.
      work: of the stages; `end`: the one that the program is of.
    """

    def __init__(self, program: Program, copies: float, step: float, work: EndWork, end: StageEnd) -> None:
        self.logits = logits(program) if copies or work.losses > 1 else dict[int, float]()
        self.program, self.copies, self.step, self.work, self.end = program, copies, round(step), work, end

    def at(self, instr: Instr, held: Mapping[int, int], over: Collection[int], size: ValueSize) -> int:
        """The bytes at one instruction.

        Args:
          held: memory -> its bytes, of the values; over: memory that the results take over.
        """
        if instr.origin.phase == Phase.UPDATE:
            return self.step
        if isinstance(instr, Local) and isinstance(op := instr.op, LibraryKernels):
            element = size(instr.outputs[0]) / itemsize(self.program.values[instr.outputs[0]].dtype)
            return round(element * sum(each[0] for each in op.kernels) / 2)
        made = self.logits.keys() & instr.outputs
        has = made and not self.logits.keys().isdisjoint(instr.inputs)
        if not has or not self.work.has(instr.origin.node, self.end):
            return 0
        there = sum(b for i, b in held.items() if i in self.logits and i not in over)
        most = max(self.copies * self.logits[i] * size(i) for i in made)
        return self.work.losses * (round(most) or there) - there


def within_kernels(program: Program) -> set[int]:
    """Values that a library's kernels (`LibraryKernels`) make for each other, rule (19)."""
    made, read = set[int](), set(program.results.values())
    for instr, _ in program.walk():
        named = isinstance(instr, Collective) or isinstance(getattr(instr, "op", None), LibraryKernels)
        own = KERNEL in instr.origin.scope.split("/") and not named
        (made if own else read).update(
            instr.outputs if own else (*instr.inputs, *getattr(instr, "leaving", ()))
        )
    return made - read


def moments(program: Program, stored: Mapping[str, int]) -> int:
    """Bytes of one moment of every variable, of variables with these bytes."""
    slots = {name: v.variable.slot_of for name, v in program.variables.items()}
    return sum(max(stored.get(n, 0) for n in slots if slots[n] == of) for of in {*slots.values()} - {None})


def gradients(program: Program, known: Collection[int] | None = None) -> tuple[set[int], dict[int, int]]:
    """Arrays that add gradients up: sums of loops over microbatches or ticks, or the gradients of one
    microbatch, and what devices add up of them; and those that a buffer has, which the update reads, as they
    are before devices add them up, or split them for the update alone, each with the gradient it becomes.
    `known`: of a part of a step, the tensors that are such arrays in the whole."""
    loops = (i for i in program.every(Loop) if i.dim.name in (MICROBATCH, TICK))
    sums = {total for loop in loops for _, total in loop.summed}
    owner, buffers, first = program.outline.gradient_of, dict[int, int](), dict[int, int]()
    some = (known or ()) if sums or known is not None else owner
    sums |= {value.id for value in program.values if value.tensor in some}
    for instr in program.code:
        if instr.origin.phase == Phase.UPDATE:
            read = ((first[i], i) for i in instr.inputs if i in first and known is None)
            buffers.update((own, i) for own, i in read if program.values[own].shape.dims)
        elif instr.origin.phase == Phase.BACKWARD or isinstance(instr, Loop):
            split = isinstance(instr, ReduceScatter | Slice)
            alike = isinstance(instr, Local) and (instr.op.converts or instr.op.free) and instr.inputs
            same = split or isinstance(instr, AllReduce) or alike
            for i, o in zip(instr.inputs if same else instr.outputs, instr.outputs, strict=False):
                first[o] = o if split and program.values[o].tensor in owner else first.get(i, i)
                sums |= {o} if same and i in sums else set()
    tensors = {program.values[i].tensor for i in sums | buffers.keys()} - {-1}
    held = (v.id for v in program.values if v.tensor in tensors or v.id in sums or v.id in buffers)
    return {i for i in held if program.values[i].shape.dims}, buffers
