"""The suite depends on nothing outside the checkout: no profile of the user, no terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from costmodels.hardware.profiles import profiles_directory
from layoutopt.cli.options import read_hardware
from mesh_tf_core.engines.jax.rendezvous import ADDRESS, PROCESS, PROCESSES


def test_profiles_of_the_user_are_not_seen() -> None:
    assert not profiles_directory().is_relative_to(Path.home() / ".cache")
    assert not profiles_directory().exists()
    assert read_hardware("cpu-local").calibration is None


def test_nor_by_commands() -> None:
    code = "from costmodels.hardware.profiles import profiles_directory; print(profiles_directory())"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == str(profiles_directory())


def test_nor_the_terminal_nor_a_job() -> None:
    assert not {"COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR", ADDRESS, PROCESSES, PROCESS} & set(os.environ)
