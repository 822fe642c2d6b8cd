"""README: short, its program runs, its question has the answer that is shown."""

from __future__ import annotations

import os
import re
import socket
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


PLANNED = """
import runpy, layoutopt
model = runpy.run_path("train.py")["model"]()
layoutopt.search(model, "data:1", hardware="h100", alternatives=False).save("plan.json")
print(float(runpy.run_path("train.py", run_name="__main__")["value"]))
"""
"""The commands of the program of PyTorch, with one process."""


def test_its_programs_run_as_pasted_and_train(tmp_path: Path) -> None:
    torch, jax = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    (tmp_path / "train.py").write_text(torch, encoding="utf-8")
    four = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        one = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
        one["MASTER_PORT"] = str(free.getsockname()[1])
    command = [sys.executable, "-c", "".join((PLANNED, jax, "print(float(value))"))]
    env = {**os.environ, **four, **one, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    first, second = map(float, done.stdout.split())
    assert second == pytest.approx(2.7726, abs=1e-3), "of 16 classes: log 16"
    assert first == pytest.approx(second, abs=1.0), "of weights that are drawn"


def test_its_question_has_the_answer_that_is_shown() -> None:
    """On the mesh that it finds, with some of its decisions: all take minutes. It surely fits."""
    plan = layoutopt.search(
        llama3_8b(batch=64),
        "data:64;model:2",
        hardware="h100",
        allow="+sequence,+collective_matmul",
        pins="batch:data;heads:model",
        storage="zero1,zero3",
        microbatches="1",
        alternatives=False,
    )
    assert plan.solver.status == "OPTIMAL"
    (seconds,) = re.findall(r"the answer[^│]*│.*│ ([\d.]+) ms │ +1.00×", TEXT)
    assert f"{1000 * plan.predicted.step_seconds:.0f}" == seconds
    assert plan.data.known.fits(plan.predicted.peak_memory_bytes, 78 * 2**30) == "yes"
    assert re.findall(r"^layout +(\S.*)$", TEXT, re.MULTILINE)[0].startswith("batch:data; heads:model")
