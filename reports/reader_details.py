"""The optional `details` of a plan: each part is read when it is there."""

from __future__ import annotations

import math
from typing import Any

from reports import evidence as e
from reports import plan as p
from reports.fields import Fields, words
from reports.units import clean, quantity


def details(at: Fields) -> p.Details:
    """All parts that `at` has."""
    dims = at.object("dims", {})
    by_kind = at.object("by_kind", {})
    return p.Details(
        hardware=_hardware(at.object("hardware")) if at.has("hardware") else None,
        dims={clean(name): dims.whole(name, minimum=1) or 1 for name in dims},
        variables=tuple(_variable(f) for f in at.objects("variables")),
        lines=tuple(_line(f) for f in at.objects("lines")),
        by_kind={clean(name): _shares(by_kind.object(name)) for name in by_kind},
        memory=_memory(at.object("memory")) if at.has("memory") else None,
        sensitivity=tuple(_sensitivity(f) for f in at.objects("sensitivity")),
        validation=validation(at.object("validation")) if at.has("validation") else None,
        source=at.text("source", ""),
        rules=_rules(at.object("search", {})),
        calibration=_calibration(at.object("calibration")) if at.has("calibration") else None,
        robustness=_robustness(at.object("robustness")) if at.has("robustness") else None,
        proof=_proof(at.object("proof")) if at.has("proof") else None,
    )


def _rules(asked: Fields) -> str:
    """Pins and forbidden splits of a search."""
    parts = [(verb, words(asked.raw(key, ""))) for verb, key in (("pinned", "pins"), ("forbidden", "forbid"))]
    return "; ".join(f"{verb} {said}" for verb, said in parts if said)


def _hardware(at: Fields) -> p.Hardware:
    return p.Hardware(
        name=at.text("name"),
        summary=at.text("summary", ""),
        device=at.text("device", ""),
        memory=at.number("memory_bytes", None),
        assumptions=at.names("assumptions"),
        placement=at.text("placement", ""),
        lies={clean(str(axis)): words(said) for axis, said in at.object("lies", {}).items()},
        numbers=tuple(_number(f) for f in at.objects("numbers")),
    )


def _number(at: Fields) -> p.Number:
    return p.Number(
        path=at.text("path"),
        value=_raw(at.raw("value")),
        unit=at.text("unit", ""),
        source=at.text("source", ""),
        date=at.text("date", ""),
    )


def _raw(value: Any) -> float | str:
    """A finite number stays one; anything else in words."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e100
    return float(value) if number else words(value)


def _value(value: Any, unit: str = "") -> str:
    found = _raw(value)
    return f"{found} {unit}".strip() if isinstance(found, str) else quantity(found, unit)


def _variable(at: Fields) -> p.Variable:
    shape = []
    for pair in at.array("shape"):
        if not isinstance(pair, list | tuple) or len(pair) != 2 or not _size(pair[1]):
            at.fail("shape", "must be a list of [dimension, size]")
        shape.append((clean(str(pair[0])), int(pair[1])))
    splits = [(axes,) if isinstance(axes, str) else tuple(axes or ()) for axes in at.array("splits", [])]
    splits = splits or [()] * len(shape)
    if len(splits) != len(shape) or not all(isinstance(a, str) for axes in splits for a in axes):
        at.fail("splits", f"must list the axes of each of the {len(shape)} dimensions")
    return p.Variable(
        name=at.text("name"),
        shape=tuple(shape),
        dtype=at.text("dtype", ""),
        splits=tuple(tuple(clean(a) for a in axes) for axes in splits),
        bytes=at.number("bytes"),
        local_bytes=at.number("local_bytes"),
        kind=at.text("kind", "parameter"),
    )


def _size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _line(at: Fields) -> p.Line:
    return p.Line(
        op=at.text("op"),
        scope=at.text("scope", ""),
        phase=at.text("phase", ""),
        kind=at.text("kind", ""),
        times=at.number("times", 1.0),
        seconds=at.number("seconds"),
        exposed=at.number("exposed_seconds", 0.0),
        flops=at.number("flops", 0.0),
        bytes=at.number("bytes", 0.0),
        axes=at.names("axes"),
        sent=at.number("sent_bytes", 0.0),
        communication=at.flag("communication", False),
        node=at.whole("node", None) if at.number("node", -1.0, signed=True) >= 0 else None,
    )


def _shares(at: Fields) -> p.Shares:
    return p.Shares(
        compute=at.number("compute"),
        hidden=at.number("hidden", 0.0),
        exposed=at.number("exposed", 0.0),
        kinds=at.numbers("kinds"),
    )


def _memory(at: Fields) -> p.Memory:
    points = tuple(
        p.Point(f.text("name", ""), f.text("scope", ""), f.text("phase", ""), f.number("bytes"))
        for f in at.objects("points")
    )
    highest = max(range(len(points)), key=lambda i: points[i].bytes) if points else 0
    where = at.whole("at", highest)
    return p.Memory(
        points=points,
        at=highest if where is None or where >= len(points) else where,
        holdings=_holdings(at),
        variables=at.number("variables", 0.0),
        limit=at.number("limit", None),
    )


def _holdings(at: Fields) -> tuple[p.Holding, ...]:
    """Tensors that look the same are one holding; the largest first."""
    found: dict[tuple[str, str, float], int] = {}
    for f in at.objects("holdings"):
        key = (f.text("what"), f.text("scope", ""), f.number("bytes"))
        found[key] = found.get(key, 0) + 1
    rows = [p.Holding(what, size * n, scope, n) for (what, scope, size), n in found.items()]
    return tuple(sorted(rows, key=lambda h: -h.bytes))


def _sensitivity(at: Fields) -> p.Sensitivity:
    trials = [
        p.Trial(f.number("value"), f.number("step_seconds", None), _layout_words(f))
        for f in at.objects("points")
    ]
    return p.Sensitivity(at.text("factor"), tuple(sorted(trials, key=lambda t: t.value)))


def _layout_words(at: Fields) -> str:
    """A layout given as text or as an object."""
    value = at.raw("layout", "")
    if isinstance(value, dict):
        return ";".join(f"{clean(str(dim))}:{words(axes)}" for dim, axes in value.items() if axes)
    return words(value)


def validation(at: Fields) -> e.Validation:
    """What `layoutopt validate --json` prints."""
    rows = []
    for f in at.objects("rows"):
        measured = f.number("measured_seconds")
        predicted = f.number("predicted_seconds")
        if measured > 0 and predicted > 0:
            rows.append(e.Measured(_layout_words(f), predicted, measured))
    return e.Validation(
        rows=tuple(rows),
        mape=_summary(at, "mape"),
        kendall=_summary(at, "kendall_tau"),
        spearman=_summary(at, "spearman"),
        regret=_summary(at, "regret"),
        noise=at.object("noise", {}).text("words", ""),
    )


def _summary(at: Fields, key: str) -> float | None:
    """A summary number; not-a-number (too few rows) is none."""
    value = at.raw(key, None)
    if isinstance(value, float) and math.isnan(value):
        return None
    return at.number(key, None, signed=True)


def _calibration(at: Fields) -> e.Calibration:
    samples = []
    for f in at.objects("measurements"):
        measured, fitted = f.number("measured_seconds"), f.number("predicted_seconds")
        if measured > 0:
            unseen = f.flag("held_out", False)
            samples.append(e.Sample(f.text("what"), f.number("size", 0.0), measured, fitted, unseen))
    fit = at.raw("fit", {})
    if isinstance(fit, dict):
        found = [(clean(str(name)), _value(value)) for name, value in fit.items()]
    else:
        found = [(f.text("name"), _value(f.raw("value"), f.text("unit", ""))) for f in at.objects("fit")]
    return e.Calibration(tuple(samples), tuple(found), at.names("notes"), at.text("of", "measurement"))


def _robustness(at: Fields) -> e.Robustness:
    draws, wins = at.whole("draws", 0) or 0, at.whole("wins", 0) or 0
    if wins > draws:
        at.fail("wins", f"says {wins} of {draws} draws")
    rival = at.text("rival", "")
    return e.Robustness(draws, wins, at.number("worst", 0.0), rival, at.whole("uncertain", 0) or 0)


def _proof(at: Fields) -> e.Proof:
    refuted = any(f.text("how", "") == "faster" for f in at.objects("problems"))
    return e.Proof(at.flag("verified", False), refuted, at.text("words", ""))
