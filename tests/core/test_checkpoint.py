"""Checkpoint files: whole, atomic, checked; written beside the training; errors in words."""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mesh_tf_core.errors import UserError
from mesh_tf_core.training import checkpoint
from mesh_tf_core.training.saving import Saver

VALUES: dict[str, Any] = {
    "w": np.arange(12.0).reshape(3, 4).T,
    "step": np.array(7, np.int32),
    "b": np.array([1.5, -2.0], ml_dtypes.bfloat16),
    "none": np.zeros((0, 3), np.float32),
}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 12, VALUES, {"data": {9: (1, 2), 10: math.inf}})
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
        checkpoint.write(tmp_path, step, VALUES, {}, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000005", "step-000000008"]
    checkpoint.write(tmp_path, 4, VALUES, {"again": True}, keep=2)  # later ones were passed over, say
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-000000004", "step-000000008"]
    checkpoint.write(tmp_path, 8, VALUES, {"again": True}, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.extra == {"again": True}


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))


def _edit(path: Path) -> None:
    manifest = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**manifest, "step": manifest["step"] + 1}), encoding="utf-8")


DAMAGE = {
    "a cut file": (lambda p: _cut(p / "00000.npy"), "variable 'w' differs from its checksum"),
    "a flipped bit": (lambda p: _flip(p / "00002.npy"), "variable 'b' differs from its checksum"),
    "a lost file": (lambda p: (p / "00001.npy").unlink(), "00001.npy cannot be read"),
    "a cut manifest": (lambda p: _cut(p / checkpoint.MANIFEST), "Expecting"),
    "an edited manifest": (
        lambda p: _edit(p / checkpoint.MANIFEST),
        "manifest.json differs from its checksum",
    ),
    "a lost manifest": (lambda p: (p / checkpoint.MANIFEST).unlink(), "manifest.json cannot be read"),
    "another format": (lambda p: (p / checkpoint.MANIFEST).write_text('{"format": "x"}'), "format 'x'"),
    "no format": (lambda p: (p / checkpoint.MANIFEST).write_text("{}"), "lacks 'format'"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(damage: str, tmp_path: Path) -> None:
    for step in (1, 2):
        checkpoint.write(tmp_path, step, VALUES, {})
    harm, said = DAMAGE[damage]
    harm(tmp_path / "step-000000002")
    found = checkpoint.newest(tmp_path)
    assert found is not None and found.step == 1
    assert (
        len(found.skipped) == 1
        and found.skipped[0].startswith("step-000000002: ")
        and said in found.skipped[0]
    )
    harm(tmp_path / "step-000000001")
    with pytest.raises(UserError, match=r"no whole checkpoint in it .step-000000002: .*; step-000000001: "):
        checkpoint.newest(tmp_path)


class Failing(Mapping[str, Any]):
    """Values of which the second one cannot be had."""

    def __getitem__(self, name: str) -> Any:
        if name == "second":
            raise OSError("No space left on device")
        return np.zeros(3)

    def __iter__(self) -> Iterator[str]:
        return iter(("first", "second"))

    def __len__(self) -> int:
        return 2


def test_a_writing_that_fails_leaves_the_older_one(tmp_path: Path) -> None:
    checkpoint.write(tmp_path, 1, VALUES, {})
    with pytest.raises(OSError, match="No space left"):
        checkpoint.write(tmp_path, 2, Failing(), {})
    found = checkpoint.newest(tmp_path)
    assert found is not None and (found.step, found.skipped) == (1, ())


def test_an_error_in_the_thread_is_raised_by_the_next_call(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saver = Saver()
    saver.save(tmp_path, 1, Failing(), {})
    with pytest.raises(UserError, match="cannot be written: No space left on device; give"):
        saver.save(tmp_path, 2, VALUES, {})
    saver.save(tmp_path, 2, VALUES, {})
    saver.wait()
    assert checkpoint.newest(tmp_path) is not None
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

class Late(Mapping):
    def __getitem__(self, name):
        threading.main_thread().join()  # the program is through
        return np.ones(3) / (1 if sys.argv[2] == "whole" else np.load("/nowhere"))
    def __iter__(self):
        return iter("w")
    def __len__(self):
        return 1

Saver().save(sys.argv[1], 5, Late(), {})
"""


@pytest.mark.parametrize("kind", ["whole", "failing"])
def test_the_end_of_the_process_waits_for_the_file(tmp_path: Path, kind: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(tmp_path), kind], capture_output=True, text=True, check=True
    )
    found = checkpoint.newest(tmp_path)
    if kind == "whole":
        assert found is not None and found.step == 5 and done.stderr == ""
    else:
        assert found is None
        assert "error: the last checkpoint was not written: checkpoint" in done.stderr
        assert "cannot be written: No such file" in done.stderr


class Fresh(Mapping[str, Any]):
    """Eight variables of a megabyte, each made when it is asked for."""

    def __getitem__(self, name: str) -> Any:
        return np.full((512, 512), float(name), np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter("12345678")

    def __len__(self) -> int:
        return 8


def test_the_host_holds_one_variable_at_a_time(tmp_path: Path) -> None:
    tracemalloc.start()
    checkpoint.write(tmp_path, 1, Fresh(), {})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 1 << 20 <= peak < 3 << 20
    shutil.rmtree(tmp_path)
