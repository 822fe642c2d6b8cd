"""Peak memory of a program.

A device holds, at instruction t,
  (1) the variables as stored, from the first step to the last;
  (2) the batch, and every value that is computed at or before t and read at or after it;
  (3) inside a loop: what is alive around the loop (its stacked results among it), plus the body's own values
      at their worst point.
When values share memory, and when it is free, says `mesh_tf_core.ir.liveness`.

Where the compiler fuses (`costmodels.kernels.fused`)
  (4) values inside of a kernel take no memory, nor what it adds to a loop's sum, nor a loop's part of a
      stack: its readers read the stack;
  (5) what a loop stacks twice, under two names, is stacked once;
  (6) the casts that loops make of a variable's parts are made at once, and held from the first loop to the
      last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from costmodels.kernels.fused import Fused, fused, made_by_kernels
from costmodels.kernels.fusion import fusion_of
from mesh_tf_core.ir.liveness import Held, Liveness
from mesh_tf_core.ir.program import Instr, Local, Loop, Origin, Program


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
    return walk.trace


@dataclass
class _Copies:
    """The casts of all parts of a variable, rule (6).

    Attributes:
      times: how many parts.
      first, last: positions at the top level between which they are held.
    """

    times: int
    first: int
    last: int


class _Walk:
    def __init__(
        self, program: Program, fuses: bool, record: bool = False, kernels: Fused | None = None
    ) -> None:
        self.program, self.record = program, record
        self.stored = {name: _bytes(program, name) for name in program.variables}
        self.resident = sum(self.stored.values())
        self.born: dict[int, Origin] = {}
        self.points: list[Point] = []
        self.peak = self.resident
        self.at = 0
        self.held: dict[int, int] = {}
        self.trace: list[Alive] = []
        shared: dict[int, int] = {}
        inner: set[int] = set()
        casts: list[tuple[int, Local, int, int]] = []
        if fuses:
            kernels = kernels or fused(program)
            shared.update(kernels.casts)
            inner.update(kernels.inner, kernels.casts, kernels.passed if record else ())
            for instr, _ in program.walk():
                if isinstance(instr, Loop):
                    inner.update(part.inner for part in instr.sliced)
                    inner.update(made_by_kernels(instr))
                    shared.update(_twice(instr))
            casts = list(_casts(program))
            inner.update(cast.outputs[0] for _, cast, _, _ in casts)
        self.liveness = Liveness(program, shared, inner)
        self.now = Held(self.liveness)
        self.copies = self._copies(casts)
        self.kept: dict[int, int] = {}

    def run(self) -> Memory:
        for position, instr in enumerate(self.program.code):
            there = (i for i, c in self.copies.items() if c.first <= position <= c.last)
            self.kept = {i: self.copies[i].times * self._size(i) for i in there}
            self._runs(instr, 0)
        variables = [Holding(f"variable {n}", b, None) for n, b in self.stored.items()]
        values = (Holding(str(self.program.values[i]), b, self.born.get(i), i) for i, b in self.held.items())
        found = sorted([*variables, *values], key=lambda h: -h.bytes)
        return Memory(
            tuple(self.points), self.peak, self.at, tuple(h for h in found if h.bytes), self.resident
        )

    def _runs(self, instr: Instr, depth: int) -> None:
        now = self.now
        over = now.begins(instr, self._size)
        self.born.update((o, instr.origin) for o in instr.outputs if o in now.bytes)
        total = self.resident + sum(self.kept.values()) + now.total - sum(now.bytes[o] for o in over)
        self.points.append(Point(instr.name, instr.origin, total, depth))
        if total > self.peak or not self.held:
            self.peak, self.at = max(total, self.peak), len(self.points) - 1
            self.held = {i: b for i, b in {**self.kept, **now.bytes}.items() if b and i not in over}
        if self.record:
            values = tuple(i for i, b in now.bytes.items() if b and i not in over)
            kept = tuple((i, self.copies[i].times) for i in self.kept)
            at, dying = instr.origin, frozenset(self.liveness.span(instr).frees)
            number = len(self.trace)
            self.trace.append(Alive(instr.name, at.scope, at.phase, at.node, number, values, kept, dying))
        if isinstance(instr, Loop):
            now.enters(instr, self._size)
            self.born.update((i, instr.origin) for i in instr.entering)
            for inner in instr.body:
                self._runs(inner, depth + 1)
            now.iterated(instr)
        now.ends(instr)

    def _size(self, id: int) -> int:
        return self.program.values[id].local_bytes(self.program.mesh)

    def _copies(self, casts: Iterable[tuple[int, Local, int, int]]) -> dict[int, _Copies]:
        """What rule (6) holds, by the first cast of every variable."""
        first: dict[int, int] = {}
        found: dict[int, _Copies] = {}
        for position, cast, source, times in casts:
            (out,) = cast.outputs
            self.born[out] = cast.origin
            one = first.setdefault(self.liveness.memory(source), out)
            found.setdefault(one, _Copies(times, position, position)).last = position
        return found


def _casts(program: Program) -> Iterator[tuple[int, Local, int, int]]:
    """The casts of variables in loops: position of the outermost loop, the cast, the value that its operand
    is a part of, and how many parts that has."""
    part: dict[int, tuple[int, int]] = {}
    for position, top in enumerate(program.code):
        for instr in _within(top):
            if isinstance(instr, Loop):
                part.update({s.inner: (s.outer, instr.dim.size) for s in instr.sliced})
            elif isinstance(instr, Local) and _casts_variable(instr, program):
                (source,), times = instr.inputs, 1
                while source in part:
                    source, n = part[source]
                    times *= n
                yield position, instr, source, times


def _casts_variable(instr: Local, program: Program) -> bool:
    return instr.op.converts and program.values[instr.outputs[0]].tensor in fusion_of(program).stored


def _twice(loop: Loop) -> Iterator[tuple[int, int]]:
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


def _within(instr: Instr) -> Iterator[Instr]:
    """What is in a loop, outer loops first, and the loop itself; nothing for other instructions."""
    if isinstance(instr, Loop):
        yield instr
        for inner in instr.body:
            yield from _within(inner) if isinstance(inner, Loop) else (inner,)


def _bytes(program: Program, name: str) -> int:
    return program.variables[name].value.local_bytes(program.mesh)
