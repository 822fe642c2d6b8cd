"""`calibrate`: a profile of this machine, where it is looked for afterwards; a profile of a TPU."""

from __future__ import annotations

import itertools
import json
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from costmodels.calibration import runner
from costmodels.calibration.clock import TimingSample
from costmodels.calibration.probes import probes
from costmodels.calibration.runner import versions
from costmodels.hardware import load_hardware
from costmodels.hardware.profiles import profiles_directory
from mesh_tf_core import Mesh
from tests.costmodels.calibration.test_fit import recorded
from tests.marks import by_day


@pytest.mark.slow
@pytest.mark.parametrize("every", by_day([12, 1]))
@pytest.mark.nightly
def test_a_profile_of_this_machine(
    run: Callable[..., Result], result: Callable[..., dict[str, Any]], tmp_path: Path, every: int
) -> None:
    """One probe of every kind is measured, or of one kind in twelve; of the others a stopped calibration had
    measurements."""
    cost = ("cost", "examples/mlp.py", "--mesh", "data:2", "--layout", "batch:data")
    before = result(*cost)["predicted"]["step_seconds"]
    profile = profiles_directory() / "cpu-local.json"
    kinds = {re.sub(r" [\dx]+", "", p.name): p.name for p in reversed(probes(Mesh("data:2"), quick=True))}
    assert len(kinds) > 50
    key = {"mesh": "data:2", "processes": 1, "quick": True, "versions": versions()}
    content = {"key": key, "measurements": recorded(Mesh("data:2"), [*kinds.values()][::every])}
    profile.parent.mkdir(parents=True)
    (profile.parent / "cpu-local.partial.json").write_text(json.dumps(content), encoding="utf-8")
    found = result("calibrate", "--mesh", "data:2")
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


def test_an_interrupted_calibration_keeps_what_was_measured(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """To the last probe, wherever between two writings of the file it was."""
    measured, out = itertools.count(1), tmp_path / "mine.json"

    def samples(*_: object) -> list[TimingSample]:
        if next(measured) == 7:  # the first is the warming up
            signal.raise_signal(signal.SIGTERM)
        return [TimingSample(0.1, 0.1, 0.0, 2)]

    monkeypatch.setattr(runner, "_samples", samples)
    done = run("calibrate", "--mesh", "data:2", "--out", str(out))
    partial = tmp_path / "mine.partial.json"
    assert (done.exit_code, done.stdout) == (143, "")
    assert (
        f"stopped; the measurements are saved in {partial}, and the same command continues from there"
        in done.stderr
    )
    assert len(json.loads(partial.read_text(encoding="utf-8"))["measurements"]) == 5
    assert [p.name for p in tmp_path.glob("mine*")] == [partial.name]


def test_wrong_input(refused: Callable[..., str], tmp_path: Path) -> None:
    assert "mesh [data:1] has one device" in refused("calibrate", "--mesh", "data:1", "--quiet")
    assert "is not an axis NAME:SIZE; write e.g. 'data:8;model:4'" in refused("calibrate", "--mesh", "data")
    assert "it is a folder; name a file" in refused("calibrate", "--out", str(tmp_path))
    line = refused("calibrate", "--engine", "lockstep", "--quiet")
    assert line.startswith(
        "the profile cpu-local describes the engine local, but this run measures the engine lockstep"
    )
    partial = tmp_path / "mine.partial.json"
    partial.write_text("{}", encoding="utf-8")
    line = refused("calibrate", "--mesh", "data:2", "--out", str(tmp_path / "mine.json"), "--quiet")
    assert f"the partial results in {str(partial)!r} are not those of a calibration; delete" in line


def test_wrong_input_about_several_processes(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    out = ("--out", str(tmp_path / "two.json"), "--quiet")
    assert "write the profile to another file with --out" in refused(
        "calibrate", "--cluster", "--mesh", "data:2"
    )
    line = refused("calibrate", "--cluster", "--target", "tpu-v5e")
    assert line.endswith(
        "compiles for a TPU in one process; remove --cluster, or run calibrate without launch"
    )
    line = refused("calibrate", "--processes", "2", "--mesh", "data:2", *out)
    assert line == "--processes and --process need --coordinator HOST:PORT; add --coordinator"
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "host0:12345")
    line = refused("calibrate", "--cluster", "--mesh", "data:2", *out)
    assert line.startswith("cluster: coordinator host0:12345 also needs the number of")


def test_a_profile_of_a_tpu(result: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """From the estimates that ship with the project; it is used where it is named, and nowhere else."""
    profile = tmp_path / "v5e.json"
    cost = ("cost", "examples/mlp.py", "--mesh", "data:4", "--layout", "batch:data", "--hardware")
    before = result(*cost, "tpu-v5e")["predicted"]
    found = result("calibrate", "--target", "tpu-v5e", "--out", str(profile))
    assert found["profile"] == str(profile) and found["shipped"] is True
    assert (found["hardware"], found["topology"]) == ("tpu-v5e", "v5e:2x2")
    assert set(found["versions"]) == {"jax", "jaxlib", "libtpu", "layoutopt"}
    assert 0 < found["memory_efficiency"] <= 1 and 0 < found["held_out_error"] < 0.5
    fitted = {"launch_overhead", "memory_efficiency", "element_time", "matmul_efficiency"}
    assert set(found["uncertainty"]) == fitted
    machine = load_hardware(profile)
    assert machine.chip.memory_efficiency.value == found["memory_efficiency"]
    assert machine.chip.element_time is not None
    assert machine.chip.element_time.value == found["element_time"] > 0
    after = result(*cost, str(profile))["predicted"]
    # The preset carries the same estimates, rounded; its launches are of arrays on the chip.
    assert after["compute_seconds"] == pytest.approx(before["compute_seconds"], rel=0.15)
    assert after["compute_seconds"] != before["compute_seconds"]
    assert after["communication_seconds"] == before["communication_seconds"]
    assert result(*cost, "tpu-v5e")["predicted"] == before
    assert result("hardware", str(profile))["calibrated"] is True


def test_a_tpu_on_the_terminal(run: Callable[..., Result], tmp_path: Path) -> None:
    done = run("calibrate", "--target", "tpu-v5e")
    assert done.exit_code == 0
    assert "for v5e:2x2 by libtpu" in done.stdout and "held out" in done.stdout
    assert "fitting to the estimates that ship with layoutopt" in done.stderr
    assert "no file was written; add --out PROFILE.json to save the profile" in done.stderr
    assert not profiles_directory().exists()


def test_a_calibrated_tpu_in_a_report(run: Callable[..., Result], tmp_path: Path) -> None:
    profile, report = tmp_path / "v5e.json", tmp_path / "report.html"
    assert run("calibrate", "--target", "tpu-v5e", "--out", str(profile), "--quiet").exit_code == 0
    asked = ("--mesh", "data:2", "--hardware", str(profile), "--report", str(report))
    done = run("search", "examples/mlp.py", *asked, "--quiet")
    assert done.exit_code == 0, done.stderr
    assert "by the compiler for v5e:2x2" in report.read_text(encoding="utf-8")


def test_wrong_input_about_a_tpu(refused: Callable[..., str], tmp_path: Path) -> None:
    line = refused("calibrate", "--target", "v5e", "--quiet")
    assert "--target 'v5e' is not a known TPU; " in line and "tpu-v5e" in line
    assert "did you mean 'tpu-v6e'" in refused("calibrate", "--target", "tpu-v6", "--quiet")
    line = refused("calibrate", "--target", "tpu-v5e", "--mesh", "data:2")
    assert "--mesh and --thorough measure this machine" in line
    assert "--refresh needs a TPU to compile for; add --target, e.g. --target tpu-v5e" in refused(
        "calibrate", "--refresh"
    )
    line = refused("calibrate", "--target", "tpu-v5e", "--out", str(tmp_path))
    assert "it is a folder; name a file" in line


def test_new_estimates_for_a_tpu(
    run: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """They are kept where they ship, if that can be written, and the profile is made all the same."""
    from costmodels.calibration import tpu, tpu_compiled

    found = tpu_compiled.shipped_probes("tpu-v5e")
    monkeypatch.setattr(tpu, "compile_probes", lambda *_: found)
    for place, said in (
        ("probes.json", "wrote "),
        ("no/where/probes.json", "warning: the estimates could not be saved for the next run: "),
    ):
        monkeypatch.setattr(tpu_compiled, "SHIPPED", tmp_path / place)
        profile = tmp_path / "v5e.json"
        done = run("calibrate", "--target", "tpu-v5e", "--refresh", "--out", str(profile))
        assert done.exit_code == 0
        assert "compiling small programs for tpu-v5e, which takes a few minutes" in done.stderr
        assert said in done.stderr and place in done.stderr
        assert load_hardware(profile).calibrated
    assert tpu_compiled.FORMAT in (tmp_path / "probes.json").read_text(encoding="utf-8")
