"""Proofs are checked without a solver, and wrong ones are found out."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from layoutopt.analysis.certificate import Certificate, certify, considered_by
from layoutopt.analysis.explain import with_pins
from layoutopt.plan.build import Plan
from layoutopt.space.kind import Allowed
from layoutopt.space.microbatches import USUAL
from tests.layoutopt.models import EXAMPLES
from tests.searching import search

ASKED = Allowed(storage=("layout", "zero1"), recompute=(False,), microbatches=USUAL)
ROOM = 1e12


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return EXAMPLES["mlp"]()


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("tpu-v3")


def found(model: mtf.Model, hardware: Hardware, **asked: Any) -> Plan:
    return search(model, hardware=hardware, **{"mesh": "data:2;model:2", **with_pins(ASKED, None), **asked})


def certificate(model: mtf.Model, plan: Plan, hardware: Hardware, limit: float, **asked: Any) -> Certificate:
    return Certificate(
        tuple(certify(model, plan, hardware, limit, ASKED, **asked)), ASKED, considered_by(plan)
    )


def test_with_room_the_bound_is_enough(model: mtf.Model, hardware: Hardware) -> None:
    plan = found(model, hardware)
    proof = certificate(model, plan, hardware, ROOM)
    assert proof.verified
    how = [p.how for p in proof.problems]
    # The first bound may miss the plan's own seconds by a rounding; then the second problem has its own.
    assert how in (["bound", *["pieces"] * 3], ["bound", "bound", *["pieces"] * 2])
    count = how.count("bound")
    said = f"{count} by their bound, {4 - count} as pieces of these"
    assert proof.layouts == considered_by(plan) and not proof.other
    assert str(proof) == f"4 problems with {proof.layouts:,} layouts, ruled out without a solver: {said}"


def test_where_memory_binds_what_is_faster_is_listed(model: mtf.Model, hardware: Hardware) -> None:
    roomy = found(model, hardware)
    limit = 0.9 * roomy.predicted.peak_memory_bytes
    plan = found(model, hardware, memory=limit)
    assert plan.predicted.step_seconds > roomy.predicted.step_seconds
    proof = certificate(model, plan, hardware, limit)
    assert proof.verified
    assert proof.problems[0].how == "listed" and proof.problems[0].listed > 0


def test_a_plan_that_is_not_the_best_is_refuted(model: mtf.Model, hardware: Hardware) -> None:
    worse = found(model, hardware, pins="batch:data+model")
    proof = certificate(model, worse, hardware, ROOM)
    assert not proof.verified
    assert str(proof).startswith("wrong: ") and str(proof).endswith(" is faster and fits")


def test_every_shape_that_was_searched_is_ruled_out(model: mtf.Model, hardware: Hardware) -> None:
    plan = found(model, hardware, mesh=None, devices=4)
    proof = certificate(model, plan, hardware, ROOM, devices=4)
    assert proof.verified
    assert len({p.mesh for p in proof.problems}) == 2
