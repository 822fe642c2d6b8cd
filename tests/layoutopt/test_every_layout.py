"""Tables and memory rows of all layouts are those of their programs (`tests.layoutopt.every_layout`)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.frameworks import framework_names, load_framework
from costmodels.hardware import load_hardware
from examples.transformer_lm import model as transformer
from examples.transformer_seq2seq import model as translator
from layoutopt.formulation.tables import Entry, Tabler
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.solver import ResourceRow
from layoutopt.space.decisions import SearchSpace
from tests.layoutopt.every_layout import Compared, Drawn, hunt
from tests.marks import by_day
from tests.searching import search

SLOW = "tpu-v4, memory_bandwidth=100GB/s, link_bandwidth=1GB/s, hop_latency=1us"
SIZES = {
    "layers": 2,
    "d_model": 512,
    "d_kv": 16,
    "heads": 2,
    "d_ff": 1024,
    "vocab": 64,
    "batch": 4,
    "length": 128,
}
GRADIENTS = [
    f"{name}:gradients={option}"
    for name, variant in ((n, load_framework(n).variants.get("gradients")) for n in framework_names())
    for option in (variant.options if variant is not None else ())
    if variant is not None and option != variant.default
]
"""Every framework with gradients of another type than by default."""
UNSPLIT = ("batch", "length", "vocab", "d_model", "positions", "memory_length", "d_kv")
STAGES: dict[str, Any] = {
    "pipeline": ("layers",),
    "elsewhere": ("d_ff", "length"),
    "microbatches": (2,),
    "recompute": (False,),
    "storage": ("layout",),
    "context": ("gather",),
    "pins": {"layers": ("x",), "d_ff@elsewhere": ("x", "z"), **dict.fromkeys(UNSPLIT, ())},
}
"""Stages, and splits of the residual that also name the axis of the stages."""


def staged() -> mtf.Model:
    return transformer(**SIZES, optimizer="sgd")


def compared() -> Compared:
    """Some splits of the residual, those over the axis of the stages among them."""
    return elsewhere(staged(), "x:2;z:2", **STAGES)


def elsewhere(model: mtf.Model, axes: str, **asked: Any) -> Compared:
    """All that splits a model's dimensions further, and nothing else that is open."""
    mesh, hardware, found = mtf.Mesh(axes), load_hardware(SLOW), Compared()
    for each in subproblems(model, [mesh], SearchSpace(**asked)):
        plain = {n: o[:1] for n, o in each.decided.options.items() if "@" not in n}
        decided = each.decided.within(plain)
        Drawn(model, mesh, hardware, decided).compare(decided, found)
    return found


def test_what_splits_further_over_the_axis_of_stages() -> None:
    found = compared()
    assert found.layouts == 4 and not found.faults


def test_a_proof_about_stages_rules_out_no_better_layout() -> None:
    plan = search(staged(), mesh="x:2;z:2", hardware=SLOW, memory=31_904_311, **STAGES)
    assert plan.solver.status == "OPTIMAL"
    assert plan.layout == mtf.Layout("layers:x;d_ff@elsewhere:x+z;length@elsewhere:z")


def test_rows_of_a_value_that_several_readers_move() -> None:
    asked = {"elsewhere": ("d_kv", "memory_length"), "microbatches": (2,), "recompute": (False,)}
    found = elsewhere(translator(**SIZES, optimizer="sgd"), "x:4", **asked, storage=("layout",))
    assert found.layouts == 4 and not found.faults


# Stages with offloaded weights and collective matmul, stages with storage, and replicas.
@pytest.mark.one_in(4)
@pytest.mark.parametrize("seed", by_day([47, 50, 55]))
def test_layouts_of_every_kind(seed: int) -> None:
    found = hunt([seed], 1)
    assert found.layouts and not found.faults


# A stage with moves and sums of its own, a loop in two parts, a second run whose reductions follow on moves
# that backward shares (89), and stages that gather for chunks once more (22).
@pytest.mark.parametrize(
    ("framework", "seeds", "bases"),
    [
        ("megatron", [2, 4, 15, 89], 1),
        ("megatron", [22], 2),
        ("megatron:gradients=bfloat16", [36], 1),
        ("torch:gradients=bfloat16", [8], 1),
    ],
)
def test_rows_of_a_framework_that_has_a_buffer_of_gradients(
    framework: str, seeds: list[int], bases: int
) -> None:
    found = hunt(seeds, bases, framework)
    assert found.layouts and not found.faults


# Weights of layers at an end that are moved in ticks, and weights on hosts that stages load.
@pytest.mark.parametrize("framework", framework_names())
@pytest.mark.one_in(10)
def test_layouts_of_every_kind_under_a_framework(framework: str) -> None:
    found = hunt([4, 46], 1, framework)
    assert found.layouts and not found.faults


@pytest.mark.nightly
@pytest.mark.parametrize("framework", (*framework_names(), *GRADIENTS))
@pytest.mark.parametrize("first", range(0, 60, 12))
def test_layouts_of_every_kind_in_many_models_under_a_framework(first: int, framework: str) -> None:
    found = hunt(range(first, first + 12), 1, framework)
    assert found.layouts and not found.faults, "\n".join(found.faults)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 240, 12))
def test_layouts_of_every_kind_in_many_models(first: int) -> None:
    found = hunt(range(first, first + 12))
    assert found.layouts > 60
    assert not found.faults, "\n".join(found.faults)


# -- planted faults --


@pytest.mark.parametrize("more", [1e-6, -1e-6])
@pytest.mark.one_in(2)
def test_seconds_that_are_not_those_of_the_program_are_found(
    more: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Tabler._entry

    def wrong(self: Tabler, *args: Any) -> Entry | None:
        found = made(self, *args)
        return found and replace(found, seconds=found.seconds * (1 + more))

    monkeypatch.setattr(Tabler, "_entry", wrong)
    faults = compared().faults
    assert len(faults) == 4 and all(fault.startswith("time") for fault in faults)


def test_rows_that_hold_more_than_the_program_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    used = ResourceRow.use
    monkeypatch.setattr(ResourceRow, "use", lambda self, choices: used(self, choices) * 1.1)
    assert any(fault.startswith("memory") for fault in compared().faults)
