"""Pass `combine`: small all-reduces of gradients over the same axes travel as one message.

Only sums that nothing before the update reads are combined, so that waiting for each other delays nobody: one
message per (axes, dtype), sent when its last member is ready.
"""

from __future__ import annotations

from dataclasses import replace

from mesh_tf_core.layout import Axes
from mesh_tf_core.program import AllReduce, Instr, Program, ReduceScatter, Value

SMALL_BYTES = 1 << 16
"""A message below this size costs mostly latency (64 KiB: on every network of the presets the time of a
message of this size is within 2x of an empty one's)."""

Key = tuple[Axes, str]


def combine_small(program: Program) -> Program:
    """Joins the small gradient sums of the top level."""
    groups = combinable(program)
    member = {id(r): key for key, found in groups.items() if len(found) > 1 for r in found}
    waiting: dict[Key, list[AllReduce]] = {}
    code: list[Instr] = []
    for instr in program.code:
        key = member.get(id(instr))
        if key is None or not isinstance(instr, AllReduce):
            code.append(instr)
            continue
        waiting.setdefault(key, []).append(instr)
        if len(waiting[key]) == len(groups[key]):
            found = waiting[key]
            inputs = tuple(i for r in found for i in r.inputs)
            outputs = tuple(o for r in found for o in r.outputs)
            code.append(AllReduce(inputs, outputs, found[-1].origin, key[0]))
    return replace(program, code=tuple(code))


def combinable(program: Program) -> dict[Key, list[AllReduce]]:
    """The top-level sums that may travel together, by axes and dtype.

    The rest of a sum that was scattered is taken just before its update; it would be late for the others.
    """
    early: set[int] = set()
    scattered: set[int] = set()
    for instr in program.code:
        if instr.origin.phase != "update":
            early.update(instr.inputs)
        if isinstance(instr, ReduceScatter):
            scattered.update(instr.outputs)
    early.update(program.results.values())
    groups: dict[Key, list[AllReduce]] = {}
    first: dict[int, int] = {}
    place: dict[int, int] = {}
    for at, instr in enumerate(program.code):
        for i in instr.inputs:
            first.setdefault(i, at)
        if not isinstance(instr, AllReduce) or instr.combine != "sum" or instr.origin.phase == "update":
            continue
        if instr.outputs[0] not in early and instr.inputs[0] not in scattered:
            place[instr.outputs[0]] = at
            value: Value = program.values[instr.inputs[0]]
            if value.local_bytes(program.mesh) <= SMALL_BYTES:
                groups.setdefault((instr.axes, value.dtype), []).append(instr)
    return {key: _in_time(found, first, place) for key, found in groups.items()}


def _in_time(found: list[AllReduce], first: dict[int, int], place: dict[int, int]) -> list[AllReduce]:
    """The members that nobody reads before the last of them is ready (an update may precede other
    gradients)."""
    while found:
        sent = place[found[-1].outputs[0]]
        kept = [r for r in found if first.get(r.outputs[0], sent + 1) > sent]
        if len(kept) == len(found):
            break
        # The last member itself is read after it is sent, so a group never becomes empty here.
        found = kept
    return found
