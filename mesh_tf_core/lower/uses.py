"""Who reads a value: the bookkeeping that passes share."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mesh_tf_core.ir.program import Instr, Loop, Program, Value, make_loop


def count_uses(code: Iterable[Instr], results: Iterable[int] = ()) -> defaultdict[int, int]:
    """How often each value is read by an instruction, leaves a loop, or is returned."""
    uses: defaultdict[int, int] = defaultdict(int)

    def visit(code: Iterable[Instr]) -> None:
        for instr in code:
            for i in instr.inputs:
                uses[i] += 1
            if isinstance(instr, Loop):
                visit(instr.body)
                for _, _, out, _ in instr.carried:
                    uses[out] += 1
                for inner, _ in (*instr.stacked, *instr.summed):
                    uses[inner] += 1

    visit(code)
    for i in results:
        uses[i] += 1
    return uses


def rebuilt(
    loop: Loop,
    body: Sequence[Instr],
    stacked: Sequence[tuple[int, int]],
    summed: Sequence[tuple[int, int]],
) -> Loop:
    """The loop with another body and other results."""
    return make_loop(
        loop.origin,
        loop.dim,
        loop.reverse,
        loop.index,
        loop.carried,
        loop.sliced,
        tuple(stacked),
        tuple(summed),
        tuple(body),
        loop.runs,
        loop.branch,
    )


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
                name([instr.index, *(c[1] for c in instr.carried), *(i for _, i in instr.sliced)])
                visit(instr.body)
            name(instr.outputs)

    def moved(instr: Instr) -> Instr:
        ins = tuple(order[i] for i in instr.inputs)
        outs = tuple(order[i] for i in instr.outputs)
        if not isinstance(instr, Loop):
            return replace(instr, inputs=ins, outputs=outs)
        return make_loop(
            instr.origin,
            instr.dim,
            instr.reverse,
            order[instr.index],
            tuple((order[a], order[b], order[c], order[d]) for a, b, c, d in instr.carried),
            tuple((order[a], order[b]) for a, b in instr.sliced),
            tuple((order[a], order[b]) for a, b in instr.stacked),
            tuple((order[a], order[b]) for a, b in instr.summed),
            tuple(moved(i) for i in instr.body),
            None if instr.runs is None else order[instr.runs],
            instr.branch,
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
