"""Every kind of decision: its options, what they mean, how they are read back and told."""

from __future__ import annotations

import random

import pytest

import mesh_tf_core as mtf
from layoutopt import search
from layoutopt.plan.build import decided as decided_of
from layoutopt.plan.build import options_of
from layoutopt.plan.decided import ELSEWHERE
from layoutopt.space.decisions import ANYTHING, KINDS, SearchSpace, decisions
from layoutopt.space.kind import Decision
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.recompute import Recompute
from layoutopt.space.splits import Split, domains
from layoutopt.space.storage import Storage
from mesh_tf_core.ir import layout
from mesh_tf_core.lower.remat_policy import Recomputed
from tests.layoutopt.every_kind import question_of
from tests.layoutopt.models import EXAMPLES, some_choices

MESH = mtf.Mesh("x:2;y:2")


def test_plans_call_rules_for_elsewhere_as_layouts_do() -> None:
    """Schemas of plans import nothing of layouts."""
    assert ELSEWHERE == layout.ELSEWHERE


def test_what_is_chosen_is_read_back() -> None:
    """Of every kind: choices, their layout and options, and these in a plan's fields say the same."""
    seen = set[type[Decision]]()
    for seed in range(6):
        question, rng = question_of(seed), random.Random(seed)
        seen |= question.free
        for decided in (each.decided for each in question.problems):
            assert {n for kind in KINDS for n in decided.of(kind)} == set(decided.options)
            for _ in range(5):
                chosen = some_choices(decided, rng)
                layout, options = decided.read(chosen)
                assert decided.write(layout, options) == chosen
                assert options_of(decided_of(options, layout)) == options
    assert seen == {*KINDS}


def test_names_and_words_are_those_of_plans() -> None:
    decided = decisions(
        EXAMPLES["transformer"]().training_step(4).graph, MESH, SearchSpace(microbatches=(4,))
    )
    assert "batch" in decided.of(Split)
    assert "storage of layers d_model d_ff" in decided.of(Storage)
    assert decided.of(Recompute) == ("recompute layers",)
    assert decided.of(Microbatches) == ("number of microbatches",)
    assert decided.microbatches == 4
    lean = decided.least_memory
    assert set(lean.storage.values()) == {3} and lean.microbatches == 4
    assert lean.recompute == {Recomputed("layers")}
    assert (
        decided_of(lean, mtf.Layout()).in_short()
        == f"zero3 ×{len(lean.storage)}; recompute layers; 4 microbatches"
    )
    assert options_of(decided_of(lean, mtf.Layout())) == lean
    assert decided_of(mtf.Options(), mtf.Layout()).in_short() == "" and not any(
        decided_of(mtf.Options(), mtf.Layout()).listed().values()
    )


def test_the_leanest_options_are_among_those_allowed() -> None:
    graph = EXAMPLES["transformer"]().training_step().graph
    lean = decisions(
        graph, MESH, SearchSpace(storage=("zero2", "layout"), recompute=(False,), microbatches=(1,))
    ).least_memory
    assert set(lean.storage.values()) == {2} and not lean.recompute


def test_fewer_options() -> None:
    decided = decisions(EXAMPLES["mlp"]().training_step().graph, MESH)
    fewer = decided.within({"batch": [("x",)]})
    assert fewer.fixed["batch"] == ("x",) and "batch" not in fewer.free and "batch" in decided.free
    assert fewer.read({})[0] == mtf.Layout("batch:x")


def test_axes_are_in_the_order_of_the_mesh_unless_all_orders_are_asked_for() -> None:
    graph = EXAMPLES["mlp"]().graph
    assert domains(graph, MESH, ANYTHING)["batch"] == ((), ("x",), ("y",), ("x", "y"))
    every = domains(graph, MESH, SearchSpace(orders="all", microbatches=(1,)))["batch"]
    assert every == ((), ("x",), ("y",), ("x", "y"), ("y", "x"))
    with pytest.raises(mtf.UserError, match="orders 'some': choose one of mesh, all"):
        search(EXAMPLES["mlp"](), mesh="x:2", orders="some")


def test_a_pin_may_have_any_order() -> None:
    found = search(
        EXAMPLES["mlp"](), mesh=MESH, hardware="tpu-v3", pins="batch:y+x", microbatches=(1,), top=3
    )
    assert found.layout.axes("batch") == ("y", "x")
    others = [a for a in found.alternatives if a.name.startswith("number ")]
    assert len(others) == 2 and all(a.layout["batch"] == ["y", "x"] for a in others)
    layouts = [str((a.layout, a.storage, a.recompute)) for a in others]
    assert len(set(layouts)) == len(layouts)
