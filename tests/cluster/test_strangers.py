"""A job believes its own processes alone: what others write to its coordinator changes and ends nothing."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import mesh_tf_core as mtf
from layoutopt.runtime import launching
from mesh_tf_core.engines.jax import codes, coordinator, rendezvous, store, watch
from mesh_tf_core.engines.jax.codes import DIGITS, SECRET, SECRET_FILE, Codes, given_secret
from mesh_tf_core.engines.jax.rendezvous import SOCKET
from mesh_tf_core.training import checkpoint
from mesh_tf_core.training.saving import Saver
from tests.cluster.job import ROOT, Job, contents, wait_for
from tests.cluster.test_agreement import Job as Members
from tests.cluster.test_agreement import Store, job
from tests.cluster.test_together import save
from tests.jax_process import free_port

__all__ = ["job"]

NOBODY = 65534
STRANGER = Path(__file__).with_name("stranger.py")
as_nobody = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("setpriv") is None, reason="only root can run a part as another user"
)


# -- codes ---------------------------------------------------------------------------------------------------


def test_a_code_is_of_one_secret_one_key_and_one_run() -> None:
    one, same, other = Codes(b"s" * 16), Codes(b"s" * 16), Codes(b"t" * 16)
    message = one.sealed("round/1/0", "[1]")
    assert len(message) == DIGITS + 3 and same.opened("round/1/0", message) == "[1]"
    assert other.opened("round/1/0", message) is None
    for key, text in (("round/1/1", message), ("round/1/0", "[1]"), ("round/1/0", message[:-1] + "2")):
        assert same.opened(key, text) is None
    assert same.opened("round/1/", f"{message[:DIGITS]}0[1]") is None  # where the key ends is part of it
    for text in ("", "\u202e" * 80, "\ud800" * 70):
        assert same.opened("round/1/0", text) is None
    one.begin(["a", "b"])
    same.begin(["a", "c"])
    assert same.opened("round/1/0", one.sealed("round/1/0", "[1]")) is None
    assert one.opened("round/1/0", message) is None  # of before the run


def test_the_secret_comes_from_a_variable_or_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (SECRET, SECRET_FILE):
        monkeypatch.delenv(name, raising=False)
    assert given_secret() == b""
    file = tmp_path / "secret"
    file.write_text("f" * 32 + "\n")
    file.chmod(0o600)
    monkeypatch.setenv(SECRET_FILE, str(file))
    assert given_secret() == b"f" * 32
    file.chmod(0o640)
    with pytest.raises(mtf.UserError, match="and mode 0640, so other users can read or change it; make"):
        given_secret()
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name, said in (("pipe", "it is a named pipe"), ("none", "cannot be read: No such file")):
        monkeypatch.setenv(SECRET_FILE, str(tmp_path / name))
        with pytest.raises(mtf.UserError, match=said):
            given_secret()
    monkeypatch.setenv(SECRET, "s" * 16)
    with pytest.raises(mtf.UserError, match=r"both LAYOUTOPT_JOB_SECRET and.*are set; set only one of them"):
        given_secret()
    monkeypatch.setenv(SECRET_FILE, "")
    assert given_secret() == b"s" * 16
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(mtf.UserError, match="has 5 bytes, but it must have 16 to 4096; make one with"):
        given_secret()
    assert "secret" not in repr(rendezvous.JobAddress(None, None, None, b"x" * 20))


def test_processes_with_other_secrets_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SILENCE", 0.2)
    monkeypatch.setattr(store, "BEAT", 0.05)
    there, said = Store(), list[str]()
    first, second = (store.JobStore(there, Codes(secret), said.append) for secret in (b"a" * 16, b"b" * 16))
    first.take_number(0)
    second.take_number(1)
    with pytest.raises(mtf.ClusterError, match="cannot be authenticated: a process outside the job wrote to"):
        first.begin_run(2)
    assert len(said) == 1 and said[0].endswith("; the message is ignored")


def test_a_recorded_run_with_the_same_secret_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody writes all that was said in an earlier run, before the process of this run says anything."""
    monkeypatch.setattr(watch, "SILENCE", 0.2)
    monkeypatch.setattr(store, "BEAT", 0.05)

    def pair(there: Store) -> list[store.JobStore]:
        return [store.JobStore(there, Codes(b"s" * 16), lambda text: None) for _ in range(2)]

    before, now = Store(), Store()
    for number, one in enumerate(old := pair(before)):
        one.take_number(number)
    for one in old:
        one.begin_run(2)
    old[0].put("checkpoint 1/folder", "old")
    first, second = pair(now)
    second.take_number(1)
    now.values |= {key: value for key, value in before.values.items() if key != "layoutopt/number/1"}
    second.begin_run(2)  # it believes the old number 0
    with pytest.raises(mtf.ClusterError, match="'checkpoint 1/folder' cannot be authenticated"):
        wait_for(lambda: second.wanted("checkpoint 1/folder"), 10, "a refusal")
    del first


# -- what strangers write ------------------------------------------------------------------------------------


def test_what_strangers_write_is_named_and_ignored(
    job: Members, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = job.join(0, 1, 2)
    forged = {"now/failure": "ended", "now/stop": "1", "now/begun 1": "1", "now/²": "x", "now/2": "[1]"}
    forged |= {f"now/{n}": "\n" * n for n in range(100, 200)}
    forged["checkpoint 1/folder"] = json.dumps({"said": [str(tmp_path / "outside")]})
    for key, value in forged.items():
        job.store.key_value_set(f"layoutopt/{key}", value, allow_overwrite=True)
    time.sleep(0.3)
    savers = [Saver(one) for one in members]
    job.together(lambda one: save(one, savers[one.index], tmp_path / "saved", 1))
    assert [one.failure for one in members] == [""] * 3 and all(one.begins(2) for one in members)
    assert [path.name for path in tmp_path.iterdir()] == ["saved"]
    said = capsys.readouterr().err
    assert "cannot be authenticated: a process outside the job wrote to" in said
    assert said.count("\n") <= 3 * store.NAMED  # and no more, whatever is written


def test_an_old_sign_of_life_is_none(job: Members) -> None:
    first, _, third = job.join(0, 1, 2)
    old = wait_for(lambda: job.store.values.get("layoutopt/now/2"), 5, "a sign of life")
    time.sleep(0.3)
    job.silence(third)
    until = time.monotonic() + 5
    turn = [old, wait_for(lambda: job.store.values.get("layoutopt/now/2"), 5, "another one")]
    while not first.failure and time.monotonic() < until:
        turn.reverse()
        job.store.key_value_set("layoutopt/now/2", turn[0], allow_overwrite=True)
        time.sleep(0.02)
    assert "worker 2" in first.failure and "was lost: no heartbeat" in first.failure


def test_a_message_that_is_overwritten_ends_the_job_in_one_line(job: Members) -> None:
    members = job.join(0, 1, 2)
    members[0].post(members[0].store.topic("checkpoint") + "/folder", {"said": ["x"]})
    job.store.key_value_set("layoutopt/checkpoint 1/folder", '{"said": ["/"]}', allow_overwrite=True)
    with pytest.raises(
        mtf.ClusterError,
        match=r"'checkpoint 1/folder' cannot be authenticated.* so the job cannot continue$",
    ):
        members[1].fetch("checkpoint 1/folder")


@pytest.mark.parametrize("name", [".step-000000002.0123456789abcdef", "step-000000001", "", "/", "../x", 7])
def test_a_folder_is_believed_below_ones_own_directory_alone(tmp_path: Path, name: Any) -> None:
    """Even of worker 0."""
    from mesh_tf_core.training import folders

    with pytest.raises(mtf.UserError, match=", which is not an unfinished checkpoint of step"):
        folders.begun(tmp_path, 1, name)
    found = folders.begun(tmp_path, 2, ".step-000000002.0123456789abcdef")
    assert found.parent == tmp_path


# -- as another user -----------------------------------------------------------------------------------------


def stranger(address: str, outside: str, user: int | None = None) -> Any:
    """What a stranger could do."""
    words = [sys.executable, "-P", str(STRANGER), address, outside]
    if user is not None:
        words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups", *words]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=120, cwd="/")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


TRAIN = ["train", "examples/mlp.py", "--mesh", "data:2", "--layout", "batch:data", "--held-out", "0"]


@as_nobody
@pytest.mark.nightly
def test_another_user_cannot_reach_a_launched_job(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    numbers = ["--steps", "400", "--every", "20", "--checkpoint", str(saved), "--checkpoint-mode", "0700"]
    with Job(["-n", "2"], [*TRAIN, *numbers], saved) as launched:
        wait_for(lambda: launched.newest() >= 20, 100, "a checkpoint")
        (pid, *_) = launched.workers().values()
        environment = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
        address = next(e for e in environment if e.startswith(rendezvous.ADDRESS)).partition("=")[2]
        assert address.startswith(SOCKET) and Path(address.removeprefix(SOCKET)).is_socket()
        found = stranger(address, str(tmp_path / "outside"), NOBODY)
        assert launched.newest() < 400, "too fast: raise the number of steps"
        code, _ = launched.end(200)
        log = launched.log()
    assert found == {**found, "uid": NOBODY, "joined": False, "read": 0, "error": "Permission denied"}, found
    assert code == 0 and "; restarting" not in log and "warning" not in log, log
    assert contents(saved, 400) and {path.stat().st_mode & 0o777 for path in saved.glob("step*/*")} == {0o600}
    wait_for(lambda: not Path(address.removeprefix(SOCKET)).parent.exists(), 30, "the folder's end")


@pytest.fixture
def by_port(tmp_path: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]], Path]]:
    """A job of two processes that meet at a port, as on several hosts, with one secret."""
    address, saved = f"127.0.0.1:{free_port()}", tmp_path / "saved"
    numbers = ["--steps", "400", "--every", "20", "--checkpoint", str(saved), "--timeout", "60"]
    place = ["--coordinator", address, "--processes", "2", "--start-timeout", "60"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "layoutopt", *TRAIN, *numbers, *place, "--process", str(index)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), SECRET: "s" * 32, "JAX_PLATFORMS": "cpu"},
        )
        for index in range(2)
    ]
    yield address, started, saved
    for one in started:
        one.kill()
        one.communicate()


@pytest.mark.nightly
def test_a_stranger_changes_nothing_in_a_job_that_meets_at_a_port(
    by_port: tuple[str, list[subprocess.Popen[str]], Path], tmp_path: Path
) -> None:
    address, started, saved = by_port
    wait_for(lambda: checkpoint.listed(saved), 100, "a checkpoint")
    found = stranger(address, str(tmp_path / "outside"), NOBODY if os.geteuid() == 0 else None)
    ended = [one.communicate(timeout=200)[1] for one in started]
    assert found["joined"] and found["read"] > 2 and found["written"] > 40, found
    assert [one.returncode for one in started] == [0, 0], ended
    assert "warning: the message 'now/" in ended[0] and "Traceback" not in "".join(ended)
    assert {path.name for path in tmp_path.iterdir()} == {"saved"} and contents(saved, 400)


@pytest.mark.parametrize("path", ["", "/" + 107 * "x"])
def test_a_socket_has_a_name_that_the_system_takes(path: str) -> None:
    with pytest.raises(mtf.UserError, match="is empty or longer than 107 bytes; choose a shorter name"):
        rendezvous.JobAddress.of(f"{SOCKET}{path}", 2, 0)
    assert rendezvous.JobAddress.of(f"{SOCKET}/{106 * 'x'}", 2, 0).process == 0


def test_the_coordinator_sees_who_is_connected(tmp_path: Path) -> None:
    place = str(tmp_path / "a name with spaces")
    with socket.socket(socket.AF_UNIX) as server, socket.create_server(("127.0.0.1", 0)) as port:
        server.bind(place)
        server.listen()
        for one, address in (
            (server, SOCKET + place),
            (port, f"127.0.0.1:{port.getsockname()[1]}"),
        ):
            assert not coordinator.connected(address)
            with socket.socket(one.family) as client:
                client.connect(one.getsockname())
                with one.accept()[0]:
                    assert coordinator.connected(address)
        assert not coordinator.connected(SOCKET + place + "x")


def test_launch_gives_every_start_a_secret_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    places: list[dict[str, str]] = []

    begin = subprocess.Popen

    def started(command: Any, env: dict[str, str], **_: Any) -> subprocess.Popen[bytes]:
        places.append(env)
        folder = Path(env[rendezvous.ADDRESS].removeprefix(SOCKET)).parent
        assert folder.stat().st_mode & 0o777 == 0o700
        return begin(["true"])

    monkeypatch.setattr(launching.subprocess, "Popen", started)
    for _ in range(2):
        launching.run_once(["train"], 2)
    (a, b, c, d) = (place[SECRET] for place in places)
    assert a == b and c == d and a != c and len(a) == 64 and {place[SECRET_FILE] for place in places} == {""}
    assert codes.SHORTEST <= len(a) <= codes.LONGEST
