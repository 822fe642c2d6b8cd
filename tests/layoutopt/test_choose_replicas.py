"""Ways to synchronise compared: the fastest that is accepted, what the law says of each, where it turns."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware, with_settings
from layoutopt import Plan, choose_replicas, search
from layoutopt.api.replicas import ways_of
from layoutopt.plan.ways import SYNCHRONOUS
from tests.core.test_replicas import model

MESH, ROWS = "sites:2;data:8", 1 << 20
FEW: dict[str, Any] = {"storage": ["layout", "zero3"], "recompute": [False], "microbatches": [1]}
WAYS = ("never", "sites:period=30", "sites:period=300")


def build(count: int) -> mtf.Model:
    made = model(mtf.Adam(1e-2), rows=ROWS // count, dtype="float32")
    made.hparams = {"batch": ROWS // count, "other": 1}
    return made


@pytest.fixture(scope="module")
def machine() -> Hardware:
    """Two nodes whose messages take no time to start, but long to arrive."""
    slow = ["nic_bandwidth=0.00001GB/s", "node_egress=0.0001GB/s"]
    return load_hardware(with_settings("h100", slow))


@pytest.fixture(scope="module")
def chosen(machine: Hardware) -> Plan:
    return choose_replicas(build, MESH, WAYS, machine, **FEW)


@pytest.mark.nightly
def test_the_fastest_way_is_the_plan(chosen: Plan, machine: Hardware) -> None:
    ways = chosen.data.details.ways
    assert ways is not None and [w.status for w in ways.compared] == ["OPTIMAL"] * 3
    wanted = {
        diloco: search(build(2 if diloco else 1), mesh=MESH, hardware=machine, diloco=diloco, **FEW)
        for diloco in (None, *WAYS[1:])
    }
    found = {w.diloco: w.step_seconds for w in ways.compared}
    for diloco, plan in wanted.items():
        said = str(mtf.DiLoCo.parse(diloco)) if diloco else ""
        assert found[said] == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert ways.compared[0].step_seconds == min(p.predicted.step_seconds for p in wanted.values())
    assert chosen.predicted.step_seconds == ways.compared[0].step_seconds
    assert chosen.data.diloco == ways.compared[0].diloco
    assert chosen.data.solver is not None and chosen.data.solver.status == "OPTIMAL"
    assert {w.name: w.hparams for w in ways.compared} == {
        SYNCHRONOUS: {"batch": ROWS},
        "sites, every 30 steps": {"batch": ROWS // 2},
        "sites, every 300 steps": {"batch": ROWS // 2},
    }


def test_what_the_law_says_decides(machine: Hardware) -> None:
    """19.226 N^-0.0985 2^0.0116 / (18.129 N^-0.0953) - 1 at 128 parameters; nothing beyond 30 steps."""
    plan = choose_replicas(build, MESH, WAYS, machine, accept_loss=0.0, **FEW)
    ways = plan.data.details.ways
    assert ways is not None and plan.options.diloco is None
    law = 19.226 * 128**-0.0985 * 2**0.0116 / (18.129 * 128**-0.0953) - 1
    found = {w.name: w for w in ways.compared}
    assert found["sites, every 30 steps"].loss == pytest.approx(law)
    assert found["sites, every 30 steps"].reason.startswith("not accepted: predicted loss +")
    assert found["sites, every 300 steps"].reason == "not accepted: the scaling law has no runs beyond H = 30"
    with pytest.raises(mtf.UserError, match=r"excludes every setting"):
        choose_replicas(build, MESH, WAYS[1:], machine, accept_loss=0.0, **FEW)


def test_free_is_every_axis_between_nodes(machine: Hardware) -> None:
    found = [*ways_of(["free", "sites", "never"], mtf.Mesh(MESH), machine)]
    assert found == [None, mtf.DiLoCo("sites", 30)]
    inside = [*ways_of(["free"], mtf.Mesh("data:2;model:4"), machine)]
    assert inside == [None, mtf.DiLoCo("data", 30), mtf.DiLoCo("model", 30)]


def test_a_way_for_every_value() -> None:
    """Those that fit together: 4 fragments do not divide 30 steps."""
    machine, mesh = load_hardware("h100"), mtf.Mesh(MESH)
    found = [*ways_of(["sites:period=30/100,fragments=1/4,bits=8/4"], mesh, machine)]
    fits = [(30, 1), (100, 1), (100, 4)]
    assert set(found) == {mtf.DiLoCo("sites", h, fragments=p, bits=b) for h, p in fits for b in (8, 4)}
    for said, error in (
        ("sites:period=30,fragments=4/7", ", must divide the period of"),
        ("sites:period=30/x", "period='x' is not a whole number"),
    ):
        with pytest.raises(mtf.UserError, match=error):
            list(ways_of([said], mesh, machine))


@pytest.mark.nightly
def test_searched_values_are_those_that_enumeration_finds(machine: Hardware) -> None:
    plan = choose_replicas(build, MESH, ["never", "sites:period=10/30,bits=32/8"], machine, **FEW)
    asked = [None] + [f"sites:period={h},bits={b}" for h in (10, 30) for b in (32, 8)]
    each = [search(build(2 if a else 1), mesh=MESH, hardware=machine, diloco=a, **FEW) for a in asked]
    ways = plan.data.details.ways
    assert ways is not None and len(ways.compared) == len(asked) and plan.solver.status == "OPTIMAL"
    assert plan.predicted.step_seconds == pytest.approx(min(e.predicted.step_seconds for e in each), rel=1e-9)
    with pytest.raises(mtf.UserError, match="no runs for fragments, quantised synchronisation or delays"):
        choose_replicas(build, MESH, ["sites:bits=8/4"], machine, accept_loss=0.5, **FEW)


def test_errors(machine: Hardware) -> None:
    with pytest.raises(mtf.UserError, match="with its share of the batch"):
        choose_replicas(lambda _: build(1), MESH, WAYS[:2], machine, **FEW)
    with pytest.raises(mtf.UserError, match="accept_loss=-1: write a fraction of"):
        choose_replicas(build, MESH, WAYS, machine, accept_loss=-1, **FEW)
    plan = choose_replicas(
        lambda n: model(mtf.SGD(0.1), rows=9, dtype="float32"), MESH, WAYS[:2], machine, **FEW
    )
    ways = plan.data.details.ways
    assert (
        ways is not None and ways.compared[1].reason == "a batch of 9 examples is not divisible by 2 replicas"
    )


def test_a_way_that_is_refused_is_one_of_them(machine: Hardware) -> None:
    """Here replicas cannot have stages of a pipeline: what is found without is not lost."""
    plan = choose_replicas(build, MESH, WAYS[:2], machine, pipeline=("layers",), **FEW)
    ways = plan.data.details.ways
    assert (
        ways is not None
        and ways.compared[0].status
        and "are too many for a loop of 2 layer" in ways.compared[1].reason
    )
    with pytest.raises(mtf.UserError, match="no operation has this dimension"):
        choose_replicas(build, MESH, WAYS[:2], machine, elsewhere=("nothing",), **FEW)
