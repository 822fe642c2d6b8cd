"""`calibrate`: a profile of this machine, where it is looked for afterwards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from costmodels.hardware import load_hardware
from costmodels.hardware.profiles import profiles_directory


@pytest.mark.slow
def test_a_profile_of_this_machine(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    cost = ("cost", "examples/mlp.py", "--mesh", "data:2", "--layout", "batch:data")
    before = result(*cost)["predicted"]["step_seconds"]
    found = result("calibrate", "--mesh", "data:2")
    profile = profiles_directory() / "cpu-local.json"
    assert found["profile"] == str(profile)
    assert list(profile.parent.iterdir()) == [profile]
    machine = load_hardware(profile)
    assert machine.calibrated
    assert found["measurements"] == len(
        json.loads(machine.calibration.measurements if machine.calibration else "")
    )
    assert found["machine"]["mesh"] == "data:2"
    assert result("hardware", "cpu-local")["calibrated"] is True
    assert result(*cost)["predicted"]["step_seconds"] != before
    assert result(*cost, "--hardware", str(profile)) == result(*cost)


def test_wrong_input(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "mesh [data:1] has one device" in refused("calibrate", "--mesh", "data:1", "--quiet")
    assert "'data' is not NAME:SIZE" in refused("calibrate", "--mesh", "data")
    assert "it is a folder; name a file" in refused("calibrate", "--out", str(tmp_path))
    partial = tmp_path / "mine.partial.json"
    partial.write_text("{}", encoding="utf-8")
    line = refused("calibrate", "--mesh", "data:2", "--out", str(tmp_path / "mine.json"), "--quiet")
    assert f"partial results {str(partial)!r} cannot be read; delete the file to start anew" in line
