"""Pass `dead`: removes instructions with unused results, in loops too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mesh_tf_core.ir.program import Done, Input, Instr, Loop, Program, WriteVariable


def drop_dead(program: Program) -> Program:
    """Keeps instructions that lead to a result or a written variable (and every input, so that feeds stay as
    declared)."""
    live = set(program.results.values())
    return replace(program, code=tuple(_sweep(program.code, live)))


def _sweep(code: Sequence[Instr], live: set[int]) -> list[Instr]:
    kept: list[Instr] = []
    for instr in reversed(code):
        if isinstance(instr, Loop):
            found = _loop(instr, live)
            if found is None:
                continue
            instr = found
        elif isinstance(instr, Done):
            awaited = tuple(i for i in instr.inputs if i in live)
            instr = replace(instr, inputs=awaited)
            if not awaited:
                continue
        elif not isinstance(instr, WriteVariable | Input) and not any(o in live for o in instr.outputs):
            continue
        live.update(instr.inputs)
        kept.append(instr)
    return kept[::-1]


def _loop(loop: Loop, live: set[int]) -> Loop | None:
    stacked = tuple(r for r in loop.stacked if r.outer in live)
    summed = tuple(r for r in loop.summed if r.outer in live)
    carried = tuple(c for c in loop.carried if c.final in live)
    while True:
        inside = {r.inner for r in (*stacked, *summed)} | {c.leave for c in carried}
        inside |= {i for i in (loop.runs, loop.first) if i is not None}
        body = _sweep(loop.body, inside)
        # A carry is needed if the body reads it, whether or not its final value is.
        more = tuple(c for c in loop.carried if c in carried or c.enter in inside)
        if len(more) == len(carried):
            break
        carried = more
    if not (stacked or summed or carried):
        return None
    sliced = tuple(s for s in loop.sliced if s.inner in inside)
    return loop.remade(carried=carried, sliced=sliced, stacked=stacked, summed=summed, body=tuple(body))
