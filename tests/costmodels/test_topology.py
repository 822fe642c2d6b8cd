"""Where meshes lie: natural placements, wraparound rules, explicit placements, meshes that do not fit."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import MeshPlacement, load_hardware, place
from costmodels.hardware import Torus, hardware_names
from costmodels.network.topology import processes_spanned, wraps
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.mesh import Mesh


def _place(name: str, mesh: str) -> MeshPlacement:
    return place(load_hardware(name), Mesh(mesh))


@pytest.mark.parametrize(
    ("name", "mesh", "words"),
    [
        ("tpu-v5e", "data:16;model:16", "data: 16 on x; model: 16 on y (slice 16x16)"),
        ("tpu-v5e", "data:8;model:4", "data: 8 on x; model: 4 on y (slice 8x4)"),
        ("tpu-v4", "a:8;b:8;c:8", "a: 8 on x; b: 8 on y; c: 8 on z (slice 8x8x8)"),
        ("tpu-v5p", "data:8;model:16", "data: 8 on x; model: 4 on y x 4 on z (slice 8x4x4)"),
        # The Mesh-TensorFlow paper's mesh: 512 cores as 16 x 32.
        ("tpu-v2", "batch:16;model:32", "batch: 16 on x; model: 2 on core x 16 on y (slice 16x16)"),
        ("a100", "data:8;model:8", "data: 8 on network; model: 8 on node"),
        ("h100", "data:2;model:4", "data: 2 on node; model: 4 on node"),
        ("cpu-local", "data:2;model:4", "data: 2 on memory; model: 4 on memory"),
        ("tpu-v5e", "data:1;model:1", "data: one device; model: one device (slice 1x1)"),
    ],
)
def test_natural_placement(name: str, mesh: str, words: str) -> None:
    assert _place(name, mesh).describe() == words


@settings(max_examples=150)
@given(
    st.sampled_from(hardware_names()),
    st.lists(st.integers(min_value=1, max_value=40), min_size=1, max_size=3),
)
@pytest.mark.nightly
def test_any_mesh_gets_a_placement_and_always_the_same(name: str, sizes: list[int]) -> None:
    mesh = Mesh([(f"axis{i}", n) for i, n in enumerate(sizes)])
    placement = place(load_hardware(name), mesh)
    assert placement == place(load_hardware(name), mesh)
    for axis, factors in placement.assignment:
        assert math.prod(n for _, n in factors) == mesh.size(axis)
    for axis in mesh.names:
        route = placement.route([axis])
        assert route.size == mesh.size(axis) == math.prod(level.size for level in route.levels)
        assert all(level.rate > 0 for level in route.levels)


def test_what_does_not_fit_is_assumed_and_said() -> None:
    assert _place("tpu-v5e", "d:17").assumptions[0] == (
        "a mesh of 17 does not fit the torus of 16x16 chips, so the prediction assumes longer torus axes"
    )
    assert (
        _place("tpu-v5e", "d:512").assumptions[0]
        == "the 512 chips form 2 slices, connected by the data-centre network"
    )
    assert _place("tpu-v3", "d:3").assumptions[0] == (
        "only 1 of the 2 devices of each chip are used, because 3 devices are not a multiple of 2"
    )
    assert _place("a100", "d:12;m:6").assumptions == (
        "only 6 of the 8 devices of each node are used, so that all groups have the same size",
    )
    assert _place("tpu-v5e", "data:16;model:16").assumptions == ()


def test_slices_are_crossed_by_one_axis_and_not_the_one_that_fills_a_torus_axis() -> None:
    placement = _place("tpu-v5p", "data:512;model:16")
    assert placement.factor("data", "slice") == 2
    assert placement.factor("model", "slice") == 1


@pytest.mark.parametrize(
    ("mesh", "crossed"),
    [
        ("replica:16;data:16;model:16", {"replica": 16}),
        ("replica:16;data:256", {"replica": 16}),
        ("data:256;replica:16", {"data": 16}),
        ("a:2;b:4;c:256", {"a": 2, "b": 4}),
        ("a:4;b:256;c:2", {"a": 4, "b": 2}),
    ],
)
def test_the_first_axes_lie_over_the_slices(mesh: str, crossed: dict[str, int]) -> None:
    """As jobs number their devices: slice by slice."""
    placement = _place("tpu-v5e", mesh)
    found = {a: n for a in placement.mesh.names if (n := placement.factor(a, "slice")) > 1}
    assert found == crossed


def test_where_the_first_axes_cannot_fill_the_slices_any_may_cross_them() -> None:
    placement = _place("tpu-v5e", "a:4;b:384")
    assert math.prod(placement.factor(a, "slice") for a in "ab") == 6


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("tpu-v5e", (16, 16), (True, True)),
        ("tpu-v5e", (8, 16), (False, True)),
        ("tpu-v5e", (8, 4), (False, False)),
        ("tpu-v4", (4, 4, 8), (True, True, True)),
        ("tpu-v4", (2, 4, 4), (False, False, False)),
        ("tpu-v3", (32, 32), (True, True)),
        ("tpu-v3", (16, 32), (False, False)),
    ],
)
def test_wraparound_rules(name: str, shape: tuple[int, ...], expected: tuple[bool, ...]) -> None:
    topology = load_hardware(name).topology
    assert isinstance(topology, Torus)
    assert wraps(topology, shape) == expected


def test_missing_wraparound_is_said() -> None:
    assert _place("tpu-v5e", "x:8;y:4").assumptions == (
        "no wraparound links on torus axis x (8), y (4), by the rule 'axis_size' of this hardware",
    )


def test_the_cards_of_a_node_are_shared_by_its_devices() -> None:
    v100 = place(load_hardware("v100"), Mesh("d:2;m:8"))
    level = v100.route(["d"]).level("network")
    assert level is not None
    assert level.rate == pytest.approx(0.9 * 50e9 / 8)
    few = place(load_hardware("v100"), Mesh("d:2;m:2"), {"d": {"network": 2}, "m": {"node": 2}}).route(["d"])
    assert few.levels[0].rate == pytest.approx(0.9 * 12.5e9), "two devices of a node have a card each"


def test_explicit_placement() -> None:
    hardware = load_hardware("tpu-v4")
    placement = place(hardware, Mesh("d:16;m:4"), {"d": {"x": 4, "z": 4}, "m": {"y": 4}})
    assert placement.shape == (4, 4, 4)
    assert placement.describe() == "d: 4 on x x 4 on z; m: 4 on y (slice 4x4x4)"
    assert [s.axis for s in placement.route(["d"]).levels[0].segments] == ["x", "z"]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            {"d": {"x": 4}, "m": {"y": 4}},
            "mesh axis 'd': the product of its factors is 4, but the axis has 8",
        ),
        (
            {"d": {"x": 8}, "m": {"w": 4}},
            "mesh axis 'm': the hardware has no level 'w'; known: core, slice, x, y, z",
        ),
        ({"d": {"x": 8}}, "axis 'm' is missing"),
        ({"d": {"x": 8}, "m": {"core": 4}}, "level 'core' has 1 devices, but the placement uses 4"),
        ({"data": {"x": 8}, "m": {"y": 4}}, "has no axis 'data'"),
    ],
)
def test_a_wrong_explicit_placement_is_refused(assignment: dict[str, dict[str, int]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        place(load_hardware("tpu-v4"), Mesh("d:8;m:4"), assignment)


@pytest.mark.parametrize(
    ("mesh", "axes", "each", "spanned"),
    [
        ("d:2;m:2", "m", 2, 1),
        ("d:2;m:2", "d", 2, 2),
        ("d:2;m:2", "d m", 2, 2),
        ("d:2;m:2", "d m", 4, 1),
        ("d:2;m:2", "d m", 1, 4),
        ("d:4;m:2", "d", 4, 2),  # ranks 0, 2 | 4, 6
        ("d:3;m:2", "m", 3, 2),  # 0, 1 | 2, 3 | 4, 5 in processes 0-2 | 3-5: the widest counts
        ("d:2;m:2", "d m", None, 1),
        ("d:2;m:2", "d m", 8, 1),
    ],
)
def test_over_how_many_processes_a_group_lies(mesh: str, axes: str, each: int | None, spanned: int) -> None:
    """Devices are dealt out in the order of their ranks."""
    assert processes_spanned(Mesh(mesh), axes.split(), each) == spanned
