"""Pass `combine`: small all-reduces of gradients over the same axes travel as one message.

Only sums that nothing before the update reads are combined, so that waiting delays no other instruction: one
message per (axes, dtype), sent when its last member is ready.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Done, Instr, Program, ReduceScatter, Value

SMALL_BYTES = 1 << 16
"""A message below this size costs mostly latency (64 KiB: on every network of the presets the time of a
message of this size is within 2x of an empty one's)."""


class BucketKey(NamedTuple):
    """The properties that small sums need in common to travel together.

    Attributes:
      late: the update's total takes them (`lower.sums`, rule 5): they are summed over `axes`, maybe more.
    """

    axes: Axes
    dtype: str
    late: bool = False


def combine_small(program: Program) -> Program:
    """Joins the small gradient sums of the top level."""
    groups = {key: [w.sum for w in found] for key, found in together(waiting(program), program.mesh).items()}
    member = {id(r): key for key, found in groups.items() if len(found) > 1 for r in found}
    ready: dict[BucketKey, list[AllReduce]] = {}
    code: list[Instr] = []
    for instr in program.code:
        key = member.get(id(instr))
        if key is None or not isinstance(instr, AllReduce):
            code.append(instr)
            continue
        ready.setdefault(key, []).append(instr)
        if len(ready[key]) == len(groups[key]):
            found = ready[key]
            inputs = tuple(i for r in found for i in r.inputs)
            outputs = tuple(o for r in found for o in r.outputs)
            code.append(AllReduce(inputs, outputs, found[-1].origin, key.axes))
    return replace(program, code=tuple(code))


@dataclass(frozen=True)
class Waiting:
    """A sum that may travel with others if it is small.

    Attributes:
      value: the summed value.
      place, read: its position among the top level's instructions, and its first reader there.
    """

    sum: AllReduce
    value: Value
    place: int
    read: int


def waiting(program: Program) -> tuple[Waiting, ...]:
    """The top-level sums that may travel together.

    The rest of a scattered sum is taken just before its update; it would be late for the others.
    """
    if not any(isinstance(instr, AllReduce) for instr in program.code):
        return ()
    early: set[int] = set()
    scattered: set[int] = set()
    for instr in program.code:
        if isinstance(instr, Done):
            continue
        if instr.origin.phase != Phase.UPDATE:
            early.update(instr.inputs)
        if isinstance(instr, ReduceScatter):
            scattered.update(instr.outputs)
    early.update(program.results.values())
    found: list[tuple[AllReduce, int]] = []
    first: dict[int, int] = {}
    for at, instr in enumerate(program.code):
        for i in instr.inputs if not isinstance(instr, Done) else ():
            first.setdefault(i, at)
        if not isinstance(instr, AllReduce) or instr.combine != "sum" or instr.origin.phase == Phase.UPDATE:
            continue
        if instr.outputs[0] not in early and instr.inputs[0] not in scattered:
            found.append((instr, at))
    end = len(program.code)
    return tuple(Waiting(r, program.values[r.inputs[0]], at, first.get(r.outputs[0], end)) for r, at in found)


def together(found: Iterable[Waiting], mesh: Mesh) -> dict[BucketKey, list[Waiting]]:
    """Those that are small on a mesh, by axes and dtype."""
    groups: dict[BucketKey, list[Waiting]] = {}
    for w in found:
        if w.value.local_bytes(mesh) <= SMALL_BYTES:
            groups.setdefault(BucketKey(w.sum.axes, w.value.dtype), []).append(w)
    return {key: _in_time(members) for key, members in groups.items()}


def _in_time(found: list[Waiting]) -> list[Waiting]:
    """The members that nobody reads before the last of them is ready (an update may precede other
    gradients)."""
    while found:
        sent = found[-1].place
        kept = [w for w in found if w.read > sent]
        if len(kept) == len(found):
            break
        # The last member itself is read after it is sent, so a group never becomes empty here.
        found = kept
    return found
