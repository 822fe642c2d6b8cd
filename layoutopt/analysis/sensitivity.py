"""The conditions under which the answer changes: other bandwidth, memory or devices, and errors of the
hardware's numbers within the uncertainties of their sources.

    sensitivity   a search under every changed condition: its best time and layout. The layout of one search
                  is also predicted under the other conditions of its mesh, and its bound holds with less of a
                  resource: nothing is slower with more
    robustness    the answer and its alternatives on machines drawn within the uncertainties; how often the
                  answer stays the fastest, and how much it loses where it does not
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from costmodels.hardware import Hardware, drawn, with_bandwidth
from costmodels.pricing.pricer import pricer
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.problems.bounds import EXACT
from layoutopt.plan.build import Plan, layout_of, options_of
from layoutopt.plan.details import FactorCurve, Robustness, Trial
from layoutopt.plan.schema import ProofStatus, Told
from layoutopt.plan.units import mesh_option
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.stages import on_mesh
from mesh_tf_core.errors import InfeasibleError, LayoutError, UserError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.model import Model

FACTORS = (0.5, 1.0, 2.0)
DRAWS, LEAST = 40, 10
LONGEST = 1.5
"""Layouts that take more than this many times the answer's time are left out."""
SETTLED = 1.05
"""Factor of the bound: a result further above the best is due to a stopped search, not to its condition."""


NOTHING: dict[str, Any] = {"step_seconds": None, "layout": "", "mesh": ""}
"""The fields of a trial without a settled answer."""
ChangedBy = dict[str, Any]
Curves = tuple[FactorCurve, ...]


def sensitivity(
    model: Model,
    plan: Plan,
    hardware: Hardware,
    limit: float,
    asked: SearchSpace,
    told: Told = lambda _: None,
    clock: Clock = UNLIMITED,
) -> Curves:
    """The best under half and twice the bandwidth, memory and devices.

    The plan's mesh stays, except where the number of devices changes: then its shape is searched too, which
    replicas, which name axes, do not allow.

    Args:
      told: called with every condition, in words, before its search.
    """
    from layoutopt.optimize.entry import search

    devices = plan.mesh.devices
    reshaped = not asked.diloco and devices % 2 == 0
    left = itertools.count(6 if reshaped else 4, -1)

    def searched(words: str, **change: Any) -> Plan | bool:
        """The answer under a condition; without any, whether that is proven."""
        told(words)
        own = clock.part(1 / next(left))
        if own.over:
            return False
        limits = {"memory": limit, "time_limit": own.rest, "alternatives": False}
        try:
            mesh = change.get("mesh", plan.mesh)
            space = asked if mesh is None else on_mesh(model, mesh, asked)
            return search(model, **{"mesh": mesh, "hardware": hardware, **limits, "space": space, **change})
        except UserError as error:  # a pin may ask for what another number of devices does not divide
            return isinstance(error, InfeasibleError)

    def curve(name: str, unit: float, change: Callable[[float], ChangedBy]) -> FactorCurve:
        conditions = [change(times) for times in FACTORS]
        answers = [
            plan if times == 1 else searched(f"{times:g}x the {name}", **condition)
            for times, condition in zip(FACTORS, conditions, strict=True)
        ]
        one_mesh = [] if "mesh" in conditions[0] else [a for a in answers if isinstance(a, Plan)]
        bounds = [(isinstance(a, Plan) and a.solver.bound) or 0.0 for a in answers]
        trials = []
        for n, (times, condition, answer) in enumerate(zip(FACTORS, conditions, answers, strict=True)):
            there = (condition.get("hardware", hardware), condition.get("memory", limit))
            other = _faster(model, [p for p in one_mesh if p is not answer], *there)
            bound = max(bounds[n:]) if one_mesh else bounds[n]
            trials.append(_best(unit * times, answer, other, bound, given=times == 1))
        return FactorCurve(factor=name, points=tuple(trials))

    curves = [
        curve("bandwidth", 1.0, lambda times: {"hardware": with_bandwidth(hardware, times)}),
        curve("memory", limit, lambda times: {"memory": limit * times}),
    ]
    if reshaped:
        other: ChangedBy = {"mesh": None, "max_axes": max(2, len(plan.mesh.axes))}
        curves.append(curve("devices", devices, lambda n: {**other, "devices": int(devices * n)}))
    return tuple(curves)


TimedPlan = tuple[float, Plan]
"""Seconds of a plan's step under some condition."""


def _faster(model: Model, plans: list[Plan], hardware: Hardware, limit: float) -> TimedPlan | None:
    """The fastest of other conditions' answers that fits under this one."""
    found = [
        (one.cost.step_seconds, p)
        for p in plans
        for one in (evaluate(model, p.mesh, p.layout, hardware, p.options, check=False),)
        if one.reason(limit) is None
    ]
    return min(found, key=lambda pair: pair[0], default=None)


def _best(value: float, answer: Plan | bool, other: TimedPlan | None, bound: float, *, given: bool) -> Trial:
    """A search's answer, or what was found elsewhere if that is faster.

    Args:
      bound: seconds that nothing is faster than.
      given: the condition is the plan's own.
    """
    if isinstance(answer, Plan):
        own = answer.predicted.step_seconds
        if other is None or other[0] >= own * (1 - EXACT):
            proven = answer.solver.status == ProofStatus.OPTIMAL or math.isclose(own, bound, rel_tol=EXACT)
            return _trial(value, own, answer, proven, bound, given)
    if other is None:
        return Trial(value=value, **NOTHING, proven=answer is True, bound=bound)
    return _trial(value, *other, math.isclose(other[0], bound, rel_tol=EXACT), bound, given)


def _trial(value: float, seconds: float, plan: Plan, proven: bool, bound: float, given: bool) -> Trial:
    answer = answer_of(plan)
    if not (proven or given or seconds <= SETTLED * bound):
        return Trial(value=value, **NOTHING, proven=False, bound=bound, found_seconds=seconds, answer=answer)
    layout = " | ".join(filter(None, (str(plan.layout) or "nothing is split", plan.data.in_short())))
    mesh, found = mesh_option(plan.data.mesh), {"step_seconds": seconds, "found_seconds": seconds}
    return Trial(value=value, layout=layout, mesh=mesh, proven=proven, bound=bound, answer=answer, **found)


def answer_of(plan: Plan) -> str:
    """All that is decided, in one text."""
    return f"{mesh_option(plan.data.mesh)} | {plan.layout} | {plan.data.listed()}"


def robustness(
    model: Model, plan: Plan, hardware: Hardware, draws: int = DRAWS, clock: Clock = UNLIMITED
) -> Robustness:
    """Prices the answer and the alternatives that fit on machines drawn within the uncertainties; on
    `LEAST` at least."""
    known = [n.uncertainty for _, n in hardware.numbers()] + [c.uncertainty for _, c in hardware.curves()]
    uncertain = sum(1 for u in known if u)
    if not uncertain:
        return Robustness()
    programs = dict(_alternatives(model, plan))
    wins: Counter[str] = Counter()
    worst = 0.0
    for seed in range(draws):
        if seed >= LEAST and clock.over:
            break
        machine = drawn(hardware, seed)
        seconds = {n: pricer(machine, p).cost(p).step_seconds for n, p in programs.items()}
        best = min(seconds, key=lambda n: (seconds[n], n != ""))
        wins[best] += 1
        worst = max(worst, seconds[""] / seconds[best] - 1)
    others = [(count, name) for name, count in wins.items() if name]
    return Robustness(
        draws=wins.total(),
        wins=wins[""],
        worst=worst,
        runner_up=max(others)[1] if others else "",
        uncertain=uncertain,
    )


def _alternatives(model: Model, plan: Plan) -> Iterator[tuple[str, Program]]:
    """The answer, named '', and the alternatives that may overtake it."""
    yield "", model.lower(plan.mesh, plan.layout, plan.options)
    for other in plan.alternatives:
        p = other.predicted
        if not other.feasible or p is None or p.step_seconds > LONGEST * plan.predicted.step_seconds:
            continue
        options = options_of(other)
        if (layout_of(other), options) == (plan.layout, plan.options):
            continue
        try:
            yield other.name, model.lower(Mesh(other.mesh), layout_of(other), options)
        except LayoutError:
            continue
