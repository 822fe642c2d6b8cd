"""A plan in the user's own JAX program: the same numbers, and every decision applied or refused by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from typer.testing import CliRunner

import layoutopt
import mesh_tf_core as mtf
from layoutopt.cli import app
from layoutopt.models.loading import load_model
from layoutopt.plan.build import Plan
from tests.importers.jax_models import MODELS, imported, perceptron_arguments, recurrence
from tests.importers.jax_plans import plan_of
from tests.jax_process import printed
from tests.searching import search


@pytest.fixture(scope="module")
def runs() -> Any:
    return printed("tests.importers.jax_plans")


def check(runs: Any) -> None:
    assert {name: by for name, by in runs["applied"].items() if not by <= 1e-5} == {}
    for name, found in runs["trained"].items():
        assert found["moved"] > 1e-3, name
        assert max(found["parameters"], found["state"], found["loss"]) <= 1e-5, (name, found)


@pytest.mark.nightly
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
    further = runs["further"]
    assert max(found["parameters"] for found in further.values()) <= 1e-6
    moved = {name: {x for x in found["moved"] if "gather" in x} for name, found in further.items()}
    assert moved == {
        "tensor": set(),
        "sequence": {"all_gather 4"},
        "zero3": {"all_gather 8"},
        "hybrid": {"all_gather 4"},
    }
    assert further["tensor"]["saves the whole length"] and not further["sequence"]["saves the whole length"]


def test_arrays_lie_as_the_plan_stores_them(runs: Any) -> None:
    placed = {name: found["placed"] for name, found in runs["trained"].items()}
    split = [None, None, "model"]
    assert placed["tensor parallel"] == {"embedding": [None, "model"], "down": split, "trace": split}
    assert placed["stage 2 in parts"]["down"] == [None, None, None]
    assert placed["stage 2 in parts"]["trace"] == [None, "data", None]


def test_loops_run_again_only_where_the_plan_says_so(runs: Any) -> None:
    assert [name for name, found in runs["trained"].items() if found["checkpoints"]] == ["stage 2 in parts"]


def test_a_step_with_a_state_of_its_own_is_compiled_once(runs: Any) -> None:
    found = runs["stateful"]
    assert found["compiled"] == 1
    assert max(found["parameters"], found["state"]) <= 1e-5
    assert found["placed"] == ["P('model',)", "P('model',)"]


def test_every_array_that_stays_is_stored_split_and_gathered_layer_by_layer(runs: Any) -> None:
    found = runs["kept"]
    assert found["numbers"] <= 1e-6 < 1e-2 < found["moved"]
    assert {*found["held"].values()} == {4} and len(found["held"]) == 5
    assert found["gathers"] >= 5 and not found["gathered stacks"]


def test_a_pair_whose_auxiliary_has_no_arrays_is_given_back(runs: Any) -> None:
    assert {name: by for name, by in runs["pairs"].items() if not by <= 1e-6} == {}


# -- refusals ------------------------------------------------------------------------------------------------


@pytest.mark.nightly
def test_no_search_splits_what_shardings_cannot() -> None:
    model, _ = imported("scanned transformer")
    plan = search(model, mesh="data:2;model:2", hardware="tpu-v3")
    assert "heads" not in plan.data.layout
    with pytest.raises(
        mtf.UserError, match=r"pins heads:model: 'heads' is an inner part of axis 2 of 'blocks/\w+'"
    ):
        search(model, mesh="data:2;model:2", hardware="tpu-v3", pins="heads:model")


def test_what_no_function_can_do_is_refused_by_name() -> None:
    model, (params, _) = imported("scanned transformer")
    plan = plan_of(model, "model:1", "heads:model")
    with pytest.raises(
        mtf.UserError, match="the plan splits 'heads' over model, but 'heads' is only an inner part of axis"
    ):
        plan.jax.shardings(params)


def test_another_function_is_no_part_of_the_plan() -> None:
    model, given = imported("recurrence")
    applied = plan_of(model, "data:1", "").jax.apply(lambda p, b: recurrence(p, b) * jnp.ones(3).sum())
    with pytest.raises(mtf.UserError, match="not the one that from_jax imported"):
        applied(*given)


def test_arguments_are_the_models_own() -> None:
    params, _ = perceptron_arguments()
    model, _ = imported("perceptron")
    jax_plan = plan_of(model, "data:1", "").jax
    with pytest.raises(mtf.UserError, match="no parameter 'layers/0/kernel'"):
        jax_plan.shardings({"layers": [{"kernel": params["layers"][0]["w"]}]})


def test_devices_and_models_that_are_missing() -> None:
    model, _ = imported("perceptron")
    with pytest.raises(mtf.UserError, match="has 64 devices, but JAX finds"):
        _ = plan_of(model, "data:64", "").jax
    plan = plan_of(model, "data:1", "")
    with pytest.raises(mtf.UserError, match=r"load_plan\(path\).of\(model\)"):
        _ = Plan(plan.data).jax
    with pytest.raises(mtf.UserError, match="made for another model"):
        plan.of(imported("recurrence")[0])


# -- what forward saves for backward -------------------------------------------------------------------------


def saved(function: Any, given: Any) -> list[int]:
    """How many stacks each loop of a gradient makes: its results, and what it saves for backward."""
    found: list[int] = []

    def look(jaxpr: Any) -> None:
        for e in jaxpr.eqns:
            if e.primitive.name == "scan":
                inside = e.params["jaxpr"].jaxpr.outvars
                found.append(sum(y.aval.ndim > v.aval.ndim for y, v in zip(e.outvars, inside, strict=True)))
            for inner in (e.params.get("jaxpr"), e.params.get("call_jaxpr")):
                if inner is not None:
                    look(getattr(inner, "jaxpr", inner))

    look(jax.make_jaxpr(jax.value_and_grad(function))(*given).jaxpr)
    return found


def test_constraints_save_nothing_more_for_backward() -> None:
    model, given = imported("scanned transformer")
    applied = model.under(mtf.Mesh("data:1"), mtf.Layout("batch:data"), mtf.Options()).apply()
    assert saved(applied, given) == saved(model.origin.loss, given)


def test_what_was_gathered_is_gathered_again_for_backward() -> None:
    model, given = imported("scanned transformer")
    abstract = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    stages = {name: 3 for name, v in model.graph.variables.items() if v.trainable}
    under = model.under(mtf.Mesh("data:2"), mtf.Layout("batch:data"), mtf.Options(stages), abstract)
    split = len(under.placing.split_stored)
    assert split > 0

    def gathers(function: Any) -> int:
        text = str(jax.make_jaxpr(function)(*given))
        return len(re.findall(r"spec=P\((?:None,? ?){1,2}\)", text))

    # In forward, of the gradients, and in backward again.
    assert gathers(under.apply()) == split and gathers(jax.grad(under.apply())) >= 3 * split


# -- microbatches --------------------------------------------------------------------------------------------


def penalised(params: Any, batch: Any) -> Any:
    return jnp.square(batch["x"] @ params["w"]).mean() + 0.01 * jnp.square(params["w"]).sum()


def masked(params: Any, batch: Any) -> Any:
    return (jnp.square(batch["x"] @ params["w"]).sum(-1) * batch["m"]).sum() / batch["m"].sum()


def largest(params: Any, batch: Any) -> Any:
    h = jnp.square(batch["x"] @ params["w"])
    return h.mean(), {"value": h.mean(), "largest": h.max()}


@pytest.mark.parametrize(
    "loss, why",
    [
        (
            penalised,
            r"which every microbatch would add again \(.*test_jax_plans.py\(\d+\)\)",
        ),
        (masked, r"is not a sum over the examples of the batch \(see .* in test_jax_plans.py\(\d+\)"),
        (largest, r"the auxiliary value '1/largest' is not a sum over .* in test_jax_plans.py\(\d+\)"),
    ],
)
def test_no_search_finds_microbatches_that_the_function_cannot_have(loss: Any, why: str) -> None:
    of = jax.ShapeDtypeStruct
    batch = {"x": of((8, 4), "float32"), "m": of((8,), "float32")}
    model = layoutopt.from_jax(loss, {"w": of((4, 4), "float32")}, batch, optimizer="sgd")
    with pytest.raises(mtf.UserError, match=f"^microbatches=2: .*{why}.*; use one microbatch$"):
        model.training_step(2)
    plan = search(model, mesh="data:2", hardware="tpu-v3", memory=1e9)
    assert plan.options.microbatches == 1


def test_a_mesh_over_slices_lies_as_the_plan_was_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    from mesh_tf_core.engines.jax import compat
    from tests.engines.test_placing import machine, spans

    model, _ = imported("perceptron")
    monkeypatch.setattr(jax, "devices", lambda: machine(2, 4))
    monkeypatch.setattr(compat, "device_mesh", lambda mesh, found: spans(mesh, found))
    plan = plan_of(model, "data:2;model:4", "batch:data", slices={"model": 2})
    assert plan.jax.mesh == {"data": 1, "model": 2}
    assert plan_of(model, "data:2;model:4", "batch:data").jax.mesh == {"data": 2, "model": 1}


def test_an_export_has_the_arrays_of_the_users_program(tmp_path: Path) -> None:
    """Of layers that became one variable, each of its own, and what optax remembers of it."""
    path = tmp_path / "train.py"
    path.write_text(
        "import jax, layoutopt\n"
        "from tests.importers.test_reroll import batch, blocks, unrolled\n"
        "def model():\n"
        "    return layoutopt.from_jax(unrolled, {'blocks': blocks()}, batch())\n"
    )
    model = load_model(str(path)).model
    plan = plan_of(model, "data:2", "batch:data", stage="zero1", hardware="cpu-local")
    plan = plan.with_details(variables=(), inputs=(), applies=True)
    plan.save(tmp_path / "plan.json")
    done = CliRunner().invoke(app, ["export", f"{tmp_path}/plan.json", "--model", str(path), "--to", "jax"])
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = {}
    exec(done.stdout, found)
    P = jax.sharding.PartitionSpec
    assert found["PARAMETERS"]["blocks/1/up"] == P(None, None)
    assert found["OPTIMIZER"]["blocks/1/up"] == P("data", None)
    assert found["INPUTS"]["x"][0] == "data" and "VARIABLES" not in found
    done = CliRunner().invoke(app, ["export", f"{tmp_path}/plan.json", "--to", "jax"])
    assert done.exit_code == 2 and "name the model with --model MODEL" in done.stderr
