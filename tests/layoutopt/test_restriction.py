"""Restrictions: the best restricted layout of all, priced one by one, is the search's answer."""

from __future__ import annotations

import math
import random
from collections import Counter

import pytest

import mesh_tf_core as mtf
from layoutopt.space.decisions import KINDS, SearchSpace, decisions
from layoutopt.space.kind import ALL, CLASS, VARIABLE, Decision
from layoutopt.space.restriction import Restriction, Role, Together
from layoutopt.space.storage import Storage
from tests.layoutopt.every_kind import APART, OF_PROBLEMS, RARE, Whole, some_restriction, whole_question
from tests.layoutopt.models import EXAMPLES
from tests.layoutopt.test_every_kind import checked
from tests.marks import by_day
from tests.searching import search


def restricted(seed: int, most: int = 24) -> Whole:
    """A random question of every kind under random relations and granularity."""
    return whole_question(
        seed, most, seed % RARE == RARE - 1, restriction=some_restriction(random.Random(seed))
    )


@pytest.mark.parametrize("seed", by_day(range(12), every=4, first=1))
@pytest.mark.one_in(3)
def test_an_answer_is_the_best_of_all_restricted_layouts(seed: int) -> None:
    checked(restricted(seed), seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(2000, 2400, 50))
def test_answers_under_many_restrictions_are_the_best(first: int) -> None:
    found = sum((checked(restricted(seed), seed) for seed in range(first, first + 50)), Counter[str]())
    assert found["optimal"] > 10 and found["binding"] and found["infeasible"]


@pytest.mark.nightly
def test_every_kind_is_restricted_in_some_question() -> None:
    """Relations are over decisions of each kind that has any in a subproblem."""
    found, every = set[type[Decision]](), {*KINDS} - {*OF_PROBLEMS, *APART}
    for seed in range(14):
        if found == every:
            break
        for each in restricted(seed, 4000).problems:
            found |= {type(each.decided.named[name]) for c in each.decided.couplings for name in c.names}
    assert found == every


GRANULAR = [kind for kind in KINDS if kind.granular]


@pytest.mark.parametrize("kind", GRANULAR)
def test_a_coarser_granularity_is_a_smaller_program(kind: type[Decision]) -> None:
    """All alike is one decision, or one choice for several loops; the program does not grow by it."""
    model, mesh = EXAMPLES["transformer"](), mtf.Mesh("x:2;y:2")
    counts = []
    for granularity in (ALL, CLASS, VARIABLE):
        said = Restriction(granularity={kind.granular: granularity})
        space = SearchSpace(microbatches=(1,), offload=("optimizer", "weights"), restriction=said)
        decided = decisions(model.training_step().graph, mesh, space)
        options = [decided.options[name] for name in decided.of(kind)]
        rows = [len(each.rows) for each in decided.couplings]
        counts.append(math.prod(rows) if rows else math.prod(map(len, options)))
    assert counts == sorted(counts)
    assert counts[0] < counts[1] or len(decided.of(kind)) < 2


def test_one_storage_for_all_variables() -> None:
    """The decision stores each variable as the option says, and reads back what differs as no option."""
    model, mesh = EXAMPLES["transformer"](), mtf.Mesh("x:4")
    graph = model.training_step().graph
    space = SearchSpace(microbatches=(1,), restriction=Restriction(granularity={"storage": ALL}))
    decided = decisions(graph, mesh, space)
    (name,) = decided.of(Storage)
    stored = {v.name for v in graph.variables.values() if v.own_storage and v.trainable}
    for choice in decided.options[name]:
        layout, options = decided.read({name: choice})
        assert {n: s for n, s in options.storage.items() if s} == (
            dict.fromkeys(stored, int(choice[0][-1])) if choice else {}
        )
        assert decided.write(layout, options)[name] == choice
        mixed = mtf.Options(storage={min(stored): 3 - int((choice or "0")[0][-1])})
        assert not decided.allows(layout, mixed)


@pytest.mark.parametrize("name", by_day(["mlp", "transformer"]))
def test_splits_of_weights_are_over_one_axis(name: str) -> None:
    """A plan has one choice of axes for all dimensions of weights that can have it."""
    model = EXAMPLES[name]()
    together = Restriction("one axis", relations=(Together((Role.INNER, Role.OUTER)),))
    plan = search(model, mesh="x:2;y:2", hardware="tpu-v3", restriction=together)
    dims = together.of(model).about.names(Role.INNER, Role.OUTER)
    assert len({plan.layout.axes(dim) for dim in dims} - {()}) <= 1
    assert (
        plan.predicted.step_seconds >= search(model, mesh="x:2;y:2", hardware="tpu-v3").predicted.step_seconds
    )
    for each in plan.alternatives:  # named layouts are under the same restriction
        assert len({tuple(each.layout.get(dim, ())) for dim in dims} - {()}) <= 1


def test_what_a_restriction_cannot_say_is_refused() -> None:
    model, said = (
        EXAMPLES["mlp"](),
        Restriction("mine", says={"storage": ("layout", "zero3"), "microbatches": None}),
    )
    for asked in ({"storage": "zero1"}, {"offload": "optimizer"}, {"recompute": "selective"}):
        (name,) = asked
        with pytest.raises(mtf.UserError, match=f"{name}.*: mine cannot express this"):
            search(model, mesh="x:2", restriction=said, **asked)
    plan = search(model, mesh="x:2", hardware="tpu-v3", restriction=said, allow="everything")
    assert not plan.data.offload and {*plan.data.storage.values()} <= {"zero3"}
