"""`layoutopt verify` and `lower --emit stablehlo`: through the real TPU compiler, without a TPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import layoutopt
from examples.moe_lm import model as moe_lm
from layoutopt.analysis.verify import GENERATIONS, collectives, counted, estimated, generation, moved
from layoutopt.models.loading import load_model
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core import Layout, Mesh, UserError

MLP = ("verify", "examples/mlp.py")
SPLIT = ("--mesh", "data:2;model:4", "--layout", "batch:data;hidden:model")


def test_what_is_compiled_is_what_is_predicted(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    text = tmp_path / "step.hlo"
    found = result(*MLP, "--topology", "v5e:2x4", *SPLIT, "--text", str(text))
    assert found["topology"] == "v5e:2x4" and found["compiled"] is True and found["out_of_memory"] is False
    assert found["mesh"] == {"data": 2, "model": 4} and found["reason"] is None
    assert {c["group_size"] for c in found["collectives"]} == {2, 4}
    assert {c["kind"] for c in found["collectives"]} == {"all_reduce"}
    assert found["same_collectives"] is True
    for m in found["moved"]:
        assert m["bytes"]["compiler"] == m["bytes"]["predicted"] > 0
        assert 0 < m["count"]["compiler"] <= m["count"]["predicted"]
    for name in ("peak_memory_bytes", "compute_seconds"):
        assert found[name].keys() == {"compiler", "predicted"}
        assert all(value > 0 for value in found[name].values())
    assert found["unknown_loops"] == 0
    assert text.read_text().startswith("HloModule")


def test_people_read_a_table(run: Callable[..., Result]) -> None:
    done = run(*MLP, "--topology", "v6e:2x2", "--mesh", "data:4", "--layout", "batch:data", "-q")
    assert done.exit_code == 0
    assert "all as predicted" in done.stdout
    assert "all-reduce, reduce-scatter" in done.stdout
    assert done.stderr == ""


def test_a_time_limit_ends_the_compiler_with_the_prediction(run: Callable[..., Result]) -> None:
    on = ("--topology", "v6e:2x2", "--mesh", "data:4", "--layout", "batch:data", "--time-limit", "0.001")
    done = run(*MLP, *on, "--json")
    found = json.loads(done.stdout)
    assert done.exit_code == 4 and found["compiled"] is False and found["out_of_memory"] is False
    assert "the time limit of 0.001 s passed" in found["reason"] and found["reason"] in done.stderr
    assert found["predicted_collectives"] and found["peak_memory_bytes"]["predicted"] > 0


def test_the_stages_of_a_compilation_are_told() -> None:
    told: list[str] = []
    priced = layoutopt.cost(load_model("examples/mlp.py").model, "data:4", "batch:data", "tpu-v6e")
    assert layoutopt.verify(priced, "v6e:2x2", on_progress=told.append).compiled is not None
    assert told[:2] == ["tracing the step", "compiling the step"]


def test_a_plan_says_everything(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    plan = str(tmp_path / "plan.json")
    searched = result(
        *("search", "examples/mlp.py", "--mesh", "data:2;model:4", "--hardware", "tpu-v5e"),
        *("--microbatches", "1", "--storage", "layout", "--out", plan),
    )
    found = result("verify", plan, "--topology", "v5e:2x4")
    assert found["compiled"] is True
    assert found["layout"] == searched["layout"] and found["mesh"] == searched["mesh"]
    assert found["peak_memory_bytes"]["predicted"] == searched["predicted"]["peak_memory_bytes"]


def test_out_of_memory_is_a_verdict(run: Callable[..., Result]) -> None:
    sizes = ("--set", "batch=4194304", "--set", "hidden=8192")
    done = run(*MLP, "--topology", "v5e:2x2", "--mesh", "data:4", "--layout", "batch:data", *sizes, "--json")
    assert done.exit_code == 3
    *_, last = done.stderr.splitlines()
    said = json.loads(last)
    assert said["exit"] == 3
    assert "does not fit on a device, according to the compiler for v5e:2x2" in said["error"]
    found = json.loads(done.stdout)
    assert found["compiled"] is False and found["out_of_memory"] is True
    assert found["collectives"] == [] and "memory" in found["reason"]
    limit = 16 * 2**30
    assert found["peak_memory_bytes"]["compiler"] > limit < found["peak_memory_bytes"]["predicted"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        (("--topology", "v9:2x2", *SPLIT), r"no TPU generation 'v9'; .*known: tpu7x, v2, v3, v4, v5e"),
        (("--topology", "v5e:2x2", *SPLIT), r"v5e:2x2 has 4 devices, but mesh \[data:2;model:4\] has 8"),
        (("--topology", "v5e:nine", *SPLIT), "write GENERATION:AxB, e.g. v5e:2x4, or GENERATION:AxBxC, e.g."),
        (("--topology", "v5e:2x4"), r"--mesh is missing"),
        (("--topology", "v5e:2x4", *SPLIT, "--model", "x"), r"is not a PLAN.json; remove --model"),
        ((), r"Missing option '--topology'"),
    ],
)
def test_bad_input(refused: Callable[..., str], arguments: tuple[str, ...], why: str) -> None:
    import re

    said = refused(*MLP, *arguments, *(("-q",) if arguments else ()))
    assert re.search(why, said), said


def test_replicas_are_two_programs(refused: Callable[..., str]) -> None:
    said = refused(*MLP, "--topology", "v5e:2x2", "--mesh", "sites:2;data:2", "--diloco", "sites", "-q")
    assert "verify cannot be combined with --diloco sites:" in said and "compiles one program" in said


def test_a_plan_takes_no_layout(refused: Callable[..., str]) -> None:
    assert "remove the options for them, or name a MODEL" in refused(
        "verify", "plan.json", "--topology", "v5e:2x4", "--mesh", "a:8"
    )


def test_every_generation_has_a_preset() -> None:
    from costmodels.hardware import load_hardware

    for name, tpu in GENERATIONS.items():
        clock = load_hardware(tpu.hardware).peak_flops("bfloat16") / tpu.flops_per_cycle
        assert 0.6e9 < clock < 2.5e9, name
    with pytest.raises(UserError, match="no TPU generation 'v5'; did you mean 'v5p'"):
        generation("v5:2x4")


def test_a_difference_is_noticed() -> None:
    """Another layout's collectives are not taken for this one's."""
    from costmodels.hardware import load_hardware

    model, mesh, tpu = load_model("examples/mlp.py").model, Mesh("data:2;model:4"), load_hardware("tpu-v5e")
    one, other = (
        collectives(evaluate(model, mesh, Layout(layout), tpu).program)
        for layout in ("batch:data;hidden:model", "batch:data")
    )
    assert all(m.same for m in moved(one, one))
    assert not all(m.same for m in moved(one, other))
    assert not all(m.same for m in moved(other, one))
    assert counted(one) != counted(other)


def test_stablehlo(run: Callable[..., Result]) -> None:
    done = run("lower", "examples/mlp.py", *SPLIT, "--emit", "stablehlo")
    assert done.exit_code == 0
    assert done.stdout.startswith("module @")
    assert '"stablehlo.all_reduce"' in done.stdout
    assert '<["data"=2, "model"=4]>' in done.stdout


@pytest.mark.parametrize(("d_ff", "grouped"), [(256, True), (96, False)])
def test_products_of_experts_are_left_out_where_a_library_runs_them(d_ff: int, grouped: bool) -> None:
    """Sizes without tiles run as XLA's own products, which the compiler estimates."""
    from costmodels.hardware import load_hardware
    from mesh_tf_core.ops.grouped import GroupedOuter, GroupedProduct

    small = {"layers": 2, "d_model": 128, "heads": 2, "d_kv": 64, "experts": 4, "vocab": 128, "batch": 8}
    model = moe_lm(**small, length=64, d_ff=d_ff, dtype="bfloat16")
    tpu = load_hardware("tpu-v5p")
    cost = evaluate(model, Mesh("data:1"), Layout(""), tpu).cost
    # Attention is no kernel of its own here, so what is left out are products of experts.
    names = {GroupedProduct, GroupedOuter, *GroupedProduct.__subclasses__(), *GroupedOuter.__subclasses__()}
    assert {line.name for line in cost.lines} & {op.__name__.lower() for op in names}
    others = sum(line.times * line.seconds for line in cost.lines if line.kind == "attention")
    left_out = cost.compute_seconds - estimated(cost, tpu, 1)
    assert (left_out > others) == grouped
    assert estimated(cost, tpu, 0) == cost.compute_seconds
