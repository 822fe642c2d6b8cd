"""Peak memory of a program by liveness.

A device holds, at instruction t,
  (1) the variables as stored, from the first step to the last;
  (2) the batch, and every value that is computed at or before t and read at or after it;
  (3) inside a loop: what is alive around the loop (its stacked results among it), plus the body's own values
      at their worst point.

Where the compiler fuses (`costmodels.kernels.fusion`)
  (4) values inside of a kernel take no memory, nor does a loop's part of a stack: its readers read the stack;
  (5) what a loop stacks twice, under two names, is stacked once;
  (6) the casts that loops make of a variable's parts are made at once, and held from the first loop to the
      last.

An output may take the place of an input that is read for the last time, if the operation works element by
element (or is an all-reduce) and the sizes agree; renames and reshapes have no memory of their own. A written
variable takes the place of the old one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from costmodels.kernels.fusion import Fused, fused
from mesh_tf_core.ir.program import (
    AllReduce,
    Instr,
    Local,
    Loop,
    Origin,
    Program,
    ReadVariable,
    Value,
    WriteVariable,
)
from mesh_tf_core.ops.basic import Cast


@dataclass(frozen=True, slots=True)
class Point:
    """Memory while one instruction runs.

    Attributes:
      bytes: everything on the device.
      depth: 0 at the top level, 1 in a loop, and so on.
    """

    name: str
    origin: Origin
    bytes: int
    depth: int


@dataclass(frozen=True, slots=True)
class Holding:
    """A value at the peak: what it is, its bytes on one device, where it comes from, its id (-1: a
    variable)."""

    what: str
    bytes: int
    origin: Origin | None
    value: int = -1


@dataclass(frozen=True)
class Memory:
    """The timeline of one step, its peak, and what is held there (largest first)."""

    points: tuple[Point, ...]
    peak: int
    at: int
    holdings: tuple[Holding, ...]
    variables: int


def memory(program: Program, fuses: bool = False, kernels: Fused | None = None) -> Memory:
    """Walks the program once; bytes of one device.

    Args:
      fuses: the compiler makes kernels of several operations (`Hardware.fuses`).
      kernels: those of `fused(program)`, where they are known.
    """
    return _Walk(program, fuses, kernels=kernels).run()


@dataclass(frozen=True, slots=True)
class Alive:
    """What a point of a program holds besides the variables: ids of the values alive there, and of casts that
    are kept there for all iterations, with how many these are; `node` runs there, and what is `dying` is not
    read again."""

    name: str
    scope: str
    phase: str
    node: int
    position: int
    values: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    dying: frozenset[int] = frozenset()


def alive(program: Program, fuses: bool = False) -> list[Alive]:
    """The values alive at every point. Meant for a program in which nothing is split: other layouts hold
    the same (what one kernel writes for the next is left out: they may make other kernels)."""
    walk = _Walk(program, fuses, record=True)
    walk.run()
    out = []
    for position, (point, live, spared, dying) in enumerate(walk.trace):
        held = tuple(i for i in live if walk.weight(i) and i not in spared)
        kept = tuple((i, walk.times[i]) for i in live if i in walk.times)
        at = point.origin
        out.append(Alive(point.name, at.scope, at.phase, at.node, position, held, kept, dying))
    return out


class _Walk:
    def __init__(
        self, program: Program, fuses: bool, record: bool = False, kernels: Fused | None = None
    ) -> None:
        self.record = record
        self.fuses = fuses
        self.inner: frozenset[int] = frozenset()
        self.casts: Mapping[int, int] = {}
        if fuses:
            kernels = kernels or fused(program)
            parts = (s.inner for instr, _ in program.walk() if isinstance(instr, Loop) for s in instr.sliced)
            self.casts = kernels.casts
            self.inner = kernels.inner.union(kernels.casts, parts, kernels.passed if record else ())
        self.trace: list[tuple[Point, tuple[int, ...], tuple[int, ...], frozenset[int]]] = []
        self.program = program
        self.size = [v.local_bytes(program.mesh) for v in program.values]
        self.copied: set[int] = set()
        self.born: dict[int, Origin] = {}
        self.stored = {name: _bytes(program, name) for name in program.variables}
        self.resident = sum(self.stored.values())
        self.points: list[Point] = []
        self.peak = self.resident
        self.at = 0
        self.held: dict[int, int] = {}
        self.root = self._roots()
        self.weightless = self._weightless()
        self.times: dict[int, int] = {}
        self.kept = self._kept()
        self.inner |= self.copied

    def run(self) -> Memory:
        self._block(self.program.code, set(self.program.results.values()), {}, 0)
        variables = [Holding(f"variable {n}", b, None) for n, b in self.stored.items()]
        values = (Holding(str(self.program.values[i]), b, self.born.get(i), i) for i, b in self.held.items())
        found = sorted([*variables, *values], key=lambda h: -h.bytes)
        return Memory(
            tuple(self.points), self.peak, self.at, tuple(h for h in found if h.bytes), self.resident
        )

    def _roots(self) -> dict[int, int]:
        """Value -> the value whose memory it shares."""
        root: dict[int, int] = {}
        for instr, _ in self.program.walk():
            if isinstance(instr, Loop) and self.fuses:
                root.update(self._twice(instr))
            if not isinstance(instr, Local) or not instr.inputs:
                continue
            if instr.op.free or instr.outputs[0] in self.casts:
                for o in instr.outputs:
                    root[o] = root.get(instr.inputs[0], instr.inputs[0])
        return root

    def _twice(self, loop: Loop) -> Iterator[tuple[int, int]]:
        """Stacks of what the loop stacks already, rule (5), and those."""
        same = {
            o: i
            for instr in loop.body
            if isinstance(instr, Local) and instr.op.free
            for i, o in zip(instr.inputs[:1], instr.outputs, strict=False)
        }
        stacks: dict[int, int] = {}
        for value, stack in loop.stacked:
            while value in same:
                value = same[value]
            if stacks.setdefault(value, stack) != stack:
                yield stack, stacks[value]

    def _kept(self) -> list[dict[int, int]]:
        """What rule (6) holds at every instruction of the top level: a cast -> bytes for all parts."""
        part: dict[int, tuple[int, int]] = {}
        spans: dict[int, tuple[int, list[int], int]] = {}
        for position, top in enumerate(self.program.code if self.fuses else ()):
            for instr in _within(top):
                if isinstance(instr, Loop):
                    part.update({s.inner: (s.outer, instr.dim.size) for s in instr.sliced})
                elif self._is_copied(instr):
                    (cast,), (source,), times = instr.outputs, instr.inputs, 1
                    while source in part:
                        source, n = part[source]
                        times *= n
                    self.copied.add(cast)
                    self.born[cast] = instr.origin
                    spans.setdefault(self.root.get(source, source), (cast, [], times))[1].append(position)
        held: list[dict[int, int]] = [{} for _ in self.program.code]
        self.times = {cast: times for cast, _, times in spans.values()}
        for cast, positions, times in spans.values():
            for at in range(positions[0], positions[-1] + 1):
                held[at][cast] = times * self.size[cast]
        return held

    def _is_copied(self, instr: Instr) -> bool:
        """Whether an instruction in a loop is the cast of a variable."""
        if not isinstance(instr, Local) or not isinstance(instr.op, Cast):
            return False
        return self.program.values[instr.outputs[0]].tensor in self.program.fusion.stored

    def _weightless(self) -> set[int]:
        """Values that lie in a variable's memory: what is read from it and what is written to it."""
        found: set[int] = set()
        for instr, _ in self.program.walk():
            if isinstance(instr, ReadVariable):
                found.update(instr.outputs)
            elif isinstance(instr, WriteVariable):
                found.add(self.root.get(instr.inputs[0], instr.inputs[0]))
        return found

    def weight(self, id: int) -> int:
        return 0 if id in self.weightless or id in self.inner else self.size[id]

    def _last_reads(self, code: Sequence[Instr], leaving: set[int]) -> list[set[int]]:
        """For every instruction, the memory that is free once it has run."""
        needed = {self.root.get(i, i) for i in leaving}
        out: list[set[int]] = []
        for instr in reversed(code):
            touched = {self.root.get(i, i) for i in (*instr.inputs, *instr.outputs)}
            out.append(touched - needed)
            needed |= touched
        return out[::-1]

    def _block(self, code: Sequence[Instr], leaving: set[int], around: dict[int, int], depth: int) -> None:
        """`around`: what is alive outside this block, value -> bytes; it is not freed here."""
        live: dict[int, int] = {}
        outside, own = sum(around.values()), 0
        for position, (instr, dying) in enumerate(zip(code, self._last_reads(code, leaving), strict=True)):
            if not depth:
                around = self.kept[position]
                outside = sum(around.values())
            reused = self._reused(instr, dying)
            for o in instr.outputs:
                if self.root.get(o, o) == o and o not in around:
                    own += self.weight(o) - live.get(o, 0)
                    live[o] = self.weight(o)
                    self.born[o] = instr.origin
            total = self.resident + outside + own - sum(map(self.weight, reused))
            self.points.append(Point(instr.name, instr.origin, total, depth))
            if total > self.peak or not self.held:
                self.peak, self.at = max(total, self.peak), len(self.points) - 1
                self.held = {i: b for i, b in {**around, **live}.items() if b and i not in reused}
            if self.record:
                self.trace.append((self.points[-1], (*around, *live), tuple(reused), frozenset(dying)))
            if isinstance(instr, Loop):
                self._loop(instr, {**around, **live}, depth + 1)
            for i in dying:
                own -= live.pop(i, 0)

    def _loop(self, loop: Loop, around: dict[int, int], depth: int) -> None:
        inner = {c.enter: self.size[c.enter] for c in loop.carried}
        inner.update({s.inner: 0 if s.inner in self.inner else self.size[s.inner] for s in loop.sliced})
        for i in inner:
            self.born[i] = loop.origin
        # A loop's start values are dead once the first iteration has copied them into the carry.
        starts = {c.init for c in loop.carried}
        kept = {i: b for i, b in around.items() if i not in starts or i in loop.inputs[len(loop.carried) :]}
        self._block(loop.body, {*loop.leaving, *inner}, {**kept, **inner}, depth)

    def _reused(self, instr: Instr, dying: set[int]) -> list[int]:
        """Outputs that take a dying input's place."""
        elementwise = isinstance(instr, Local) and instr.op.kind == "elementwise"
        if not (elementwise or isinstance(instr, AllReduce)):
            return []
        inputs = {self.root.get(j, j) for j in instr.inputs}
        freed = [self.weight(i) for i in dying if i not in instr.outputs and i in inputs]
        taken = []
        for o in instr.outputs:
            if self.weight(o) in freed:
                freed.remove(self.weight(o))
                taken.append(o)
        return taken


def _within(instr: Instr) -> Iterator[Instr]:
    """What is in a loop, outer loops first, and the loop itself; nothing for other instructions."""
    if isinstance(instr, Loop):
        yield instr
        for inner in instr.body:
            yield from _within(inner) if isinstance(inner, Loop) else (inner,)


def _bytes(program: Program, name: str) -> int:
    stored = program.variables[name]
    value = Value(-1, stored.variable.shape, stored.variable.dtype, stored.splits)
    return value.local_bytes(program.mesh)
