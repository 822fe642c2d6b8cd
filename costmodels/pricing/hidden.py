"""Overlapped messages: the work between their starts and their dones, as in the program.

The hidden part is a rule's fraction of a message's own time, or the time of the products between start and
done (`costmodels.pricing.overlap`), so costs add up. Here the whole step is known: the work between start and
done has a time, and a prediction that hides more than this is too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.pricing.lines import Cost, Line
from costmodels.pricing.overlap import ACTIVATION, AWAITED, LONGER, windows
from mesh_tf_core.ir.instructions import HOST, RULES
from mesh_tf_core.ir.program import Instr, Local, Loop, Origin, Program
from mesh_tf_core.ir.traits import PartialAccess

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
            parts = (
                instr.inputs if isinstance(instr.op, PartialAccess) and instr.op.joins else instr.inputs[:1]
            )
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
