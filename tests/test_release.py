"""A release: the sdist builds the wheel, and the wheel answers alone, away from the checkout."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERSION = "0.1.0"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel that the sdist builds alone; dependencies are those of this interpreter."""
    place = tmp_path_factory.mktemp("release")
    build = "import sys; from setuptools import build_meta as b; getattr(b, sys.argv[1])(sys.argv[2])"
    subprocess.run(
        [sys.executable, "-c", build, "build_sdist", str(place)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    with tarfile.open(place / f"layoutopt-{VERSION}.tar.gz") as archive:
        archive.extractall(place, filter="data")
    unpacked = place / f"layoutopt-{VERSION}"
    subprocess.run(
        [sys.executable, "-c", build, "build_wheel", str(place)],
        cwd=unpacked,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    (wheel,) = place.glob("*.whl")
    pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    subprocess.run([*pip, str(place / "site"), str(wheel)], check=True)
    return place / "site"


def asked(installed: Path, folder: Path, *arguments: str) -> str:
    """What a command of the installed package prints, from another folder."""
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    done = subprocess.run(
        [sys.executable, "-m", "layoutopt", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.nightly
def test_a_wheel_answers_alone(installed: Path, tmp_path: Path) -> None:
    where = "import layoutopt, reports, costmodels, mesh_tf_core as m; print(layoutopt.__file__, m.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(installed)}
    found = subprocess.run(
        [sys.executable, "-c", where], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert all(name.startswith(str(installed)) for name in found.stdout.split()), found
    assert VERSION in asked(installed, tmp_path, "--version")
    asked(installed, tmp_path, "init", "model.py")
    plan = asked(
        installed,
        tmp_path,
        *("search", "model.py", "--devices", "4", "--hardware", "tpu-v5e", "--out", "plan.json", "--json"),
    )
    assert json.loads(plan)["solver"]["status"] == "OPTIMAL"
    asked(installed, tmp_path, "report", "plan.json", "--out", "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "layout" in asked(installed, tmp_path, "cost", "model.py", "--layout", "plan.json")
    asked(installed, tmp_path, "init", "--example", "mlp")


def test_extras_and_files_of_a_release_are_named() -> None:
    told = (ROOT / "README.md").read_text(encoding="utf-8")
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = re.findall(r"^(\w+) = \[", project.partition("[project.optional-dependencies]")[2], re.MULTILINE)
    assert {"jax", "tensorflow"} <= {e for e in extras if f".[{e}]" in told}
    for name in ("CITATION.cff", "CHANGELOG.md"):
        assert VERSION in (ROOT / name).read_text(encoding="utf-8"), name
    assert len((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").splitlines()) <= 60
