"""Overlapped messages: the work between their starts and their dones, as in the program.

The hidden part is a rule's fraction of a message's own time, or the time of the products between start and
done (`costmodels.pricing.overlap`), so costs add up. Here the whole step is known: the work between start and
done has a time, and a prediction that hides more than this is too low.

The predicted lines of a program, and their sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.pricing.items import Computed, Item
from costmodels.pricing.overlap import ACTIVATION, AWAITED, LONGER, windows
from mesh_tf_core.ir.instructions import HOST, RULES
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import Instr, Local, Loop, Origin, Program


@dataclass(frozen=True, slots=True)
class Line:
    """One item with its price.

    Attributes:
      times: how often it runs in a step, as far as that counts (`costmodels.stage_times`); every other number
        is of one run on one device.
      item: the source of its seconds (`costmodels.pricing.explanation`).
      seconds: all of it, hidden or not.
      exposed: seconds that the step waits for.
      value: of a message, the first value that it brings; -1 if another program than the step's sends it.
      ran: how often it runs in the program (`Loop.times`); 0 if all of it counts.
    """

    name: str
    text: str
    origin: Origin
    times: float
    item: Item
    seconds: float
    exposed: float
    value: int = -1
    ran: float = 0.0

    def counted(self, share: float) -> Line:
        """The same where only a share of its runs counts."""
        return replace(self, times=self.times * share, ran=self.times)

    @property
    def runs(self) -> float:
        """How often it runs in the program."""
        return self.ran or self.times

    @property
    def kind(self) -> str:
        """The class of the work; of a collective, its name."""
        return self.item.kind

    @property
    def flops(self) -> float:
        return self.item.flops

    @property
    def bytes(self) -> float:
        """Read and written by computation."""
        return self.item.bytes

    @property
    def axes(self) -> Axes:
        """The axes of a collective, or of a message over the host link."""
        return self.item.axes

    @property
    def sent(self) -> float:
        """Bytes that a device sends, or moves over its host link."""
        return self.item.sent

    @property
    def purpose(self) -> str:
        """The purpose of a collective, its rule (`costmodels.pricing.overlap`)."""
        return self.item.purpose

    @property
    def is_communication(self) -> bool:
        return bool(self.item.axes)

    def facts(self) -> dict[str, Any]:
        """The part of it that records and tables have."""
        return {
            "scope": self.origin.scope,
            "phase": self.origin.phase,
            "axes": self.axes,
            "runs": self.times,
            "seconds": self.seconds,
            "exposed_seconds": self.exposed,
            "flops": self.flops,
            "bytes": self.bytes,
            "sent_bytes": self.sent,
        }


def is_launched(item: Item) -> bool:
    """True if a host launches a kernel for each run of an item, not one for many."""
    return not item.axes and not (isinstance(item, Computed) and item.quantity.joins)


@dataclass(frozen=True)
class Cost:
    """The price of a program on hardware; all numbers of one step, per device.

    Attributes:
      interval: seconds that a host needs for each kernel that it launches; 0: none launches them.
    """

    lines: tuple[Line, ...]
    interval: float = 0.0

    def _total(self, value: Callable[[Line], float], communication: bool) -> float:
        return sum(value(x) * x.times for x in self.lines if x.is_communication == communication)

    @cached_property
    def compute_seconds(self) -> float:
        return self._total(lambda x: x.seconds, False)

    @cached_property
    def communication_seconds(self) -> float:
        return self._total(lambda x: x.seconds, True)

    @cached_property
    def exposed_communication_seconds(self) -> float:
        return self._total(lambda x: x.exposed, True)

    @cached_property
    def launched(self) -> float:
        """The number of kernels that a host launches in a step."""
        return sum(x.times for x in self.lines if is_launched(x.item))

    @property
    def device_seconds(self) -> float:
        """Seconds of what the device does."""
        return self.compute_seconds + self.exposed_communication_seconds

    @cached_property
    def host_seconds(self) -> float | None:
        """Seconds of the host that launches it, where it needs longer."""
        host = self.interval * self.launched if self.interval else 0.0
        return host if host > self.device_seconds else None

    @property
    def step_seconds(self) -> float:
        """The longer of both."""
        return self.host_seconds or self.device_seconds

    @cached_property
    def flops(self) -> float:
        return self._total(lambda x: x.flops, False)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on work that was priced otherwise than this hardware runs it."""
        lacking = (x.item.lacks for x in self.lines if isinstance(x.item, Computed) and x.item.lacks)
        return tuple(
            f"{lacks}, so the time is predicted from FLOPs and bytes, not from measured array functions"
            for lacks in dict.fromkeys(lacking)
        )

    def by(self, key: Callable[[Line], str]) -> dict[str, float]:
        """Exposed seconds grouped by any property of the lines, the largest first."""
        out: dict[str, float] = {}
        for x in self.lines:
            out[key(x)] = out.get(key(x), 0.0) + x.exposed * x.times
        return dict(sorted(out.items(), key=lambda item: -item[1]))


RunSeconds = dict[tuple[Origin, float], float]
"""The origin of work, and the number of its runs in a step -> the share of its runs to count."""
NOTHING = "nothing: it is waited for"
OUTER = "outer step"
"""The note on the messages of replicas that synchronise rarely (DiLoCo)."""


@dataclass(frozen=True, slots=True)
class Under:
    """The work from the start of a message, or of some, to the done.

    Attributes:
      words: the phases that it belongs to.
      seconds: of a step.
    """

    words: str
    seconds: float


@dataclass(frozen=True, slots=True)
class Hidden:
    """The messages of one rule, in seconds of a step.

    Attributes:
      seconds, hidden: of all its messages, and the part that is predicted as hidden.
      behind: the overlapped work.
      room: its duration.
    """

    purpose: str
    seconds: float
    hidden: float
    behind: str
    room: float

    @property
    def exposed(self) -> float:
        """The exposed seconds, for which the step waits."""
        return self.seconds - self.hidden

    @property
    def fits(self) -> bool:
        """True if the overlapped work takes at least as long as the hidden part."""
        return self.hidden <= self.room * (1 + 1e-9)


def hidden(program: Program, cost: Cost) -> list[Hidden]:
    """The rules of a step's messages, the longest first.

    Args:
      cost: of the program.
    """
    runs, groups = between(program), dict[str, list[Line]]()
    for x in cost.lines:
        if x.is_communication:
            groups.setdefault(rule_of(x), []).append(x)
    found = []
    for rule, lines in groups.items():
        seconds = sum(x.seconds * x.times for x in lines)
        exposed = sum(x.exposed * x.times for x in lines)
        under = _under(rule, _joined(runs.get(x.value, {}) for x in lines), cost)
        if rule == OUTER and exposed < seconds:
            under = Under("later steps", seconds - exposed)
        elif rule in AWAITED and exposed < seconds:
            under = Under("matmuls, piece by piece", seconds - exposed)
        found.append(Hidden(rule, seconds, seconds - exposed, under.words, under.seconds))
    return sorted(found, key=lambda h: -h.seconds)


def under(program: Program, cost: Cost) -> dict[int, Under]:
    """The work that overlaps every message that has a start and a done, by the message's first value."""
    runs = between(program)
    sent = (x for x in cost.lines if x.value in runs)
    return {x.value: _under(rule_of(x), runs[x.value], cost) for x in sent}


def rule_of(line: Line) -> str:
    """The rule of a message, or a text if there is none."""
    if line.value < 0:
        return OUTER
    return HOST if HOST in line.axes else line.purpose or ACTIVATION


def _under(rule: str, runs: RunSeconds, cost: Cost) -> Under:
    phases: dict[str, float] = {}
    for x in cost.lines:
        counts = not x.is_communication and (rule not in LONGER or x.kind in MATMUL_CLASSES)
        if counts and (part := runs.get((x.origin, x.runs))):
            phases[x.origin.phase] = phases.get(x.origin.phase, 0.0) + part * x.seconds * x.times
    if rule in AWAITED or not phases:
        return Under(NOTHING, 0.0)
    return Under(f"{'matmuls in ' * (rule in LONGER)}{', '.join(phases)}", sum(phases.values()))


# -- from start to done --------------------------------------------------------------------------------------


def between(program: Program, apart: bool = True) -> dict[int, RunSeconds]:
    """Message, by its first value -> the instructions between its start and its done.

    Parts of a stack may be sent as iterations compute them, and the last iteration computes the last term of
    a sum; a loop that computes the message's value therefore counts too.

    Args:
      apart: include messages whose done is one iteration after their start.
    """
    found: dict[int, RunSeconds] = {}
    for w in windows(program, RULES):
        if apart or not w.message.pipelined:
            every = dict.fromkeys(_keys(w.code, w.times), w.part)
            made = () if w.message.pipelined else w.message.inputs
            found[w.message.outputs[0]] = _joined([every, *(_after(i, w.before, w.times) for i in made)])
    return found


def _after(value: int, code: Sequence[Instr], times: float) -> RunSeconds:
    """What runs in a block once parts of a value have been made by a loop of it; else nothing."""
    for at, instr in enumerate(code):
        if value in instr.outputs and isinstance(instr, Local) and (instr.op.free or instr.op.converts):
            parts = instr.inputs if instr.op.joins else instr.inputs[:1]
            return _joined(_after(i, code, times) for i in parts)
        if isinstance(instr, Loop) and value in instr.outputs:
            inside = times * instr.times
            made = dict.fromkeys(_keys(code[at + 1 :], times), 1.0)
            if any(outer == value for _, outer in instr.stacked):
                made.update(dict.fromkeys(_keys(instr.body, inside), 1.0))
            for term in (inner for inner, outer in instr.summed if outer == value):
                last = _after(term, instr.body, inside)
                made.update((key, part / instr.dim.size) for key, part in last.items())
            return made
    return {}


def _keys(code: Iterable[Instr], times: float) -> Iterator[tuple[Origin, float]]:
    for instr in code:
        yield instr.origin, times
        if isinstance(instr, Loop):
            yield instr.origin, times * instr.times
            yield from _keys(instr.body, times * instr.times)


def _joined(every: Iterable[RunSeconds]) -> RunSeconds:
    found: RunSeconds = {}
    for runs in every:
        for key, part in runs.items():
            found[key] = max(part, found.get(key, 0.0))
    return found
