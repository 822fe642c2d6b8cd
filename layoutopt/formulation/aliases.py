"""Values that go on living under another name or shape only.

Where nothing is split, a rename or a reshape is its operand's memory. Under a layout that splits dimensions
which only the new shape has, it is a smaller value of its own, and the operand dies with its last reader;
where it lacks split dimensions of the operand, it is a larger one, gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mesh_tf_core.ir.program import Instr, Local, Loop, Program


@dataclass(frozen=True)
class Aliases:
    """Attributes:
    names: value -> dimensions that it has under other names or shapes only.
    last: value -> the last instruction, in the order of `Program.walk`, that reads it under its own.
    others: value -> the values that are it under another name or shape, and where they are made.
    """

    names: dict[int, tuple[str, ...]]
    last: dict[int, int]
    others: dict[int, dict[int, int]]

    def beyond(self, value: int, position: int) -> tuple[str, ...]:
        """The dimensions that make a value disappear at a position when they are split."""
        return self.names.get(value, ()) if position > self.last.get(value, -1) else ()

    def instead(self, value: int, position: int) -> int | None:
        """The only value that is still read, where that is made and another name or shape of `value`."""
        if position <= self.last.get(value, -1):
            return None
        found = [o for o in self.others.get(value, ()) if self.last.get(o, -1) >= position]
        return found[0] if len(found) == 1 and self.others[value][found[0]] <= position else None


def aliases(program: Program) -> Aliases:
    """The aliases of a program in which nothing is split."""
    root: dict[int, int] = {}
    names: dict[int, tuple[str, ...]] = {}
    last: dict[int, int] = {}
    others: dict[int, dict[int, int]] = {}

    def visit(code: Sequence[Instr], position: int) -> int:
        for instr in code:
            if isinstance(instr, Loop):
                position = visit(instr.body, position + 1)
                # What a body reads from outside, and what it hands on, lives until its end.
                last.update((i, position - 1) for i in (*instr.inputs, *instr.leaving))
                continue
            if isinstance(instr, Local) and instr.op.free and instr.inputs:
                source = root.setdefault(instr.inputs[0], instr.inputs[0])
                own = program.values[source].shape.names
                for o in instr.outputs:
                    root[o] = source
                    others.setdefault(source, {})[o] = position
                    new = (n for n in program.values[o].shape.names if n not in own)
                    names[source] = tuple(dict.fromkeys((*names.get(source, ()), *new)))
            else:
                last.update((i, position) for i in instr.inputs)
            position += 1
        return position

    visit(program.code, 0)
    last.update((i, len(program.values)) for i in program.results.values())
    return Aliases(names, last, others)
