"""Local workers: exit codes, restarts, and that none of them outlives the launcher."""

from __future__ import annotations

import inspect
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from layoutopt.cli import app
from layoutopt.runtime import launching
from layoutopt.runtime.launching import Attempt, launch, run_once
from mesh_tf_core.engines import Cluster
from mesh_tf_core.engines.jax import rendezvous
from mesh_tf_core.errors import ClusterError, UserError
from tests.cluster.job import ROOT, Job, wait_for
from tests.jax_process import free_port
from tests.marks import by_day

WAITS = "import os, time\nopen(f'{os.path.dirname(__file__)}/{os.getpid()}', 'w').close()\ntime.sleep(600)\n"
LEAVES = "import os\nif int(os.environ['JAX_PROCESS_ID']): os._exit(7)\n"


@pytest.mark.parametrize(
    ("codes", "stuck", "culprit", "code", "reason"),
    [
        ((0, 0), (), None, 0, None),
        ((5, -9), (), 1, 137, "worker 1 was killed by SIGKILL"),
        ((5, -15), (1,), 1, 5, "worker 1 stopped responding"),
        ((-15, 1), (0,), 1, 1, "worker 1 ended with exit code 1"),
        ((5, 3, -9), (), 1, 3, "worker 1 ended with exit code 3"),
        ((5, 5), (), 0, 5, "worker 0 ended with exit code 5"),
    ],
)
def test_whose_end_the_others_follow(
    codes: tuple[int, ...], stuck: tuple[int, ...], culprit: int | None, code: int, reason: str | None
) -> None:
    attempt = Attempt(codes, stuck, ("",) * len(codes))
    assert (attempt.culprit, attempt.exit_code) == (culprit, code)
    if reason is not None:
        assert attempt.reason() == reason


@pytest.fixture
def attempts(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Callable[[], Attempt]]], None]:
    """Attempts that end as told."""

    def plan(ends: list[Callable[[], Attempt]]) -> None:
        left = iter(ends)
        monkeypatch.setattr(launching, "run_once", lambda *_: next(left)())

    return plan


def killed() -> Attempt:
    return Attempt((5, -9), (), ("", ""))


def done() -> Attempt:
    return Attempt((0, 0), (), ("", ""))


def test_a_step_to_resume_from_is_chosen_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A job that was told to go back to step 5 and is started again goes on from what it has saved since."""
    words, seen = ["train", "--resume", "5", "model.py", "--steps=9"], list[list[str]]()
    for step in (5, 10):
        (tmp_path / f"step-{step:09d}").mkdir()

    def run(command: list[str], processes: int) -> Attempt:
        seen.append(list(command))
        if len(seen) == 2:  # sets step 10 aside, saves it again, and is killed
            (tmp_path / "step-000000010").rename(tmp_path / "step-000000010.aside")
            (tmp_path / "step-000000010").mkdir()
        return done() if len(seen) == 3 else killed()

    monkeypatch.setattr(launching, "run_once", run)
    assert launch(words, 2, 2, tmp_path) == 0
    assert seen == [words, words, ["train", "model.py", "--steps=9"]]


def test_a_job_is_started_again_from_its_checkpoint(
    attempts: Callable[[list[Callable[[], Attempt]]], None], tmp_path: Path
) -> None:
    def saved(step: int) -> Callable[[], Attempt]:
        def end() -> Attempt:
            (tmp_path / f"step-{step:09d}").mkdir()
            return killed()

        return end

    said: list[str] = []
    attempts([killed, saved(5), killed, saved(10), killed, done])
    assert launch(["train"], 2, 2, tmp_path, said.append) == 0
    assert [text.partition("; ")[2] for text in said] == [
        "restarting from the beginning, because there is no checkpoint yet (restart 1 of 2)",
        "restarting from step-000000005 (restart 1 of 2)",
        "restarting from step-000000005 (restart 2 of 2)",
        "restarting from step-000000010 (restart 1 of 2)",
        "restarting from step-000000010 (restart 2 of 2)",
    ]


def test_it_is_given_up(attempts: Callable[[list[Callable[[], Attempt]]], None], tmp_path: Path) -> None:
    said: list[str] = []
    attempts([killed] * 3)
    assert launch(["train"], 2, 2, tmp_path, said.append) == 137
    assert said[-1] == "worker 1 was killed by SIGKILL; stopped after 2 restarts without a new checkpoint"
    attempts([killed])
    assert launch(["train"], 2, 2, None, said.append) == 137
    assert said[-1] == "worker 1 was killed by SIGKILL; add --checkpoint DIR to resume after a failure"


def test_wrong_input_is_not_tried_again(
    attempts: Callable[[list[Callable[[], Attempt]]], None], tmp_path: Path
) -> None:
    said: list[str] = []
    attempts([lambda: Attempt((5, 2), (), ("", "error: no such file"))])
    assert launch(["train"], 2, 2, tmp_path, said.append) == 2
    assert said == ["worker 1 ended with exit code 2: error: no such file"]
    attempts([lambda: Attempt((2, 2), (), ("", "error: no such file"))])
    assert launch(["train"], 2, 2, tmp_path, said.append) == 2
    assert len(said) == 1  # worker 0 has shown it


@pytest.mark.nightly
def test_the_others_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "SETTLE", 0.0)
    monkeypatch.chdir(ROOT)
    file = tmp_path / "model.py"
    file.write_text(LEAVES + WAITS, encoding="utf-8")
    attempt = run_once(["train", "--cluster", str(file), "--mesh", "data:2"], 2)
    assert (attempt.codes[1], attempt.stuck, attempt.culprit) == (7, (0,), 1)


def test_what_is_refused_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launching, "SETTLE", 600.0)
    monkeypatch.setattr(launching, "REFUSED", 0.0)
    monkeypatch.chdir(ROOT)
    file = tmp_path / "model.py"
    file.write_text(LEAVES.replace("7", "2") + WAITS, encoding="utf-8")
    attempt = run_once(["train", "--cluster", str(file), "--mesh", "data:2"], 2)
    assert (attempt.codes[1], attempt.stuck, attempt.exit_code) == (2, (0,), 2)


@pytest.mark.parametrize(
    ("number", "code"),
    by_day(
        [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL), (signal.SIGHUP, 129)]
    ),
)
@pytest.mark.nightly
def test_no_worker_outlives_the_launcher(tmp_path: Path, number: int, code: int) -> None:
    file = tmp_path / "model.py"
    file.write_text(WAITS, encoding="utf-8")
    with Job(["-n", "2"], ["train", str(file), "--mesh", "data:2"], tmp_path / "saved") as job:

        def waiting() -> set[int]:
            return {int(p.name) for p in tmp_path.glob("[0-9]*")} & set(job.workers().values())

        pids = wait_for(lambda: len(found := waiting()) == 2 and found, 60, "the start of two workers")
        os.kill(min(pids), signal.SIGSTOP)
        job.process.send_signal(number)
        assert job.end(30)[0] == code
        wait_for(lambda: not any(map(runs, pids)), 30, "the end of the workers")


def runs(pid: int) -> bool:
    """Whether a process is there and not only waits for somebody to ask how it ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_an_abort_is_told_by_its_message(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    notes.write_text("F1122 no answer\n*** Check failure stack trace: ***\n    @   0x7f00 (unknown)\n\n")
    with notes.open("rb") as file:
        assert launching._last_line(file) == "F1122 no answer"


def test_launch_tells_what_it_takes() -> None:
    found = CliRunner().invoke(app, ["launch", "-n", "2", "--", "search", "examples/mlp.py"])
    assert found.exit_code == 2
    assert "error: launch runs only train, calibrate, measure, validate, generate in several" in found.stderr


@pytest.mark.parametrize("words", [["--process", "1"], ["--processes=2"], ["--coordinator", "127.0.0.1:99"]])
def test_launch_alone_says_who_the_workers_are(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With one number for all of them JAX aborts with the addresses of its stack."""
    monkeypatch.setattr(launching, "launch", lambda *_: pytest.fail("it starts workers"))
    found = CliRunner().invoke(app, ["launch", "--", "train", "examples/mlp.py", *words])
    assert found.exit_code == 2
    assert f"and their coordinator; remove {words[0].partition('=')[0]}, or start" in found.stderr


def test_launch_looks_where_the_command_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launching, "launch", lambda *given: asked.append(given[3]) or 0)
    command = ["train", "examples/mlp.py", "--checkpoint", "one", "--checkpoint=two"]
    assert CliRunner().invoke(app, ["launch", "--", *command]).exit_code == 0
    assert asked == [Path("two")]


def test_an_engine_of_one_process_is_refused_before_anybody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_tf_core.engines.Cluster.join", lambda one: pytest.fail("it waits"))
    place = ["--coordinator", "127.0.0.1:1", "--processes", "2", "--process", "0"]
    found = CliRunner().invoke(
        app, ["train", "examples/mlp.py", "--mesh", "data:2", "--engine", "local", *place]
    )
    assert found.exit_code == 2
    assert "' runs in one process only; use the engine 'jax' for several" in found.stderr


def test_a_process_that_never_comes_is_told() -> None:
    """JAX would abort the process that waits, with the addresses of its stack."""
    place = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process", "1"]
    words = ["train", "examples/mlp.py", "--mesh", "data:2", *place, "--start-timeout", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "layoutopt", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == ClusterError.exit_code, done.stderr
    assert done.stderr.startswith(
        f"error: not all processes of the job connected to {place[1]} within 1 s; check"
    )
    assert done.stderr.count("\n") == 1


def test_a_number_that_the_job_has_not_is_refused() -> None:
    """JAX would abort the process, with the addresses of its stack."""
    port = free_port()
    service = rendezvous._Coordinator(f"127.0.0.1:{port}", 2)
    words = ["--coordinator", f"127.0.0.1:{port}", "--processes", "3", "--process", "2"]
    command = [sys.executable, "-m", "layoutopt", "train", "examples/mlp.py", "--mesh", "data:3", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    service.shutdown()
    service._process.wait()
    assert done.returncode == 2, done.stderr
    assert f"the coordinator at 127.0.0.1:{port} rejected process 2 of 3: another process has" in done.stderr
    assert done.stderr.count("\n") == 1


def test_two_jobs_do_not_share_a_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh_tf_core.engines.jax.coordinator.LINGER", 0.0)
    said = r"process 0 cannot listen on .* in use\); check whether another job"
    with (
        socket.create_server(("127.0.0.1", 0), reuse_port=True) as taken,
        pytest.raises(UserError, match=said),
    ):
        rendezvous._Coordinator(f"127.0.0.1:{taken.getsockname()[1]}", 2)


def test_the_options_say_how_long_a_job_waits() -> None:
    """The command line shows what `mtf.Cluster` does by default without loading it."""
    waits = {name: p.default for name, p in inspect.signature(Cluster).parameters.items()}
    said = {p.name: p.show_default for p in typer.main.get_command(app).commands["train"].params}  # type: ignore[attr-defined]
    assert said["timeout"] == f"{waits['timeout']:g}"
    assert said["start_timeout"] == f"{waits['start_timeout']:g}"


@pytest.mark.nightly
def test_two_processes_measure_validate_and_generate(tmp_path: Path) -> None:
    """What one process gives, two give: losses, counted bytes, texts. One of them speaks."""

    def printed(*words: str, together: bool = True) -> Any:
        launched = ["launch", "-n", "2", "--"] if together else []
        command = [sys.executable, "-m", "layoutopt", *launched, *words, "--json"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout)

    where = ("examples/mlp.py", "--mesh", "data:2;model:2", "--layout", "batch:data;hidden:model")
    alone = printed("measure", *where, "--engine", "jax", "--steps", "2", together=False)
    found = printed("measure", *where, "--steps", "2")
    assert found["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert found["communication_bytes_per_device"] == alone["communication_bytes_per_device"]
    out = tmp_path / "validation.json"
    rows = printed("validate", *where[:3], "--layouts", "2", "--steps", "2", "--out", str(out))["rows"]
    assert [row["measured_seconds"] > 0 for row in rows] == [True, True]
    assert json.loads(out.read_text())["rows"] == rows

    model = ("examples/transformer_lm.py", "--mesh", "data:2", "--layout", "batch:data")
    sizes = [f"--set={text}" for text in ("layers=1", "d_model=32", "d_ff=32", "length=16", "batch=2")]
    saved = ("--checkpoint", str(tmp_path / "run"))
    printed("train", *model, *sizes, *saved, "--steps", "2", "--held-out", "0")
    asked = ("generate", *model, *sizes[:-1], *saved, "--prompt", "def ", "--prompt", "import ")
    together, alone = (
        [text["continuations"][0] for text in found["texts"]]
        for found in (printed(*asked), printed(*asked, "--engine", "local", together=False))
    )
    assert len(together) == 2
    assert [x["text"] for x in together] == [x["text"] for x in alone]
    assert [x["score"] for x in together] == pytest.approx([x["score"] for x in alone], rel=1e-5)


@pytest.mark.parametrize(
    ("environment", "words", "why"),
    [
        ({}, [], "error: cluster: JAX found no job of Slurm"),
        (
            {"JAX_COORDINATOR_ADDRESS": "host0"},
            [],
            "error: cluster: coordinator 'host0' is not an address HOST:PORT",
        ),
        (
            {},
            ["--coordinator", "host0:1"],
            "cluster: coordinator host0:1 also needs the number of processes",
        ),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "two"}, [], "error: cluster: JAX_PROCESS_ID is 'two'"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}, [], "cluster: a rank or a number of processes"),
        (
            {},
            ["--coordinator", "h:1", "--processes", "2", "--process", "2"],
            "cluster: rank 2 does not exist among",
        ),
    ],
)
def test_a_cluster_needs_its_description(
    environment: dict[str, str], words: list[str], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not environment and not words:  # what JAX says in a process that has not used it yet
        monkeypatch.setattr("jax.distributed.initialize", refuse)
        monkeypatch.setattr("mesh_tf_core.engines.jax.compat.running", lambda: False)
    file = str(ROOT / "examples/mlp.py")
    found = CliRunner().invoke(app, ["train", file, "--cluster", "--mesh", "data:2", *words])
    assert (found.exit_code, why in found.stderr) == (2, True), found.stderr


def refuse(*_: object, **__: object) -> None:
    raise ValueError("coordinator_address should be defined.")
