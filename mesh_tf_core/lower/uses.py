"""Who reads a value: the bookkeeping that passes share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

from mesh_tf_core.ir.program import Carry, Instr, Loop, Program, Result, Sliced, Value


def count_uses(code: Iterable[Instr], results: Iterable[int] = ()) -> defaultdict[int, int]:
    """How often each value is read by an instruction, leaves a loop, or is returned."""
    uses: defaultdict[int, int] = defaultdict(int)

    def visit(code: Iterable[Instr]) -> None:
        for instr in code:
            for i in instr.inputs:
                uses[i] += 1
            if isinstance(instr, Loop):
                visit(instr.body)
                for i in instr.leaving:
                    uses[i] += 1

    visit(code)
    for i in results:
        uses[i] += 1
    return uses


def compact(program: Program) -> Program:
    """Drops values that no instruction names and numbers the others in order of appearance."""
    order: dict[int, int] = {}

    def name(ids: Iterable[int]) -> None:
        for i in ids:
            order.setdefault(i, len(order))

    def visit(code: Iterable[Instr]) -> None:
        for instr in code:
            name(instr.inputs)
            if isinstance(instr, Loop):
                name((instr.index, *instr.entering))
                visit(instr.body)
            name(instr.outputs)

    def moved(instr: Instr) -> Instr:
        ins = tuple(order[i] for i in instr.inputs)
        outs = tuple(order[i] for i in instr.outputs)
        if not isinstance(instr, Loop):
            return replace(instr, inputs=ins, outputs=outs)
        return instr.remade(
            index=order[instr.index],
            carried=tuple(Carry(*(order[i] for i in c)) for c in instr.carried),
            sliced=tuple(Sliced(order[s.outer], order[s.inner]) for s in instr.sliced),
            stacked=tuple(Result(order[r.inner], order[r.outer]) for r in instr.stacked),
            summed=tuple(Result(order[r.inner], order[r.outer]) for r in instr.summed),
            body=tuple(moved(i) for i in instr.body),
            runs=None if instr.runs is None else order[instr.runs],
        )

    visit(program.code)
    name(program.results.values())
    values: list[Value] = [replace(program.values[old], id=new) for old, new in order.items()]
    return replace(
        program,
        values=tuple(values),
        code=tuple(moved(i) for i in program.code),
        feeds={n: order[i] for n, i in program.feeds.items() if i in order},
        results={n: order[i] for n, i in program.results.items()},
    )
