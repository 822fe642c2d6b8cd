"""`candidates --out`, measured, into `learn`, and its file into `--framework`."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import layoutopt
from costmodels import framework_names, load_framework, load_hardware
from costmodels.step_fit import SUSTAINED, constants_of
from examples import moe_lm
from examples.transformer_lm import model as transformer
from layoutopt.api.learning import WIDTHS, Learned
from layoutopt.cli import learn as cli_learn
from layoutopt.plan.known import kind_words
from layoutopt.plan.layout_results import LearnedConstant
from layoutopt.plan.machine_details import errors_known
from layoutopt.plan.units import percent
from mesh_tf_core.errors import UserError

MODEL = str(Path(__file__).resolve().parents[2] / "examples" / "transformer_lm.py")
ON = ("--hardware", "h100", "--framework", "torch")
RunCommand = Callable[..., Result]
PRICED = cli_learn._priced


def table(path: Path, seconds: Sequence[float | str], **more: str) -> Path:
    """Runs of a model on 2, 4, … devices."""
    with path.open("w", newline="") as f:
        rows = csv.DictWriter(f, ["model", "set", "mesh", "layout", *more, "step_seconds"])
        rows.writeheader()
        for n, each in enumerate(seconds):
            given = {"model": MODEL, "set": f"batch={64 << n} layers=2", "mesh": f"data:{2 << n}"}
            rows.writerow({**given, "layout": "batch:data", **more, "step_seconds": each})
    return path


def predicted(count: int, framework: str = "torch") -> list[float]:
    return [
        layoutopt.cost(
            transformer(batch=64 << n, layers=2), f"data:{2 << n}", "batch:data", "h100", framework=framework
        ).predicted.step_seconds
        for n in range(count)
    ]


@pytest.mark.nightly
def test_what_candidates_write_is_learnt_and_used(
    run: RunCommand, result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    runs, learnt = tmp_path / "runs.csv", tmp_path / "mine.json"
    small = ("--set", "layers=2", "--set", "batch=64")
    asked = ("candidates", MODEL, "--mesh", "data:2;model:2", *small, *ON, "-n", "4", "--allow", "usual")
    done = run(*asked, "--out", str(runs))
    assert done.exit_code == 0, done.stderr
    rows = [*csv.DictReader(runs.read_text().splitlines())]
    assert {(row["hardware"], row["framework"]) for row in rows} == {("h100", "torch")}
    assert len(rows) == 4 and {row["step_seconds"] for row in rows} == {""}
    for row in rows:  # what an unknown stack would take: every step a third longer
        row["step_seconds"] = str(1.33 * float(row["predicted_seconds"]))
    with runs.open("w", newline="") as f:
        writer = csv.DictWriter(f, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    found = result("learn", str(runs), *ON, "--out", str(learnt))
    assert found["rows"] == 4 and found["framework"] == "torch" and 1 <= len(found["constants"]) <= 2
    assert found["error_before"] == pytest.approx(1 - 1 / 1.33, rel=0.02)
    assert found["error_after"] < 0.5 * found["error_before"]
    for each in found["constants"]:
        assert each["before"] != each["after"] and len(each["interval"]) == 2
        ships, has = (constants_of(load_hardware("h100", name)) for name in ("torch", str(learnt)))
        assert ships[each["name"]] == pytest.approx(each["before"])
        assert has[each["name"]] == pytest.approx(each["after"], rel=1e-3)
    first = rows[0]
    said = ("--mesh", first["mesh"], "--layout", first["layout"], "--hardware", "h100")
    priced = result("cost", MODEL, *small, *said, "--framework", str(learnt))
    assert priced["predicted"]["step_seconds"] == pytest.approx(
        float(first["step_seconds"]), rel=2 * found["error_after"] + 0.01
    )
    shown = run("cost", MODEL, *small, *said, "--framework", str(learnt)).stdout
    told = f"mean error {percent(found['error_after'])}"
    words = " ".join(shown.replace("\u00a0", " ").split())
    assert f"4 runs of yours (dense, no pipeline, {learnt})" in words and told in words
    assert "fitted; each predicted by a fit without it" in words and "none used" not in words


def test_a_learnt_error_is_said_of_the_kinds_that_ran(tmp_path: Path) -> None:
    """Not of mixtures or pipelines, where none of them was measured, nor where an option replaces numbers."""
    path, machine = tmp_path / "mine.json", load_hardware("h100", "torch")
    constant = LearnedConstant(name=SUSTAINED, before=0.8, after=0.5, interval=(0.4, 0.6))
    kinds = [kind_words(False, False), kind_words(False, False), kind_words(True, True)]
    Learned(machine, (constant,), (0.3,) * 3, (0.1, 0.3, 0.04), tuple(kinds)).save(path)
    dense, mixture = transformer(layers=2), moe_lm.model(layers=2, experts=4)
    mine = load_hardware("h100", str(path))
    for model, stages, mean in (
        (dense, (), 0.2),
        (dense, ("layers",), None),
        (mixture, (), None),
        (mixture, ("layers",), 0.04),
    ):
        known = errors_known(mine, model, stages)
        assert (known.runs and known.runs.mean) == (mean and pytest.approx(mean)), known.words
        assert "none used in a fit" not in known.words
    other = load_hardware("h100", f"{path}:attention=fa3")
    assert errors_known(other, dense, ()).runs is None
    again = tmp_path / "again.json"  # learnt from runs of another kind, with other numbers
    Learned(mine, (constant,), (0.3,), (0.1,), (kind_words(True, False),)).save(again)
    assert [*load_framework(str(again)).errors["h100"]] == [kind_words(True, False)]


@pytest.mark.nightly
def test_runs_are_of_the_machine_that_the_table_says(
    run: RunCommand, result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    seconds = [1.3 * each for each in predicted(3)]
    runs = str(table(tmp_path / "runs.csv", seconds, hardware="h100", framework="torch"))
    for asked in ((), ON, ("--hardware", "h100"), ("--framework", "torch")):
        found = result("learn", runs, *asked)
        assert (found["hardware"], found["framework"], found["rows"]) == ("h100", "torch", 3)
    for asked in (("--hardware", "a100"), ("--framework", "megatron"), (*ON[:2], "--framework", "layoutopt")):
        done = run("learn", runs, *asked)
        assert done.exit_code == 2 and done.stderr.count("\n") == 1
        assert "run 1: it is a run on h100 under torch, but" in done.stderr


def test_the_framework_that_it_begins_with_is_not_written_over(run: RunCommand, tmp_path: Path) -> None:
    mine, table = tmp_path / "mine.json", tmp_path / "runs.csv"
    mine.write_text('{"name": "mine", "like": "torch"}')
    table.write_text("model,step_seconds\n")
    done = run("learn", str(table), "--hardware", "h100", "--framework", str(mine), "--out", str(mine))
    assert done.exit_code == 2 and "would overwrite a file that this command reads" in done.stderr


@pytest.mark.nightly
def test_runs_that_ship_well_change_nothing(run: RunCommand, tmp_path: Path) -> None:
    seconds = [s * (0.97 if n % 2 else 1.03) for n, s in enumerate(predicted(4))]
    runs, out = table(tmp_path / "runs.csv", seconds), tmp_path / "mine.json"
    done = run("learn", str(runs), *ON, "--out", str(out))
    assert "No constants predict these runs better" in done.stdout and "Use them" not in done.stdout
    assert load_hardware("h100", str(out)).chip == load_hardware("h100", "torch").chip


@pytest.mark.parametrize(
    "framework", [name for name in framework_names() if "gpu" in load_framework(name).kinds]
)
def test_every_framework_learns_with_every_option_chosen(framework: str, tmp_path: Path) -> None:
    """A learnt number is not replaced by that of an option."""
    base = load_framework(framework)
    texts = [f"{framework}:{v}={o}" for v, each in base.variants.items() for o in each.options]
    for text in (each for each in (framework, *texts) if not load_framework(each).lacking("h100")):
        machine = load_hardware("h100", text)
        ships = constants_of(machine)
        constants = [
            LearnedConstant(
                name=name, before=ships[name], after=0.5 * ships[name] or 1e-6, interval=(0.0, 1.0)
            )
            for name in WIDTHS
        ]
        learnt = Learned(machine, tuple(constants), (0.3,), (0.1,), ("dense",))
        learnt.save(tmp_path / "mine.json")
        found = constants_of(load_hardware("h100", str(tmp_path / "mine.json")))
        for each in constants:
            assert found[each.name] == pytest.approx(each.after, rel=1e-3), (text, each.name)


@pytest.mark.nightly
def test_equal_layouts_are_one(
    run: RunCommand, result: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Predicted once, of their mean seconds, and left out together."""
    runs, again = tmp_path / "runs.csv", tmp_path / "again.csv"
    rows = table(runs, [1.3 * s for s in predicted(3)]).read_text().splitlines()
    parts = [(*row.rsplit(",", 1),) for row in rows[1:]]
    more = [f"{asked},{share * float(s)!r}" for asked, s in parts for share in (0.98, 1.02) for _ in range(9)]
    again.write_text("\n".join([rows[0], *more]))
    asked = []
    monkeypatch.setattr(cli_learn, "_priced", lambda *said: asked.append(said) or PRICED(*said))
    once, often = result("learn", str(runs), *ON), result("learn", str(again), *ON)
    assert len(asked) == 6 and once["rows"] == often["rows"] == 3
    assert often["error_after"] == pytest.approx(once["error_after"], abs=1e-9)
    assert "54 measured of 3 different layouts" in run("learn", str(again), *ON).stdout
    again.write_text("\n".join([rows[0], *more[:18]]))
    assert "18 measured runs of 1 different layouts; give at least 3" in run("learn", str(again), *ON).stderr


@pytest.mark.parametrize(
    ("seconds", "more", "told"),
    [
        ((0.01, 0.02), {}, "2 measured runs of 2 different layouts; give at least 3"),
        ((0.01, "", 0.02), {}, "2 measured runs of 2 different layouts; give at least 3"),
        (("", "", ""), {}, "step_seconds is empty in every line; write there how long"),
        ((1.0, "fast", 2.0), {}, "run 2: step_seconds 'fast' is not a positive number"),
        ((1.0, -1.0, 2.0), {}, "run 2: step_seconds '-1.0' is not a positive number"),
        ((1.0, "0_0.1", 2.0), {}, "run 2: step_seconds '0_0.1' is not a positive number"),
        ((1.0, "0.0\n1", 2.0), {}, "run 2: step_seconds '0.0 1' is not a positive number"),
        ((0.1, 6e-30, 0.1), {}, "run 2 took 6e-30 s, but 0.00"),
        ((1.0, 2.0, 3.0), {"storage": "zero9"}, "run 1: "),
        ((1.0, 2.0, 3.0), {"recompte": "layers"}, "column 'recompte' is not known; did you mean"),
    ],
)
def test_a_bad_table_is_one_line(
    seconds: Sequence[float | str], more: dict[str, str], told: str, run: RunCommand, tmp_path: Path
) -> None:
    done = run("learn", str(table(tmp_path / "runs.csv", seconds, **more)), *ON)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert told in done.stderr


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "no column 'model' among none"),
        ("model,mesh\na.py,data:2\n", "no column 'step_seconds'"),
        ("model,step_seconds,step_seconds\na.py,1,2\n", "2 columns are named 'step_seconds'; leave one"),
        ("model,step_seconds\na.py\n", "run 1 has another number of fields"),
        ("model,mesh,step_seconds\nno_model.py,data:2,1\n", "run 1: "),
    ],
)
def test_a_damaged_table_is_one_line(text: str, told: str, run: RunCommand, tmp_path: Path) -> None:
    (tmp_path / "runs.csv").write_text(text)
    done = run("learn", str(tmp_path / "runs.csv"), *ON)
    assert done.exit_code == 2 and done.stderr.count("\n") == 1
    assert told in done.stderr


@pytest.mark.nightly
def test_a_run_may_be_a_plan(run: RunCommand, result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    rows = [
        *csv.reader(table(tmp_path / "runs.csv", [1.3 * s for s in predicted(3)]).read_text().splitlines())
    ]
    plan, runs = tmp_path / "plan.json", tmp_path / "plans.csv"
    asked = ("search", MODEL, *ON, "--mesh", "data:4", "--set", "layers=2", "--allow", "usual")
    assert run(*asked, "--out", str(plan)).exit_code == 0
    seconds = json.loads(plan.read_text())["predicted"]["step_seconds"]
    rows += [
        [str(plan), "", "", "", str(1.3 * seconds)],
        [MODEL, "layers=2", "", str(plan), str(1.3 * seconds)],
    ]
    runs.write_text("\n".join(",".join(row) for row in rows))
    found = result("learn", str(runs), *ON)
    # Both plans are the same layout.
    assert found["rows"] == 4 and found["error_before"] == pytest.approx(1 - 1 / 1.3, rel=0.02)


def test_machines_that_cannot_be_learnt_are_refused(run: RunCommand, tmp_path: Path) -> None:
    runs = table(tmp_path / "runs.csv", (1.0, 2.0, 3.0))
    done = run("learn", str(runs))
    assert done.exit_code == 2 and "cpu-local is no preset of GPUs or TPUs" in done.stderr
    done = run("learn", str(runs), *ON, "--set-hardware", "memory_efficiency=0.5")
    assert done.exit_code == 2 and "memory_efficiency=0.5 of the hardware is what" in done.stderr
    priced = [
        layoutopt.cost(transformer(layers=2), "data:2", "batch:data", "h100", framework=name)
        for name in ("torch", "torch", "megatron")
    ]
    with pytest.raises(UserError, match="run 3 is predicted for h100 under megatron"):
        layoutopt.learn([(each, each.predicted.step_seconds) for each in priced])


def test_python_learns_as_the_command(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    seconds = [1.4 * s for s in predicted(3)]
    found = result("learn", str(table(tmp_path / "runs.csv", seconds)), *ON)
    priced = [
        layoutopt.cost(
            transformer(batch=64 << n, layers=2), f"data:{2 << n}", "batch:data", "h100", framework="torch"
        )
        for n in range(3)
    ]
    again = layoutopt.learn([*zip(priced, seconds, strict=True)])
    assert json.loads(json.dumps(again.to_json())) == found
    assert again.to_frame().shape[0] == len(found["constants"]) and "3 runs" in repr(again)
