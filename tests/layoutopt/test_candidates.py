"""`candidates`: the layouts worth measuring, the error known of them, and which it cannot tell apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

import layoutopt
from examples import mlp
from examples.transformer_lm import model as transformer
from layoutopt.api.comparing import LayoutCandidates, _grouped
from layoutopt.plan.known import Known, Runs
from layoutopt.plan.schema import Alternative, Predicted
from mesh_tf_core.errors import UserError


def priced(seconds: float) -> Alternative:
    times = dict.fromkeys(
        ("compute_seconds", "communication_seconds", "exposed_communication_seconds", "flops_per_device"), 0.0
    )
    predicted = Predicted(
        step_seconds=seconds, peak_memory_bytes=0, communication_bytes_per_device={}, **times
    )
    return Alternative(name=str(seconds), predicted=predicted, feasible=True)


def known(error: float | None) -> Callable[[Any], Known]:
    runs = None if error is None else Runs(rows=3, mean=error, worst=error)
    return lambda stages: Known(runs=runs)


@pytest.mark.parametrize(
    ("error", "groups"),
    [
        (0.0, [1, 2, 3, 4]),
        (0.05, [1, 1, 2, 3]),
        (0.2, [1, 1, 1, 2]),
        (0.9, [1, 1, 1, 1]),
        (None, [1, 1, 1, 1]),
    ],
)
def test_a_group_ends_where_the_error_tells_layouts_apart(error: float | None, groups: list[int]) -> None:
    found = [*_grouped([priced(s) for s in (1.0, 1.1, 1.2, 2.0)], known(error))]
    assert [each.group for each in found] == groups
    assert {each.error for each in found} == {error}


@pytest.mark.nightly
def test_candidates_fit_are_unlike_and_begin_with_the_answer() -> None:
    small = transformer(layers=2, d_model=16, d_kv=4, heads=4, d_ff=32, vocab=16, batch=16, length=8)
    asked = {"storage": ("layout", "zero3"), "microbatches": (1,)}
    found = layoutopt.candidates(small, n=4, devices=4, hardware="h100", framework="torch", **asked)
    assert found.chosen[0].name == "the answer" and len(found.chosen) == 4
    times = [each.predicted.step_seconds for each in found.chosen if each.predicted]
    assert times == sorted(times) and times[0] == found.plan.predicted.step_seconds
    unlike = {(str(each.mesh), str(each.layout), each.as_options()) for each in found.chosen}
    assert len(unlike) == 4 and all(each.feasible and each.error for each in found.chosen)
    for each in found.chosen:  # every one is a layout that `cost` prices alike
        mesh = ";".join(f"{axis}:{size}" for axis, size in each.mesh.items())
        layout = ";".join(f"{dim}:{'+'.join(axes)}" for dim, axes in each.layout.items())
        if not each.as_options():
            again = layoutopt.cost(small, mesh, layout, hardware="h100", framework="torch")
            assert again.predicted.step_seconds == pytest.approx(each.predicted.step_seconds)


def test_candidates_obey_pins_and_prohibitions() -> None:
    """Named layouts of a plan do not: they stand beside it."""
    asked = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "storage": "layout", "microbatches": (1,)}
    found = layoutopt.candidates(mlp.model(), n=9, **asked, pins="batch:data", forbid="hidden_1:model")
    beside = {str(a.layout) for a in found.plan.alternatives} - {str(each.layout) for each in found.chosen}
    assert len(found.chosen) > 2 and beside
    assert all(each.layout["batch"] == ["data"] for each in found.chosen)
    assert all("model" not in each.layout.get("hidden_1", ()) for each in found.chosen)


@pytest.mark.parametrize("n", [0, -3, 101])
def test_a_number_beyond_all_use_is_refused(n: int) -> None:
    with pytest.raises(UserError, match="from 1 to 100"):
        layoutopt.candidates(mlp.model(), n=n, mesh="data:4")


@pytest.mark.nightly
def test_the_command_prints_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    from typer.testing import CliRunner

    from layoutopt.cli.application import app

    asked = "candidates examples/mlp.py --mesh data:2 --hardware tpu-v5e -n 3 --json"
    done = CliRunner().invoke(app, asked.split(), prog_name="layoutopt", catch_exceptions=False)
    found = json.loads(done.stdout)
    same = layoutopt.candidates(mlp.model(), n=3, mesh="data:2", hardware="tpu-v5e").to_json()
    assert found["format"] == "layoutopt-candidates/1"
    assert [each["name"] for each in found["candidates"]] == [each["name"] for each in same["candidates"]]


def test_why_there_are_fewer_than_asked_is_said() -> None:
    asked: dict[str, Any] = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}
    found = layoutopt.candidates(mlp.model(), n=100, mesh="x:2", hardware="tpu-v5e", pins="batch:x", **asked)
    assert f"{len(found.chosen)} of 100 layouts: the search found no others that fit" in [*found.notes]
    plan = SimpleNamespace(solver=SimpleNamespace(proven=False), data=SimpleNamespace(notes=[]))
    (cut,) = LayoutCandidates(cast("Any", plan), (), 4).notes
    assert cut.startswith("0 of 4 layouts") and "longer --time-limit" in cut
