"""The benchmark against the TPU compiler: its results file, and predictions made anew without compiling."""

from __future__ import annotations

import json
import math
from statistics import median
from typing import Any

import pytest

from benchmarks import verify
from benchmarks.verify_pairs import KINDS, MLP, PAIRS, Pair
from costmodels.hardware import load_hardware
from layoutopt.models.loading import load_model
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core import Layout, Mesh

SMALL = Pair("v5e:2x2", "data:4", "batch:data", {"batch": 64, "hidden": 64}, MLP)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return json.loads(verify.OUT.read_text(encoding="utf-8"))["rows"]


def test_every_pair_has_a_row_and_moves_what_was_predicted(rows: list[dict[str, Any]]) -> None:
    assert {verify.key(r) for r in rows} == {verify.key(verify.described(p)) for p in PAIRS}
    # XLA sends once what a forward and a backward convolution both need, and may send halves of float32.
    others = [r for r in rows if not r["same_collectives"]]
    assert len(others) <= 3
    assert all(m["compiler"][1] <= m["predicted"][1] for r in others for m in r["moved"])
    large = {r["topology"].split(":")[0] for r in rows if r["parameters"] >= 1e9}
    assert large == {"v4", "v5e", "v5p", "v6e"}


def test_the_compiler_moves_what_each_kind_of_decision_says() -> None:
    found = json.loads(verify.OUT.read_text(encoding="utf-8"))["kinds"]
    assert [verify.key(r) for r in found] == [verify.key(verify.described(p)) for p in KINDS.values()]
    by_name = dict(zip(KINDS, found, strict=True))
    assert all(r["same_collectives"] for r in found)

    def kinds(name: str) -> set[tuple[str, int]]:
        return {(kind, size) for kind, size, *_ in by_name[name]["compiler"]["collectives"]}

    assert ("permute", 4) in kinds("ring") & kinds("zigzag") and ("all_to_all", 4) in kinds("all_to_all")
    assert {("reduce_scatter", 2), ("all_gather", 2)} <= kinds("sequence") & kinds("hybrid")


@pytest.mark.parametrize(("name", "target"), [("peak_memory_bytes", 0.035), ("compute_seconds", 0.15)])
def test_predictions_are_near_what_the_compiler_says(
    rows: list[dict[str, Any]], name: str, target: float
) -> None:
    for side in ("predicted", "calibrated") if name == "compute_seconds" else ("predicted",):
        today = [r for r in rows if "stale" not in r]
        ratios = [found for r in today if (found := verify.ratio(r, name, side))]
        # A v3 has no estimates of the compiler's to calibrate by.
        assert len(ratios) >= max(len(today) - 1, len(PAIRS) / 2)
        assert math.exp(median(abs(math.log(r)) for r in ratios)) - 1 <= target


def test_what_the_compiler_said_of_the_same_program_is_kept() -> None:
    program = evaluate(
        load_model(SMALL.model, SMALL.hparams).model,
        Mesh(SMALL.mesh),
        Layout(SMALL.layout),
        load_hardware("tpu-v5e"),
    ).program
    said = {"given": verify.digest(program), "cycles": 3000, "peak_bytes": 10**6, "collectives": []}
    found = verify.row(SMALL, said, rescore=True)
    assert found is not None and found["compiler"] is said
    assert found["compute_seconds"]["compiler"] == pytest.approx(2e-6, rel=0.01)
    assert not found["same_collectives"] and found["peak_memory_bytes"]["predicted"] > 0
    assert verify.row(SMALL, {**said, "given": "another"}, rescore=True) is None
    assert verify.row(SMALL, None, rescore=True) is None
    assert "1 of 2 compiled, 0 with the predicted collectives, 1 left out" in verify.summary(
        [found, {**found, "stale": True}]
    )
