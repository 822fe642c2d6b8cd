"""Searches with an axis that synchronises rarely: the tables add up to the price of what runs, rows of memory
forbid nothing that fits, and the answer is the best of all layouts."""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware, with_settings
from layoutopt import Plan, search
from layoutopt.analysis.certificate import certify
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.kind import STORED
from tests.core.test_replicas import model
from tests.layoutopt.models import some_choices
from tests.marks import by_day

MESH = mtf.Mesh("sites:2;data:2;model:2")
RARE = mtf.DiLoCo("sites", 4, fragments=2, bits=8)
LATE = mtf.DiLoCo("sites", 4, fragments=2, delay=1)
FEW = SearchSpace(
    pins={"d": ()}, storage=("layout", "zero3"), recompute=(False,), diloco=RARE, microbatches=(1,)
)
ALL = SearchSpace(storage=STORED, microbatches=(1, 2), diloco=RARE)


@pytest.fixture(scope="module")
def machine() -> Hardware:
    return load_hardware(with_settings("tpu-v5e", ["network_bandwidth=0.001GB/s"]))


@pytest.fixture(scope="module")
def evaluator(machine: Hardware) -> Evaluator:
    return Evaluator(model(mtf.Adam(1e-2), dtype="float32"), machine)


Priced = tuple[float, int]
"""Seconds and bytes."""


def every(evaluator: Evaluator, allowed: SearchSpace) -> Iterator[Priced]:
    """All legal layouts, each held against its tables and its rows."""
    for subproblem in subproblems(evaluator.model, [MESH], allowed, evaluator.near):
        decided = subproblem.decided
        its = subproblem.opened(evaluator)
        for chosen in itertools.product(*(decided.options[n] for n in decided.free)):
            layout, options = decided.read(dict(zip(decided.free, chosen, strict=True)))
            try:
                priced = evaluator(MESH, layout, options)
            except mtf.LayoutError:
                continue
            seconds, peak = priced.cost.step_seconds, priced.memory.peak
            summed = evaluator.table_prices(MESH, decided).seconds(layout, options)
            sites = [x for x in priced.cost.lines if "sites" in x.axes]
            waited = sum(x.exposed * x.times for x in sites) if allowed.diloco == LATE else 0.0
            assert summed == pytest.approx(seconds - waited, rel=1e-9)
            choices = its.extraction.choices(layout, options)
            assert choices is not None
            assert all(row.use(choices) <= peak + 0.5 for row in its.rows)
            yield seconds, peak


def best(evaluator: Evaluator, allowed: SearchSpace, limit: float) -> Plan:
    plan = search(
        evaluator.model,
        mesh=MESH,
        hardware=evaluator.hardware,
        memory=limit,
        pins=allowed.pins,
        storage=allowed.storage,
        recompute=allowed.recompute,
        microbatches=allowed.microbatches,
        diloco=str(allowed.diloco),
    )
    assert plan.options.diloco == allowed.diloco and plan.data.diloco == str(allowed.diloco)
    return plan


@pytest.mark.parametrize("allowed", [FEW, pytest.param(ALL, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_the_answer_is_the_best_of_all_layouts(evaluator: Evaluator, allowed: SearchSpace) -> None:
    known = [*every(evaluator, allowed)]
    peaks = sorted({peak for _, peak in known})
    assert len(known) >= 36 and len(peaks) > 10
    for limit in (peaks[-1], peaks[len(peaks) // 2], peaks[0]):
        plan = best(evaluator, allowed, limit)
        wanted = min(seconds for seconds, peak in known if peak <= limit)
        assert plan.solver.status == "OPTIMAL"
        assert plan.predicted.step_seconds == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(mtf.InfeasibleError):
        best(evaluator, allowed, peaks[0] - 1)


@pytest.mark.parametrize("asked", [{}, {"fragments": 2}, {"bits": 8}, {"fragments": 2, "bits": 4}])
def test_tables_know_shards_that_are_padded(evaluator: Evaluator, asked: dict[str, Any]) -> None:
    """Fragments and few bits take rows apart, which padding must not change: these shards are not padded."""
    mesh = mtf.Mesh("sites:2;data:3")
    by = mtf.DiLoCo("sites", 4, **asked)
    allowed = SearchSpace(storage=("zero3",), recompute=(False,), diloco=by, microbatches=(1,))
    (subproblem,) = subproblems(evaluator.model, [mesh], allowed, evaluator.near)
    layout, options = subproblem.decided.read({n: o[0] for n, o in subproblem.decided.options.items()})
    priced = evaluator(mesh, layout, options)
    assert any(s.padded is not None for s in priced.program.variables.values()) is not bool(asked)
    summed = evaluator.table_prices(mesh, subproblem.decided).seconds(layout, options)
    assert summed == pytest.approx(priced.cost.step_seconds, rel=1e-9)
    its = subproblem.opened(evaluator)
    choices = its.extraction.choices(layout, options)
    assert choices is not None
    assert all(row.use(choices) <= priced.memory.peak + 0.5 for row in its.rows)


@pytest.mark.parametrize("hidden", by_day([False, True]))
def test_what_a_delay_hides_is_in_the_answer(hidden: bool) -> None:
    """Tables hide all of an exchange: where steps do, the answer is proven, else a gap says what is not."""
    slow = () if hidden else ("nic_bandwidth=0.000001GB/s", "node_egress=0.000001GB/s")
    machine = load_hardware(with_settings("h100", ["node_size=4", *slow]))
    evaluator = Evaluator(model(mtf.Adam(1e-2), rows=1 << 20, dtype="float32"), machine)
    asked = replace(FEW, diloco=LATE)
    wanted = min(seconds for seconds, _ in every(evaluator, asked))
    plan = best(evaluator, asked, machine.usable_memory_bytes)
    assert (plan.solver.status == "OPTIMAL") is hidden
    assert plan.solver.bound is not None and plan.solver.bound <= wanted * (1 + 1e-9)
    assert plan.predicted.step_seconds == pytest.approx(wanted, rel=1e-9 if hidden else 1e-3)
    notes = " ".join(evaluator(MESH, plan.layout, plan.options).notes)
    assert "over 'sites' every 2 steps" in notes and ("of which 0 s is exposed" in notes) is hidden


def test_the_proof_holds_without_a_solver(evaluator: Evaluator) -> None:
    plan = best(evaluator, FEW, 4000)
    ruled = [*certify(evaluator.model, plan, evaluator.hardware, 4000, FEW)]
    assert [r.how for r in ruled] in (["bound"], ["listed"])


@pytest.mark.parametrize(
    ("asked", "error"),
    [
        ({"diloco": "site"}, "has no axis 'site'; did you mean 'sites'"),
        ({"pins": "batch:sites"}, "pins batch: axis 'sites' is the axis of the"),
        ({"storage": ["zero3@sites"]}, "storage zero3@sites: axis 'sites' is the axis of the"),
        ({"mesh": None, "devices": 8}, "diloco refers to mesh axes by name"),
    ],
)
def test_errors(evaluator: Evaluator, asked: dict[str, object], error: str) -> None:
    given: dict[str, object] = {"mesh": MESH, "diloco": "sites", **asked}
    with pytest.raises(mtf.UserError, match=error):
        search(evaluator.model, hardware=evaluator.hardware, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("way", by_day([RARE, LATE]))
def test_replicas_keep_values_on_their_hosts(way: mtf.DiLoCo) -> None:
    """Tables, rows of memory and the row of the hosts' memory add up with meetings beside the step."""
    settings = ["network_bandwidth=0.001GB/s", "host_memory=1KiB", "host_link=1e6GB/s"]
    evaluator = Evaluator(
        model(mtf.Adam(1e-2), dtype="float32"), load_hardware(with_settings("tpu-v5e", settings))
    )
    allowed = SearchSpace(
        storage=STORED, microbatches=(1,), diloco=way, offload=("optimizer", "activations", "weights")
    )
    rng, compared = random.Random(1), 0
    (subproblem,) = subproblems(evaluator.model, [MESH], allowed, evaluator.near)
    decided = subproblem.decided
    its = subproblem.opened(evaluator)
    while compared < 12:
        layout, options = decided.read(some_choices(decided, rng))
        try:
            priced = evaluator(MESH, layout, options)
        except mtf.LayoutError:
            continue
        compared += 1
        sites = [x for x in priced.cost.lines if "sites" in x.axes]
        waited = sum(x.exposed * x.times for x in sites) if way.delay else 0.0
        summed = evaluator.table_prices(MESH, decided).seconds(layout, options)
        assert summed == pytest.approx(priced.cost.step_seconds - waited, rel=1e-9)
        choices = its.extraction.choices(layout, options)
        assert choices is not None
        assert max(row.use(choices) for row in its.rows) <= priced.memory.peak + 0.5
        (host,) = (row for row in its.extraction.problem.rows if row.name == "host memory")
        assert host.use(choices) == priced.program.host_bytes


def test_one_decision_may_be_of_variables_that_meet_apart() -> None:
    """Two heads that are stored alike, in two fragments: a meeting's tables know one of them."""
    g = mtf.Graph("heads")
    b, d, v = mtf.Dim("batch", 16), mtf.Dim("d", 8), mtf.Dim("vocab", 32)
    x, y = g.input("x", [b, d], "float32"), g.input("y", [b])
    heads = (g.variable(n, [d, v], mtf.Normal(0.1)) for n in ("head", "second"))
    first, second = (
        mtf.reduce_mean(mtf.softmax_cross_entropy(mtf.einsum([x, head], [b, v]), y, v)) for head in heads
    )
    heads_of = mtf.Model(first + second, mtf.Adam(1e-2))
    rare, mesh = "sites:period=4,fragments=2", "sites:2;data:2"
    plan = search(heads_of, mesh, hardware="h100", diloco=rare, microbatches=[1], alternatives=False)
    assert plan.solver.status == "OPTIMAL"


def test_a_split_that_does_not_divide_what_is_sent_is_not_in_the_tables() -> None:
    """A row of 12 is sent as 6 bytes, which 4 devices do not divide."""
    g = mtf.Graph("head")
    b, d, v = mtf.Dim("batch", 16), mtf.Dim("d", 8), mtf.Dim("vocab", 12)
    x, y = g.input("x", [b, d], "float32"), g.input("y", [b])
    scores = mtf.einsum([x, g.variable("head", [d, v], mtf.Normal(0.1))], [b, v])
    head = mtf.Model(mtf.reduce_mean(mtf.softmax_cross_entropy(scores, y, v)), mtf.Adam(1e-2))
    evaluator, mesh = Evaluator(head, load_hardware("tpu-v4")), mtf.Mesh("data:4;sites:2")
    for bits in (8, 4):
        allowed = SearchSpace(
            storage=("layout",), microbatches=(1,), diloco=mtf.DiLoCo("sites", 4, bits=bits)
        )
        (subproblem,) = subproblems(head, [mesh], allowed, evaluator.near)
        layout, options = subproblem.decided.read({"vocab": ("data",)})
        assert (subproblem.opened(evaluator).extraction.choices(layout, options) is None) == (bits == 4)
        with pytest.raises(mtf.LayoutError, match="size 6") if bits == 4 else contextlib.nullcontext():
            evaluator(mesh, layout, options)
    plan = search(head, mesh, hardware="tpu-v4", diloco="sites:bits=4", alternatives=False)
    assert plan.solver.status == "OPTIMAL"
