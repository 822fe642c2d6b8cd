"""A step's time by operation with its collectives, and by kind of work."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from layoutopt.plan.details import PricedLine, TimeShares
from layoutopt.plan.schema import PlanFile
from mesh_tf_core.ir.program import COLLECTIVES


@dataclass
class CollectiveWork:
    """Collectives of one kind over the same axes, that one operation caused."""

    kind: str
    axes: tuple[str, ...]
    runs: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0
    sent: float = 0.0

    @property
    def name(self) -> str:
        """The usual name of the collective, with its axes."""
        return f"{collective_name(self.kind)} over {'+'.join(self.axes) or 'no axis'}"


@dataclass
class OperationWork:
    """An operation in one phase, totals of a step on one device; `place`: where the model writes it."""

    op: str
    scope: str
    phase: str
    runs: float = 0.0
    compute: float = 0.0
    hidden: float = 0.0
    exposed: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    collectives: dict[tuple[str, tuple[str, ...]], CollectiveWork] = field(default_factory=dict)
    place: str = ""

    @property
    def seconds(self) -> float:
        """The seconds that it adds to the step: hidden communication adds nothing."""
        return self.compute + self.exposed

    @property
    def name(self) -> str:
        return f"{self.scope}/{self.op}" if self.scope and self.scope != self.op else self.op


def work(plan: PlanFile) -> tuple[OperationWork, ...]:
    """Operations by what they add to the step, the most expensive first."""
    found: dict[tuple[str, str, str], OperationWork] = {}
    names = {x.node: x.op for x in plan.details.lines if x.node is not None and not x.communication}
    for line in plan.details.lines:
        op = line.op if line.node is None or not line.communication else names.get(line.node, line.op)
        key = (op, line.scope, line.phase)
        _add(found.setdefault(key, OperationWork(*key)), line)
    return tuple(sorted(found.values(), key=lambda w: -w.seconds))


def _add(to: OperationWork, line: PricedLine) -> None:
    seconds, exposed = line.times * line.seconds, line.times * line.exposed_seconds
    to.place = to.place or line.place
    if not line.communication:
        to.runs += line.times
        to.compute += seconds
        to.flops += line.times * line.flops
        to.bytes += line.times * line.bytes
        return
    to.exposed += exposed
    to.hidden += max(seconds - exposed, 0.0)
    key = (line.kind, line.axes)
    one = to.collectives.setdefault(key, CollectiveWork(line.kind, line.axes))
    one.runs += line.times
    one.seconds += seconds
    one.exposed += exposed
    one.sent += line.times * line.sent_bytes


def collective_name(kind: str) -> str:
    """The field's name of a kind of collective."""
    return kind.replace("_", "-")


def is_collective(kind: str) -> bool:
    """True if a kind of work is communication."""
    return kind in COLLECTIVES or kind == "slice"


def shares(plan: PlanFile) -> Mapping[str, TimeShares]:
    """Time by kind for the answer and every alternative that the plan has it for, the answer first.

    Without `by_kind` the answer's is summed from its lines.
    """
    found = dict(plan.details.by_kind)
    answer = found.pop("answer", None) or _from_lines(plan)
    return ({"answer": answer} if answer else {}) | found


def _from_lines(plan: PlanFile) -> TimeShares | None:
    if not plan.details.lines:
        return None
    kinds: dict[str, float] = {}
    for line in plan.details.lines:
        kinds[line.kind] = kinds.get(line.kind, 0.0) + line.times * line.seconds
    p = plan.predicted
    exposed = p.exposed_communication_seconds
    return TimeShares(compute=p.compute_seconds, hidden=p.hidden_seconds, exposed=exposed, kinds=kinds)
