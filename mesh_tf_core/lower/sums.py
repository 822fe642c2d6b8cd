"""Pass `pending sums`: an all-reduce waits behind linear operations, so that what is added anyway is summed
once.

Rewrites, each where the all-reduced value has no other reader:
  (1) all_reduce(all_reduce(x, a), b)          ->  all_reduce(x, a+b)
  (2) f(all_reduce(x, a), all_reduce(y, a))    ->  all_reduce(f(x, y), a)       f linear
  (3) slice(all_reduce(x, a), dim, a)          ->  reduce_scatter(x, a, dim)
  (4) loop { stack or sum all_reduce(x, a) }   ->  all_reduce(loop { stack or sum x }, a)
A gradient's sum is taken before the update begins (rule 2 stops there), so that `combine` finds all of them
together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from mesh_tf_core.layout import Axes
from mesh_tf_core.lower.uses import count_uses, rebuilt
from mesh_tf_core.program import AllReduce, Instr, Local, Loop, Program, ReduceScatter, Slice


def delay_sums(program: Program) -> Program:
    """Applies the rewrites of the module's text, once through the program."""
    state = _Sums(program)
    code, _ = state.block(program.code)
    return replace(program, values=tuple(state.values), code=tuple(code))


class _Sums:
    def __init__(self, program: Program) -> None:
        self.names = program.mesh.names
        self.values = list(program.values)
        self.uses: Counter[int] = count_uses(program.code, program.results.values())

    def block(self, code: Sequence[Instr]) -> tuple[list[Instr], dict[int, AllReduce]]:
        """The rewritten code, and the sums in it by result."""
        out: list[Instr] = []
        sums: dict[int, AllReduce] = {}

        def take(id: int) -> AllReduce:
            found = sums.pop(id)
            out.remove(found)
            return found

        for instr in code:
            single = {i: sums[i] for i in instr.inputs if i in sums and self.uses[i] == 1}
            if isinstance(instr, Loop):
                loop, hoisted = self.loop(instr)
                out.append(loop)
                for reduce in hoisted:
                    self._add(reduce, out, sums)
            elif isinstance(instr, AllReduce) and instr.combine == "sum":
                if single:
                    inner = take(instr.inputs[0])
                    axes = self._ordered(inner.axes + instr.axes)
                    instr = replace(instr, inputs=inner.inputs, axes=axes)
                    self._mark(inner.inputs[0], axes)
                self._add(instr, out, sums)
            elif isinstance(instr, Slice) and single and single[instr.inputs[0]].axes == instr.axes:
                inner = take(instr.inputs[0])
                out.append(ReduceScatter(inner.inputs, instr.outputs, inner.origin, inner.axes, instr.dim))
            elif self._passes(instr, single):
                self._delayed(instr, [take(i) for i in instr.inputs], out, sums)
            else:
                out.append(instr)
        return out, sums

    def _passes(self, instr: Instr, single: dict[int, AllReduce]) -> bool:
        """Rule (2): linear, every operand an all-reduce of its own over the same axes."""
        if not isinstance(instr, Local) or not instr.op.linear or not instr.inputs:
            return False
        if len(set(instr.inputs)) < len(instr.inputs) or len(instr.outputs) > 1:
            return False
        if any((r.origin.phase == "update") != (instr.origin.phase == "update") for r in single.values()):
            return False
        return all(i in single for i in instr.inputs) and len({r.axes for r in single.values()}) == 1

    def _delayed(
        self, instr: Instr, inner: Sequence[AllReduce], out: list[Instr], sums: dict[int, AllReduce]
    ) -> None:
        (result,), axes = instr.outputs, inner[0].axes
        pending = self._partial(result, self._ordered(axes + self.values[result].partial))
        out.append(replace(instr, inputs=tuple(r.inputs[0] for r in inner), outputs=(pending,)))
        self._add(AllReduce((pending,), (result,), instr.origin, axes), out, sums)
        if self.values[result].partial:
            self.uses[result] = 1

    def loop(self, loop: Loop) -> tuple[Loop, list[AllReduce]]:
        """Rule (4)."""
        body, sums = self.block(loop.body)
        hoisted: list[AllReduce] = []
        stacked: list[tuple[int, int]] = []
        summed: list[tuple[int, int]] = []
        for pairs, target in ((loop.stacked, stacked), (loop.summed, summed)):
            for inner, outer in pairs:
                reduce = sums.get(inner)
                if reduce is None or self.uses[inner] != 1:
                    target.append((inner, outer))
                    continue
                body.remove(reduce)
                pending = self._partial(outer, self._ordered(reduce.axes))
                target.append((reduce.inputs[0], pending))
                hoisted.append(AllReduce((pending,), (outer,), reduce.origin, reduce.axes))
        return rebuilt(loop, body, stacked, summed), hoisted

    def _add(self, reduce: AllReduce, out: list[Instr], sums: dict[int, AllReduce]) -> None:
        out.append(reduce)
        sums[reduce.outputs[0]] = reduce

    def _partial(self, id: int, axes: Axes) -> int:
        """A new value like `id`, still partial over `axes`."""
        self.values.append(replace(self.values[id], id=len(self.values), partial=axes))
        return len(self.values) - 1

    def _mark(self, id: int, axes: Axes) -> None:
        self.values[id] = replace(self.values[id], partial=axes)

    def _ordered(self, axes: Axes) -> Axes:
        return tuple(a for a in self.names if a in axes)
