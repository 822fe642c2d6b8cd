"""A plan in the user's own JAX program: the same numbers, and every decision applied or refused by name."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import pytest

import layoutopt
import mesh_tf_core as mtf
from layoutopt.plan.build import Plan
from tests.importers.jax_models import MODELS, imported, perceptron_arguments, recurrence
from tests.importers.jax_plans import plan_of
from tests.jax_process import printed


@pytest.fixture(scope="module")
def runs() -> Any:
    return printed("tests.importers.jax_plans")


def check(runs: Any) -> None:
    assert {name: by for name, by in runs["applied"].items() if not by <= 1e-5} == {}
    for name, found in runs["trained"].items():
        assert found["moved"] > 1e-3, name
        assert max(found["parameters"], found["state"], found["loss"]) <= 1e-5, (name, found)


def test_numbers_are_those_of_the_program_without_a_plan(runs: Any) -> None:
    check(runs)


@pytest.mark.nightly
def test_numbers_of_all_models_and_stages() -> None:
    runs = printed("tests.importers.jax_plans", "all")
    assert set(runs["applied"]) == set(MODELS)
    check(runs)
    placed = runs["trained"]["stage 3"]["placed"]
    assert placed["embedding"] == [["model", "data"], None]
    assert placed["down"] == placed["trace"] == [None, ["data", "model"], None]


def test_arrays_lie_as_the_plan_stores_them(runs: Any) -> None:
    placed = {name: found["placed"] for name, found in runs["trained"].items()}
    split = [None, None, "model"]
    assert placed["tensor parallel"] == {"embedding": [None, "model"], "down": split, "trace": split}
    assert placed["stage 2 in parts"]["down"] == [None, None, None]
    assert placed["stage 2 in parts"]["trace"] == [None, "data", None]


def test_loops_run_again_only_where_the_plan_says_so(runs: Any) -> None:
    assert [name for name, found in runs["trained"].items() if found["checkpoints"]] == ["stage 2 in parts"]


# -- refusals ------------------------------------------------------------------------------------------------


def test_no_search_splits_what_shardings_cannot() -> None:
    model, _ = imported("scanned transformer")
    plan = layoutopt.search(model, mesh="data:2;model:2", hardware="tpu-v3")
    assert "heads" not in plan.data.layout
    with pytest.raises(
        mtf.UserError, match=r"--pin heads:model: 'heads' is an inner part of axis 2 of 'blocks/\w+'"
    ):
        layoutopt.search(model, mesh="data:2;model:2", hardware="tpu-v3", pins="heads:model")


def test_what_no_function_can_do_is_refused_by_name() -> None:
    model, (params, _) = imported("scanned transformer")
    plan = plan_of(model, "model:1", "heads:model")
    with pytest.raises(mtf.UserError, match="the plan splits 'heads' over model, an inner part of axis"):
        plan.jax.shardings(params)


def test_another_function_is_no_part_of_the_plan() -> None:
    model, given = imported("recurrence")
    applied = plan_of(model, "data:1", "").jax.apply(lambda p, b: recurrence(p, b) * jnp.ones(3).sum())
    with pytest.raises(mtf.UserError, match="not the one that was imported"):
        applied(*given)


def test_arguments_are_the_models_own() -> None:
    params, _ = perceptron_arguments()
    model, _ = imported("perceptron")
    jax_plan = plan_of(model, "data:1", "").jax
    with pytest.raises(mtf.UserError, match="no parameter 'layers/0/kernel'"):
        jax_plan.shardings({"layers": [{"kernel": params["layers"][0]["w"]}]})


def test_devices_and_models_that_are_missing() -> None:
    model, _ = imported("perceptron")
    with pytest.raises(mtf.UserError, match="has 64 devices, JAX finds"):
        _ = plan_of(model, "data:64", "").jax
    plan = plan_of(model, "data:1", "")
    with pytest.raises(mtf.UserError, match=r"load_plan\(path\).of\(model\)"):
        _ = Plan(plan.data).jax
    with pytest.raises(mtf.UserError, match="made for another model"):
        plan.of(imported("recurrence")[0])
