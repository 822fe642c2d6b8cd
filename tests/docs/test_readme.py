"""README: short, its program runs, its question has the answer that is shown."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import layoutopt
from examples.transformer_lm import llama3_8b

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


def test_readme_is_short() -> None:
    assert len(TEXT.splitlines()) <= 130


def test_its_programs_run_as_pasted_and_train() -> None:
    """All blocks of Python, one after the other, in one new namespace."""
    whole = "".join((*re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL), "print(float(value))"))
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", whole], cwd=ROOT, capture_output=True, text=True, env={**os.environ, **four}
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[-1]) == pytest.approx(2.7726, abs=1e-3), "of 16 classes: log 16"


def test_its_question_has_the_answer_that_is_shown() -> None:
    """On the mesh that it finds: a search of all shapes takes 16 CPU seconds. It surely fits."""
    plan = layoutopt.search(
        llama3_8b(batch=64),
        "data:64;model:2",
        hardware="h100",
        allow="+sequence",
        alternatives=False,
    )
    assert plan.solver.status == "OPTIMAL"
    (seconds,) = re.findall(r"the answer[^│]*│.*│ ([\d.]+) ms │ +1.00×", TEXT)
    assert f"{1000 * plan.predicted.step_seconds:.0f}" == seconds
    assert plan.data.known.fits(plan.predicted.peak_memory_bytes, 78 * 2**30) == "yes"
    assert re.findall(r"^layout +(\S.*)$", TEXT, re.MULTILINE)[0].startswith("batch:data; heads:model")
