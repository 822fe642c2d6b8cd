"""Properties of collective times: positive, monotone, ordered; what each kind of hardware does."""

from __future__ import annotations

import dataclasses
from itertools import combinations
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels import COLLECTIVES, collective_cost, collective_seconds, full_bytes, load_hardware, place
from costmodels.hardware import (
    CollectiveCurve,
    Curve,
    Hardware,
    Number,
    SharedMemory,
    Torus,
    hardware_names,
)
from costmodels.network import closed_forms as formulas
from costmodels.network.closed_forms import CollectiveCost
from costmodels.network.collectives import check_prices
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import SparseDim
from mesh_tf_core.ir.mesh import Mesh

SIZES = st.sampled_from((1, 2, 3, 4, 6, 8, 16, 32))
BYTES = st.floats(min_value=1, max_value=1e11)
MEASURED = "cpu-jax"
"""XLA's virtual CPU devices reduce-scatter by an all-reduce, and gather in less."""


def _seconds(name: str, mesh: Mesh, kind: str, axes: tuple[str, ...], size: float) -> float:
    hardware = load_hardware(name)
    return collective_seconds(hardware, place(hardware, mesh), kind, axes, size)


meshes = st.builds(lambda a, b, c: Mesh({"a": a, "b": b, "c": c}), SIZES, SIZES, st.sampled_from((1, 2, 4)))
axes_of = st.sampled_from((("a",), ("b",), ("c",), ("a", "b"), ("a", "c"), ("a", "b", "c")))


@settings(max_examples=150)
@given(st.sampled_from(hardware_names()), meshes, axes_of, st.sampled_from(COLLECTIVES), BYTES, BYTES)
def test_zero_in_a_group_of_one_else_positive_and_monotone_in_bytes(
    name: str, mesh: Mesh, axes: tuple[str, ...], kind: str, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    a, b = _seconds(name, mesh, kind, axes, less), _seconds(name, mesh, kind, axes, more)
    if mesh.group_size(axes) == 1:
        assert a == b == 0.0
    else:
        assert 0 < a <= b


@settings(max_examples=100)
@given(st.sampled_from(hardware_names()), meshes, axes_of, BYTES)
def test_an_all_reduce_takes_at_least_a_reduce_scatter(
    name: str, mesh: Mesh, axes: tuple[str, ...], size: float
) -> None:
    whole = _seconds(name, mesh, "all_reduce", axes, size)
    scatter = _seconds(name, mesh, "reduce_scatter", axes, size)
    assert whole >= scatter
    if name != MEASURED:
        assert scatter == _seconds(name, mesh, "all_gather", axes, size)


@settings(max_examples=100)
@given(
    st.sampled_from(("tpu-v4", "tpu-v5p")),
    st.sampled_from((("x",), ("y",), ("x", "y"), ("x", "y", "z"))),
    st.sampled_from(COLLECTIVES),
    st.tuples(*[st.sampled_from((4, 8, 16))] * 3),
    BYTES,
)
def test_wraparound_never_costs(
    name: str, axes: tuple[str, ...], kind: str, shape: tuple[int, int, int], size: float
) -> None:
    ring, mesh = load_hardware(name), Mesh(dict(zip("xyz", shape, strict=True)))
    line = _without_wraparound(ring)
    where = {axis: {axis: n} for axis, n in mesh.axes}
    with_ring = collective_seconds(ring, place(ring, mesh, where), kind, axes, size)
    assert with_ring <= collective_seconds(line, place(line, mesh, where), kind, axes, size) * (1 + 1e-12)


def _without_wraparound(hardware: Hardware) -> Hardware:
    topology = hardware.topology
    assert isinstance(topology, Torus)
    never = dataclasses.replace(topology.wraparound, rule="never", value=None)
    return dataclasses.replace(hardware, topology=dataclasses.replace(topology, wraparound=never))


@given(st.sampled_from(("tpu-v4", "tpu-v5p")), BYTES)
def test_more_torus_axes_are_not_slower_for_large_arrays(name: str, size: float) -> None:
    hardware = load_hardware(name)
    one = place(hardware, Mesh("a:16;b:16"), {"a": {"x": 16}, "b": {"y": 16}})
    two = place(hardware, Mesh("a:16;b:16"), {"a": {"x": 4, "y": 4}, "b": {"x": 4, "y": 4}})
    big = size + 1e9
    assert collective_seconds(hardware, one, "all_gather", ["a", "b"], big) == pytest.approx(
        collective_seconds(hardware, two, "all_gather", ["a", "b"], big)
    )


def test_bandwidth_adds_over_the_axes_of_one_mesh_axis() -> None:
    hardware = load_hardware("tpu-v5e")
    placement = place(hardware, Mesh("a:16;b:16"))
    one = collective_seconds(hardware, placement, "all_gather", ["a"], 1e9)
    assert collective_seconds(hardware, placement, "all_gather", ["a", "b"], 1e9) == pytest.approx(one / 2)


def test_the_two_cores_of_a_chip_share_its_links() -> None:
    hardware = load_hardware("tpu-v3")
    alone = place(hardware, Mesh("a:32;b:64"), {"a": {"x": 32}, "b": {"core": 2, "y": 32}})
    reduce_a = collective_seconds(hardware, alone, "all_reduce", ["a"], 1e9)
    reduce_b = collective_seconds(hardware, alone, "all_reduce", ["b"], 1e9)
    assert reduce_a == pytest.approx(2 * reduce_b)


def test_strided_groups_share_the_links_they_cross() -> None:
    hardware = load_hardware("tpu-v5e")
    placement = place(
        hardware, Mesh("outer:4;inner:4;y:16"), {"outer": {"x": 4}, "inner": {"x": 4}, "y": {"y": 16}}
    )
    outer, inner = placement.route(["outer"]).levels[0], placement.route(["inner"]).levels[0]
    assert (outer.segments[0].stride, outer.segments[0].ring) == (4, True)
    assert (inner.segments[0].stride, inner.segments[0].ring) == (1, False)
    assert outer.rate == pytest.approx(2 * 45e9 / 4)
    assert inner.rate == pytest.approx(45e9)


def test_slices_are_joined_hierarchically() -> None:
    hardware = load_hardware("tpu-v5e")
    placement = place(
        hardware, Mesh("pod:2;data:16;model:16"), {"pod": {"slice": 2}, "data": {"x": 16}, "model": {"y": 16}}
    )
    within = collective_seconds(hardware, placement, "all_reduce", ["data"], 1e9)
    both = collective_cost(hardware, placement, "all_reduce", ["pod", "data"], 1e9)
    across = 2 * (68.89e-6 + 1e9 / 16 / 2 / 3.125e9)
    assert both.seconds == pytest.approx(within + across)
    assert both.algorithm == "torus, then slices"
    assert "2 slices at 3.125 GB/s" in both.words


def test_a_group_over_nodes_uses_the_cards_of_all_its_members() -> None:
    """Galvatron measured 16 GPUs on 2 nodes at 5.5 times the bandwidth of 2 on 2 nodes, 8 at 2.6."""
    hardware = load_hardware("a100")
    busbw = {}
    for inside in (1, 2, 4, 8):
        mesh = Mesh({"nodes": 2, "out": 8 // inside, "inside": inside})
        where = {"nodes": {"network": 2}, "out": {"node": 8 // inside}, "inside": {"node": inside}}
        t = collective_seconds(hardware, place(hardware, mesh, where), "all_reduce", ["nodes", "inside"], 1e9)
        n = 2 * inside
        busbw[n] = 2 * (n - 1) / n * 1e9 / t
    assert busbw[2] < busbw[4] < busbw[8] < busbw[16]
    assert busbw[16] / busbw[2] == pytest.approx(8, rel=0.05)


def test_small_arrays_use_a_tree_over_nodes_and_large_ones_a_ring() -> None:
    hardware = load_hardware("a100")
    placement = place(hardware, Mesh("d:256"))
    small = collective_cost(hardware, placement, "all_reduce", ["d"], 1e4)
    large = collective_cost(hardware, placement, "all_reduce", ["d"], 1e11)
    assert small.algorithm == "tree, LL"
    assert large.algorithm == "ring, Simple"


def test_the_switch_reduces_large_arrays_in_one_node() -> None:
    hardware = load_hardware("h200")
    assert collective_cost(hardware, place(hardware, Mesh("d:8")), "all_reduce", ["d"], 1e9).algorithm == (
        "switch reduction"
    )
    assert (
        "ring" in collective_cost(hardware, place(hardware, Mesh("d:4")), "all_reduce", ["d"], 1e9).algorithm
    )


# ----------------------------------------------------------------------------------------------- measured


def _with_curves(*curves: tuple[str, int, tuple[tuple[float, float], ...]]) -> Hardware:
    made = tuple(CollectiveCurve(kind, n, 8, Curve(points), "a test", "2026") for kind, n, points in curves)
    return dataclasses.replace(load_hardware("cpu-local"), collective_curves=made)


def test_a_measured_curve_is_interpolated_in_bytes_and_in_group_size() -> None:
    hardware = _with_curves(
        ("all_gather", 2, ((1000, 1e-4), (2000, 2e-4))), ("all_gather", 8, ((1000, 4e-4), (2000, 8e-4)))
    )

    def at(n: int, size: float) -> float:
        return collective_seconds(hardware, place(hardware, Mesh({"d": n})), "all_gather", ["d"], size)

    assert at(2, 1500) == pytest.approx(1.5e-4)
    assert at(2, 10) == pytest.approx(1e-4), "below the first point it is latency"
    assert at(2, 3000) == pytest.approx(3e-4), "above the last point the slope goes on"
    assert at(5, 1000) == pytest.approx((1e-4 + 4e-4) / 2)
    assert at(16, 1000) == pytest.approx(8e-4)
    assert at(1, 1000) == 0.0


def test_the_curve_of_the_nearest_number_of_busy_devices_is_used() -> None:
    base = _with_curves(("all_reduce", 2, ((1000, 1e-4),)))
    other = dataclasses.replace(base.collective_curves[0], devices=2, seconds=Curve(((1000, 5e-5),)))
    hardware = dataclasses.replace(base, collective_curves=(*base.collective_curves, other))

    def at(mesh: str) -> float:
        return collective_seconds(hardware, place(hardware, Mesh(mesh)), "all_reduce", ["d"], 1000)

    assert at("d:2") == pytest.approx(5e-5)
    assert at("d:2;m:4") == pytest.approx(1e-4)


def _dealt_out(each: int, *curves: tuple[int, int, float]) -> Hardware:
    """Measured over processes of `each` devices: (group size, processes, seconds of 1 kB) of all-reduces."""
    base = load_hardware("cpu-local")
    assert isinstance(base.topology, SharedMemory)
    held = Number(float(each), str(each), "a test", "2026")
    made = tuple(
        CollectiveCurve("all_reduce", n, 4, Curve(((1000.0, y),)), "a test", "2026", None, over)
        for n, over, y in curves
    )
    topology = dataclasses.replace(base.topology, devices_per_process=held)
    return dataclasses.replace(base, topology=topology, collective_curves=made)


def _reduced(hardware: Hardware, mesh: str, *axes: str) -> CollectiveCost:
    return collective_cost(hardware, place(hardware, Mesh(mesh)), "all_reduce", axes, 1000)


def test_a_group_over_processes_has_the_curve_of_one() -> None:
    hardware = _dealt_out(2, (2, 1, 1e-4), (2, 2, 9e-4), (4, 2, 2e-3))
    inside, across = _reduced(hardware, "d:2;m:2", "m"), _reduced(hardware, "d:2;m:2", "d")
    assert inside.seconds == pytest.approx(1e-4)
    assert inside.words == "measured for groups of 2 devices inside a process, at 1,000 B"
    assert across.seconds == pytest.approx(9e-4)
    assert "over 2 processes" in across.words
    assert _reduced(hardware, "d:2;m:2", "d", "m").seconds == pytest.approx(2e-3)
    assert _reduced(hardware, "d:4", "d").seconds == pytest.approx(2e-3)


def test_a_group_over_so_many_processes_as_none_measured_has_the_next_ones_curve() -> None:
    hardware = _dealt_out(2, (2, 1, 1e-4), (4, 2, 2e-3), (8, 4, 5e-3))
    more = _reduced(hardware, "d:8;m:2", "d")
    assert more.seconds == pytest.approx(5e-3)
    assert (
        more.words == "measured for groups of 8 devices over 4 processes, because no curve was measured "
        "over 8 processes, at 1,000 B"
    )
    between = _reduced(hardware, "d:3;m:2", "d")  # rather slower than faster
    assert between.seconds == pytest.approx(5e-3 * 3 / 8)
    far = _dealt_out(2, (2, 1, 1e-4), (8, 4, 5e-3))  # never what one process does for what two do
    assert _reduced(far, "d:2;m:2", "d").seconds == pytest.approx(5e-3 * 2 / 8)
    only = _dealt_out(2, (4, 2, 2e-3))
    assert (
        "over 2 processes, because no curve was measured inside a process"
        in _reduced(only, "d:2;m:2", "m").words
    )


def test_a_profile_of_one_process_asks_nothing_about_processes() -> None:
    hardware = dataclasses.replace(_dealt_out(2, (2, 1, 1e-4)), topology=load_hardware("cpu-local").topology)
    assert _reduced(hardware, "d:2;m:2", "d").words == "measured for groups of 2 devices, at 1,000 B"


def test_a_reduce_scatter_without_a_curve_costs_at_most_the_measured_all_reduce() -> None:
    hardware = load_hardware("cpu-local")
    placement = place(hardware, Mesh("d:8"))
    for size in (1e3, 1e5, 1e6, 1e7):
        scatter = collective_seconds(hardware, placement, "reduce_scatter", ["d"], size)
        assert 0 < scatter <= collective_seconds(hardware, placement, "all_reduce", ["d"], size)


# ------------------------------------------------------------------------------------------------- errors


def test_bytes_are_those_of_the_full_array() -> None:
    assert [full_bytes(kind, 10, 4) for kind in COLLECTIVES] == [10, 10, 40, 40, 10]


def test_unknown_collective_axis_and_negative_bytes_are_refused() -> None:
    hardware = load_hardware("tpu-v4")
    placement = place(hardware, Mesh("d:8"))
    with pytest.raises(UserError, match="collective 'allreduce' is not known; did you mean 'all_reduce'"):
        collective_seconds(hardware, placement, "allreduce", ["d"], 1)
    with pytest.raises(UserError, match="has no axis 'model'; known: d"):
        collective_seconds(hardware, placement, "all_reduce", ["model"], 1)
    with pytest.raises(UserError, match=r"the number of bytes is .*; give at least 0"):
        collective_seconds(hardware, placement, "all_reduce", ["d"], -1)


def test_no_bytes_take_no_time() -> None:
    assert _seconds("a100", Mesh("d:8"), "all_reduce", ("d",), 0) == 0.0


def test_a_kind_without_a_price_is_refused() -> None:
    check_prices(COLLECTIVES)
    with pytest.raises(TypeError, match="collective 'broadcast' has no formula for its time"):
        check_prices([*COLLECTIVES, "broadcast"])


CHOICES = [(8, 2, 1, 1), (8, 3, 4, 2), (12, 4, 3, 2), (16, 4, 4, 2), (16, 2, 8, 3)]


@pytest.mark.parametrize(("experts", "chosen", "groups", "kept"), CHOICES)
def test_rows_that_travel_once_are_those_of_places_with_any_expert(
    experts: int, chosen: int, groups: int, kept: int
) -> None:
    """Equation (10) against all choices, for places that groups divide, or that divide groups."""
    few, of = SparseDim("e", experts, chosen, experts, 1.0, groups, kept), experts // groups
    sets = [
        set(found)
        for some in combinations(range(groups), kept)
        for found in combinations([g * of + i for g in some for i in range(of)], chosen)
    ]
    for here in (n for n in range(1, experts + 1) if experts % n == 0 and (n % of == 0 or of % n == 0)):
        places = [set(range(i, i + here)) for i in range(0, experts, here)]
        once = fmean(sum(bool(p & s) for p in places) for s in sets) / chosen
        assert formulas.sent_once(few, here) == pytest.approx(once, rel=1e-12)


def test_a_dispatcher_that_sends_once_takes_a_nodes_rows_once() -> None:
    """DeepSeek-V3 over 8 nodes: at most 4 nodes of a token's 8 experts; nothing changes where all differ."""
    plain, flex = (load_hardware("h100", f"megatron{v}") for v in ("", ":dispatcher=flex"))
    few = SparseDim("experts", 4, 8, 256, 1.0, 8, 4)
    for mesh, least, most in (("data:64", 0.45, 0.46), ("data:8", 0.9, 1.2)):
        placement = place(plain, Mesh(mesh))
        each, once = (
            collective_cost(m, placement, "all_to_all", ["data"], 64e9, few).seconds for m in (plain, flex)
        )
        assert least < once / each < most
    placement = place(plain, Mesh("data:64"))
    other = {collective_cost(m, placement, "all_to_all", ["data"], 1e9).seconds for m in (plain, flex)}
    assert len(other) == 1
