"""A piece of some work costs at least its share of the whole: what the search's bound on microbatches rests
on."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodels.hardware import Hardware, hardware_names, load_hardware
from costmodels.kernels.compute import Quantity, compute_seconds
from costmodels.network.collectives import collective_seconds, full_bytes
from costmodels.network.topology import place
from costmodels.pricing.pricer import pricer
from mesh_tf_core.ir.mesh import Mesh

ANALYTIC = [n for n in hardware_names() if not load_hardware(n).collective_curves]
ITEM = {"bfloat16": 2, "float32": 4}
CLOSE = 1 - 1e-12

sizes = st.builds(lambda power, odd: 2**power * odd, st.integers(0, 13), st.sampled_from([1, 1, 3, 5]))
parts = st.sampled_from([2, 3, 4, 8])


def product(m: int, n: int, k: int, batch: int, dtype: str) -> Quantity:
    """As `quantities.quantity_of` sees a product: with a dimension of one it is not a matrix product."""
    flops, moved = 2.0 * m * n * k * batch, float(ITEM[dtype] * batch * (m * k + k * n + m * n))
    if min(m, n, k) == 1:
        return Quantity(flops, moved, "elementwise", dtype, (m, n, k, batch))
    return Quantity(flops, moved, "matmul", dtype, (m, n, k, batch))


def test_presets_without_measured_curves_have_the_property() -> None:
    mesh = Mesh("data:2;model:4")
    said = {n: pricer(load_hardware(n), mesh).pieces_cost_more for n in hardware_names()}
    assert all(said[n] for n in ANALYTIC) and len(ANALYTIC) > 10
    assert not said["cpu-local"]


@pytest.mark.parametrize("name", ANALYTIC)
@given(st.tuples(sizes, sizes, sizes, sizes), st.integers(0, 3), parts, st.sampled_from(sorted(ITEM)))
@settings(deadline=None, max_examples=60)
@pytest.mark.one_in(3)
def test_products(name: str, piece: tuple[int, int, int, int], along: int, count: int, dtype: str) -> None:
    hardware = load_hardware(name)
    whole = [size * count if i == along else size for i, size in enumerate(piece)]
    one = compute_seconds(hardware, product(*piece, dtype))
    assert count * one >= CLOSE * compute_seconds(hardware, product(*whole, dtype))


def collective(hardware: Hardware, kind: str, payload: int) -> float:
    mesh = Mesh("data:2;model:4")
    size = full_bytes(kind, payload, 4)
    return collective_seconds(hardware, place(hardware, mesh), kind, ("model",), size)


@pytest.mark.parametrize("name", ANALYTIC)
@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute"]),
    st.integers(1, 1 << 28),
    parts,
)
@settings(deadline=None, max_examples=30)
def test_collectives(name: str, kind: str, payload: int, count: int) -> None:
    hardware = load_hardware(name)
    whole = collective(hardware, kind, count * payload)
    assert count * collective(hardware, kind, payload) >= CLOSE * whole
