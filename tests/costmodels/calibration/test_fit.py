"""Fitting: synthetic machines whose curves are known."""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from costmodels.calibration.fit import SMALLEST, curve_of, fit, products, stores
from costmodels.calibration.probes import COLLECTIVES, groups, probes
from costmodels.kernels.calls import PARTS, call_seconds
from mesh_tf_core import Mesh

MESH = Mesh("data:2;model:2")
STEP, STORE, LAUNCH = 1e-4, 2e-6, 7e-6


TARGETS = {f"kernel.{p.target}" for p in probes(MESH, quick=True) if p.op is not None and p.target != "check"}


def truth(op_class: str):
    """Seconds of one class: launch, then a rate; a machine without surprises."""
    if op_class == "kernel.fresh":
        return lambda x: 1e-11 * x
    if op_class.endswith(PARTS):
        return lambda x: (3 + PARTS.index(op_class.rpartition(".")[2])) * 1e-11 * x
    if op_class not in TARGETS:
        return None
    if op_class in ("kernel.matmul", "kernel.batch", "kernel.matmul.conv"):
        return lambda x: 5e-6 + 4e-12 * x
    extra = 1 + sorted(TARGETS).index(op_class) / 10 if op_class != "kernel.unary" else 1  # the cheapest
    return lambda x: 2e-6 + extra * 5e-11 * x


def collective(kind: str, n: int, size: float) -> float:
    return 1e-5 * n + 1e-10 * size * (1 + COLLECTIVES.index(kind))


def measured(noise: float = 0.0, seed: int = 0, each: int | None = None) -> dict[str, dict[str, float]]:
    """What the synthetic machine would measure; a group over n processes (of `each` devices) takes n times as
    long."""
    rng, out = random.Random(seed), {}
    for p in probes(MESH, True, each):
        if p.op is not None:
            one = sum(call_seconds(c, truth) for c in p.calls)
        elif p.target == "launch":
            one = sum(call_seconds(c, truth) + LAUNCH for c in p.calls)
        elif p.axes:
            size, over = groups(MESH, each)[p.axes]
            one = over * collective(p.target, size, p.bytes)
        else:
            one = 0.0
        whole = STEP + p.stores * STORE + p.repeats * one
        out[p.name] = {"seconds": whole * (1 + rng.gauss(0, noise)), "spread": noise}
    return out


def recorded(mesh: Mesh, really: Collection[str], each: int | None = None) -> list[dict[str, object]]:
    """What a calibration of the synthetic machine (of the axes of MESH) would have written down, but for what
    is still to be measured."""
    found = measured(each=each)
    return [
        {"name": p.name, "target": p.target, "axes": "+".join(p.axes), "bytes": p.bytes, "repeats": p.repeats,
         "wall_seconds": found[p.name]["seconds"], "foreign": 0.0, "samples": 5, **found[p.name]}
        for p in probes(mesh, True, each) if p.name not in really
    ]  # fmt: skip


def fitted(found, each=None):
    return fit(probes(MESH, True, each), found, groups(MESH, each))


def test_curves_of_a_known_machine_are_recovered():
    out = fitted(measured())
    assert (out.step, out.store) == (pytest.approx(STEP), pytest.approx(STORE))
    for name, found in out.curves.items():
        if name == "kernel.launch":
            # Small calls are priced a little too high.
            assert found.curve(0.0) == pytest.approx(LAUNCH, rel=0.06)
            continue
        own = truth(name)
        for x, y in found.curve.points:
            if x >= 1e5 or name.endswith(("matmul", "batch", "conv", "unary")):
                assert y == pytest.approx(own(x), rel=0.02, abs=1e-12), name
            else:  # below its first point a curve is flat: more than the truth is taken off for other calls
                assert 0 < y <= own(x) * 1.15 or x == 0, name
    for (n, _), found in out.collectives:
        for x, y in found.curve.points:
            assert y == pytest.approx(collective(found.op_class, n, x), rel=1e-6), found.op_class


def test_launches_are_of_steps_and_not_of_what_is_repeated():
    """One kernel again and again saves them: a probe's own calls are predicted without, a step's with."""
    out, whole = fitted(measured()), next(p for p in probes(MESH, quick=True) if p.target == "launch")
    kinds = {c.op_class for c in whole.calls}
    assert len(whole.calls) > 500 and len(kinds) > 10 and "kernel.scalar" in kinds
    alone = out.seconds(whole.calls)
    assert out.seconds(whole.calls, repeated=False) == pytest.approx(
        alone + len(whole.calls) * out.curves["kernel.launch"].curve(0.0)
    )


def test_groups_over_processes_have_curves_of_their_own():
    out = fitted(measured(each=2), 2)
    assert {kind for kind, _ in out.collectives} == {(2, 1), (2, 2), (4, 2)}
    for (n, over), found in out.collectives:
        for x, y in found.curve.points:
            assert y == pytest.approx(over * collective(found.op_class, n, x), rel=1e-6), found.op_class


def test_what_was_held_out_is_predicted():
    out = fitted(measured())
    assert len(out.held_out) > 5
    assert max(abs(e) for e in out.held_out.values()) < 0.08


def test_noise_makes_curves_less_sure_but_not_wrong():
    out = fitted(measured(noise=0.1))
    exact = fitted(measured())
    for name in ("kernel.unary", "kernel.binary.same", "kernel.matmul"):
        assert out.curves[name].uncertainty > exact.curves[name].uncertainty
        (x, y), (_, sure) = out.curves[name].curve.points[-1], exact.curves[name].curve.points[-1]
        assert y == pytest.approx(sure, rel=0.4), f"{name} at {x:g}"


def test_every_curve_is_non_negative_and_never_falls_whatever_is_measured():
    rng = random.Random(1)
    found = {name: {"seconds": rng.uniform(1e-5, 1e-2), "spread": 0.5} for name in measured()}
    out = fitted(found)
    curves = [*(f.curve for f in out.curves.values()), *(f.curve for _, f in out.collectives)]
    for curve in curves:
        values = [y for _, y in curve.points]
        assert min(values) >= 0
        assert values == sorted(values)


def test_a_repeat_never_vanishes():
    found = measured()
    for m in found.values():
        m["seconds"] = STEP
    out = fitted(found)
    assert out.curves["kernel.unary"].curve.points[0][1] >= 0.9 * SMALLEST * STEP / 96


def test_stores():
    assert stores([]) == (0.0, 0.0)
    assert stores([(0, 1.0)]) == (1.0, 0.0)
    assert stores([(0, 1.0), (64, 7.4)]) == (1.0, pytest.approx(0.1))
    assert stores([(0, 1.0), (64, 0.5)]) == (1.0, 0.0)


def test_products_recover_non_negative_coefficients():
    rows = [(1.0, f, b) for f in (1e6, 1e8, 1e9) for b in (1e4, 1e6)]
    found = products(rows, [2e-6 + 4e-12 * f + 1e-10 * b for _, f, b in rows])
    assert found == pytest.approx((2e-6, 4e-12, 1e-10))
    less = products(rows, [2e-6 + 4e-12 * f - 1e-13 * b for _, f, b in rows])
    assert min(less) >= 0


def test_a_disturbed_measurement_does_not_decide_the_line():
    rows = [(1.0, f) for f in (1e6, 1e7, 5e7, 1e8, 5e8, 1e9)]
    seconds = [2e-6 + 4e-12 * f for _, f in rows]
    seconds[3] *= 3
    squares, robust = products(rows, seconds), products(rows, seconds, seconds, 0.1)
    assert abs(robust[1] / 4e-12 - 1) < 0.03 < abs(squares[1] / 4e-12 - 1)


def test_errors_are_relative_to_all_that_was_measured():
    """A product of which little is left after its other parts are taken off says little."""
    rows = [(1.0, 1e6), (1.0, 1e8), (1.0, 1e9)]
    seconds = [1e-6, 4e-4, 4e-3]
    small = products(rows, seconds, [1e-3, 4e-4, 4e-3])
    assert small[0] + small[1] * 1e9 == pytest.approx(4e-3, rel=1e-3)


def test_a_curve_is_as_unsure_as_its_points_left_out():
    straight = curve_of("x", [(1.0, 1.0, 0.0), (2.0, 2.0, 0.0), (3.0, 3.0, 0.0)])
    bent = curve_of("x", [(1.0, 1.0, 0.0), (2.0, 1.0, 0.0), (3.0, 3.0, 0.0)])
    assert straight.uncertainty == pytest.approx(0.0)
    assert bent.uncertainty == pytest.approx(1.0)
    assert curve_of("x", [(1.0, 1.0, 0.3)]).uncertainty == 0.3
