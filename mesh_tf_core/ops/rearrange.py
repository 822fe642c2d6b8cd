"""Any fixed rearrangement of elements along a split dimension: only elements of other devices are sent.

The moves of an operation are a list of runs: these elements of one shard go to this place of another shard.
The runs between different devices are sorted into rounds in which no device sends or receives twice. The
longest run comes first, so that runs of similar lengths share a round; a round is one `Permute` of pieces
with the length of its longest run. Where that would send as many bytes as gathering the dimension whole, it
is gathered: that is one message per operand, and happens only where nearly every device needs nearly
everything (as of one tensor repeated).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from mesh_tf_core.ir.builder import Emitter
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import wire_bytes
from mesh_tf_core.ops.kinds import MadeByLowering, Move
from mesh_tf_core.ops.pieces import PieceJoin, resized


@dataclass(frozen=True, slots=True, order=True)
class Run:
    """`size` neighbouring elements, from place `begin` of piece `source` to place `at` of piece `target`."""

    source: int
    begin: int
    target: int
    at: int
    size: int


OperandRun = tuple[int, int, int]
"""Neighbouring elements of one operand: the place of the first in the whole result, its place in the operand,
and their number."""


def runs(parts: Sequence[OperandRun], sizes: Sequence[int], pieces: int, length: int) -> list[Run]:
    """The elements that move between pieces if every operand and the result are cut into as many pieces.

    Args:
      parts: one per operand.
      sizes: of the operands along the dimension; a device holds its pieces of them end to end.
      length: of one piece of the result.
    """
    out, before = [], 0
    for (place, first, count), size in zip(parts, sizes, strict=True):
        step, done = size // pieces, 0
        while done < count:
            source, inside = divmod(first + done, step)
            target, at = divmod(place + done, length)
            span = min(count - done, step - inside, length - at)
            out.append(Run(source, before + inside, target, at, span))
            done += span
        before += step
    return list(_joined(out))


def _joined(found: Sequence[Run]) -> Iterator[Run]:
    """Runs that follow each other at both ends as one."""
    last: Run | None = None
    for run in found:
        if last is not None and replace(last, size=run.size) == Run(
            run.source, run.begin - last.size, run.target, run.at - last.size, run.size
        ):
            last = replace(last, size=last.size + run.size)
            continue
        if last is not None:
            yield last
        last = run
    if last is not None:
        yield last


def rounds(found: Sequence[Run]) -> list[list[Run]]:
    """Sorts the runs between different devices into rounds in which no device sends or receives twice."""
    out: list[tuple[list[Run], set[int], set[int]]] = []
    for run in sorted((r for r in found if r.source != r.target), key=lambda r: -r.size):
        free = (r for r in out if run.source not in r[1] and run.target not in r[2])
        taken, sources, targets = next(free, None) or ([], set(), set())
        if not taken:
            out.append((taken, sources, targets))
        taken.append(run)
        sources.add(run.source)
        targets.add(run.target)
    return [taken for taken, _, _ in out]


@dataclass(frozen=True)
class PieceTake(MadeByLowering, Move):
    """`size` elements of every device's piece of `dim`, from `begins[number of the piece]`."""

    dim: str
    begins: tuple[int, ...]
    size: int

    def infer(self, *inputs: TensorType) -> TensorType:
        return resized(inputs[0], self.dim, self.size * len(self.begins))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        begin = _looked_up(k, at, self.dim, self.begins)
        return k.slice(
            slices[0],
            [begin if n == self.dim else 0 for n in at.inputs[0].shape.names],
            at.outputs[0].shape.sizes,
        )


_NOTHING = (0, 0, 0)


@dataclass(frozen=True, slots=True)
class Slot:
    """The elements that a device takes from one operand: per piece (begin in the operand, place in the
    result, elements)."""

    operand: int
    table: tuple[tuple[int, int, int], ...]

    def __str__(self) -> str:
        return f"{self.operand}: " + " ".join(f"{begin}>{at}*{size}" for begin, at, size in self.table)


@dataclass(frozen=True)
class PiecePut(MadeByLowering, Move):
    """Pieces of `length` elements along `dim`, made of runs of the operands; the other elements are
    `fill`."""

    dim: str
    length: int
    fill: float
    slots: tuple[Slot, ...]

    def infer(self, *inputs: TensorType) -> TensorType:
        return resized(inputs[0], self.dim, self.length * len(self.slots[0].table))

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        type = at.outputs[0]
        axis = type.shape.index(self.dim)
        out = k.scalar(self.fill, type.dtype)
        column = [self.length if i == axis else 1 for i in range(len(type.shape))]
        places = k.reshape(k.iota(self.length, "int32"), column)
        for slot in self.slots:
            part = self._moved(k, at, slot, slices[slot.operand], axis)
            if any((first, size) != (0, self.length) for _, first, size in slot.table):
                ends = ([first, first + size] for _, first, size in slot.table)
                first, last = (_looked_up(k, at, self.dim, end) for end in zip(*ends, strict=True))
                inside = k.binary("ge", places, k.scalar(first, "int32"))
                inside = k.binary("and", inside, k.binary("lt", places, k.scalar(last, "int32")))
                part = k.where(inside, part, out)
            out = part
        return out

    def _moved(self, k: Kernel, at: At, slot: Slot, x: Any, axis: int) -> Any:
        """The operand as long as the result, so that the slot's run lies in its place; elsewhere anything."""
        size, shape = x.shape[axis], at.outputs[0].shape
        starts = [begin - first for begin, first, _ in slot.table]
        before, after = max(0, -min(starts)), max(0, max(starts) + self.length - size)
        if before or after:
            x = k.pad(x, [(before, after) if i == axis else (0, 0) for i in range(len(shape))])
        start = _looked_up(k, at, self.dim, [s + before for s in starts])
        return k.slice(x, [start if i == axis else 0 for i in range(len(shape))], shape.sizes)


def _looked_up(k: Kernel, at: At, dim: str, table: Sequence[int]) -> Any:
    """The number for this device's piece of `dim`."""
    if len(set(table)) == 1:
        return table[0]
    return k.take(k.array(table, "int32"), k.scalar(at.shard(dim), "int32"))


def rearranged(
    low: Emitter,
    op: Op,
    inputs: Sequence[int],
    type: TensorType,
    dim: str,
    parts: Sequence[OperandRun],
    fill: float = 0.0,
) -> int:
    """The result of `op`, which puts `parts` (see `runs`) of its operands along `dim` and `fill` elsewhere.

    The operands have the splits of the layout, and so has the result if exchanging shards pays. If `dim` is
    not split, or gathering it is faster, `op` itself runs.
    """
    values = [low.values[i] for i in inputs]
    kept = low.natural(type.shape)
    count = low.oracle.ways(low.layout.axes(dim))
    sizes = tuple(v.shape.dim(dim).size for v in values)
    length = type.shape.dim(dim).size // count
    own_slots, steps = plan(tuple(parts), sizes, count, length)
    once = sum(low.values[i].shape.dim(dim).size for i in set(inputs))
    whole = wire_bytes("all_gather", once // count, count)
    if count == 1 or sum(step[0].size for step in steps) >= whole:
        whole_inputs = [low.without(i, [dim]) for i in inputs]
        splits = tuple(() if n == dim else s for n, s in zip(type.shape.names, kept, strict=True))
        return low.local(op, whole_inputs, [type], [splits])[0]
    own = inputs[0]
    if len(inputs) > 1:
        own = low.applied(PieceJoin(dim, 0, 0, count), *inputs, splits=kept)
    operands, slots = [own], list(own_slots)
    for number, step in enumerate(steps, 1):
        operand, slot = _sent(low, own, dim, step, number, count)
        operands.append(operand)
        slots.append(slot)
    used = sorted({slot.operand for slot in slots})
    slots = [replace(slot, operand=used.index(slot.operand)) for slot in slots]
    put = PiecePut(dim, length, fill, tuple(slots))
    return low.local(put, [operands[i] for i in used], [type], [kept])[0]


@lru_cache(maxsize=1 << 12)
def plan(
    parts: tuple[OperandRun, ...], sizes: tuple[int, ...], pieces: int, length: int
) -> tuple[list[Slot], list[list[Run]]]:
    """The elements that devices put from their own pieces, and the rounds of messages (see `runs`)."""
    found = runs(parts, sizes, pieces, length) if pieces > 1 else []
    own: list[list[tuple[int, int, int]]] = [[] for _ in range(pieces)]
    for run in found:
        if run.source == run.target:
            own[run.target].append((run.begin, run.at, run.size))
    # As many slots as any device has runs.
    columns = itertools.zip_longest(*own, fillvalue=_NOTHING)
    return [Slot(0, column) for column in columns], rounds(found)


def _sent(low: Emitter, own: int, dim: str, step: Sequence[Run], number: int, count: int) -> tuple[int, Slot]:
    """One round: what every device sends, and where its receiver puts it."""
    v = low.values[own]
    longest, piece = step[0].size, v.shape.dim(dim).size // count
    begins, table = [0] * count, [_NOTHING] * count
    for run in step:
        begins[run.source] = min(run.begin, piece - longest)
        table[run.target] = (run.begin - begins[run.source], run.at, run.size)
    source = own
    if longest < piece:
        source = low.applied(PieceTake(dim, tuple(begins), longest), own)
    pairs = tuple(sorted((run.source, run.target) for run in step))
    out = low.sent(source, v.split_of(dim), wrap=False, pairs=pairs)
    return out, Slot(number, tuple(table))
