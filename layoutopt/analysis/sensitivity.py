"""Where the answer would be another one: with other bandwidth, memory or devices, and if the numbers that the
prediction rests on are off by what their sources admit.

    sensitivity   a search under every changed condition: its best time and layout
    robustness    the answer and its alternatives on machines drawn within the uncertainties; how often the
                  answer stays the fastest, and how much it loses where it does not
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from costmodels.hardware import Hardware, drawn, with_bandwidth
from costmodels.pricing.pricer import pricer
from layoutopt.analysis.explain import Asked
from layoutopt.clock import UNLIMITED, Clock
from layoutopt.plan import details
from layoutopt.plan.build import Plan, layout_of, options_of
from layoutopt.plan.details import Robustness
from layoutopt.plan.units import mesh_option
from mesh_tf_core.errors import InfeasibleError, LayoutError, LimitError
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.model import Model

FACTORS = (0.5, 1.0, 2.0)
DRAWS, LEAST = 40, 10
LONGEST = 1.5
"""Layouts that take longer than so many times the answer are left out."""


@dataclass(frozen=True)
class Trial:
    """The best under one condition; no seconds where nothing fits or nothing was found.

    Attributes:
      value: of the factor: a multiple (bandwidth), bytes (memory) or a number (devices).
      options: what is decided beside the layout, in short; `answer` is all of it.
    """

    value: float
    step_seconds: float | None
    proven: bool
    mesh: str = ""
    layout: str = ""
    options: str = ""
    answer: str = ""


@dataclass(frozen=True)
class Curve:
    """The best as one factor changes: 'bandwidth', 'memory' or 'devices'."""

    factor: str
    trials: tuple[Trial, ...]


Told = Callable[[str], None]
"""told(condition in words), before it is searched."""


def sensitivity(
    model: Model,
    plan: Plan,
    hardware: Hardware,
    limit: float,
    asked: Asked,
    told: Told = lambda _: None,
    clock: Clock = UNLIMITED,
) -> list[Curve]:
    """The best under half and twice the bandwidth, memory and devices.

    The plan's mesh stays, except where the number of devices changes: then its shape is searched too, which
    pins and replicas, which name axes, do not allow.
    """
    from layoutopt import search

    more: Mapping[str, Any] = asked.with_pins(None)
    devices = plan.mesh.devices
    reshaped = not (asked.pins or asked.forbid or asked.diloco) and devices % 2 == 0
    left = itertools.count(6 if reshaped else 4, -1)

    def trial(value: float, words: str, **change: Any) -> Trial:
        told(words)
        own = clock.part(1 / next(left))
        if own.over:
            return Trial(value, None, False)
        limits = {"memory": limit, "time_limit": own.rest}
        now = {"mesh": plan.mesh, "hardware": hardware, **limits, **more, **change}
        try:
            return _trial(value, search(model, **now))
        except (InfeasibleError, LimitError) as error:
            return Trial(value, None, isinstance(error, InfeasibleError))

    def curve(name: str, unit: float, change: Callable[[float], dict[str, Any]]) -> Curve:
        trials = []
        for times in FACTORS:
            words, known = f"{times:g}x the {name}", times == 1
            trials.append(_trial(unit, plan) if known else trial(unit * times, words, **change(times)))
        return Curve(name, tuple(trials))

    curves = [
        curve("bandwidth", 1.0, lambda times: {"hardware": with_bandwidth(hardware, times)}),
        curve("memory", limit, lambda times: {"memory": limit * times}),
    ]
    if reshaped:
        axes = max(2, len(plan.mesh.axes))
        other = {"mesh": None, "max_axes": axes}
        curves.append(curve("devices", devices, lambda times: {**other, "devices": int(devices * times)}))
    return curves


def _trial(value: float, plan: Plan) -> Trial:
    data = plan.data
    sizes = mesh_option(data.mesh)
    answer = f"{sizes} | {plan.layout} | {data.listed()}"
    proven = plan.solver.status == "OPTIMAL"
    return Trial(value, data.predicted.step_seconds, proven, sizes, str(plan.layout), data.in_short(), answer)


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


def as_details(curves: list[Curve]) -> tuple[details.Curve, ...]:
    """As a plan's details hold them."""
    return tuple(
        details.Curve(
            factor=c.factor,
            points=tuple(
                details.Trial(
                    value=t.value,
                    step_seconds=t.step_seconds,
                    layout=" | ".join(filter(None, (t.layout or "nothing is split", t.options))),
                    mesh=t.mesh,
                    proven=t.proven,
                )
                for t in c.trials
            ),
        )
        for c in curves
    )
