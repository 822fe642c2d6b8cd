"""Devices take the places in a mesh that keep what talks most on fast links; stand-ins for JAX's devices."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from layoutopt import search
from layoutopt.plan.build import parse_plan
from mesh_tf_core import Mesh
from mesh_tf_core.engines.jax.compat import placed


@dataclass(frozen=True)
class Device:
    id: int
    slice_index: int = 0
    coords: tuple[int, int, int] = (0, 0, 0)
    platform: str = "gpu"
    device_kind: str = "stand-in"
    core_on_chip: int = 0
    process_index: int = 0


def machine(slices: int, each: int) -> list[Device]:
    return [Device(n, n // each) for n in range(slices * each)]


def torus(slices: int, x: int, y: int) -> list[Device]:
    """TPU v4 chips, whose ids say nothing of where they are."""
    places = itertools.product(range(slices), range(y), range(x))
    found = [(s, (i, j, 0)) for s, j, i in places]
    return [Device(97 * n % 89, s, at, "tpu", "TPU v4") for n, (s, at) in enumerate(found)]


def spans(mesh: Mesh, devices: list[Any]) -> dict[str, int]:
    """Mesh axis -> over how many slices each of its groups lies."""
    return {
        axis: max(len({devices[rank].slice_index for rank in group}) for group in mesh.groups([axis]))
        for axis in mesh.names
    }


@pytest.mark.parametrize(
    ("mesh", "slices", "asked", "over"),
    [
        ("data:2;model:4", 2, {}, {"data": 2, "model": 1}),
        ("data:4;model:2", 2, {}, {"data": 2, "model": 1}),
        ("data:2;model:4", 4, {}, {"data": 2, "model": 2}),
        ("data:2;model:4", 2, {"model": 2}, {"data": 1, "model": 2}),
        ("data:2;model:4", 4, {"model": 4}, {"data": 1, "model": 4}),
        ("data:2;model:4", 4, {"data": 2, "model": 2}, {"data": 2, "model": 2}),
        ("data:2;model:4", 2, {"model": 4}, {"data": 2, "model": 1}),  # not the slices that there are
        ("model:4;data:2", 2, {"data": 2}, {"model": 1, "data": 2}),
        ("data:2;model:4", 1, {"data": 2}, {"data": 1, "model": 1}),
    ],
)
def test_slow_links_carry_the_axes_that_the_plan_put_there(
    mesh: str, slices: int, asked: dict[str, int], over: dict[str, int]
) -> None:
    found = machine(slices, 8 // slices)
    devices = placed(Mesh(mesh), found, asked)
    assert sorted(d.id for d in devices) == list(range(8))
    assert spans(Mesh(mesh), devices) == over


def test_slices_that_no_axes_fill_are_taken_in_order() -> None:
    uneven = [Device(n, n // 6) for n in range(8)]
    assert placed(Mesh("data:2;model:4"), uneven) == uneven
    three = machine(3, 2)
    assert placed(Mesh("data:2;model:2"), three[:4]) == three[:4]  # 2 and 2
    assert placed(Mesh("data:4"), [*machine(1, 2), Device(2, 1), Device(3, 2)]) == [
        *machine(1, 2),
        Device(2, 1),
        Device(3, 2),
    ]


def test_axes_follow_the_torus_within_a_slice() -> None:
    """Neighbours of an axis are a link apart, which the chips' numbers do not say."""
    mesh = Mesh("data:2;x:2;y:4")
    devices = np.array(placed(mesh, torus(2, 4, 2)), object).reshape(mesh.shape)
    for group in (*devices.transpose(0, 1, 2).reshape(-1, 4), *devices.transpose(0, 2, 1).reshape(-1, 2)):
        assert len({d.slice_index for d in group}) == 1
        apart = [
            sum(abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
            for one, other in itertools.pairwise(group)
        ]
        assert apart == [1] * (len(group) - 1)
    assert {d.slice_index for d in devices[0].flat} == {0}


def test_chips_with_gaps_are_taken_in_order() -> None:
    some = [d for d in torus(1, 4, 2) if d.coords[0] != 1][:4]
    assert placed(Mesh("data:2;model:2"), some) == some


def test_a_plan_says_which_axes_lie_over_slices() -> None:
    g = mtf.Graph()
    b, d = mtf.Dim("batch", 8192), mtf.Dim("d", 64)
    y = g.input("x", [b, d], "float32") * g.variable("w", [d], mtf.ONES)
    model = mtf.Model(mtf.reduce_mean(mtf.square(y)))
    plan = search(model, mesh="data:512", hardware="tpu-v5e")  # of 256 chips at most
    assert plan.slices == {"data": 2}
    assert parse_plan(plan.to_json(), "here").slices == {"data": 2}
    # JAX calls nodes of GPUs slices, too, and MaxText asks for their number (its configs/gpu).
    assert search(model, mesh="data:4;model:8", hardware="h100").slices == {"data": 4}
    assert "slices" not in search(model, mesh="data:8", hardware="h100").to_json()
    assert "slices" not in search(model, mesh="data:4", hardware="tpu-v5e").to_json()
