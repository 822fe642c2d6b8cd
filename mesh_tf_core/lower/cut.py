"""Pending sums that cross the border of a part that is lowered alone (see `subgraph`)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import AllReduce, Program
from mesh_tf_core.ir.rewriter import ProgramRewriter


@dataclass(frozen=True)
class Cut:
    """Tensors whose sum is taken after operations outside the part, each with the axes of the sum.

    Attributes:
      given: operands: their sum has to wait further here.
      left: results: their sum, over just these axes, is taken elsewhere.
    """

    given: Mapping[int, Axes] = field(default_factory=dict)
    left: Mapping[int, Axes] = field(default_factory=dict)

    @cached_property
    def key(self) -> Hashable:
        """Equal for equal cuts, and hashable."""
        return frozenset(self.given.items()), frozenset(self.left.items())

    def begin(self, program: Program) -> Program:
        """The program with the sums of its given values at the start."""
        if not self.given:
            return program
        made = {o for instr in program.code for o in instr.outputs}
        taken = [v for v in program.values if v.tensor in self.given and v.id not in made]
        state = ProgramRewriter(program)
        for v in taken:
            axes = self.given[v.tensor]
            if {a for split in v.splits for a in split} & {*axes}:
                raise LayoutError(
                    f"{v}: a sum over {'+'.join(axes)} cannot be deferred, because the tensor is split over "
                    "the same axis"
                )
            state.emit(AllReduce((state.pending(v.id, axes),), (v.id,), state.origin, axes))
        return state.rewritten((*state.code, *program.code))

    def end(self, program: Program) -> Program:
        """The program without the sums that it leaves to others; LayoutError if one that it was given did not
        wait, or one that it is to leave is another."""
        made = {o for instr in program.code for o in instr.outputs}
        left, renamed, code = dict(self.left), dict[int, int](), []
        for instr in program.code:
            if isinstance(instr, AllReduce):
                (put, *_), (out, *_) = instr.inputs, instr.outputs
                tensor = program.values[out].tensor
                if put not in made and tensor in self.given:
                    raise LayoutError(f"the sum of tensor %{tensor} cannot be deferred")
                if tensor in left and instr.axes == left[tensor]:
                    del left[tensor]
                    renamed[out] = put
                    continue
            code.append(instr)
        if left:
            raise LayoutError(
                f"tensors {sorted(left)} have no sum over the requested axes that could be deferred"
            )
        results = {name: renamed.get(i, i) for name, i in program.results.items()}
        return replace(program, code=tuple(code), results=results) if renamed else program


NO_CUT = Cut()
