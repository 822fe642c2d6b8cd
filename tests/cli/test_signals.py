"""Signals: who hears them, when, and what becomes of a command."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from layoutopt.runtime import signals

ROOT = Path(__file__).resolve().parents[2]
EVERY = pytest.mark.parametrize("number", signals.ENDING, ids=lambda number: signal.Signals(number).name)


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Signals of a test are never one request, unless it says so; handlers are left as they were."""
    monkeypatch.setattr(signals, "BURST", 0.0)
    before = [signal.getsignal(number) for number in signals.ENDING]
    yield
    assert [signal.getsignal(number) for number in signals.ENDING] == before


@EVERY
def test_work_that_is_told_goes_on_to_its_end(number: int) -> None:
    told: list[str] = []
    with signals.command(), signals.handled(lambda: told.append("stop")):
        signal.raise_signal(number)
        told.append("still at work")
    assert told == ["stop", "still at work"]
    assert signals.exit_code() == 128 + number


@EVERY
def test_other_work_is_interrupted(number: int) -> None:
    with pytest.raises(KeyboardInterrupt), signals.command():
        signal.raise_signal(number)
    assert signals.exit_code() == 128 + number


def test_ctrl_c_again_interrupts_work_that_was_told() -> None:
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt), signals.command(), signals.handled(lambda: told.append("stop")):
        signal.raise_signal(signal.SIGINT)
        told.append("still at work")
        signal.raise_signal(signal.SIGINT)
    assert told == ["stop", "still at work"]


@pytest.mark.parametrize("first", signals.ENDING)
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
def test_what_machines_repeat_is_one_request(first: int, second: int) -> None:
    told: list[str] = []
    with signals.command(), signals.handled(lambda: told.append("stop")):
        signal.raise_signal(first)
        signal.raise_signal(second)
    assert told == ["stop"] and signals.exit_code() == 128 + first


def test_a_ctrl_c_that_is_forwarded_counts_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "BURST", 60.0)
    told: list[str] = []
    with signals.command(), signals.handled(lambda: told.append("stop")):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
    assert told == ["stop"]


def test_the_innermost_work_is_told_first() -> None:
    told: list[str] = []
    with signals.command(), signals.handled(lambda: told.append("outer")):
        with signals.handled(lambda: told.append("inner")):
            pass
        signal.raise_signal(signal.SIGINT)
        with signals.handled(lambda: told.append("inner")):
            signal.raise_signal(signal.SIGINT)
    assert told == ["outer", "inner"]


def test_without_a_command_ctrl_c_is_told() -> None:
    told: list[str] = []
    with pytest.raises(KeyboardInterrupt), signals.handled(lambda: told.append("stop")):
        signal.raise_signal(signal.SIGINT)
        told.append("still at work")
        signal.raise_signal(signal.SIGINT)
    assert told == ["stop", "still at work"]


@EVERY
def test_what_was_ignored_stays_ignored(number: int) -> None:
    before = signal.signal(number, signal.SIG_IGN)
    try:
        with signals.command(), signals.handled(lambda: pytest.fail("told")):
            signal.raise_signal(number)
            assert signal.getsignal(number) is signal.SIG_IGN
    finally:
        signal.signal(number, before)


def test_an_import_is_not_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "import signal, time\nsignal.raise_signal(signal.SIGTERM)\ntime.sleep(0.2)\nwhole = True\n"
    (tmp_path / "module_of_a_library.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(KeyboardInterrupt), signals.command():
        module = importlib.import_module("module_of_a_library")
        assert module.whole
        while True:
            signal.pause()
    assert signals.exit_code() == 143


# -- in processes of their own -------------------------------------------------------------------------------


def python(text: str, *args: str) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-c", text, *args]
    return subprocess.run(words, capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)


@EVERY
@pytest.mark.parametrize(
    "where", ["layoutopt.runtime.signals", "typer", "layoutopt.cli.application", "layoutopt.cli.search"]
)
def test_no_traceback_while_the_command_line_is_imported(where: str, number: int) -> None:
    text = (
        "import importlib.abc, runpy, signal, sys\n"
        "where, number = sys.argv[1], int(sys.argv[2])\n"
        "class Now(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, path, target=None):\n"
        "        if name == where:\n"
        "            signal.raise_signal(number)\n"
        "sys.meta_path.insert(0, Now())\n"
        "sys.argv = ['layoutopt', 'search', '--help']\n"
        "runpy.run_module('layoutopt', run_name='__main__')\n"
    )
    done = python(text, where, str(int(number)))
    code = -number if where == "layoutopt.runtime.signals" else 128 + number  # to a shell they are the same
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_the_console_script_hears_signals_first() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"] == {"layoutopt": "layoutopt.__main__:main"}


STUCK = """
import ctypes, os, signal, sys, threading, time
from layoutopt.runtime import signals

signals.STUCK, signals.PATIENCE = 0.2, 0.4
number, mutex = int(sys.argv[1]), ctypes.create_string_buffer(64)

def ask():
    for _ in range(3):
        time.sleep(0.4)
        os.kill(os.getpid(), number)

signals.start()
with signals.command():
    threading.Thread(target=ask, daemon=True).start()
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
    ctypes.CDLL(None).pthread_mutex_lock(mutex)  # in C for ever
"""


@EVERY
def test_a_process_that_is_stuck_in_a_library_ends(number: int) -> None:
    done = python(STUCK, str(int(number)))
    assert (done.returncode, done.stderr) == (128 + number, "")


WORKING = """
import os, signal, sys, time
from layoutopt.runtime import signals

signals.PATIENCE = 0.2
signals.start()
with signals.command():
    with signals.handled(lambda: print("told", flush=True)):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1.5)
    print("done", flush=True)
"""


def test_work_that_was_told_has_its_time() -> None:
    done = python(WORKING)
    assert (done.returncode, done.stdout, done.stderr) == (0, "told\ndone\n", "")


def test_an_import_is_not_waited_for_where_nothing_can_be_lost(tmp_path: Path) -> None:
    slow = "import signal, time\nsignal.raise_signal(signal.SIGINT)\ntime.sleep(60)\n"
    (tmp_path / "slow.py").write_text(slow)
    program = """
from layoutopt.runtime import signals
with signals.command(), signals.nothing_to_keep(lambda: print("said", flush=True)):
    with signals.nothing_to_keep(lambda: print("the inner one knows less")):
        with signals.put_right(lambda: print("put right", flush=True)):
            import slow
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (130, "put right\nsaid\n", "")


def test_work_that_is_told_outlives_an_import_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signalled.py").write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")
    monkeypatch.syspath_prepend(tmp_path)
    told: list[str] = []
    left = signals.nothing_to_keep(lambda: told.append("left"))
    with signals.command(), left, signals.handled(lambda: told.append("stop")):
        importlib.import_module("signalled")
        while not told:
            time.sleep(0.01)
    assert told == ["stop"]
