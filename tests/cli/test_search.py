"""`search`: the plan file of the contract, exit codes, and the same numbers in every form."""

from __future__ import annotations

import io
import json
import re
import shlex
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import Result

from layoutopt.cli.plan_tables import alternatives_table
from layoutopt.cli.terminal import Sheet
from layoutopt.models.loading import load_model
from layoutopt.plan.build import load_plan
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import seconds_text, share_text, used_text
from tests.cli.conftest import fits

LM = "examples/transformer_lm.py"
# Only splits are decided where nothing else is the point.
PLAIN = ("--storage", "layout", "--recompute", "never", "--microbatches", "1")
MLP = ("search", "examples/mlp.py", "--mesh", "data:2;model:2", *PLAIN)
SMALLEST = (
    "search",
    "examples/mlp.py",
    "--mesh",
    "data:2",
    "--set",
    "hidden=64",
    "--set",
    "layers=1",
    *PLAIN,
)
SMALL = ("--set", "layers=2", "--set", "d_model=64", "--set", "d_ff=128", "--set", "length=32")

PLAN = [
    "format",
    "model",
    "mesh",
    "layout",
    "storage",
    "recompute",
    "microbatches",
    "hardware",
    "framework",
    "predicted",
    "solver",
    "space",
    "alternatives",
]


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the small language model, written by the command."""
    from typer.testing import CliRunner

    from layoutopt.cli import app

    path = tmp_path_factory.mktemp("plan") / "deep" / "plan.json"
    args = ["search", LM, "--mesh", "data:2;model:4", *SMALL, "--microbatches", "1", "--out", str(path)]
    done = CliRunner().invoke(app, args)
    assert done.exit_code == 0, done.stderr
    assert f"wrote the plan to {path}" in done.stderr
    assert f"next: layoutopt train {LM} {' '.join(SMALL)} --layout {path}" in done.stderr
    return path


def test_what_is_next_for_another_machine(run: Callable[..., Result], tmp_path: Path) -> None:
    out = str(tmp_path / "plan.json")
    done = run("search", "examples/mlp.py", "--mesh", "data:2", "--hardware", "h100", "--out", out)
    assert f"next: layoutopt explain {out}; report and export" in done.stderr


@pytest.mark.nightly
def test_what_is_next_names_a_model_that_its_plan_may_not(run: Callable[..., Result], tmp_path: Path) -> None:
    """Of another function than model(), and of one that is not below the current folder."""
    text = Path("examples/mlp.py").read_text(encoding="utf-8")
    other = tmp_path / "other.py"
    other.write_text(f"{text}\n\nsmall = model\n", encoding="utf-8")
    out = str(tmp_path / "plan.json")
    for source in (f"{other}:small", str(other)):
        done = run("search", source, "--mesh", "data:2", "--hardware", "h100", "--out", out)
        assert (
            f"next: layoutopt explain {out} --model {source}; report takes the plan too, and export takes"
            in done.stderr
        )
        assert run("explain", out, "--model", source).exit_code == 0


@pytest.mark.nightly
def test_a_model_that_has_changed_in_other_ways(
    plan_file: Path, tmp_path: Path, refused: Callable[..., str]
) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    plan["model"]["fingerprint"] = "0"
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(plan), encoding="utf-8")
    assert "or by another version of layoutopt (the operations differ)" in refused("explain", str(path))


def test_the_json_is_the_contracts(plan_file: Path) -> None:
    found = json.loads(plan_file.read_text(encoding="utf-8"))
    fits(found, PlanFile)
    assert [key for key in found if key not in ("notes", "details")] == PLAN
    assert found["format"] == "layoutopt-plan/1"
    assert found["model"]["hparams"]["layers"] == 2
    assert found["solver"]["status"] == "OPTIMAL"
    assert found["solver"]["gap"] == 0
    assert found["solver"]["bound"] == found["solver"]["objective"] == found["predicted"]["step_seconds"]
    assert {"data parallel", "replicated"} <= {a["name"] for a in found["alternatives"]}
    for alternative in found["alternatives"]:
        assert {"name", "mesh", "layout", "predicted", "feasible", "reason"} <= set(alternative)
        if alternative["feasible"]:
            assert alternative["predicted"]["step_seconds"] >= found["predicted"]["step_seconds"] * (1 - 1e-9)


def test_the_plan_costs_what_cost_says(plan_file: Path, result: Callable[..., dict[str, Any]]) -> None:
    plan = json.loads(plan_file.read_text(encoding="utf-8"))
    by_plan = result("cost", LM, *SMALL, "--layout", str(plan_file))
    by_hand = result(
        "cost",
        LM,
        *SMALL,
        "--mesh",
        ";".join(f"{axis}:{size}" for axis, size in plan["mesh"].items()),
        "--layout",
        ";".join(f"{name}:{'+'.join(axes)}" for name, axes in plan["layout"].items()),
        *(word for name, stage in plan["storage"].items() for word in ("--storage", f"{name}={stage}")),
        *(word for name in plan["recompute"] for word in ("--recompute", name)),
        "--microbatches",
        str(plan["microbatches"]),
    )
    assert by_plan == by_hand
    for name, number in plan["predicted"].items():
        assert by_plan["predicted"][name] == pytest.approx(number, rel=1e-12), name


def test_a_plan_file_loads_and_carries_what_a_report_needs(plan_file: Path) -> None:
    plan = load_plan(plan_file)
    assert str(plan.mesh) == "data:2;model:4"
    details = json.loads(plan_file.read_text(encoding="utf-8"))["details"]
    parts = {"search", "hardware", "parallelism", "dims", "variables", "inputs", "lines", "sources"}
    assert set(details) == {"source", "source_sha256", "by_kind", "memory", "dtype", *parts}
    assert details["source"] == LM
    assert details["dims"]["d_ff"] == 128
    model = load_model(LM, SMALL[1::2]).model
    trained = [v for v in details["variables"] if v["kind"] == "parameter"]
    assert sum(v["bytes"] for v in trained) == 4 * model.parameters
    seconds = sum(x["exposed_seconds"] * x["times"] for x in details["lines"])
    assert seconds == pytest.approx(plan.predicted.step_seconds, rel=1e-9)
    assert max(p["bytes"] for p in details["memory"]["points"]) == plan.predicted.peak_memory_bytes
    assert set(details["by_kind"]) == {"answer", *(a.name for a in plan.alternatives)}
    priced = [plan.predicted, *(a.predicted for a in plan.alternatives if a.predicted)]
    assert len({p.model_flops for p in priced}) == 1 and all(p.mfu and p.tokens_per_second for p in priced)


def test_a_plan_of_another_model_is_refused(plan_file: Path, refused: Callable[..., str]) -> None:
    line = refused("cost", LM, "--set", "layers=4", "--layout", str(plan_file))
    assert f"{plan_file}: the plan was made for another model: layers=2 in the plan, 4 in this model" in line
    line = refused("cost", LM, *SMALL, "--layout", str(plan_file), "--mesh", "data:8")
    assert f"--mesh 'data:8' differs from the mesh of {plan_file}, data:2;model:4" in line


def test_a_plan_gives_the_hyperparameters_that_are_not_set(
    plan_file: Path, result: Callable[..., dict[str, Any]]
) -> None:
    assert result("cost", LM, "--layout", str(plan_file)) == result(
        "cost", LM, *SMALL, "--layout", str(plan_file)
    )


def test_a_narrow_terminal_has_a_table_too(plan_file: Path) -> None:
    """With what is decided beside the splits, and without a column of nothing but yes."""
    plan = load_plan(plan_file)
    drawn = {}
    for width in (60, 80, 240):
        console = Console(width=width, file=io.StringIO(), color_system=None)
        console.print(Sheet(alternatives_table(plan)))
        drawn[width] = console.file.getvalue()  # type: ignore[attr-defined]
        assert all(len(line) <= width for line in drawn[width].splitlines())
    assert re.search("┃ storage and recompute +┃.*┃ fits", drawn[240])
    assert "┃" in drawn[80] and "recompute" not in drawn[80] and "MFU" in drawn[80]
    for word in plan.data.in_short().replace(";", "; ").split():
        assert word in drawn[80].split() and word in drawn[60].split()


def test_people_see_the_proof_and_the_alternatives(run: Callable[..., Result]) -> None:
    done = run(*MLP)
    assert "optimal under this cost model, of " in done.stdout and "layouts (gap 0%, " in done.stdout
    outside = r"not\s+in\s+proof\s+collective\s+matmul,.*\(--allow\s+everything\s"
    assert re.search(outside, done.stdout, re.DOTALL)
    rows = done.stdout.partition("Alternatives")[2]
    assert re.search(r"^the answer, tensor parallel.* +│ .*│ +1\.00× │", rows, re.MULTILINE)
    assert not re.search(r"^tensor parallel", rows, re.MULTILINE)  # it is the answer's row
    assert re.search(r"^data parallel +│ batch:data\+model +│", done.stdout, re.MULTILINE)
    assert re.search(r"^speed +[\d.]+% MFU, [\d,.]+ examples/s", done.stdout, re.MULTILINE)
    assert re.fullmatch(r"((best so far: |searching ).*\n)+", done.stderr)


def test_pins_and_prohibitions_hold(result: Callable[..., dict[str, Any]]) -> None:
    found = result(*MLP, "--pin", "batch:model", "--pin", "hidden:none", "--forbid", "pixels:data")
    assert found["layout"]["batch"] == ["model"]
    assert "hidden" not in found["layout"]
    assert found["layout"].get("pixels") != ["data"]


def test_axes_in_any_order(result: Callable[..., dict[str, Any]]) -> None:
    asked = ("examples/mlp.py", "--mesh", "data:2;model:2", "--storage", "layout", "--microbatches", "1")
    plan, every = (result("search", *asked, *more) for more in ((), ("--orders", "all")))
    counts = [int(p["solver"]["layouts_considered"].replace(",", "")) for p in (plan, every)]
    assert every["solver"]["status"] == "OPTIMAL" and counts[0] < counts[1]
    assert every["solver"]["objective"] <= plan["solver"]["objective"]


def test_what_else_may_be_decided(result: Callable[..., dict[str, Any]], refused: Callable[..., str]) -> None:
    search = ("search", LM, "--mesh", "data:2", *SMALL, "--pin", "batch:data")
    plain = result(*search, "--storage", "layout", "--recompute", "never", "--microbatches", "1")
    assert (plain["storage"], plain["recompute"], plain["microbatches"]) == ({}, [], 1)
    free = result(*search, "--microbatches", "1,2")
    assert free["predicted"]["step_seconds"] <= plain["predicted"]["step_seconds"]
    again = result(*search, "--storage", "layout,zero3", "--recompute", "always", "--microbatches", "2")
    assert (again["recompute"], again["microbatches"]) == (["layers"], 2)
    assert set(again["storage"].values()) <= {"zero3"}
    assert "unknown storage 'zero5'; did you mean" in refused(*search, "--storage", "zero5")
    assert "--microbatches 'two' is not a list of positive numbers" in refused(
        *search, "--microbatches", "two"
    )
    assert "known: always, auto, every, never, selective, some" in refused(*search, "--recompute", "maybe")


def test_objectives(result: Callable[..., dict[str, Any]], run: Callable[..., Result]) -> None:
    least = result(*MLP, "--objective", "memory")["predicted"]
    fastest = result(*MLP)["predicted"]
    assert least["peak_memory_bytes"] <= fastest["peak_memory_bytes"]
    listed = run(*MLP, "--objective", "memory", "--top", "3").stdout
    names = re.findall(r"^(the answer|fully sharded|replicated)", listed.partition("Alternatives")[2], re.M)
    assert names == ["the answer", "fully sharded", "replicated"]  # though that one is the fastest
    assert (
        "--top 3: only 1 layouts have the least peak memory; for others, use --objective pareto"
        in " ".join(listed.split())
    )
    frontier = result(*MLP, "--objective", "pareto")["frontier"]
    assert frontier[0]["predicted"]["step_seconds"] == pytest.approx(fastest["step_seconds"], rel=1e-9)
    times = [point["predicted"]["step_seconds"] for point in frontier]
    peaks = [point["predicted"]["peak_memory_bytes"] for point in frontier]
    assert times == sorted(times) and peaks == sorted(peaks, reverse=True)


def test_the_mesh_is_searched_too(result: Callable[..., dict[str, Any]]) -> None:
    found = result("search", "examples/mlp.py", "--devices", "4", "--top", "2", *PLAIN)
    assert sorted(found["mesh"].values()) in ([2, 2], [4])
    one_axis = result("search", "examples/mlp.py", "--devices", "4", "--max-axes", "1", *PLAIN)
    assert list(one_axis["mesh"].values()) == [4]
    assert found["predicted"]["step_seconds"] <= one_axis["predicted"]["step_seconds"]


def test_nothing_fits(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("layoutopt.optimize.answers.infeasible.SHARE", 0.0)  # what would help is tested below
    line = refused(*SMALLEST, "--memory", "5KiB", "--json", code=3)  # with `repairs`, too
    assert "no layout of 'mlp' fits into 5 KiB per device" in line
    assert re.search(r"largest tensors: \S+.* \([\d.]+ [KM]iB\), .*; use about [\d,]+ devices \(if", line)


@pytest.mark.nightly
def test_what_would_help_is_priced_reported_and_ready_to_copy(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    page = tmp_path / "report.html"
    asked = (
        "search",
        "examples/mlp.py",
        "--devices",
        "2",
        "--memory",
        "200KiB",
        "--hardware",
        "tpu-v3",
        *PLAIN,
    )
    done = run(*asked, "--report", str(page))
    assert done.exit_code == 3
    assert 0 <= done.output.index("error: ") < done.output.index("What would help")
    table, commands = done.stdout.split("\n\n")
    assert table.startswith("What would help")
    first = shlex.split(commands.splitlines()[0])
    assert first[:3] == ["layoutopt", "search", "examples/mlp.py"] and str(page) not in first
    again = result(*first[1:])["predicted"]
    said = f"{seconds_text(again['step_seconds'])} │ {share_text(again['mfu'], 1)} │ "
    assert f"{said}{used_text(again['peak_memory_bytes'], 200 * 1024)}" in re.sub(" +", " ", table)
    html = page.read_text(encoding="utf-8")
    assert "What would fit" in html and "Nothing fits" in html
    assert all(escape(command) in html for command in commands.splitlines())


def test_no_time_for_anything(run: Callable[..., Result], refused: Callable[..., str]) -> None:
    """A layout that is named without a search is still found, where one fits."""
    hurried = ("search", LM, "--mesh", "data:2;model:4", "--time-limit", "0.000001")
    assert run(*hurried).exit_code == 0
    line = refused(*hurried, "--memory", "5MiB", code=4)
    assert "so one may or may not fit; raise --time-limit" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "give either a mesh (--mesh 'data:2;model:4') or a number of devices (--devices 8)"),
        (["--mesh", "data:2", "--devices", "2"], "give either a mesh"),
        (["--devices", "0"], "--devices 0: write at least 1"),
        (["--mesh", "data:2", "--max-axes", "-1"], "--max-axes -1: write at least 1"),
        (
            ["--mesh", "data:2", "--pin", "btch:data"],
            "--pin btch: no operation has this dimension; did you mean",
        ),
        (["--mesh", "data:2", "--pin", "batch:model"], "mesh data:2 has no axis 'model'; known: data"),
        (["--mesh", "data:2", "--forbid", "batch"], "'batch' is not a rule DIM:AXIS or DIM:AXIS+AXIS"),
        (["--mesh", "data:2", "--objective", "speed"], "is not one of 'time', 'memory', 'pareto'"),
        (["--mesh", "data:2", "--top", "0"], "--top is 0; give a whole number of at least 1"),
        (
            ["--mesh", "data:2", "--time-limit", "-1"],
            "--time-limit: '-1' is not a positive time",
        ),
        (
            ["--mesh", "data:2", "--time-limit", "inf"],
            "--time-limit: 'inf' is not a positive time",
        ),
    ],
)
def test_wrong_input(refused: Callable[..., str], args: list[str], message: str) -> None:
    assert message in refused("search", "examples/mlp.py", *args)


def test_a_plan_that_cannot_be_written(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    line = refused(*MLP, "--quiet", "--json", "--out", str(tmp_path / "file" / "plan.json"))
    assert "cannot be written" in line


def test_a_frontier_that_is_cut_is_not_called_far_from_the_best(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("layoutopt.optimize.driver.search.MOST_POINTS", 1)
    shown = run(*MLP, "--objective", "pareto").stdout
    assert re.search(
        r"^proof +the fastest layout is proven optimal, but the frontier is not complete ",
        shown,
        re.M,
    )
