"""What messages run under: the work between their starts and their dones, as the program says.

A rule's fraction of a message's own time is hidden, or what the products between start and done take
(`costmodels.pricing.overlap`), so that prices add up. Here the whole step is at hand: what runs from start to
done has a time, and a price that hides more than that is too low.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.pricing.lines import Cost, Line
from costmodels.pricing.overlap import ACTIVATION, LONGER
from mesh_tf_core.ir.instructions import HOST
from mesh_tf_core.ir.program import Done, Instr, Local, Loop, Message, Origin, Program

Runs = dict[tuple[Origin, float], float]
"""Where work comes from, and how often it runs in a step -> the part of its runs that is meant."""
NOTHING = "nothing: what follows waits"
OUTER = "outer step"
"""What is said of the messages of replicas that synchronise rarely."""


@dataclass(frozen=True, slots=True)
class Under:
    """What runs from the start of a message, or of some, to the done.

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
      seconds, hidden: of all its messages, and what of that is priced as hidden.
      behind: what runs meanwhile.
      room: how long that takes.
    """

    purpose: str
    seconds: float
    hidden: float
    behind: str
    room: float

    @property
    def exposed(self) -> float:
        """What the step waits for."""
        return self.seconds - self.hidden

    @property
    def fits(self) -> bool:
        """Whether what runs meanwhile takes as long as what is hidden."""
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
        found.append(Hidden(rule, seconds, seconds - exposed, under.words, under.seconds))
    return sorted(found, key=lambda h: -h.seconds)


def under(program: Program, cost: Cost) -> dict[int, Under]:
    """What every message that has a start and a done runs under, by its first value."""
    runs = between(program)
    sent = (x for x in cost.lines if x.value in runs)
    return {x.value: _under(rule_of(x), runs[x.value], cost) for x in sent}


def rule_of(line: Line) -> str:
    """The rule of a message, or what is said where there is none."""
    if line.value < 0:
        return OUTER
    return HOST if HOST in line.axes else line.purpose or ACTIVATION


def _under(rule: str, runs: Runs, cost: Cost) -> Under:
    phases: dict[str, float] = {}
    for x in cost.lines:
        counts = not x.is_communication and (rule not in LONGER or x.kind in MATMUL_CLASSES)
        if counts and (part := runs.get((x.origin, x.times))):
            phases[x.origin.phase] = phases.get(x.origin.phase, 0.0) + part * x.seconds * x.times
    if rule == ACTIVATION or not phases:
        return Under(NOTHING, 0.0)
    return Under(f"{'products of ' * (rule in LONGER)}{', '.join(phases)}", sum(phases.values()))


# -- from start to done --------------------------------------------------------------------------------------


def between(program: Program, apart: bool = True) -> dict[int, Runs]:
    """Message, by its first value -> what runs from its start to its done.

    Start and done of a pipelined message are an iteration of its block apart: all of the block runs
    meanwhile, in every iteration but one. What a loop stacks may be sent part by part as iterations make it,
    and of what it sums the last iteration makes the last term; so a loop that makes what is sent counts too.

    Args:
      apart: messages whose start and done are an iteration apart are meant, too.
    """
    found: dict[int, Runs] = {}

    def visit(code: Sequence[Instr], times: float, iterations: int) -> None:
        for at, instr in enumerate(code):
            if isinstance(instr, Loop):
                visit(instr.body, times * instr.times, instr.dim.size)
            elif isinstance(instr, Message) and instr.rule and instr.pipelined:
                often = (iterations - 1) / iterations if iterations else 1.0
                if apart:
                    found[instr.outputs[0]] = _scaled(_all_of(code, times), often)
            elif isinstance(instr, Message) and instr.rule:
                ends = (n for n, each in enumerate(code) if _waits(each, instr))
                until = code[: next(ends)]
                own = _all_of(until[at:], times)
                found[instr.outputs[0]] = _joined([own, *(_after(i, until, times) for i in instr.inputs)])

    visit(program.code, 1.0, 0)
    return found


def _waits(instr: Instr, message: Message) -> bool:
    return isinstance(instr, Done) and message.outputs[0] in instr.inputs


def _after(value: int, code: Sequence[Instr], times: float) -> Runs:
    """What runs in a block once parts of a value have been made by a loop of it; else nothing."""
    for at, instr in enumerate(code):
        if value in instr.outputs and isinstance(instr, Local) and (instr.op.free or instr.op.converts):
            return _after(instr.inputs[0], code, times)
        if isinstance(instr, Loop) and value in instr.outputs:
            inside = times * instr.times
            made = [_all_of(code[at + 1 :], times)]
            made += [_all_of(instr.body, inside) for _, outer in instr.stacked if outer == value]
            for inner, outer in instr.summed:
                if outer == value:
                    made.append(_scaled(_after(inner, instr.body, inside), 1 / instr.dim.size))
            return _joined(made)
    return {}


def _all_of(code: Iterable[Instr], times: float) -> Runs:
    return dict.fromkeys(_keys(code, times), 1.0)


def _keys(code: Iterable[Instr], times: float) -> Iterator[tuple[Origin, float]]:
    for instr in code:
        yield instr.origin, times
        if isinstance(instr, Loop):
            yield instr.origin, times * instr.times
            yield from _keys(instr.body, times * instr.times)


def _scaled(runs: Mapping[tuple[Origin, float], float], by: float) -> Runs:
    return {key: by * part for key, part in runs.items()}


def _joined(every: Iterable[Runs]) -> Runs:
    found: Runs = {}
    for runs in every:
        for key, part in runs.items():
            found[key] = max(part, found.get(key, 0.0))
    return found
