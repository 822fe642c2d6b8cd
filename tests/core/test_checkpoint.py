"""Checkpoint files: whole, atomic, checked; written beside the training; errors in words."""

from __future__ import annotations

import fcntl
import json
import math
import os
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh_tf_core.engines.pieces import VariablePiece
from mesh_tf_core.errors import UserError
from mesh_tf_core.training import array_files, checkpoint, folders, locking, manifest
from mesh_tf_core.training.locking import locked
from mesh_tf_core.training.saving import Saver
from tests.core.saved import VALUES, cut, piece, whole

ROOT = Path(__file__).resolve().parents[2]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 12, whole(VALUES), {"data": {9: (1, 2), 10: math.inf}})
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (12, ())
    assert found.extra == {"data": {"9": [1, 2], "10": math.inf}}  # as JSON gives it back
    for name, value in VALUES.items():
        read = found.read(name)
        assert read.dtype == value.dtype
        np.testing.assert_array_equal(read, value)
    with pytest.raises(UserError, match="has no variable 'c'; known: b, none, step, w"):
        found.read("c")
    assert checkpoint.newest(tmp_path / "elsewhere") is None


def test_the_newest_are_kept_and_remains_are_removed(tmp_path: Path) -> None:
    (tmp_path / ".step-000000001.123").mkdir()
    for step in (2, 3, 5, 8):
        checkpoint.write(tmp_path, step, whole(VALUES), {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000005", "step-000000008"]
    checkpoint.write(tmp_path, 4, whole(VALUES), {"again": True}, keep=2)  # later ones were passed over, say
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000004", "step-000000008"]
    checkpoint.write(tmp_path, 8, whole(VALUES), {"again": True}, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.extra == {"again": True}


THEIRS = (
    "step-000000001-best",
    "step-final",
    "step-1",
    "step-0000000010",
    "step-\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661\u0661",
    "my-step-000000007",
    ".step-notes",
    ".step-000000001.best",
    "step-9999999999999999999",
)


def test_only_names_that_are_ours_are_counted_or_removed(tmp_path: Path) -> None:
    for name in THEIRS:
        (tmp_path / name).mkdir()
    (tmp_path / "step-000000009").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-000000008").symlink_to(tmp_path / "elsewhere")
    (tmp_path / ".step-000000003.0123456789abcdef").mkdir()
    before = {p.name for p in tmp_path.iterdir()} - {".step-000000003.0123456789abcdef"}
    assert checkpoint.newest(tmp_path) is None
    for step in (1, 2, 3, 10**9):
        checkpoint.write(tmp_path, step, whole(VALUES), {}, keep=2)
    assert {p.name for p in tmp_path.iterdir()} - before == {"step-000000003", "step-1000000000"}
    assert before <= {p.name for p in tmp_path.iterdir()}
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (10**9, ())


def test_one_that_was_put_aside_for_a_newer_one_of_its_step_is_not_lost(tmp_path: Path) -> None:
    """A process that is killed between the two renamings leaves neither under the step's name."""
    checkpoint.write(tmp_path, 4, whole(VALUES), {})
    aside = tmp_path / ".step-000000004.replaced"
    (tmp_path / "step-000000004").rename(aside)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 4
    checkpoint.write(tmp_path, 5, whole(VALUES), {})
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [5, 4] and not aside.exists()


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place, said in {
        "": "checkpoint '' is empty; name a directory, e.g. build/run",
        tmp_path / "file": "file' is a file; give another path",
        tmp_path / "file" / "run": "file' is a file; give another path",
        tmp_path / "a" / "b" / "c" / "run": "there is no folder .*b'; create",
        tmp_path / ("x" * 300): "File name too long",
        tmp_path / "nul\0": "null byte",
    }.items():
        with pytest.raises(UserError, match=said):
            checkpoint.check_directory(place)
    checkpoint.check_directory(tmp_path / "a" / "run")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "file"]


# -- one job at a time ---------------------------------------------------------------------------------------

HOLDER = """
import os, sys
from mesh_tf_core.training.locking import locked

with locked(sys.argv[1]):
    if sys.argv[2] == "alone":
        print(os.getpid(), flush=True)
    elif os.fork() == 0:
        print(os.getppid(), flush=True)
        sys.stdin.read()  # outlives its parent
        os._exit(0)
    sys.stdin.read()
"""


@pytest.mark.parametrize("kind", ["alone", "forks"])
def test_a_second_job_is_told_whose_the_directory_is(tmp_path: Path, kind: str) -> None:
    words = [sys.executable, "-c", HOLDER, str(tmp_path), kind]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        pid = holder.stdout.readline().strip()
        said = rf"is in use by process {pid} on .+ \(since .+\); wait until that process ends, or give"
        with pytest.raises(UserError, match=said):
            Saver().save(tmp_path, 1, whole(VALUES), {})
        holder.kill()
        holder.wait()
        with checkpoint.owned(tmp_path) as trouble:  # the lock ended with it
            assert trouble == ""
    assert checkpoint.listed(tmp_path) == []


def test_a_job_holds_its_directory_as_often_as_it_likes(tmp_path: Path) -> None:
    with locked(tmp_path), locked(tmp_path / "."):
        with locked(tmp_path):
            pass
        assert locking._handles
    assert not locking._handles and not locking._counts


def test_where_there_are_no_locks_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(handle: int, how: int) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", lacking)
    with checkpoint.owned(tmp_path) as trouble:
        assert "make sure that no other job writes to it" in trouble
    saver = Saver()
    with pytest.warns(checkpoint.CheckpointWarning, match="make sure that no other job writes to it"):
        saver.save(tmp_path, 1, whole(VALUES), {})
    saver.wait()
    assert checkpoint.newest(tmp_path) is not None


# -- while it is written -------------------------------------------------------------------------------------


class Failing(Mapping[VariablePiece, Any]):
    """Values of which the second one cannot be had."""

    def __getitem__(self, key: VariablePiece) -> Any:
        if key.name == "second":
            raise OSError("No space left on device")
        return np.zeros(3)

    def __iter__(self) -> Iterator[VariablePiece]:
        return (piece(name, "float64", (3,)) for name in ("first", "second"))

    def __len__(self) -> int:
        return 2


def test_a_writing_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, whole(VALUES), {})
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, 2, Failing(), {})
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (1, ())
    assert [p.name for p in tmp_path.iterdir()] == ["step-000000001"]  # and no room is taken


@pytest.mark.parametrize("damage", ["missing", "cut", "another", "folder"])
def test_what_is_not_there_is_not_called_saved(tmp_path: Path, damage: str) -> None:
    """A process said that it had written its file, and did not, or wrote it elsewhere: nothing older goes."""
    for step in (1, 2, 3):
        checkpoint.write(tmp_path, step, whole(VALUES), {})
    with (
        pytest.raises(
            UserError,
            match=", although every process reported that it had written its part",
        ),
        checkpoint.beginning(tmp_path, 4) as folder,
    ):
        written = checkpoint.write_pieces(folder, 0, whole(VALUES))
        file = folder / "00000.safetensors"
        if damage == "cut":
            cut(file)
        else:
            file.unlink()
        if damage == "another":
            array_files.write_pieces(file, whole({"w": VALUES["w"]}))
        elif damage == "folder":
            file.mkdir()
        checkpoint.finish(folder, 4, written, {})
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [3, 2, 1]
    assert len([*tmp_path.iterdir()]) == 3
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 3


def test_of_whole_ones_as_many_are_kept(tmp_path: Path) -> None:
    """Files that go later, as by hand: what is torn counts for nothing, and goes with what is as old."""
    for step in range(1, 7):
        checkpoint.write(tmp_path, step, whole(VALUES), {}, keep=9)
    for step in (5, 6):
        (tmp_path / f"step-{step:09d}" / "00000.safetensors").unlink()
    checkpoint.write(tmp_path, 7, whole(VALUES), {})
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [7, 6, 5, 4, 3]
    checkpoint.write(tmp_path, 8, whole(VALUES), {})
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [8, 7, 6, 5, 4]
    checkpoint.write(tmp_path, 9, whole(VALUES), {})
    assert [step for step, _ in checkpoint.listed(tmp_path)] == [9, 8, 7]


def test_who_says_what_makes_no_sense_saves_nothing(tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="step 1 is not saved: a process sent an invalid report of its"),
        checkpoint.beginning(tmp_path, 1) as folder,
    ):
        checkpoint.finish(folder, 1, [{"name": "w", "file": "../../x"}], {})
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(("text", "mode"), [("0700", 0o700), ("750", 0o750), ("0777", 0o777)])
def test_a_mode_is_that_of_folders_and_files(tmp_path: Path, text: str, mode: int) -> None:
    """Whatever the umask of the process is."""
    root, found = tmp_path / "run", folders.read_mode(text)
    before = os.umask(0o027)
    try:
        saver = Saver(mode=found)
        saver.save(root, 1, whole(VALUES), {})
        saver.wait()
    finally:
        os.umask(before)
    made = [root, root / "step-000000001", *(root / "step-000000001").iterdir()]
    assert [path.stat().st_mode & 0o777 for path in made] == [mode, mode, mode & 0o666, mode & 0o666]


def test_a_mode_that_keeps_the_owner_out_is_refused() -> None:
    for text in ("0070", "", "rwx", "8", "1777", "-700", "0o700"):
        with pytest.raises(
            UserError, match=r"must be an octal number that gives the owner full access, e.g."
        ):
            folders.read_mode(text)
    with pytest.raises(UserError, match="checkpoint mode 0o600 must be an octal number that gives the"):
        Saver(mode=0o600)


def test_what_could_not_be_read_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest has one bound, on writing as on reading."""
    checkpoint.write(tmp_path, 1, whole(VALUES), {})
    file = tmp_path / "step-000000001" / manifest.MANIFEST
    assert b"\n" not in file.read_bytes()
    monkeypatch.setattr(manifest, "LARGEST", file.stat().st_size)
    checkpoint.write(tmp_path, 2, whole(VALUES), {})
    with pytest.raises(UserError, match="step 3 is not saved: its 4 pieces of variables are too many"):
        checkpoint.write(tmp_path, 3, whole(VALUES), {"data": "a place"})
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (2, ())


def test_an_error_in_the_thread_is_raised_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Saver()
    saver.save(tmp_path, 1, Failing(), {})
    with pytest.raises(UserError, match="cannot be written: No space left on device; give"):
        saver.save(tmp_path, 2, whole(VALUES), {})
    saver.save(tmp_path, 2, whole(VALUES), {})
    saver.wait()
    assert checkpoint.newest(tmp_path) is not None
    saver.save(tmp_path, 3, Failing(), {})
    with pytest.raises(
        UserError, match=r"No space left on device; .*; the checkpoint step-000000002 is still complete"
    ):
        saver.wait()
    saver.save(tmp_path, 3, Failing(), {})
    assert saver._thread is not None
    saver._thread.join()
    saver._report()
    assert "error: the last checkpoint was not written: checkpoint" in capsys.readouterr().err
    with pytest.raises(UserError, match="cannot be written: No space left on device; give"):
        saver.wait()
    saver.wait()


ENDING = """
import sys, threading
from collections.abc import Mapping
import numpy as np
from mesh_tf_core.training.saving import Saver
from tests.core.saved import piece

class Late(Mapping):
    def __getitem__(self, key):
        threading.main_thread().join()  # the program is through
        return np.ones(3) / (1 if sys.argv[2] == "whole" else np.load("/nowhere"))
    def __iter__(self):
        return iter([piece("w", "float64", (3,))])
    def __len__(self):
        return 1

Saver().save(sys.argv[1], 5, Late(), {})
"""


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["whole", "failing"])
def test_the_end_of_the_process_waits_for_the_file(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path), kind],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    found = checkpoint.newest(tmp_path)
    if kind == "whole":
        assert found is not None and found.step == 5 and done.stderr == ""
    else:
        assert found is None
        assert "error: the last checkpoint was not written: checkpoint" in done.stderr
        assert "cannot be written: another process removed the directory; do not" in done.stderr


class Fresh(Mapping[VariablePiece, Any]):
    """Eight variables of a megabyte, each made when it is asked for."""

    def __getitem__(self, key: VariablePiece) -> Any:
        return np.full(key.shape, float(key.name), np.float32)

    def __iter__(self) -> Iterator[VariablePiece]:
        return (piece(name, "float32", (512, 512)) for name in "12345678")

    def __len__(self) -> int:
        return 8


def test_the_host_holds_one_variable_at_a_time(tmp_path: Path) -> None:
    tracemalloc.start()
    checkpoint.write(tmp_path, 1, Fresh(), {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1 << 20 <= peak < 3 << 20
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("kills", [12, pytest.param(450, marks=pytest.mark.nightly)])
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path: Path, kills: int) -> None:
    """In a process that has no threads: it forks."""
    found = json.loads(_hunted(str(tmp_path / "run"), str(kills)))
    assert found == {**found, "kills": kills, "lost": 0, "torn": 0, "faults": []}
    assert found["written"] > 0


def _hunted(*words: str) -> str:
    code = "import dataclasses, json, pathlib, sys; from tests.core.killed import hunt; " + (
        "print(json.dumps(dataclasses.asdict(hunt(pathlib.Path(sys.argv[1]), int(sys.argv[2])))))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout


@pytest.mark.parametrize("kills", [4, pytest.param(120, marks=pytest.mark.nightly)])
def test_a_training_that_is_killed_learns_the_same(tmp_path: Path, kills: int) -> None:
    """Every second kill comes while a checkpoint is written."""
    words = [sys.executable, "-m", "tests.core.killed_training", str(tmp_path), str(kills)]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {**found, "kills": kills, "back": 0, "torn": 0, "differ": 0}
    assert found["runs"] > 0 and found["while saving"] > 0
