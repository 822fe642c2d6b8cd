r"""Curves from measurements.

A probe's step holds r repeats of one operation, whose calls (`costmodels.kernels.array_functions`) are known;
each repeat also reads and stores variables, which probes without work measure:

(1) seconds of one repeat y = (step - empty step) / r - seconds of its reads and stores
(2) seconds of the class that the probe is about: y - sum of the other calls, by the classes fitted
    before it; at least the time of the cheapest pass over as many bytes, `kernel.unary`
(3) a class's curve: the non-decreasing one nearest to its points (least squares, pooling adjacent violators)
(4) matrix products: y = launch + a FLOPs + the sum of b bytes over their parts
    (`costmodels.kernels.calls.PARTS`), all coefficients >= 0, least errors relative to y, large
    ones not squared
(5) fresh memory: the probes of `kernel.unary` again with every result stored, less the curve without
(6) launches: what a step of many small kernels takes beyond all this, the same for each of its calls
(7) uncertainty of a curve: the larger of the typical spread of its points' repeats and of the error at each
    inner point when the curve is fitted without it

Nothing here depends on an operation, and no result is negative.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from costmodels.calibration.probes import LAUNCH, GroupShape, Probe
from costmodels.hardware import Curve, monotone
from costmodels.kernels.calls import PARTS, Call, call_seconds
from costmodels.network.collectives import COLLECTIVES
from mesh_tf_core.ir.layout import Axes

Measurement = Mapping[str, Any]
SMALLEST = 0.05
"""Least part of a measured repeat that belongs to its target, because the subtracted part is uncertain
too."""
PRODUCTS = ("matmul", "batch", "matmul.conv")
LAUNCH_CLASS = f"kernel.{LAUNCH}"
DISTURBED = 0.1
"""Relative error beyond which a product's measurement is taken for disturbed."""


@dataclass(frozen=True)
class FittedCurve:
    """One curve: seconds over bytes or FLOPs, with all devices at work, and its relative uncertainty."""

    op_class: str
    against: str
    curve: Curve
    uncertainty: float


@dataclass
class CalibrationFit:
    """Everything fitted, in order.

    Attributes:
      step: seconds of an empty step.
      store: seconds per variable that a step reads and stores.
      curves: of array functions, by class.
      collectives: (kind of group, curve).
      held_out: relative errors, predicted / measured - 1, of the checks.
    """

    step: float = 0.0
    store: float = 0.0
    curves: dict[str, FittedCurve] = field(default_factory=dict)
    collectives: list[tuple[GroupShape, FittedCurve]] = field(default_factory=list)
    held_out: dict[str, float] = field(default_factory=dict)

    def seconds(self, calls: Sequence[Call], repeated: bool = True) -> float:
        """Predicted seconds of calls on all devices at once; `repeated`: one operation again and again, as in
        probes, which saves the launches of a step.
        """
        table = {name: f.curve for name, f in self.curves.items() if not (repeated and name == LAUNCH_CLASS)}
        return sum(call_seconds(c, table.get) for c in calls)


def fit(
    probes: Sequence[Probe], measured: Mapping[str, Measurement], groups: Mapping[Axes, GroupShape]
) -> CalibrationFit:
    """Fits all curves.

    Args:
      measured: by the probes' names; `seconds` is of a whole step.
      groups: the kind of group of the probes' axes.
    """
    out = CalibrationFit()
    found = [(p, measured[p.name]) for p in probes if p.name in measured]
    out.step, out.store = stores([(p.repeats, m["seconds"]) for p, m in found if p.target == "stores"])
    for target in dict.fromkeys(p.target for p, _ in found if p.op is not None and p.target != "check"):
        chosen = [(p, m) for p, m in found if p.target == target and p.op is not None]
        if target in PRODUCTS:
            _products(out, target, chosen)
        elif target == "fresh":
            _fresh(out, chosen)
        else:
            samples = [(p.bytes, target_seconds(out, p, m), m["spread"]) for p, m in chosen]
            out.curves[f"kernel.{target}"] = curve_of(f"kernel.{target}", samples)
    for p, m in found:
        if p.target == LAUNCH:
            _launch(out, p, m)
    for kind in COLLECTIVES:
        for axes in dict.fromkeys(p.axes for p, _ in found if p.target == kind):
            samples = [
                (p.bytes, repeat(out, p, m), m["spread"])
                for p, m in found
                if p.target == kind and p.axes == axes
            ]
            out.collectives.append((groups[axes], curve_of(kind, samples)))
    for p, m in found:
        if p.target == "check":
            out.held_out[p.name] = out.seconds(p.calls) / repeat(out, p, m) - 1
    return out


def stores(samples: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Seconds of an empty step and of one more read and store, from (number of stores, seconds): none, and
    many.
    """
    if not samples:
        return 0.0, 0.0
    (n0, t0), (n1, t1) = min(samples), max(samples)
    return t0, max(0.0, (t1 - t0) / (n1 - n0)) if n1 > n0 else 0.0


def repeat(out: CalibrationFit, probe: Probe, m: Measurement) -> float:
    """Equation (1), at least a small part of the measured time."""
    seconds = m["seconds"] - out.step - probe.stores * out.store
    return max(seconds, SMALLEST * m["seconds"]) / probe.repeats


def target_seconds(out: CalibrationFit, probe: Probe, m: Measurement) -> float:
    """Equation (2)."""
    whole = repeat(out, probe, m)
    own = next(c for c in reversed(probe.calls) if f"{c.op_class}.".startswith(f"kernel.{probe.target}."))
    seconds = whole - out.seconds([c for c in probe.calls if c is not own])
    if own.final and (fresh := out.curves.get("kernel.fresh")) is not None:
        seconds -= fresh.curve(own.made)
    cheapest = out.curves.get("kernel.unary")
    floor = cheapest.curve(own.bytes) if cheapest is not None and not own.flops else 0.0
    return max(seconds, floor, SMALLEST * whole)


def curve_of(op_class: str, samples: Sequence[tuple[float, float, float]]) -> FittedCurve:
    """Equations (3) and (7) from (bytes, seconds, spread of the repeats)."""
    points = [(x, y) for x, y, _ in samples]
    curve = monotone(points)
    noise = median(s for *_, s in samples)
    errors = []
    for i in range(1, len(points) - 1):
        rest = monotone([p for j, p in enumerate(sorted(points)) if j != i])
        x, y = sorted(points)[i]
        errors.append(abs(rest(x) - y) / max(y, curve(x), 1e-12))
    return FittedCurve(op_class, "bytes", curve, max([noise, *([median(errors)] if errors else [])]))


def _fresh(out: CalibrationFit, chosen: Sequence[tuple[Probe, Measurement]]) -> None:
    """Equation (5)."""
    samples = []
    for p, m in chosen:
        samples.append((p.calls[-1].made, max(0.0, repeat(out, p, m) - out.seconds(p.calls)), m["spread"]))
    out.curves["kernel.fresh"] = curve_of("kernel.fresh", [(0.0, 0.0, 0.0), *samples])


def _launch(out: CalibrationFit, probe: Probe, m: Measurement) -> None:
    """Equation (6)."""
    left = max(0.0, repeat(out, probe, m) - out.seconds(probe.calls)) / len(probe.calls)
    out.curves[LAUNCH_CLASS] = FittedCurve(LAUNCH_CLASS, "bytes", Curve(((0.0, left),)), m["spread"])


def _products(out: CalibrationFit, target: str, chosen: Sequence[tuple[Probe, Measurement]]) -> None:
    """Equation (4), as curves of FLOPs, from the launch on, and of every part that the probes have."""
    rows, seconds, wholes = [], [], []
    have = [i for i in range(len(PARTS)) if any(p.calls[-1].parts[i] for p, _ in chosen)]
    for p, m in chosen:
        own = p.calls[-1]
        rows.append((1.0, own.flops, *(own.parts[i] for i in have)))
        seconds.append(target_seconds(out, p, m))
        wholes.append(repeat(out, p, m))
    found = products(rows, seconds, wholes, DISTURBED)
    errors = [
        abs(sum(c * x for c, x in zip(found, r, strict=True)) - y) / whole
        for r, y, whole in zip(rows, seconds, wholes, strict=True)
    ]
    sure = max(median(errors), median(m["spread"] for _, m in chosen))
    for i, part in enumerate(("", *(f".{PARTS[i]}" for i in have)), 1):
        start, top = found[0] if i == 1 else 0.0, max(r[i] for r in rows)
        name, line = f"kernel.{target}{part}", Curve(((0.0, start), (top, start + found[i] * top)))
        out.curves[name] = FittedCurve(name, "flops" if i == 1 else "bytes", line, sure)


def products(
    rows: Sequence[tuple[float, ...]],
    seconds: Sequence[float],
    wholes: Sequence[float] | None = None,
    disturbed: float = math.inf,
) -> tuple[float, ...]:
    """Coefficients >= 0 with rows · coefficients ≈ seconds, of the least relative squares.

    Args:
      wholes: reference of relative errors (None: `seconds`): the whole measured time, if `seconds` is a part
        of it.
      disturbed: relative error from which on one counts in proportion, not squared (soft L1), so that a
        disturbed measurement does not decide the line.
    """
    import numpy as np
    from scipy.optimize import least_squares, nnls

    a, y = np.asarray(rows, float), np.asarray(seconds, float)
    whole = y if wholes is None else np.asarray(wholes, float)
    scale = np.maximum(np.abs(a).max(axis=0), 1e-300)
    shares, wanted = a / scale / whole[:, None], y / whole
    found = nnls(shares, wanted)[0]
    if disturbed < math.inf:
        start = np.maximum(found, 1e-3 * found.max())
        fit = least_squares(
            lambda c: shares @ c - wanted,
            start,
            bounds=(0.0, np.inf),
            x_scale=start,
            loss="soft_l1",
            f_scale=disturbed,
        )
        found = fit.x
    return tuple(float(v) for v in found / scale)
