"""The predicted step as slices of time on one device, in the order of the program; for trace viewers.

Work on a device is sequential. A message is drawn with all its seconds on a track of its axes, from its start
on. It delays the device by its exposed seconds: at its place, or, if the program has a done
(`mesh_tf_core.lower.messages`), there. So the device's track takes `Cost.step_seconds`, equation (4) of
`costmodels.pricing.pricer`. Hidden messages may end later, where there is not work enough to hide them under
(`costmodels.pricing.hidden`). Messages whose done is one iteration after their start are drawn at their
place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from costmodels.pricing.hidden import Cost, Line, RunSeconds, between
from mesh_tf_core.ir.program import Instr, Loop, Origin, Program

PHASES, DEVICE = "phases", "device"
"""Tracks besides those of messages."""
MOST = 20_000
"""Number of slices up to which every iteration of a loop is drawn; otherwise two of each, and the others as
one slice."""
SHOWN = 2


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """A stretch of time, seconds since the start of the step. Slices of one track nest, or follow each other.

    Attributes:
      line: its predicted line; None for a loop, an iteration or a phase.
    """

    track: str
    name: str
    begin: float
    end: float
    line: Line | None = None


@dataclass(frozen=True, slots=True)
class _Half:
    """The start of a message, or where the device waits for one that has started before."""

    line: Line
    waits: bool


@dataclass
class _Block:
    """Lines that run in a loop; of no loop at the root."""

    loop: Loop | None = None
    parts: list[_Part] = field(default_factory=list)

    @property
    def runs(self) -> int:
        return 1 if self.loop is None else max(1, self.loop.dim.size)

    @property
    def slices(self) -> int:
        """Drawn if every iteration is."""
        return self.runs * (1 + sum(x.slices if isinstance(x, _Block) else 2 for x in self.parts))


_Part: TypeAlias = "_Block | Line | _Half"


def timeline(program: Program, cost: Cost, most: int = MOST) -> list[TimeSlice]:
    """The slices of a step, those that contain others before them.

    Args:
      cost: of `program`.
      most: see `MOST`.
    """
    root = _blocks(program, cost.lines)
    _place_waits(root, between(program, apart=False))
    drawn = _Drawn(whole=root.slices <= most)
    end = drawn.block(root, 0.0, 1.0)
    step = TimeSlice(PHASES, "step", 0.0, end)
    order = {PHASES: 0, DEVICE: 1}
    return sorted(
        [step, *(TimeSlice(PHASES, *phase) for phase in drawn.phases), *drawn.slices],
        key=lambda s: (order.get(s.track, len(order)), s.track, s.begin, -s.end),
    )


def _blocks(program: Program, lines: Sequence[Line]) -> _Block:
    """The lines in the loops that they run in."""
    homes, root = _homes(program), _Block()
    opened = [root]
    for line in lines:
        path = homes.get((line.origin, line.runs), ())
        common = 0
        while common < min(len(path), len(opened) - 1) and opened[common + 1].loop is path[common]:
            common += 1
        del opened[common + 1 :]
        for loop in path[common:]:
            block = _Block(loop)
            opened[-1].parts.append(block)
            opened.append(block)
        opened[-1].parts.append(line)
    return root


def _place_waits(block: _Block, runs: Mapping[int, RunSeconds]) -> None:
    """Puts waiting for messages behind what runs from their starts to their dones."""
    places: dict[int, list[_Part]] = {}
    for at, part in enumerate(block.parts):
        own = places.setdefault(at, [])
        if isinstance(part, _Block):
            _place_waits(part, runs)
        if isinstance(part, Line) and part.is_communication and (work := runs.get(part.value)):
            behind = [n for n, x in enumerate(block.parts) if n > at and _is_of(x, work)]
            if behind:
                own.insert(0, _Half(part, False))
                places.setdefault(behind[-1], []).append(_Half(part, True))
                continue
        own.insert(0, part)
    block.parts = [x for at in sorted(places) for x in places[at]]


def _is_of(part: _Part, runs: RunSeconds) -> bool:
    """Whether a part is work that runs between a start and its done."""
    while isinstance(part, _Block):
        part = part.parts[0]
    return isinstance(part, Line) and not part.is_communication and (part.origin, part.runs) in runs


def _homes(program: Program) -> Mapping[tuple[Origin, float], tuple[Loop, ...]]:
    """Where an instruction comes from and how often it runs -> the loops around it, the outermost first."""
    found: dict[tuple[Origin, float], tuple[Loop, ...]] = {}

    def visit(code: Sequence[Instr], around: tuple[Loop, ...], times: float) -> None:
        for instr in code:
            found.setdefault((instr.origin, times), around)
            if isinstance(instr, Loop):
                within = (*around, instr)
                found.setdefault((instr.origin, times * instr.times), within)
                visit(instr.body, within, times * instr.times)

    visit(program.code, (), 1)
    return found


@dataclass
class _Drawn:
    """What is drawn so far.

    Attributes:
      whole: every iteration is drawn.
      slices: those that contain others before them.
      free: when the last message of a track ends.
      phases: name, begin and end.
    """

    whole: bool
    slices: list[TimeSlice] = field(default_factory=list)
    free: dict[str, float] = field(default_factory=dict)
    phases: list[tuple[str, float, float]] = field(default_factory=list)

    def block(self, block: _Block, clock: float, share: float) -> float:
        """Draws one iteration after the other; when the last one ends.

        Args:
          share: of what a line takes in a step, what one iteration of the block around takes.
        """
        loop, began, runs, first = block.loop, clock, block.runs, len(self.slices)
        shown = runs if self.whole else min(runs, SHOWN)
        for number in range(shown):
            begin, here = clock, len(self.slices)
            for part in block.parts:
                if isinstance(part, _Block):
                    clock = self.block(part, clock, share / runs)
                    continue
                line = part.line if isinstance(part, _Half) else part
                if line.is_communication and not (isinstance(part, _Half) and part.waits):
                    self.sent(line, clock, share / runs)
                if not isinstance(part, _Half) or part.waits:
                    clock = self.held(line, clock, share / runs)
            if loop is not None:
                at = runs - 1 - number if loop.reverse else number
                self.slices.insert(here, TimeSlice(DEVICE, f"{loop.dim.name} {at}", begin, clock))
        if shown < runs:
            begin, clock = clock, clock + (clock - began) / shown * (runs - shown)
            self.slices.append(
                TimeSlice(DEVICE, f"{runs - shown} more iterations like those shown", begin, clock)
            )
        if loop is not None:
            self.slices.insert(first, TimeSlice(DEVICE, loop.text(), began, clock))
        return clock

    def sent(self, line: Line, clock: float, share: float) -> None:
        """Draws a message that starts."""
        track = f"messages over {'+'.join(line.axes)}"
        begin = max(clock, self.free.get(track, 0.0))
        self.free[track] = begin + line.seconds * line.times * share
        self.slices.append(TimeSlice(track, line.name, begin, self.free[track], line))

    def held(self, line: Line, clock: float, share: float) -> float:
        """Draws work, or waiting for a message; when the next thing begins."""
        end = clock + line.exposed * line.times * share
        if end > clock:
            self._phase(line.origin.phase, clock, end)
            name = f"waits for {line.name}" if line.is_communication else line.name
            self.slices.append(TimeSlice(DEVICE, name, clock, end, line))
        return end

    def _phase(self, name: str, begin: float, end: float) -> None:
        if self.phases and self.phases[-1][::2] == (name, begin):
            begin = self.phases.pop()[1]
        self.phases.append((name, begin, end))
