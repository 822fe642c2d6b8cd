"""Every file that is read, damaged: one clear line, or something that can be used. Together with
`test_command_line` more than 2,000 cases."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from costmodels.calibration.runner import Partial
from costmodels.calibration.tpu import calibrate_tpu
from costmodels.hardware import preset_content, read_hardware
from layoutopt.cli.terminal import plain
from layoutopt.importers.huggingface import from_huggingface
from layoutopt.plan.build import load_plan
from layoutopt.solver import load
from mesh_tf_core.errors import UserError
from mesh_tf_core.reading import read_json, reading
from mesh_tf_core.training import checkpoint
from reports.page.answers import answers
from reports.reader import plan_of, validation_of
from tests.core.saved import whole
from tests.fuzz import hostile
from tests.reports import sample
from tests.solver.strategies import random_problem, to_json

CONTEST = {
    "problem": {
        "name": "little",
        "usage_limit": 50,
        "nodes": {
            "intervals": [[30, 70], [40, 60]],
            "costs": [[15], [55, 65]],
            "usages": [[10], [25, 25]],
        },
        "edges": {"nodes": [[0, 1]], "costs": [[30, 40]]},
    }
}
KEY = {"mesh": "data:2", "processes": 1}


def plan_details() -> dict[str, Any]:
    whole = sample.full_plan()
    whole["details"] |= {
        "source": "model.py",
        "source_sha256": {"model.py": "0" * 64},
        "inputs": whole["details"]["variables"][:1],
        "search": {"memory_bytes": 10, "pins": "batch:data", "recompute": [True], "microbatches": [1, 2]},
        "robustness": {"draws": 40, "wins": 33, "worst": 0.06, "runner_up": "greedy", "uncertain": 71},
        "proof": {"verified": True, "words": "1 problem", "problems": [{"mesh": "data:2", "bound": 0.4}]},
    }
    return whole


def read_plan(path: Path) -> None:
    """As commands do, and as reports do; details that are damaged do not keep a layout from its use."""
    plan = load_plan(path)
    assert json.dumps(plain(plan.to_json()), allow_nan=False)
    assert answers(plan_of(plan.to_json()))


def read_plan_without_details(path: Path) -> None:
    told: list[str] = []
    plan = load_plan(path, told.append)
    assert all("\n" not in line for line in told)
    assert plan.mesh.devices >= 1 and plan.data.listed() is not None


def read_validation(path: Path) -> None:
    with reading("the validation", "write it again"):
        found = read_json(path)
    validation_of(found)


def read_checkpoint(path: Path) -> None:
    """As the manifest of a checkpoint."""
    folder = path.parent / "ckpt" / "step-000000001"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / checkpoint.MANIFEST).write_bytes(path.read_bytes())
    checkpoint.newest(folder.parent)


def manifest(folder: Path) -> Any:
    import numpy as np

    checkpoint.write(folder / "whole", 1, whole({"w": np.zeros(3)}), {"layout": "batch:data"})
    return json.loads((folder / "whole" / "step-000000001" / checkpoint.MANIFEST).read_text())


def configuration(name: str) -> Any:
    return json.loads((Path(__file__).parents[1] / "data" / "huggingface_losses.json").read_text())["models"][
        name
    ]["config"]


Format = tuple[int, Callable[[Path], Any], Callable[[Path], object]]
FORMATS: dict[str, Format] = {
    "plan": (250, lambda _: sample.plain_plan(), read_plan),
    "details": (200, lambda _: plan_details(), read_plan),
    "damaged details": (60, lambda _: plan_details(), read_plan_without_details),
    "hardware": (150, lambda _: preset_content("a100"), read_hardware),
    "torus": (100, lambda _: preset_content("tpu-v5p"), read_hardware),
    "profile": (100, lambda _: calibrate_tpu("tpu-v5e").content, read_hardware),
    "problem": (250, lambda _: to_json(random_problem(3, whole=False)), load),
    "problem of the contest": (200, lambda _: CONTEST, load),
    "validation": (100, lambda _: sample.validation(), read_validation),
    "partial results": (50, lambda _: {"key": KEY, "measurements": [{"name": "x", "seconds": 1}]},
                        lambda path: Partial(path, KEY)),
    "checkpoint": (100, manifest, read_checkpoint),
    **{f"configuration of {name}": (25, lambda _, name=name: configuration(name), from_huggingface)
       for name in ("llama", "gemma3", "qwen3_moe", "deepseek_v2", "bert", "vit")},
}  # fmt: skip
"""Name -> cases, the whole content, what reads it."""


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.one_in(6)
def test_a_damaged_file_is_refused_in_one_line_or_read(name: str, more: bool, tmp_path: Path) -> None:
    cases, whole, read = FORMATS[name]
    path = tmp_path / "file.json"

    def look(content: bytes) -> None:
        path.write_bytes(content)
        try:
            read(path)
        except UserError as error:
            hostile.one_clear_line(error)

    hostile.hunt(cases, more, hostile.damaged(whole(tmp_path)), look)


@pytest.mark.parametrize("name", FORMATS)
def test_a_whole_file_is_read(name: str, tmp_path: Path) -> None:
    _, whole, read = FORMATS[name]
    path = tmp_path / "file.json"
    path.write_text(json.dumps(whole(tmp_path)), encoding="utf-8")
    if name == "checkpoint":  # it lacks its array here
        with pytest.raises(UserError, match=r"no complete checkpoint"):
            read(path)
    else:
        read(path)
