"""Proofs are checked without a solver, and wrong ones are found out."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from layoutopt.analysis.certificate import certify, considered_by, proof_of, rule_out
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.subproblems import Subproblem, subproblems
from layoutopt.plan.build import Plan
from layoutopt.plan.details import Proof
from layoutopt.space.decisions import KINDS, SearchSpace
from layoutopt.space.diloco import Rarely
from layoutopt.space.kind import Decision
from layoutopt.space.microbatches import USUAL
from layoutopt.space.offload import Weights
from layoutopt.space.recompute import Recompute
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.splits import Split
from layoutopt.space.stages import StageSplit
from layoutopt.space.storage import Storage
from tests.layoutopt.every_kind import APART, Whole, alone, forgotten, opened, question_of, whole_model
from tests.layoutopt.models import EXAMPLES
from tests.marks import by_day
from tests.searching import search

ASKED = SearchSpace(storage=("layout", "zero1"), recompute=(False,), microbatches=USUAL)
ROOM = 1e12


@pytest.fixture(scope="module")
def model() -> mtf.Model:
    return EXAMPLES["mlp"]()


@pytest.fixture(scope="module")
def hardware() -> Hardware:
    return load_hardware("tpu-v3")


def found(model: mtf.Model, hardware: Hardware, **asked: Any) -> Plan:
    return search(model, hardware=hardware, **{"mesh": "data:2;model:2", "space": ASKED, **asked})


def certificate(model: mtf.Model, plan: Plan, hardware: Hardware, limit: float, **asked: Any) -> Proof:
    return proof_of(tuple(certify(model, plan, hardware, limit, ASKED, **asked)), ASKED, considered_by(plan))


def test_with_room_the_bound_is_enough(model: mtf.Model, hardware: Hardware) -> None:
    plan = found(model, hardware)
    proof = certificate(model, plan, hardware, ROOM)
    assert proof.verified
    how = [p.how for p in proof.problems]
    # The first bound may miss the plan's own seconds by a rounding; then the second problem has its own.
    assert how in (["bound", *["pieces"] * 3], ["bound", "bound", *["pieces"] * 2])
    count = how.count("bound")
    said = f"{count} by their own bound, {4 - count} by the bound of fewer microbatches"
    assert proof.layouts == considered_by(plan) and "another search space" not in proof.words
    assert proof.words == f"4 problems with {proof.layouts:,} layouts, ruled out without a solver: {said}"


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
    assert proof.words.startswith("refuted, because ") and proof.words.endswith(" is faster and fits")


def test_every_shape_that_was_searched_is_ruled_out(model: mtf.Model, hardware: Hardware) -> None:
    plan = found(model, hardware, mesh=None, devices=4)
    proof = certificate(model, plan, hardware, ROOM, devices=4)
    assert proof.verified
    assert len({p.mesh for p in proof.problems}) == 2


# -- every kind of decision, against enumeration --


def check_whole(question: Whole, seed: int, forgets: type[Decision] | None = None) -> Counter[str]:
    """A certificate about every kind, within a limit that mostly binds: it rules out all that is faster than
    the best of all layouts, and not all that is faster than the next best.

    Args:
      forgets: a kind of which it knows the plain option alone: a planted fault.
    """
    rng = random.Random(seed)
    known = [(each.cost.step_seconds, each.memory.peak) for each in question.evaluated()]
    if not known:
        return Counter()
    peaks = sorted({peak for _, peak in known})
    limit = rng.choice([math.inf, *peaks[: 1 + len(peaks) // 2]])
    best, *others = sorted({seconds for seconds, peak in known if peak <= limit})
    problems = forgotten(question.problems, forgets)
    where = f"{question.model.name}: {question.mesh}, {question.hardware.name}, {limit} bytes"

    def certified(claimed: float) -> Proof:
        return proof_of(tuple(rule_out(question.evaluator, problems, claimed, limit)), question.allowed)

    true = certified(best)
    assert not true.refuted, f"{where}: {true.words}, but enumeration finds {best}"
    claimed = next((seconds for seconds in others if seconds > best * (1 + 1e-6)), None)
    if claimed is not None:
        assert not certified(claimed).verified, f"{where}: {claimed} is verified, and {best} is possible"
    return Counter(models=1, verified=true.verified, refuted=claimed is not None)


@pytest.mark.parametrize("seed", by_day([5, 2]))
def test_a_certificate_agrees_with_enumeration(seed: int) -> None:
    assert check_whole(question_of(seed), seed)["models"]


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(100, 200, 20))
def test_many_certificates_agree_with_enumeration(first: int) -> None:
    found = sum((check_whole(question_of(seed), seed) for seed in range(first, first + 20)), Counter[str]())
    assert found["verified"] > 5 and found["refuted"] > 5


FINDS: dict[type[Decision], tuple[Callable[[int], Whole | None], int]] = {
    Split: (partial(alone, Split), 0),
    Storage: (partial(alone, Storage), 0),
    Weights: (partial(alone, Weights), 0),
    Recompute: (partial(alone, Recompute), 0),
    StageSplit: (partial(question_of, most=16), 8),
    ScheduleDecision: (partial(question_of, most=16), 8),
    Rarely: (partial(question_of, most=16), 5),
}
"""Questions in which what a certificate that forgets a kind rules out is not all that is faster."""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", by_day(FINDS, every=4))
def test_a_certificate_that_forgets_a_kind_disagrees_with_enumeration(kind: type[Decision]) -> None:
    asks, seed = FINDS[kind]
    question = asks(seed)
    assert question is not None and check_whole(question, seed)["refuted"]
    with pytest.raises(AssertionError, match=r"is (verified, and|faster and fits)"):
        check_whole(question, seed, kind)


@pytest.fixture(scope="module")
def opened_space() -> Callable[[type[Decision] | None], Proof]:
    """Certificates of one model with every kind free, with all kinds or without one. What one certificate
    lowers the next one knows."""
    model, mesh, machine = whole_model(3), mtf.Mesh("x:2"), load_hardware("tpu-v4")
    evaluator, allowed = Evaluator(model, machine), opened(random.Random(1), model)
    every = (p for p in subproblems(model, [mesh], allowed, evaluator.near) if not p.refused)
    problems = [Subproblem.of(mesh, each.decided) for each in every]
    considered = sum(each.layouts for each in problems)

    def certificate(without: type[Decision] | None) -> Proof:
        of = problems if without is None else forgotten(problems, without)
        return proof_of(tuple(rule_out(evaluator, of, 1e-12, math.inf)), allowed, considered)

    assert certificate(None).verified
    return certificate


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.nightly
def test_a_certificate_that_forgets_a_kind_is_of_another_space(
    opened_space: Callable[[type[Decision] | None], Proof], kind: type[Decision]
) -> None:
    """It has fewer layouts than the plan says; `FINDS` has a kind of which nothing is left to choose."""
    found = opened_space(kind)
    assert kind in {*APART} & FINDS.keys() or (
        not found.verified and "for another search space" in str(found)
    )
