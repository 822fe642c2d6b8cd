"""`train` on real devices: searched, planned and given layouts, resuming, held-out loss."""

from __future__ import annotations

import fcntl
import itertools
import json
import re
import signal
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

import mesh_tf_core as mtf
from costmodels import hardware_names, load_hardware
from layoutopt.analysis.difference import runs_on
from layoutopt.cli.given import GivenOptions
from layoutopt.cli.running import Session, machine_here, machine_of_run
from layoutopt.cli.terminal import Terminal
from mesh_tf_core.engines.jax import compat
from mesh_tf_core.training import Trainer
from mesh_tf_core.training.checkpoint import listed
from tests.cluster.job import contents

MLP = "examples/mlp.py"
ON_ITS_OWN = (("jax", "cpu-jax"), ("local", "cpu-local"))
ON = ("--mesh", "data:2;model:2", "--layout", "batch:data;hidden:model")


def test_training_resumes_under_another_layout(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    judged = ("--held-out", "2", "--evaluate-every", "3")
    whole = result("train", MLP, *ON, "--steps", "6", *judged)
    first = result("train", MLP, *ON, "--steps", "4", "--held-out", "0", "--checkpoint", str(tmp_path))
    other = ("--mesh", "data:4", "--layout", "batch:data")
    second = result("train", MLP, *other, "--steps", "6", "--held-out", "2", "--checkpoint", str(tmp_path))
    assert (first["first_step"], first["steps"], second["first_step"], second["steps"]) == (0, 4, 4, 6)
    assert first["loss"] + second["loss"] == pytest.approx(whole["loss"], rel=1e-4)
    assert second["held_out"]["loss"] == pytest.approx(whole["held_out"]["loss"], rel=1e-4)
    assert set(whole["held_out"]) == {"loss", "accuracy"}
    assert set(whole["evaluations"]) == {"3", "6"} and whole["evaluations"]["6"] == whole["held_out"]
    assert whole["evaluations"]["3"]["loss"] > whole["held_out"]["loss"]
    assert 0 < whole["waited_for_input"] < 1
    again = result("train", MLP, *other, "--steps", "6", "--held-out", "0", "--checkpoint", str(tmp_path))
    assert (again["first_step"], again["steps"], again["loss"]) == (6, 6, [])


@pytest.mark.nightly
def test_a_long_training_keeps_two_numbers_a_step(
    result: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in bytes, without what the engine does: a loss and seconds take 16, with room to grow 18."""
    first, last, held = 1100, 2100, dict[int, int]()  # a progress bar keeps the last 1,000

    def begun(self: Trainer, ready: Any) -> Callable[[], dict[str, Any]]:
        self.step_number += 1
        if self.step_number == 1:
            tracemalloc.start()
        if self.step_number in (first, last):
            held[self.step_number] = tracemalloc.get_traced_memory()[0]
        return lambda loss=self.step_number / 7: {"loss": loss, "accuracy": loss / 3}

    monkeypatch.setattr(Trainer, "_begun", begun)
    sizes = ("--set", "hidden=4", "--set", "batch=2")
    try:
        found = result(
            "train", MLP, "--engine", "lockstep", *ON, *sizes, "--steps", str(last), "--held-out", "0"
        )
    finally:
        tracemalloc.stop()
    assert found["loss"] == [step / 7 for step in range(1, last + 1)]
    assert (held[last] - held[first]) / (last - first) < 40


@pytest.mark.nightly
def test_what_was_evaluated_after_the_last_step_is_not_evaluated_again(
    result: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluate, steps = Trainer.evaluate, list[int]()

    def counted(self: Trainer, *given: Any) -> dict[str, float]:
        steps.append(self.step_number)
        return evaluate(self, *given)

    monkeypatch.setattr(Trainer, "evaluate", counted)
    judged = ("--held-out", "1", "--evaluate-every", "2")
    for last in (4, 3):
        assert result("train", MLP, *ON, "--steps", str(last), *judged)["held_out"]
    assert steps == [2, 4, 2, 3]


def test_a_damaged_checkpoint_is_told(run: Callable[..., Result], tmp_path: Path) -> None:
    command = ("train", MLP, *ON, "--held-out", "0", "--checkpoint", str(tmp_path), "--every", "2", "--steps")
    assert run(*command, "3").exit_code == 0
    (tmp_path / "step-000000003" / "manifest.json").unlink()
    done = run(*command, "4")
    assert done.exit_code == 0, done.stderr
    assert "warning: checkpoint step-000000003: manifest.json cannot be read" in done.stderr
    assert "resuming from step 2" in done.stderr
    assert "% of the time" in done.stdout and "steps 3 to 4, saved in" in done.stdout


def test_held_out_data_is_judged_without_dropout_and_to_its_end(
    result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "model.py"
    file.write_text(
        "import numpy as np\nimport mesh_tf_core as mtf\n\n"
        "def model(batch: int = 4, dropout: float = 0.5) -> mtf.Model:\n"
        "    g = mtf.Graph('one')\n"
        "    b, n = mtf.Dim('batch', batch), mtf.Dim('n', 8)\n"
        "    x, w = g.input('x', [b, n], 'float32'), g.variable('w', [n], mtf.ONES)\n"
        "    seen = mtf.reduce_mean(mtf.dropout(x * w, dropout))\n"
        "    return mtf.Model(seen, mtf.SGD(1e-6), {'rate': seen * 0 + dropout})\n\n"
        "def data(batch, split='train'):\n"
        "    for rows in (batch, batch, 1 if split == 'held-out' else batch):\n"
        "        yield {'x': np.full((rows, 8), 9 if rows == 1 else 1, np.float32)}\n",
        encoding="utf-8",
    )
    found = result("train", str(file), "--mesh", "data:2", "--layout", "batch:data", "--steps", "1")
    assert found["held_out"] == pytest.approx({"loss": (8 * 1 + 9) / 9, "rate": 0.0}, rel=1e-4)


@pytest.fixture
def signal_in_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Sends a signal in the middle of a step, when its variables are stored and it is not yet counted."""
    from mesh_tf_core.engines.tf.local import TfLocalEngine

    def plan(number: int, at: int) -> None:
        step, count = TfLocalEngine.run, itertools.count(1)

        def run(self: TfLocalEngine, fed: Any) -> dict[str, Any]:
            found = step(self, fed)
            if next(count) == at:
                signal.raise_signal(number)
            return found

        monkeypatch.setattr(TfLocalEngine, "run", run)

    return plan


TRAIN = ("train", MLP, *ON, "--steps", "6", "--held-out", "0")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.one_in(4)
def test_a_signal_in_a_step_saves_what_the_step_learned(
    run: Callable[..., Result], signal_in_step: Callable[[int, int], None], tmp_path: Path, number: int
) -> None:
    three = run("train", MLP, *ON, "--held-out", "0", "--steps", "3", "--checkpoint", str(tmp_path / "three"))
    assert three.exit_code == 0
    signal_in_step(number, 3)
    place = tmp_path / "run"
    done = run(*TRAIN, "--checkpoint", str(place))
    assert (done.exit_code, done.stdout) == (128 + number, "")
    last = done.stderr.splitlines()[-1]
    assert last == f"stopped after step 3 of 6, saved in {place}; the same command continues from there"
    assert contents(place, 3) == contents(tmp_path / "three", 3)


def test_where_nothing_can_be_saved_it_is_said(
    run: Callable[..., Result], signal_in_step: Callable[[int, int], None], tmp_path: Path
) -> None:
    signal_in_step(signal.SIGTERM, 2)
    done = run(*TRAIN)
    assert done.exit_code == 143
    assert "stopped after step 2 of 6; without --checkpoint DIR nothing was saved" in done.stderr
    signal_in_step(signal.SIGINT, 1)
    done = run(*TRAIN, "--checkpoint", str(tmp_path / "run"))
    assert done.exit_code == 130
    assert f"stopped before the end of step 1; {tmp_path / 'run'} is unchanged" in done.stderr
    assert listed(tmp_path / "run") == []


def test_the_step_that_compiles_is_no_speed(run: Callable[..., Result]) -> None:
    done = run("train", MLP, "--engine", "lockstep", *ON, "--steps", "1", "--held-out", "0")
    assert re.search(r"^step +[\d.]+ \w+ including compilation \(predicted", done.stdout, re.MULTILINE)
    assert "rate" not in done.stdout and "examples/s" not in done.stdout


def test_a_signal_while_the_layout_is_searched(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "layoutopt.optimize.entry.search", lambda *_, **__: signal.raise_signal(signal.SIGTERM)
    )
    done = run("train", MLP, "--mesh", "data:2", "--steps", "1")
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (143, "stopped before training began")


def test_a_directory_of_another_job_is_refused_before_the_search(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def taken(handle: int, how: int) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(fcntl, "flock", taken)
    line = refused("train", MLP, "--mesh", "data:2", "--checkpoint", str(tmp_path))
    assert "is in use by another process; wait until that process ends, or" in line


@pytest.mark.parametrize("words", [("train", MLP), ("generate", MLP, "--prompt", "a")])
def test_a_checkpoint_needs_a_name(refused: Callable[..., str], words: tuple[str, ...]) -> None:
    line = refused(*words, "--mesh", "data:2", "--checkpoint", "")
    assert "the path is empty; write a path" in line


def test_checkpoints_have_the_mode_that_is_asked_for(
    run: Callable[..., Result],
    refused: Callable[..., str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """A lock that is removed meanwhile is one line."""
    words = ("train", MLP, "--mesh", "data:2", "--layout", "batch:data", "--engine", "lockstep")
    assert (
        "--checkpoint-mode needs --checkpoint DIR; add --checkpoint, or remove --checkpoint-mode"
        in refused(*words, "--checkpoint-mode", "0700")
    )
    place = ("--checkpoint", str(tmp_path / "run"))
    assert "checkpoint mode '0077' must be an octal number that gives the" in refused(
        *words, *place, "--checkpoint-mode", "0077"
    )
    save = Trainer.save

    def saves(trainer: Trainer, *given: Any, **more: Any) -> None:
        (tmp_path / "run" / ".lock").unlink(missing_ok=trainer.step_number > 1)
        save(trainer, *given, **more)

    monkeypatch.setattr(Trainer, "save", saves)
    numbers = ("--steps", "2", "--every", "1", "--held-out", "0")
    done = run(*words, *place, *numbers, "--checkpoint-mode", "0700")
    assert done.exit_code == 0, done.stderr
    assert (
        done.stderr.count(
            "its lock file .lock was removed while this job was running and has been created again; do"
        )
        == 1
    )
    made = [tmp_path / "run", *(tmp_path / "run").glob("step*"), *(tmp_path / "run").glob("step*/*")]
    assert [path.stat().st_mode & 0o777 for path in made] == [0o700] * 3 + [0o600] * 4


def test_the_table_says_what_else_was_decided(run: Callable[..., Result]) -> None:
    how = ("--mesh", "data:2", "--layout", "batch:data", "--storage", "zero2", "--microbatches", "2")
    done = run("train", MLP, *how, "--engine", "lockstep", "--steps", "1", "--held-out", "0")
    assert done.exit_code == 0, done.stderr
    rows = dict(line.split(maxsplit=1) for line in done.stdout.splitlines() if line[:1].strip())
    assert rows["storage"].strip() == "zero2: 5 variables" and rows["microbatches"].strip() == "2"


def test_training_searches_its_layout(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]]
) -> None:
    done = run("train", MLP, "--mesh", "data:2", "--steps", "3", "--held-out", "1")
    assert done.exit_code == 0, done.stderr
    assert "(optimal)" in done.stderr
    assert "step 3/3: loss " in done.stderr
    assert "held-out loss" in done.stdout
    plan = result("search", MLP, "--mesh", "data:2")
    layout = ";".join(f"{name}:{'+'.join(axes)}" for name, axes in plan["layout"].items())
    assert layout in done.stdout


def test_training_under_a_plan(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    plan = str(tmp_path / "plan.json")
    assert run("search", MLP, "--mesh", "data:2", "--out", plan, "--quiet").stderr == ""
    found = result("train", MLP, "--layout", plan, "--steps", "2", "--held-out", "0")
    assert found["layout"] == json.loads(Path(plan).read_text(encoding="utf-8"))["layout"]
    assert found["predicted"] == result("cost", MLP, "--layout", plan)["predicted"]


@pytest.mark.nightly
def test_a_plan_is_held_against_its_own_prediction(
    result: Callable[..., dict[str, Any]], run: Callable[..., Result], tmp_path: Path
) -> None:
    """What the plan said, not what its hardware's profile would say now; of other hardware, by name."""
    plan = tmp_path / "plan.json"
    result("search", MLP, "--mesh", "data:2", "--out", str(plan))
    said = json.loads(plan.read_text())
    said["predicted"]["step_seconds"] = 123.0
    plan.write_text(json.dumps(said))
    asked = ("train", MLP, "--layout", str(plan), "--steps", "2", "--held-out", "0", "--engine", "local")
    found = result(*asked)
    assert (found["predicted"]["step_seconds"], found["hardware"]) == (123.0, "cpu-local")
    told = run(*asked)
    assert "(2.05 min predicted)" in told.stderr and "(predicted 2.05 min for cpu-local)" in told.stdout
    other = run(*asked, "--hardware", "tpu-v4")
    assert "predicted for tpu-v4)" in other.stderr and " for tpu-v4)" in other.stdout


@pytest.mark.parametrize(
    ("engine", "planned", "asked", "found"),
    [
        ("jax", "cpu-jax", None, "cpu-jax"),
        ("local", "cpu-jax", None, "cpu-local"),
        ("lockstep", "cpu-local", None, "cpu-local"),
        ("jax", "tpu-v4", None, "cpu-local"),
        ("jax", "no such file", None, "cpu-local"),
        ("jax", "cpu-jax", "h100", "h100"),
    ],
)
def test_the_machine_of_a_run(
    monkeypatch: pytest.MonkeyPatch, engine: str, planned: str, asked: str | None, found: str
) -> None:
    monkeypatch.setattr("layoutopt.cli.running.machine_of_plan", lambda plan, _: load_hardware(plan))
    given = GivenOptions(mtf.Mesh("a:2"), mtf.Layout(), mtf.Options(), planned)  # type: ignore[arg-type]
    session = Session(Terminal(False, True), engine)
    assert machine_of_run(session, given, asked, None).name == found
    assert runs_on(session.kind, load_hardware(found)) == ((engine, found) in ON_ITS_OWN)


def test_training_on_text_tells_the_unigram_entropy(result: Callable[..., dict[str, Any]]) -> None:
    sizes = (
        "layers=1",
        "d_model=32",
        "d_kv=8",
        "heads=2",
        "d_ff=32",
        "length=16",
        "batch=4",
        "learning_rate=0.01",
    )
    sets = [word for size in sizes for word in ("--set", size)]
    found = result(
        "train",
        "examples/transformer_lm.py",
        *sets,
        "--mesh",
        "data:2",
        "--layout",
        "batch:data",
        "--steps",
        "60",
    )
    assert 3 < found["reference_losses"]["unigram entropy"] < 5
    assert found["held_out"]["loss"] < found["loss"][0] - 1
    assert found["tokens_per_second"] == pytest.approx(64 / found["step_seconds"])


def test_what_replicas_did_since_they_met_is_said(run: Callable[..., Result]) -> None:
    ways = ("--mesh", "sites:2", "--layout", "", "--diloco", "sites:period=2")
    for steps, said in (
        ("1", "not synchronised yet; the held-out"),
        ("3", "last synchronised after step 2"),
    ):
        done = run("train", MLP, "--engine", "lockstep", *ways, "--steps", steps, "--held-out", "0")
        assert done.exit_code == 0 and said in done.stdout
    done = run("train", MLP, "--engine", "lockstep", *ways, "--steps", "2", "--held-out", "0")
    assert " met " not in done.stdout


def test_data_that_fails_is_one_line(refused: Callable[..., str], tmp_path: Path) -> None:
    text = Path("examples/starters/mesh_tf.py").read_text(encoding="utf-8")
    file = tmp_path / "model.py"
    file.write_text(text.replace('yield {"x"', 'yield {"y"'), encoding="utf-8")
    line = refused(
        "train", str(file), "--mesh", "data:2", "--layout", "batch:data", "--quiet", "--steps", "1"
    )
    assert "data() yielded a batch without the input 'x'" in line
    line = refused("train", str(file), "--layout", "batch:data", "--quiet")
    assert "--mesh is missing" in line
    line = refused("train", str(file), "--mesh", "data:2", "--steps", "0")
    assert "--steps" in line


def test_a_model_without_data_is_refused_before_any_work(refused: Callable[..., str], tmp_path: Path) -> None:
    """One line: nothing was searched and no device was started before."""
    model = tmp_path / "train.py"
    model.write_text("from examples.mlp import model\n")
    said = refused("train", str(model), "--mesh", "data:2")
    assert said.endswith(
        "train.py has no function data(); define data(**hparams) in the same file as model()"
    )


@pytest.mark.parametrize(("option", "value"), [("--collective-matmul", "hidden"), ("--schedule", "1f1b")])
def test_what_auto_does_not_decide_is_named(refused: Callable[..., str], option: str, value: str) -> None:
    said = refused("train", MLP, "--layout", "auto", "--mesh", "data:2", option, value)
    assert f"--layout auto searches with the defaults of `search`; remove {option}" in said


@pytest.mark.parametrize(
    ("kind", "platform", "asked", "found", "said"),
    [
        ("NVIDIA H100 80GB HBM3", "gpu", None, "h100", ""),
        ("TPU v5 lite", "tpu", None, "tpu-v5e", ""),
        ("NVIDIA H100 80GB HBM3", "gpu", "a100", "a100", ""),
        (
            "NVIDIA L4",
            "gpu",
            None,
            "cpu-local",
            "no preset describes NVIDIA L4, so predictions",
        ),
        ("cpu", "cpu", None, "cpu-local", ""),
    ],
)
def test_a_run_is_predicted_for_the_accelerators_that_it_is_on(
    kind: str,
    platform: str,
    asked: str | None,
    found: str,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(compat, "running", lambda: True)
    monkeypatch.setattr(compat, "device_kind", lambda: (kind, platform))
    session = Session(Terminal(False, False), "jax")
    assert machine_here(session, asked, None).name == found
    assert said in capsys.readouterr().err


def test_no_two_presets_are_of_one_device() -> None:
    kinds = [kind for name in hardware_names() for kind in load_hardware(name).jax_devices]
    assert len(kinds) == len(set(kinds)) > 10
