"""Plans that are none get one line that names the plan, the field and what to do."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

import reports
from mesh_tf_core.errors import UserError
from reports.plan import dims_on
from reports.reader import plan_of
from tests.reports import sample


def test_plain_plan_is_read() -> None:
    plan = plan_of(sample.plain_plan())
    assert plan.model.name == "transformer_lm"
    assert plan.devices == 512
    assert dims_on(plan, "model") == ("vocab", "heads", "d_ff")
    assert plan.alternatives[-1].predicted is None
    assert plan.memory_limit is None and plan.fits is None


def test_details_are_read() -> None:
    plan = plan_of(sample.full_plan())
    assert plan.fits is True
    assert len(plan.details.variables) == 3 + 9 * sample.LAYERS
    assert plan.details.variables[0].local_shape(plan.mesh) == (1024, 1024)
    assert plan.details.validation is not None and plan.details.validation.regret == 0.012


def test_file_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(sample.full_plan()))
    assert reports.read_plan(path) == json.loads(json.dumps(sample.full_plan()))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            json.dumps(sample.plain_plan())[:700],
            r"is not valid JSON: .* \(line 1, column \d+\)",
        ),
        ("", "is not valid JSON"),
        ("[1, 2]", "it must be a JSON object, but is list"),
        (
            '{"format": "layoutopt-plan/9"}',
            r"format 'layoutopt-plan/9', but this version of layoutopt reads 'layoutopt-plan/1'",
        ),
        ('{"model": {}}', "has no 'format'"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": ' * 80 + "1" + "}" * 80, "is nested too deeply"),
    ],
)
def test_file_that_is_no_plan(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(UserError, match=said) as caught:
        reports.read_plan(path)
    assert "\n" not in str(caught.value) and "search" in str(caught.value) and str(path) in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"plan .* cannot be read: No such file"):
        reports.read_plan(tmp_path / "none.json")
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(UserError, match="is not UTF-8 text"):
        reports.read_plan(tmp_path / "bytes.json")


def changed(path: str, value: Any) -> dict[str, Any]:
    """The full plan with one field replaced; None removes it."""
    plan = copy.deepcopy(sample.full_plan())
    at: Any = plan
    *outer, last = [int(p) if p.isdigit() else p for p in path.split("/")]
    for step in outer:
        at = at[step]
    if value is None:
        del at[last]
    else:
        at[last] = value
    return plan


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        ("predicted", None, "'predicted' is missing, so the file"),
        ("predicted/step_seconds", None, "'predicted.step_seconds' is missing"),
        ("predicted/step_seconds", "fast", "'predicted.step_seconds' must be a number, found str"),
        ("predicted/step_seconds", float("nan"), "must be a finite number"),
        pytest.param("predicted/step_seconds", 10**5000, "more than a hundred digits", id="huge"),
        ("predicted/peak_memory_bytes", -1, "must not be negative"),
        ("predicted/peak_memory_bytes", True, "must be a number, found bool"),
        ("model", [], "'model' must be a JSON object, found list"),
        ("model/name", 3, "'model.name' must be text, found int"),
        ("mesh/data", 0, "'mesh.data' must be a whole number of at least 1"),
        ("mesh/data", 2.5, "'mesh.data' must be a whole number"),
        ("layout/batch", ["pod"], r"'layout.batch' splits over 'pod', .*\(axes: data, model\)"),
        ("layout/batch", [1], r"'layout.batch\[0\]' must be text, found int"),
        ("alternatives/1/predicted/step_seconds", "x", r"'alternatives\[1\].predicted.step_seconds' must be"),
        ("alternatives/1", 5, r"'alternatives\[1\]' must be a JSON object"),
        ("details/variables/0/shape", [["vocab"]], r"'details.variables\[0\].shape\[0\]\[1\]' is missing"),
        ("details/variables/0/splits", [[]], "must list the mesh axes of each of the 2 dimensions"),
        ("details/lines", {}, "'details.lines' must be a list, found dict"),
        ("details/lines/0/communication", "no", "must be true or false"),
    ],
)
def test_field_that_is_wrong(path: str, value: Any, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        plan_of(changed(path, value), "plan 'a.json'")
    message = str(caught.value)
    assert message.startswith("plan 'a.json': ") and "\n" not in message and len(message) < 300
    assert re.search("make it again", message)


def test_solver_without_a_bound_is_read() -> None:
    plan = plan_of(changed("solver", {"status": "FEASIBLE", "bound": None, "gap": None}))
    assert plan.solver is not None and not plan.solver.proven


@pytest.mark.parametrize(
    ("status", "gap", "proven"),
    [("OPTIMAL", 0.0, True), ("OPTIMAL", None, True), ("OPTIMAL", 0.03, False), ("FEASIBLE", 0.0, False)],
)
def test_proven_is_only_said_when_proven(status: str, gap: float | None, proven: bool) -> None:
    solver = plan_of(changed("solver", {"status": status, "gap": gap})).solver
    assert solver is not None and solver.proven is proven


def test_names_lose_controls_and_turns() -> None:
    plan = plan_of(sample.hostile_plan())
    assert not set("\x00\u202e\n") & set(plan.model.name)
    assert "<script>" in plan.model.name
