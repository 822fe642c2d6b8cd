"""The bounds of a subproblem: what holds for which limit of memory, and what of it is proven at all."""

from __future__ import annotations

import math
import random

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.analysis.certificate import rule_out
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import EXACT, Bound, BoundSource, ProvenBounds, State
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from tests.layoutopt.models import EXAMPLES


def test_a_bound_holds_for_every_smaller_limit() -> None:
    """Against all that was proven, in any order: the highest of those within at least as many bytes."""
    rng = random.Random(0)
    for _ in range(50):
        bounds, proven = ProvenBounds(), [Bound()]
        for _ in range(rng.randint(1, 12)):
            one = Bound(
                float(rng.randint(1, 9)), rng.choice([*BoundSource]), rng.choice([1.0, 2.0, 3.0, math.inf])
            )
            proven.append(one)
            bounds.prove(one.value, one.source, one.within)
        for limit in (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, math.inf):
            assert bounds.lower(limit).value == max(b.value for b in proven if b.within >= limit)
            assert bounds.lower(limit) in proven
        for one in bounds.proven:  # none follows from another
            others = (b for b in bounds.proven if b is not one)
            assert not any(b.value >= one.value and b.within >= one.within for b in others)


def test_no_layout_is_within_less_than_the_least_bytes() -> None:
    bounds = ProvenBounds()
    bounds.prove(2.0, BoundSource.TABLES)
    bounds.hold_at_least(100.0)
    bounds.hold_at_least(50.0)
    assert bounds.lower(100.0).value == 2.0
    assert bounds.lower(99.0).value == math.inf
    assert bounds.state(math.inf, 99.0) is State.PRUNED


@pytest.mark.parametrize(
    ("seconds", "limit", "state"),
    [(3.0, 10.0, State.OPEN), (2.0, 10.0, State.PRUNED), (2.0 * (1 + 3 * EXACT), 10.0, State.OPEN)],
)
def test_what_may_be_better_is_open(seconds: float, limit: float, state: State) -> None:
    bounds = ProvenBounds()
    bounds.prove(2.0, BoundSource.SOLVER, within=10.0)
    assert bounds.state(seconds, limit) is state
    assert bounds.state(seconds, 11.0) is State.OPEN


def test_dimensions_that_stayed_whole_rule_nothing_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A certificate says nothing of layouts that its tables have not."""
    evaluator = Evaluator(EXAMPLES["mlp"](), load_hardware("tpu-v4"))
    space = SearchSpace(microbatches=(1,), storage=("layout",), recompute=(False,))

    def verified() -> set[str]:
        problems = subproblems(evaluator.model, [mtf.Mesh("a:2;b:2")], space)
        return {ruled.how for ruled in rule_out(evaluator, problems, 1e-9, math.inf)}

    assert verified() == {BoundSource.TABLES}
    monkeypatch.setattr("layoutopt.formulation.extract.MOST_LOWERED", 1)
    assert verified() == {BoundSource.NOTHING}
