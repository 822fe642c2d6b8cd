"""Axes that do the same are one in the answer, and devices that do the same work are named."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples.mlp import model as perceptron
from layoutopt import search
from layoutopt.optimize.driver.search import merged
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from tests.layoutopt.models import SMALL, transformer

MODEL = transformer(**SMALL)
SHAPES = [(2, 2, 2), (4, 2), (2, 4), (8,), (5, 4, 3), (20, 3), (15, 4), (12, 5), (60,)]
MESHES = {shape: mtf.Mesh([(f"axis{i}", n) for i, n in enumerate(shape)]) for shape in SHAPES}


def one(layout: str, hardware: str = "h100") -> tuple[mtf.Mesh, str]:
    """What a layout on three axes of two becomes; it is as fast and as lean."""
    machine, start = load_hardware(hardware), MESHES[2, 2, 2]

    def price(mesh: mtf.Mesh, layout: mtf.Layout) -> Evaluation:
        return evaluate(MODEL, mesh, layout, machine)

    mesh, found = merged(start, mtf.Layout(layout), MESHES, price)
    before, after = price(start, mtf.Layout(layout)), price(mesh, found)
    assert after.cost.step_seconds <= before.cost.step_seconds * (1 + 1e-7)
    assert after.memory.peak <= before.memory.peak
    return mesh, str(found)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("layout", "shape", "becomes"),
    [
        ("batch:axis0+axis1+axis2", (8,), "batch:axis0"),
        ("batch:axis0+axis1;d_ff:axis2;heads:axis2", (4, 2), "batch:axis0;d_ff:axis1;heads:axis1"),
        ("batch:axis0;d_ff:axis1+axis2", (2, 4), "batch:axis0;d_ff:axis1"),
        # One of them splits something alone.
        ("batch:axis0;d_ff:axis1+axis2;heads:axis1", (2, 2, 2), "batch:axis0;d_ff:axis1+axis2;heads:axis1"),
        ("batch:axis0;d_ff:axis1;vocab:axis2", (2, 2, 2), "batch:axis0;d_ff:axis1;vocab:axis2"),
        ("", (8,), ""),
    ],
)
def test_axes_that_split_the_same_are_one(layout: str, shape: tuple[int, ...], becomes: str) -> None:
    assert one(layout) == (MESHES[shape], becomes)


def test_axes_that_are_not_neighbours_are_one_where_that_is_as_fast_and_lean() -> None:
    """Variables of 128 and 256 rows divide over an axis of 4, not over one of 12, 20 or 60. (Adafactor's
    are not padded.)"""
    model, machine = transformer(batch=120, optimizer="adafactor"), load_hardware("tpu-v4")
    stored = mtf.Options({"embedding/tokens": 3, "embedding/positions": 1, "output/projection": 1})

    def price(mesh: mtf.Mesh, layout: mtf.Layout) -> Evaluation:
        return evaluate(model, mesh, layout, machine, stored)

    found = merged(MESHES[5, 4, 3], mtf.Layout("batch:axis0+axis1+axis2"), MESHES, price)
    assert found == (MESHES[15, 4], mtf.Layout("batch:axis0+axis1"))


def test_three_axes_are_one_where_two_of_them_are_slower() -> None:
    def price(mesh: mtf.Mesh, layout: mtf.Layout) -> Evaluation:
        if mesh.shape in ((4, 2), (2, 4)):
            raise mtf.LayoutError("not this one")
        return evaluate(MODEL, mesh, layout, load_hardware("h100"))

    start = mtf.Layout("batch:axis0+axis1+axis2")
    assert merged(MESHES[2, 2, 2], start, MESHES, price) == (MESHES[8,], mtf.Layout("batch:axis0"))


def test_a_mesh_that_is_slower_is_not_taken() -> None:
    """A ring of eight on a torus takes other times than three of two."""
    mesh, _ = one("batch:axis0+axis1;d_ff:axis2", "tpu-v4")
    assert mesh in MESHES.values()


def test_a_search_over_shapes_answers_with_the_fewest_axes() -> None:
    model = perceptron(batch=512, hidden=64, layers=1)
    plan = search(model, devices=8, hardware="h100", max_axes=3, top=3, microbatches=(1,))
    assert plan.solver.status == "OPTIMAL"
    used = [tuple(axes) for axes in plan.layout.values()]
    pairs = [(a, b) for a in plan.mesh.names for b in plan.mesh.names if a != b]
    assert not any(all((a in axes) == (b in axes) for axes in used) for a, b in pairs)
    priced = evaluate(model, plan.mesh, plan.layout, load_hardware("h100"), plan.options)
    assert plan.predicted == priced.predicted
    listed = [(str(a.mesh), str(a.layout), a.storage) for a in plan.alternatives if "number" in a.name]
    assert len(listed) == 2 and listed[0] != listed[1]


def test_devices_that_do_the_same_work_are_named() -> None:
    plan = search(perceptron(batch=16), devices=7, hardware="tpu-v4")
    (note,) = [n for n in plan.data.notes if "do the same work" in n]
    assert note == (
        "the 7 devices along axis 'model' all do the same work: 'batch' of size 16 does not divide into 7 "
        "equal parts; use a size of 14 or 21, or a mesh axis of size 4 or 8"
    )
    plan = search(perceptron(batch=16), devices=7, hardware="tpu-v4", microbatches=(2,))
    assert any(
        "'batch' of size 16 does not divide into 7 equal parts in each of 2 microbatches; use a size of 14"
        in n
        for n in plan.data.notes
    )
    fits = search(perceptron(batch=4096, hidden=4096), devices=4, hardware="tpu-v4")
    assert not [n for n in fits.data.notes if "same work" in n or "repeat" in n]
