"""A program that a pass rewrites: its values and more, and code with other instructions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mesh_tf_core.ir.builder import ProgramBuilder
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.loops import Loop
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.values import Instr, Splits, Value


class ProgramRewriter(ProgramBuilder):
    """Adds values to a program and replaces its code.

    Ids of the program stay the same; new values follow them. `dead` and `compact` remove unused values.
    """

    def __init__(self, program: Program) -> None:
        super().__init__(list(program.values))
        self.program = program

    def rewritten(self, code: Sequence[Instr], **more: Any) -> Program:
        """The program with other code and the values made so far.

        Args:
          more: other fields of it.
        """
        return replace(self.program, values=tuple(self.values), code=tuple(code), **more)

    def pending(self, id: int, axes: Axes) -> int:
        """A new value like another one, with a pending sum over some axes."""
        new = len(self.values)
        self.values.append(self.values[id].pending(axes, new))
        return new

    def otherwise(self, id: int, splits: Splits, partial: Axes = (), dtype: str | None = None) -> int:
        """A new value of the same tensor of the graph with another placement."""
        new, v = len(self.values), self.values[id]
        self.values.append(Value(new, v.shape, dtype or v.dtype, splits, partial, v.tensor))
        return new


def inside(loop: Loop, block: Callable[[Sequence[Instr]], Sequence[Instr]]) -> Loop:
    """A loop with a rewritten body; the same object if nothing changed."""
    body = tuple(block(loop.body))
    return loop if body == loop.body else loop.remade(body=body)


def take_out(instr: Instr, code: list[Instr]) -> None:
    """Takes an instruction, mostly one of the last, out of the code."""
    for at in range(len(code) - 1, -1, -1):
        if code[at] is instr:
            del code[at]
            return
    raise AssertionError(f"instruction {instr} is not in this block")
