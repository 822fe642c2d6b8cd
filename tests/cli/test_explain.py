"""`explain`: what splits and pins are worth, what binds, where two layouts differ."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

import layoutopt
from costmodels.hardware import preset_content, write_profile
from layoutopt.cli import app
from layoutopt.models.loading import load_model
from layoutopt.plan.build import load_plan
from layoutopt.plan.decided import Decided
from layoutopt.plan.schema import Alternative
from mesh_tf_core.errors import UserError

# Large enough that splitting pays.
LM = "examples/transformer_lm.py"
PLAIN = ("--storage", "layout", "--recompute", "never", "--microbatches", "1")
MLP = ("examples/mlp.py", "--set", "hidden=2048", "--set", "batch=256", "--mesh", "data:2;model:2", *PLAIN)


def searched(path: Path, *more: str) -> dict[str, Any]:
    done = CliRunner().invoke(app, ["search", *MLP, "--out", str(path), "--json", *more])
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    searched(path)
    return path


def test_what_is_said_is_what_searches_find(result: Callable[..., dict[str, Any]], plan_file: Path) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    found = result("explain", str(plan_file), "--pin", "batch:none")
    assert found["agrees"] and found["disagreements"] == []
    assert found["step_seconds"] == pytest.approx(plan["predicted"]["step_seconds"], rel=1e-9)
    assert found["memory"]["binds"] is False
    assert [worth["rule"] for worth in found["splits"]] == [
        f"{name}:{'+'.join(axes)}" for name, axes in plan["layout"].items()
    ]
    assert all(worth["costs_seconds"] >= 0 and worth["proven"] for worth in found["splits"])
    (pin,) = found["pins"]
    again = result("search", *MLP, "--pin", "batch:none")
    assert pin["step_seconds"] == pytest.approx(again["predicted"]["step_seconds"], rel=1e-6)


def test_a_tight_memory_binds(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    fastest = searched(tmp_path / "fast.json")["predicted"]
    less = fastest["peak_memory_bytes"] - 1
    tight = searched(tmp_path / "tight.json", "--memory", str(less))["predicted"]
    assert tight["step_seconds"] > fastest["step_seconds"]
    found = result("explain", str(tmp_path / "tight.json"))["memory"]
    assert (found["limit_bytes"], found["binds"]) == (less, True)
    assert re.match(r"at \S+ in (forward|backward|update): .*layer_\d.* \(.* MiB\), ", found["peak"])
    assert found["step_seconds_without_limit"] == pytest.approx(fastest["step_seconds"], rel=1e-6)


def test_differences_add_up(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], plan_file: Path
) -> None:
    args = ("explain", str(plan_file), "--against", "batch:data+model")
    other = result(*args)["against"]
    own = json.loads(plan_file.read_text(encoding="utf-8"))["predicted"]["step_seconds"]
    saved = sum(d["other_seconds"] - d["plan_seconds"] for d in other["differences"])
    assert saved == pytest.approx(other["step_seconds"] - own, rel=1e-9, abs=1e-15)
    shown = run(*args).stdout
    assert "What each split is worth" in shown and "Differences per operation" in shown
    assert "checked" in shown and "the same" in shown


@pytest.mark.nightly
def test_plans_of_any_meshes_are_compared_part_by_part(
    run: Callable[..., Result],
    result: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    tmp_path: Path,
) -> None:
    """Another mesh, a pipeline with a schedule, another plan, and the other way round."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    layers = ("--set", "layers=4", "--hardware", "h100", "--allow", "usual", "--microbatches", "2")
    small = [f"--set={one}" for one in ("batch=8", "length=16", "d_model=64", "d_ff=128", "vocab=64")]
    for file, mesh in ((first, "data:4"), (second, "pipe:2;data:2")):
        pins = ("--pin", "layers:pipe") if file is second else ()
        asked = ("--mesh", mesh, *pins, *layers, *small, "--out", str(file))
        assert run("search", LM, *asked).exit_code == 0
    steps = []
    for plan, other in ((first, second), (second, first)):
        args = (str(plan), "--model", LM, "--against", str(other), "--time-limit", "1")
        found = result("explain", *args)
        parts = found["against"]["parts"]
        for name, step in (("plan", found), ("other", found["against"])):
            assert sum(part[f"{name}_seconds"] for part in parts) == pytest.approx(step["step_seconds"])
        bubble = {part["part"]: part for part in parts}["pipeline bubble"]
        assert (bubble["plan_seconds"] > 0, bubble["other_seconds"] > 0) == (plan is second, plan is first)
        steps.append((found["step_seconds"], found["against"]["step_seconds"]))
    assert steps[0] == steps[1][::-1]
    stages = ("--mesh", "pipe:4", "--microbatches", "4", "--schedule", "1f1b", "--against", "layers:pipe")
    shown = run("explain", str(first), "--model", LM, *stages, "--time-limit", "1").stdout
    assert "Parts of the step" in shown and "pipeline bubble" in shown and "on pipe:4" in shown
    for args, error in (
        (("--mesh", "pipe:4"), "--mesh: these describe the layout to compare with; name it with --against"),
        (("--against", "batch:data", "--mesh", "data:8"), "data:8 has 8 devices, but the plan has 4"),
        (("--against", str(second), "--mesh", "data:4"), "differs from the mesh of"),
        (("--against", str(second), "--microbatches", "2"), "sets every decision; remove --microbatches"),
    ):
        assert error in refused("explain", str(first), "--model", LM, *args)


def test_an_alternative_is_compared_by_its_name(
    run: Callable[..., Result],
    result: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    plan_file: Path,
) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    priced = [each for each in plan["alternatives"] if each["predicted"]]
    for each in (priced[0], priced[-1]):
        other = result("explain", str(plan_file), "--against", each["name"])["against"]
        assert other["step_seconds"] == pytest.approx(each["predicted"]["step_seconds"], rel=1e-9)
        assert other["step_seconds_with_the_plans_options"] is None
    assert len(priced) > 2
    error = refused("explain", str(plan_file), "--against", "repliated")
    assert (
        "'repliated' is neither a layout nor an alternative of the plan; did you mean 'replicated'"
    ) in error


def test_a_short_name_means_an_alternative_and_never_the_plan_itself(plan_file: Path) -> None:
    """Exact names first, then parts."""
    plan = load_plan(plan_file)
    own = {name: getattr(plan.data, name) for name in (*Decided.model_fields, "layout")}
    answer = Alternative(name="FSDP + context parallel", **own)
    other = {**own, "layout": {}}
    names = ["FSDP + tensor parallel", "fully sharded (FSDP)", "data + tensor parallel", "data parallel"]
    plan.data.alternatives[:] = [answer, *(Alternative(name=name, **other) for name in names)]
    for asked, found in {"FSDP": names[1], "DP": names[3], "dp + tp": names[2], "sharded": names[1]}.items():
        assert plan.alternative(asked).name == found
    del plan.data.alternatives[1:3]
    assert plan.alternative("TP").name == names[2]
    for asked in ("FSDP", "FSDP + context parallel", "PP"):
        with pytest.raises(UserError, match=r"known: data [+] tensor parallel, data parallel$"):
            plan.alternative(asked)


def test_a_plan_that_is_no_longer_true_is_told(
    result: Callable[..., dict[str, Any]], plan_file: Path, tmp_path: Path
) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    plan["predicted"]["step_seconds"] *= 2
    file = tmp_path / "old.json"
    file.write_text(json.dumps(plan), encoding="utf-8")
    found = result("explain", str(file))
    assert found["agrees"] is False
    assert found["disagreements"][0].startswith("step_seconds is ")


def test_the_other_layout_is_priced_with_the_plans_options_too(
    result: Callable[..., dict[str, Any]], run: Callable[..., Result], plan_file: Path, tmp_path: Path
) -> None:
    stored = {"layer_1/weight": "zero3"}
    plan = changed(tmp_path / "stored.json", plan_file, "storage", value=stored)
    args = ("explain", plan, "--against", "batch:data")
    again = changed(tmp_path / "same.json", tmp_path / "stored.json", "layout", value={"batch": ["data"]})
    with_them = result(*args)["against"]["step_seconds_with_the_plans_options"]
    assert with_them == result("explain", again)["step_seconds"]
    assert "this layout with the plan's zero3 ×1: " in run(*args).stdout


@pytest.mark.slow
@pytest.mark.nightly
def test_what_was_found_goes_into_the_plan_and_its_report(
    result: Callable[..., dict[str, Any]], run: Callable[..., Result], plan_file: Path, tmp_path: Path
) -> None:
    more, page = tmp_path / "more.json", tmp_path / "report.html"
    found = result("explain", str(plan_file), "--sensitivity", "--check", "--out", str(more))
    details = json.loads(more.read_text(encoding="utf-8"))["details"]
    for name in ("sensitivity", "robustness", "proof"):
        assert details[name] == found[name]
    assert details["proof"]["verified"] is True
    assert details["variables"]  # what the plan had is still there
    assert run("report", str(more), "--out", str(page)).exit_code == 0
    html = page.read_text(encoding="utf-8")
    assert "verified without a solver" in html and "variants drawn within the uncertainties" in html
    assert "Step time by link bandwidth" in html and "one machine&#39;s memory" in html


def test_a_plan_for_a_hardware_file_is_explained_on_it(
    result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    content = preset_content("cpu-local")
    content["chip"]["peak_flops"]["float32"]["value"] *= 2
    write_profile(content, tmp_path / "mine.json")
    plan = searched(tmp_path / "plan.json", "--hardware", str(tmp_path / "mine.json"))
    assert plan["hardware"] == "cpu-local"
    assert result("explain", str(tmp_path / "plan.json"))["agrees"]


@pytest.mark.nightly
def test_a_plan_for_the_least_memory_is_explained_in_bytes(
    result: Callable[..., dict[str, Any]],
    refused: Callable[..., str],
    run: Callable[..., Result],
    tmp_path: Path,
) -> None:
    plan = searched(tmp_path / "lean.json", "--objective", "memory")
    found = result("explain", str(tmp_path / "lean.json"), "--pin", "batch:none")
    assert found["agrees"] and found["memory"]["binds"] is False
    (pin,) = found["pins"]
    again = result("search", *MLP, "--pin", "batch:none", "--objective", "memory")
    assert pin["peak_bytes"] == again["predicted"]["peak_memory_bytes"]
    assert pin["costs_bytes"] == pin["peak_bytes"] - plan["predicted"]["peak_memory_bytes"]
    assert pin["costs_seconds"] is None
    assert "the search minimised memory" in run("explain", str(tmp_path / "lean.json")).stdout
    for option, message in (
        ("--check", "the check proves that no layout is faster"),
        ("--sensitivity", "the sensitivity analysis compares step times"),
    ):
        assert message in refused("explain", str(tmp_path / "lean.json"), option)


def changed(path: Path, plan_file: Path, *where: str, value: object) -> str:
    plan = inner = json.loads(plan_file.read_text(encoding="utf-8"))
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    path.write_text(json.dumps(plan), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        (
            ("predicted", "step_seconds"),
            float("nan"),
            "'predicted.step_seconds' must be a finite number, found nan",
        ),
        (
            ("predicted", "step_seconds"),
            1e-9,
            "disagrees with a new prediction of its layout (step_seconds is",
        ),
        (("solver", "objective"), 1e-9, "is neither its step time nor its peak memory"),
        (("solver", "bound"), 1e-9, "the plan claims a proof, but its bound"),
        (("layout",), {"batch": ["data"]}, "disagrees with a new prediction of its layout (step_seconds is"),
        (("details", "search", "memory_bytes"), 1000, "the memory limit of its search was 1000 B"),
        (
            ("details", "search", "microbatches"),
            "one",
            "'details.search.microbatches' must be a list, found str",
        ),
        (("details", "search", "pins"), 5, "'details.search.pins' must be text, found int"),
        (("details",), {}, "--check: the plan does not record its search; search again with --out"),
    ],
)
def test_an_edited_plan_is_not_checked(
    refused: Callable[..., str],
    plan_file: Path,
    tmp_path: Path,
    where: tuple[str, ...],
    value: object,
    message: str,
) -> None:
    edited = changed(tmp_path / "edited.json", plan_file, *where, value=value)
    assert message in refused("explain", edited, "--model", "examples/mlp.py", "--check")


def test_a_proof_that_does_not_hold_is_refuted(run: Callable[..., Result], tmp_path: Path) -> None:
    searched(tmp_path / "pinned.json", "--pin", "batch:data+model")
    free = changed(tmp_path / "free.json", tmp_path / "pinned.json", "details", "search", "pins", value=None)
    done = run("explain", free, "--check", "-q")
    assert done.exit_code == 2
    assert "is faster and fits" in done.stdout
    assert done.stderr.startswith("error: --check: the plan's proof is refuted, because ")


def test_what_a_decision_is_worth(
    result: Callable[..., dict[str, Any]], refused: Callable[..., str], tmp_path: Path
) -> None:
    path, model = str(tmp_path / "plan.json"), MLP[:7]
    plain = ("--recompute", "never", "--microbatches", "1")
    plan = result("search", *model, *plain, "--storage", "layout,zero1,zero3", "--out", path)
    assert plan["storage"]
    (worth,) = result("explain", path, "--without", "all")["decisions"]
    without = result("search", *MLP)["predicted"]["step_seconds"]
    assert worth["rule"] == "zero" and worth["proven"]
    assert worth["step_seconds"] == pytest.approx(without, rel=1e-9)
    assert worth["costs_seconds"] == pytest.approx(without - plan["predicted"]["step_seconds"], rel=1e-6)
    assert "--without hybird: did you mean 'hybrid'?" in refused("explain", path, "--without", "hybird")
    for name in ("sequence", "zero,pipeline"):
        assert "was not allowed to make this decision" in refused("explain", path, "--without", name)


def test_wrong_input(refused: Callable[..., str], plan_file: Path) -> None:
    plan = str(plan_file)
    assert "mesh data:2;model:2 has no axis 'dta'; did you mean 'data'?" in refused(
        "explain", plan, "--against", "batch:dta"
    )
    assert "--pin btch: no operation has this dimension" in refused(
        "explain", plan, "--pin", "btch:data", "-q"
    )
    assert "cannot be read" in refused("explain", "none.json")


def test_a_plan_saved_from_python_says_what_was_asked(
    result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    model = load_model(MLP[0], [MLP[2], MLP[4]]).model
    limits = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}
    plan = layoutopt.search(model, mesh="data:2;model:2", pins={"hidden": ()}, forbid="pixels:data", **limits)
    plan.save(tmp_path / "plan.json")
    asked = layoutopt.load_plan(tmp_path / "plan.json").data.details.search
    assert asked is not None and (asked.pins, asked.storage, asked.devices) == (
        "hidden:none",
        ("layout",),
        None,
    )
    free = layoutopt.search(model, mesh="data:2;model:2", **limits)
    assert free.predicted.step_seconds < plan.predicted.step_seconds
    found = result("explain", str(tmp_path / "plan.json"), "--model", MLP[0])
    assert found["memory"]["binds"] is False


def test_other_hardware_numbers_are_told(
    result: Callable[..., dict[str, Any]], plan_file: Path, tmp_path: Path
) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    number = plan["details"]["hardware"]["numbers"][0]
    number["value"] = "another"
    plan["predicted"]["step_seconds"] *= 2
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    said = result("explain", str(path))["disagreements"]
    assert said[0] == f"the plan used other values for these hardware numbers: {number['path']}"
    assert said[1].startswith("step_seconds is ")


def test_what_there_was_no_time_for_is_unknown(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], plan_file: Path
) -> None:
    asked = (
        "explain",
        str(plan_file),
        "--time-limit",
        "0.0001",
        "--check",
        "--sensitivity",
        "--pin",
        "batch:none",
    )
    found = result(*asked)
    assert found["agrees"] and found["memory"]["step_seconds_without_limit"] is None
    rules = [*found["splits"], *found["pins"]]
    assert [(w["step_seconds"], w["proven"], w["reason"]) for w in rules] == [
        (None, False, "the time limit was reached first")
    ] * len(rules)
    assert not found["proof"]["verified"]
    assert found["proof"]["words"] == "no problem was checked within the time limit"
    points = {
        c["factor"]: [(p["step_seconds"], p["proven"]) for p in c["points"]] for c in found["sensitivity"]
    }
    own = (found["step_seconds"], True)
    assert points["memory"] == [
        own,
        own,
        (None, False),
    ]  # what fits in half and is proven for all, for half too
    assert points["devices"] == [(None, False), own, (None, False)]
    assert not any(proven for _, proven in points["bandwidth"][::2])
    text = run(*asked).stdout
    assert "the time limit was reached before a search with more" in text and "nothing fits" not in text


def test_a_clock_of_explain_is_checked(refused: Callable[..., str], plan_file: Path) -> None:
    line = refused("explain", str(plan_file), "--time-limit", "0")
    assert line.startswith("--time-limit: '0' is not a positive time")


@pytest.mark.nightly
def test_the_placement_is_that_of_the_program(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    small = ("layers=2", "d_model=16", "d_kv=4", "heads=2", "d_ff=16", "vocab=16", "batch=4", "length=8")
    path, model = tmp_path / "plan.json", "examples/transformer_lm.py"
    only = ("--storage", "layout,zero3", "--microbatches", "1", *(x for n in small for x in ("--set", n)))
    whole = "vocab:none;d_model:none;positions:none;length:none;memory_length:none;d_kv:none"
    args = (
        *only,
        "--pin",
        f"batch:data;{whole}",
        "--mesh",
        "data:2",
        "--hardware",
        "tpu-v4",
        "--objective",
        "memory",
    )
    plan = result(
        "search", model, *args, "--recompute", "always", "--offload", "optimizer", "--out", str(path)
    )
    found = result("explain", str(path), "--model", model)["placement"]
    assert sum(p["bytes"] for p in found if p["host"]) == plan["predicted"]["host_memory_bytes"]
    (saved,) = (p for p in found if p["values"] == "saved")
    assert saved["names"] == ["layers"] and saved["again"] == "compute"
    split = {
        n: p["further"]
        for p in found
        for n in p["names"]
        if (p["values"], p["phase"]) == ("state", "between steps")
    }
    assert {n for n, axes in split.items() if axes} == {*plan["storage"]}
    printed = CliRunner().invoke(app, ["explain", str(path), "--model", model]).stdout
    assert "Placement of values" in printed and "compute" in printed
