"""Predicted against measured: statistics on known rows, the choice of layouts, a real run of a small one."""

from __future__ import annotations

import math

import pytest

from costmodels.calibration import TimingSample
from costmodels.hardware import load_hardware
from examples.mlp import model as mlp
from layoutopt.analysis.validate import (
    RunCandidate,
    ValidationRuns,
    choose,
    result,
    seconds_of,
    stratified,
    validate,
)
from mesh_tf_core import Layout, LayoutError, Mesh, UserError

MESH = Mesh("data:2")


def rows(predicted: list[float], measured: list[float]):
    chosen = [RunCandidate(f"n{i}", Layout({"batch": (f"a{i}",)}), p) for i, p in enumerate(predicted)]
    return chosen, [[TimingSample(m * f, 0.0, 0.0, 2) for f in (0.99, 1.0, 1.01)] for m in measured]


def test_statistics_of_known_rows():
    found = result(*rows([1.0, 2.0, 3.0, 4.0], [1.1, 2.0, 2.4, 8.0]))
    assert found.mape == pytest.approx((1 / 11 + 0 + 0.25 + 0.5) / 4)
    assert found.kendall_tau == pytest.approx(1.0)
    assert found.spearman == pytest.approx(1.0)
    assert found.regret == pytest.approx(0.0)


def test_one_exchanged_pair():
    found = result(*rows([1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 3.0, 4.0]))
    assert found.kendall_tau == pytest.approx(1 - 2 / 6)
    assert found.spearman == pytest.approx(1 - 6 * 2 / (4 * 15))
    assert found.regret == pytest.approx(1.0)


def test_a_row_says_what_ran_and_how_sure_it_is():
    found = result(*rows([1.0, 2.0], [1.0, 2.0]), drift=1.25)
    assert found.rows[1].to_json() == {
        "layout": "batch:a1",
        "predicted_seconds": 2.0,
        "measured_seconds": 2.0,
        "name": "n1",
        "spread": pytest.approx(0.01),
    }
    assert not found.noise.noisy
    assert found.noise.drift == 1.25


def test_a_noisy_machine_is_said():
    chosen, samples = rows([1.0, 2.0], [1.0, 2.0])
    disturbed = [[TimingSample(s.wall, 0.5, s.wall, 2) for s in group] for group in samples]
    found = result(chosen, disturbed)
    assert found.noise.noisy
    assert "other processes used 50% of the cores" in found.noise.words


def test_strata_spread_over_the_range():
    made = [RunCandidate("", Layout(), s) for s in (1.0, 1.01, 1.02, 1.03, 10.0, 11.0, 100.0)]
    assert [c.seconds for c in stratified(made, 3)] == [1.03, 10.0, 100.0]
    assert stratified(made, 20) == sorted(made, key=lambda c: c.seconds)
    assert stratified(made, 0) == []


def test_the_chosen_hold_the_best_and_the_named_ones():
    model, mesh, hardware = mlp(batch=16, hidden=32), Mesh("data:2;model:2"), load_hardware("cpu-local")
    best = Layout("batch:data;hidden:model")
    chosen = choose(model, mesh, hardware, 8, best=best)
    assert chosen[0] == RunCandidate("best by the search", best, chosen[0].seconds)
    assert [c.name for c in chosen[1:3]] == ["replicated", "data parallel"]
    assert len(chosen) == len({c.layout for c in chosen}) == 8
    assert all(math.isfinite(c.seconds) and c.seconds > 0 for c in chosen)


def test_a_real_run_has_one_row_for_each_layout():
    heard = []
    found = validate(
        mlp(batch=16, hidden=32),
        MESH,
        "cpu-local",
        ["batch:data", Layout(), "hidden:data", "batch:data"],
        ValidationRuns(steps=2),
        on_progress=lambda *said: heard.append(said),
    )
    assert [row.layout for row in found.rows] == ["batch:data", "", "hidden:data"]
    assert all(row.measured_seconds > 0 for row in found.rows)
    assert -1 <= found.kendall_tau <= 1
    assert found.noise.drift is None
    assert heard[-1][1] == heard[-1][2] == 9


def test_a_prediction_is_the_whole_step_s():
    from costmodels.pricing.pricer import pricer

    model = mlp(batch=16, hidden=32)
    prices = pricer(load_hardware("cpu-local"), MESH)
    program = model.lower(MESH, Layout("batch:data"))
    assert seconds_of(model, MESH, Layout("batch:data"), prices) == prices.cost(program).step_seconds


def test_bad_requests():
    model = mlp(batch=16, hidden=32)
    with pytest.raises(UserError, match="at least two layouts on mesh"):
        validate(model, MESH, layouts=["batch:data"])
    with pytest.raises(LayoutError, match="nowhere"):
        validate(model, MESH, layouts=["batch:nowhere", ""])
