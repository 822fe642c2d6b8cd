"""Nodes and slices whose links are slower between than within: the proven best is that of all layouts, priced
one by one on every shape."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import GpuCluster, Hardware, Torus, load_hardware
from costmodels.network.topology import place
from costmodels.pricing.pricer import pricer
from examples.mlp import model as mlp
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.space.decisions import SearchSpace, decisions
from layoutopt.space.mesh_shapes import meshes
from tests.searching import search

PLAIN = SearchSpace(storage=("layout",), recompute=(False,), microbatches=(1,))


def nodes_of(size: int) -> Hardware:
    """H100 in smaller nodes."""
    hardware = load_hardware("h100")
    assert isinstance(hardware.topology, GpuCluster)
    size_number = replace(hardware.topology.node_size, value=float(size))
    return replace(hardware, topology=replace(hardware.topology, node_size=size_number))


def slices_of(size: int) -> Hardware:
    """TPU v5e in smaller slices, over the data-centre network."""
    hardware = load_hardware("tpu-v5e")
    assert isinstance(hardware.topology, Torus)
    axes = tuple(replace(axis, value=float(size)) for axis in hardware.topology.axes)
    return replace(hardware, topology=replace(hardware.topology, axes=axes))


def slow_bytes(plan_mesh: mtf.Mesh, hardware: Hardware, sent: Mapping[str, float]) -> float:
    """Bytes over axes that lie on the slow links."""
    placement = place(hardware, plan_mesh)
    slow = {
        a
        for a in plan_mesh.names
        if placement.factor(a, "network" if "h100" in hardware.name else "slice") > 1
    }
    return sum(n for axes, n in sent.items() if slow & set(axes.split("+")))


@pytest.mark.nightly
def test_storage_in_a_node_is_offered_where_links_differ() -> None:
    """And taken, where a device has no room for the optimizer's state."""
    mesh, equal = mtf.Mesh("pod:4;data:2"), mtf.Mesh("pod:2;data:2")
    hardware = slices_of(2)
    assert place(hardware, mesh).near == ("data",) and place(hardware, equal).near == ()
    model = mlp(layers=4, batch=4096, hidden=4096)
    on: dict[str, Any] = {"mesh": mesh, "hardware": hardware, "recompute": (False,), "microbatches": (1,)}
    on["memory"] = 600 * 2**20
    without = search(model, storage=("layout", "zero1", "zero2", "zero3"), **on)
    plan = search(model, **on)
    assert plan.solver.status == without.solver.status == "OPTIMAL"
    assert "zero3@data" in plan.data.storage.values()
    assert plan.predicted.step_seconds < without.predicted.step_seconds
    searched = search(model, devices=8, **{**on, "mesh": None, "max_axes": 2})
    named = {axis for stage in searched.data.storage.values() for axis in stage.partition("@")[2].split("+")}
    assert named - {""} and named - {""} <= {*searched.data.mesh}  # what axes are called in the plan
    evaluate(model, searched.mesh, searched.layout, hardware, searched.options)


@pytest.mark.parametrize(
    ("hardware", "asked", "large", "avoided"),
    [
        (nodes_of(4), 8, {"batch": 2048, "hidden": 16384}, True),
        (nodes_of(4), 8, {"batch": 32768, "hidden": 4096}, False),
        (slices_of(2), 8, {"batch": 2048, "hidden": 16384}, False),
        (nodes_of(2), "a:4;b:4", {"batch": 32768, "hidden": 4096}, False),
    ],
    ids=["nodes, little work", "nodes, much work", "slices", "an axis that crosses nodes"],
)
@pytest.mark.one_in(2)
def test_the_answer_is_the_best_of_all(
    hardware: Hardware, asked: int | str, large: dict[str, int], avoided: bool
) -> None:
    model = mlp(layers=1, **large)
    mesh, devices = (asked, None) if isinstance(asked, str) else (None, asked)
    on: dict[str, Any] = {"storage": ("layout",), "recompute": (False,), "microbatches": (1,)}
    plan = search(model, mesh=mesh, devices=devices, hardware=hardware, **on)
    seconds = []
    for each in meshes(mesh, devices, 2, hardware):
        decided, prices = decisions(model.training_step(1).graph, each, PLAIN), pricer(hardware, each)
        for picked in itertools.product(*decided.options.values()):
            layout, options = decided.read(dict(zip(decided.options, picked, strict=True)))
            try:
                found = evaluate(model, each, layout, hardware, options, prices, check=False)
            except mtf.LayoutError:
                continue
            seconds.append(found.cost.step_seconds)
    assert len(seconds) > 10 and plan.solver.status == "OPTIMAL"
    assert plan.predicted.step_seconds == pytest.approx(min(seconds), rel=1e-9)
    sent = plan.predicted.communication_bytes_per_device
    assert sum(sent.values()) > 0
    assert (slow_bytes(plan.mesh, hardware, sent) == 0) == avoided
