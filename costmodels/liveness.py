"""Peak memory of a program.

A device holds, at instruction t,
  (1) the variables as stored, from the first step to the last, but for those that lie on the host;
  (2) the batch, and every value that is computed at or before t and read at or after it;
  (3) inside a loop: what is alive around the loop (its stacked results among it), plus the body's own values
      at their worst point.
`mesh_tf_core.ir.liveness` decides when values share memory, and when it is free.

Where the compiler fuses (`costmodels.kernels.fused`)
  (4) values inside of a kernel take no memory, nor what it adds to a loop's sum, nor a loop's part of a
      stack: its readers read the stack;
  (5) what a loop stacks twice, under two names, is stacked once;
  (6) the casts that loops make of a variable's parts are made at once, and held from the first loop to the
      last; of parts that are loaded from the host as each iteration needs them;
  (7) a TPU lays arrays out in tiles, whose lanes are filled up (`costmodels.kernels.quantities.tiling`).

Where each stage of a pipeline is a program of its own
  (8) what backward reads stays where it was made; a stage has fewer microbatches in flight
      (`PipelineSchedule.in_flight_apart`) than one program of all stages, and its own number of layers; and
      only the first or last one has the layers before or behind the stages (`costmodels.stage_ends`). The
      fullest stage counts.

Where PyTorch's autograd decides what stays for backward (`costmodels.kept`)
  (9) fused kernels of backward make again what they can of other values that are kept; functions that
  models write in steps keep what each step reads, if every call is a kernel (`kept.STEPS`)
  (10) logits are cast to float32 in memory, of which the loss is computed
  (12) the result of an operation does not take the place of an operand; (13) dropout keeps its mask, a byte
  (14) the casts of rule (6) are the model's parameters, and are held through the whole step
  (19) a library's kernels for states hold half of what they move: it is written and read; nothing else inside

Where a framework gives a number (`MemoryRules`, from `Hardware.holds`)
  (15) the loss and its gradient hold so many arrays of the logits' size, in float32 unless the library's call
       casts them itself (`kept.logits`); where a stage has its own program, of every microbatch until its
       backward
  (16) the optimizer's step holds so many arrays of the size of a moment of every variable or gradient at once
  (17) sums of gradients over microbatches take so many bytes an element
  (18) 1: gradients lie in a buffer that is there from the start of the step
  (11) 1: a product keeps its operands as it read them, gathered; else it gathers them again in backward
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodels.held_by_frameworks import Beside, gradients, moments, within_kernels
from costmodels.kept import beside, gathered, kept_values, logits, staying, variable_casts
from costmodels.kernels.fused import Fused, fused, made_by_kernels, unwritten
from costmodels.kernels.fusion import Fuses, fusion_of
from costmodels.kernels.quantities import tiling
from costmodels.stage_ends import EndWork, StageEnd, end_work, schedule_of, stage_shares
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.liveness import Held, Liveness
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Instr, Local, Loop, Origin, Program
from mesh_tf_core.ir.values import Value


@dataclass(frozen=True, slots=True)
class MemoryPoint:
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
    """A value at the peak: its name, its bytes on one device, its origin, its id (-1: a variable)."""

    what: str
    bytes: int
    origin: Origin | None
    value: int = -1


@dataclass(frozen=True)
class MemoryProfile:
    """The timeline of one step, its peak, and the values there (largest first); `stage`: of which stage, if
    each is a program of its own."""

    points: tuple[MemoryPoint, ...]
    peak: int
    at: int
    holdings: tuple[Holding, ...]
    variables: int
    stage: StageEnd | None = None


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """The rules of memory that hold for a compiler or engine.

    Attributes:
      fuses: the operations that share kernels: rules (4) to (6), of a library's calls (4) alone.
      tiles: arrays lie in tiles: rule (7).
      stage_programs: each stage of a pipeline is a program of its own: rule (8).
      remakes, wide_logits, masks, parameters: rules (9), (10), (13) and (14).
      overwrites: rule (4) of `mesh_tf_core.ir.liveness` holds for element-wise operations; else rule (12).
      loss_copies, step_copies, step_gradients, gradient_bytes, gathers: rules (15) to (17), (11); 0: none.
      buffers: rule (18).
      to_the_end: 1: recomputation goes to the end of what it recomputes (`mesh_tf_core.tracing.graph.Graph`).
    """

    fuses: Fuses = Fuses.NONE
    tiles: bool = False
    stage_programs: bool = False
    remakes: bool = False
    wide_logits: bool = False
    masks: bool = False
    parameters: bool = False
    overwrites: bool = True
    loss_copies: float = 0
    step_copies: float = 0
    step_gradients: float = 0
    gradient_bytes: float = 0
    gathers: float = 0
    to_the_end: float = 0
    buffers: float = 0

    def sizes(
        self, program: Program, end: StageEnd = StageEnd.FIRST, sums: Mapping[int, bool] | None = None
    ) -> ValueSizes:
        """The sizes of a program's values, at one stage; `sums`: of a part of a step, the tensors that rule
        (17) is about in the whole, and whether it surely is."""
        shares = self.stages(program).get(end, {})
        regrouped = fusion_of(program).regrouped if self.tiles else None
        more = Counter[int](beside(program, self.fuses) if self.masks else {})
        more.update({t: n - 1 for t, n in (gathered(program) if self.gathers else {}).items()})
        times, wide, surely = dict(self._flying(program)), self.gradient_bytes, sums or {}
        for value in map(program.values.__getitem__, gradients(program, sums)[0] if wide else ()):
            size = wide / itemsize(value.dtype)
            times[value.id] = size if surely.get(value.tensor, all(surely.values())) else min(size, 1)
        return ValueSizes(regrouped, shares, more, times)

    def _flying(self, program: Program) -> Mapping[int, float]:
        """What loops before the stages keep, and its copies in flight at the first stage, rule (8)."""
        work = self.work(program)
        column = schedule_of(program.outline) if work.remade else None
        flying = 1 if column is None else column.schedule.in_flight_apart(0)
        loops = (loop for loop in program.every(Loop) if loop.origin.node in work.remade)
        return {outer: flying for loop in loops for _, outer in loop.stacked}

    def stages(self, program: Program) -> Mapping[StageEnd, Mapping[tuple[str, int], float]]:
        """The stages that may be the fullest, with their shares of dimensions, rule (8)."""
        return stage_shares(program.outline) if self.stage_programs else {}

    def work(self, program: Program) -> EndWork:
        """The work of single stages in a program."""
        return end_work(program.outline) if self.stage_programs else NO_ENDS

    def ends(self, program: Program) -> Sequence[StageEnd]:
        """The stages of which one holds most."""
        return (*self.stages(program),) or (StageEnd.FIRST,)


PLAIN = MemoryRules()
NO_ENDS = EndWork()


def memory(
    program: Program, rules: MemoryRules = PLAIN, kernels: Fused | None = None, at: Iterable[StageEnd] = ()
) -> MemoryProfile:
    """Walks the program once for each stage of its own; bytes of one device. `kernels`: those of
    `fused(program)`, if known; `at`: these stages alone."""
    ends = at or rules.ends(program)
    return max((_Walk(program, rules, kernels, end).run() for end in ends), key=lambda found: found.peak)


SMALL = 1 << 16
"""Bytes of arrays whose tiles are not counted: they do not affect a peak."""


@dataclass(frozen=True, slots=True)
class ValueSizes:
    """Bytes that values of a program take on a device, rules (7), (8), (11) and (13).

    Attributes:
      regrouped: `Fusion.regrouped` where arrays lie in tiles, None where they do not.
      shares: name and size of a dimension -> the share of it that a stage of its own has.
      more: kept tensor -> bytes that are kept besides for each of its own.
      times: value -> how often its bytes are there: once for each microbatch, wider in a buffer of gradients.
    """

    regrouped: frozenset[frozenset[str]] | None = None
    shares: Mapping[tuple[str, int], float] = field(default_factory=dict)
    more: Mapping[int, float] = field(default_factory=dict)
    times: Mapping[int, float] = field(default_factory=dict)

    def of(self, value: Value, mesh: Mesh) -> int:
        """Bytes of one device's piece of a value."""
        held = (1 + self.more.get(value.tensor, 0)) * self.times.get(value.id, 1)
        for dim in value.shape if self.shares else ():
            held *= self.share(dim)
        size = round(value.local_bytes(mesh) * held)
        if self.regrouped is None or size < SMALL:
            return size
        return round(size * tiling(value.local(mesh).shape, self.regrouped))

    def share(self, dim: Dim) -> float:
        """The share of a dimension that a stage has."""
        return self.shares.get((dim.name, dim.size), 1)

    def first(self, value: Value) -> float:
        """That of the first dimension of a value."""
        return self.share(value.shape.dims[0]) if value.shape.dims else 1.0

    def text(self, value: Value) -> str:
        """The name of a value, with the places that a ring has."""
        dims = (Dim(d.name, max(1, round(d.size * self.share(d)))) for d in value.shape)
        return str(replace(value, shape=Shape(dims)) if self.shares else value)


@dataclass
class _Copies:
    """The casts of all parts of a variable, rule (6).

    Attributes:
      times: how many parts.
      first, last: positions at the top level between which they are held.
    """

    times: float
    first: int
    last: int


@dataclass(frozen=True)
class KernelMemory:
    """The effect of a program's kernels on memory.

    Attributes:
      made_of: values that are computed where they are read -> their operands.
      twice: stacks of values that a loop stacks already, and those, rule (5).
      nowhere: values without memory, rule (4).
      casts: of variables in loops, rule (6): position of the outermost loop, the cast, the value whose part
        its operand is, and the number of parts.
    """

    made_of: Mapping[int, int]
    twice: Mapping[int, int]
    nowhere: frozenset[int]
    casts: tuple[tuple[int, Local, int, int], ...]

    @property
    def shared(self) -> dict[int, int]:
        """`Liveness.shared`."""
        return {**self.made_of, **self.twice}


def kernel_memory(
    program: Program,
    rules: MemoryRules,
    kernels: Fused | None = None,
    anyhow: bool = False,
    end: StageEnd | None = None,
) -> KernelMemory:
    """Rules (4) to (6), and (8) to (10).

    Args:
      kernels: those of `fused(program)`, if known.
      anyhow: values without memory under some sizes have none, so that the result holds for every layout with
        the same instructions.
      end: the stage, where each is a program of its own; None: either, all of whose values have memory.
    """
    stays = {*staying(program)} if rules.stage_programs else set()
    stays |= rules.work(program).absent(program, end) if end is not None else set()
    if rules.remakes:
        remade = kept_values(program.outline).without_memory(rules.fuses)
        stays |= {value.id for value in program.values if value.tensor in remade} | within_kernels(program)
    made = variable_casts(program, rules.parameters and not anyhow)
    casts = tuple(each for each in made if each[1].outputs[0] not in stays)
    inside, made_of = set[int](), dict[int, int]()
    if rules.fuses is not Fuses.NONE and anyhow:
        inside, made_of = unwritten(program, rules.fuses)
    elif rules.fuses is not Fuses.NONE:
        kernels = kernels or fused(program, rules.fuses)
        inside, made_of = set(kernels.inner), dict(kernels.casts)
    if rules.fuses is not Fuses.ALL:
        casts = casts if rules.parameters else ()
        nowhere = stays | inside | {cast.outputs[0] for _, cast, _, _ in casts}
        loops = program.every(Loop) if rules.remakes else ()
        nowhere.update(part.inner for loop in loops for part in loop.sliced)
        return KernelMemory({}, {}, frozenset(nowhere), casts)
    twice: dict[int, int] = {}
    nowhere = (inside | made_of.keys()) - (logits(program).keys() if rules.wide_logits else set()) | stays
    for loop in program.every(Loop):
        nowhere |= {*made_by_kernels(loop), *(part.inner for part in loop.sliced)}
        twice.update(_twice(loop))
    nowhere.update(cast.outputs[0] for _, cast, _, _ in casts)
    return KernelMemory(made_of, twice, frozenset(nowhere), casts)


class _Walk:
    def __init__(self, program: Program, rules: MemoryRules, kernels: Fused | None, end: StageEnd) -> None:
        self.program, self.sizes, self._known = program, rules.sizes(program, end), dict[int, int]()
        work = rules.work(program)
        self.stage, others = end if work.nodes else None, work.of_others(end)
        self.stored = {
            name: self.sizes.of(stored.value, program.mesh)
            for name, stored in program.variables.items()
            if not stored.host and name not in others
        }
        self.resident = sum(self.stored.values())
        self.born, self.points = dict[int, Origin](), list[MemoryPoint]()
        self.peak, self.at = self.resident, 0
        self.held, self.more = dict[int, int](), list[Holding]()
        found = kernel_memory(program, rules, kernels, end=end)
        self.liveness = Liveness(program, found.shared, found.nowhere)
        self.now, self.overwrites = Held(self.liveness), rules.overwrites
        self.copies = self._copies(found.casts)
        if rules.parameters:
            self.copies = {i: _Copies(c.times, 0, len(program.code)) for i, c in self.copies.items()}
        self.kept: dict[int, int] = {}
        step = (rules.step_copies + rules.step_gradients) * moments(program, self.stored)
        self.beside = Beside(program, rules.loss_copies, step, work, end)
        early = map(self.liveness.memory, gradients(program)[1] if rules.buffers else ())
        self.now.take(self.liveness.own(early), self._size)

    def run(self) -> MemoryProfile:
        copies = [(i, c.first, c.last, round(c.times * self._size(i))) for i, c in self.copies.items()]
        for position, instr in enumerate(self.program.code):
            self.kept = {i: size for i, first, last, size in copies if first <= position <= last}
            self._runs(instr, 0)
        variables = [Holding(f"variable {n}", b, None) for n, b in self.stored.items()]
        text, of = self.sizes.text, self.program.values
        values = (Holding(text(of[i]), b, self.born.get(i), i) for i, b in self.held.items())
        found = sorted([*variables, *values, *self.more], key=lambda h: -h.bytes)
        held = tuple(h for h in found if h.bytes)
        return MemoryProfile(tuple(self.points), self.peak, self.at, held, self.resident, self.stage)

    def _runs(self, instr: Instr, depth: int) -> None:
        now = self.now
        over = now.begins(instr, self._size)
        if not (self.overwrites or isinstance(instr, AllReduce) or instr.origin.phase == Phase.UPDATE):
            over = []
        self.born.update((o, instr.origin) for o in instr.outputs if o in now.bytes)
        total = self.resident + sum(self.kept.values()) + now.total - sum(now.bytes[o] for o in over)
        total += (more := self.beside.at(instr, now.bytes, over, self._size))
        self.points.append(MemoryPoint(instr.name, instr.origin, total, depth))
        if total > self.peak or not self.held:
            self.peak, self.at = max(total, self.peak), len(self.points) - 1
            self.held = {i: b for i, b in {**self.kept, **now.bytes}.items() if b and i not in over}
            self.more = [Holding(f"temporaries of {instr.name}", more, instr.origin)]
        if isinstance(instr, Loop):
            now.enters(instr, self._size)
            self.born.update((i, instr.origin) for i in instr.entering)
            for inner in instr.body:
                self._runs(inner, depth + 1)
            now.iterated(instr)
        now.ends(instr)

    def _size(self, id: int) -> int:
        if (size := self._known.get(id)) is None:
            size = self._known[id] = self.sizes.of(self.program.values[id], self.program.mesh)
        return size

    def _copies(self, casts: Iterable[tuple[int, Local, int, int]]) -> dict[int, _Copies]:
        """What rule (6) holds, by the first cast of every variable."""
        first, found = dict[int, int](), dict[int, _Copies]()
        for position, cast, source, times in casts:
            (out,) = cast.outputs
            self.born[out] = cast.origin
            one = first.setdefault(self.liveness.memory(source), out)
            parts = times * self.sizes.first(self.program.values[source])
            found.setdefault(one, _Copies(parts, position, position)).last = position
        return found


def _twice(loop: Loop) -> Iterator[tuple[int, int]]:
    """Stacks of what the loop stacks already, rule (5), and those."""
    free = (n for n in loop.body if isinstance(n, Local) and n.op.free)
    same = {o: i for n in free for i, o in zip(n.inputs[:1], n.outputs, strict=False)}
    stacks: dict[int, int] = {}
    for value, stack in loop.stacked:
        while value in same:
            value = same[value]
        if stacks.setdefault(value, stack) != stack:
            yield stack, stacks[value]
