"""Every worked example of the scaling book that a formula of this package must give.

`tests/data/scaling_book_worked.csv` holds the published answers. The book rounds on the way, so each example
says how far its answer may lie from ours. `ar1` is an erratum: the text ignores that the
array is split over X and Y.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path

import pytest

from costmodels import collective_seconds, load_hardware, place
from costmodels.network import closed_forms as formulas
from mesh_tf_core.ir.mesh import Mesh

DATA = Path(__file__).parents[1] / "data" / "scaling_book_worked.csv"
MB16 = 2.0 * 8 * 128 * 8192


def _published() -> dict[str, str]:
    lines = [line for line in DATA.read_text().splitlines() if not line.startswith("#")]
    return {row["id"]: row["expected"] for row in csv.DictReader(lines)}


def _gather(name: str, mesh: str, axes: tuple[str, ...], size: float, kind: str = "all_gather") -> float:
    """Microseconds on the hardware of that name, mesh axes on the torus axes of the same names."""
    hardware = load_hardware(name)
    shape = Mesh(mesh)
    placement = place(hardware, shape, {axis: {axis: n} for axis, n in shape.axes})
    return 1e6 * collective_seconds(hardware, placement, kind, axes, size)


def _intensity(name: str, bandwidth: float | None = None) -> float:
    """FLOPs per byte at which a product takes as long as the transfer: peak / bandwidth (of one ring)."""
    hardware = load_hardware(name)
    ring = (
        place(hardware, Mesh("x:16;y:16;z:16"), {a: {a: 16} for a in "xyz"}).route(["x"])
        if not bandwidth
        else None
    )
    return hardware.peak_flops("bfloat16") / (ring.levels[0].rate if ring else bandwidth or 1.0)


def _flops_bound_batch() -> float:
    """B at which int8[16384, 4096] x int8[B, 4096] on v5e leaves the memory bound."""
    hardware = load_hardware("tpu-v5e")
    d, f, peak, bandwidth = 4096, 16384, hardware.peak_flops("int8"), hardware.memory_bandwidth
    return d * f / bandwidth / (2 * d * f / peak - (d + f) / bandwidth)


V4 = 2.0 * 1024 * 4096
H100 = 450e9
EXAMPLES: dict[str, tuple[Callable[[], float], float, float]] = {
    # id: our value, the published one, relative tolerance
    "hbm1": (lambda: 1e3 * 400e9 / (32 * load_hardware("tpu-v4").memory_bandwidth), 10, 0.05),
    "mm1": (_flops_bound_batch, 271, 0.05),
    "p2p": (lambda: 1e6 * formulas.permute(MB16, 2 * 45e9, 0, 1e-6), 188, 0.01),
    "gather": (lambda: 1e3 * formulas.torus_gather(16, 16e9, 2 * 45e9, False, 6e-6), 167, 0.005),
    "ag1": (lambda: _gather("tpu-v5e", "x:8;y:4", ("y",), 2.0 * 2048 * 8192), 560, 0.005),
    "ag2": (lambda: _gather("tpu-v5e", "x:8;y:4", ("y",), 2.0 * 256 * 256), 3, 0.001),
    "ag3": (lambda: _gather("tpu-v4", "x:4;y:4;z:4", ("x",), V4 / 4), 23, 0.02),
    "ag4": (lambda: _gather("tpu-v4", "x:4;y:4;z:4", ("x", "y"), V4), 46, 0.02),
    "ar1": (lambda: _gather("tpu-v4", "x:4;y:4;z:4", ("z",), V4 / 16, "all_reduce"), 11.9, 0.03),
    "ag5": (lambda: _gather("tpu-v4", "x:4;y:4;z:4", ("x",), 256), 2, 0.001),
    "dp1": (lambda: _intensity("tpu-v5p"), 2550, 0.001),
    "tp1": (lambda: 32768 / _intensity("tpu-v5p"), 32768 / 2550, 0.001),
    "mix": (lambda: 2 * _intensity("tpu-v5p") ** 2 / 32768, 400, 0.01),
    "dcn": (lambda: _intensity("tpu-v5p", 6.25e9), 75000, 0.03),
    "ag-h100": (lambda: 1e3 * formulas.switch_gather(8, 2.0 * 4096 * 65536, H100), 1.04, 0.01),
    "ag-h100b": (lambda: 1e6 * formulas.switch_gather(8, 2.0 * 1024 * 16384, H100), 65, 0.01),
    "h100dp": (lambda: _intensity("h100", H100), 2200, 0.002),
    "h100tp": (lambda: 32768 / _intensity("h100", H100), 32768 / 2200, 0.002),
    "axpy": (lambda: 1e3 * 12.0 * 2**30 / load_hardware("h100").memory_bandwidth, 3.84, 0.005),
    "train1": (lambda: _train_days(), 44, 0.02),
}


def _train_days() -> float:
    return 6 * 70e9 * 15e12 / (8960 * load_hardware("tpu-v5p").peak_flops("bfloat16") * 0.4) / 86400


@pytest.mark.parametrize("name", EXAMPLES)
def test_worked_example(name: str) -> None:
    ours, published, tolerance = EXAMPLES[name]
    assert ours() == pytest.approx(published, rel=tolerance)


def test_every_published_example_is_here() -> None:
    # h100lvl overlaps the levels of a network; ours run one after the other.
    assert set(_published()) == {*EXAMPLES, "h100lvl"}


def test_the_published_numbers_are_those_of_the_file() -> None:
    """The expected value stands in the file's row: as its number, or in its words."""
    rows = _published()
    for name in ("mm1", "p2p", "gather", "ag3", "ag4", "ag5", "dp1", "axpy", "train1", "ag-h100"):
        assert float(rows[name]) == EXAMPLES[name][1], name
    assert "11.9" in rows["ar1"]
    assert "2200 / 2475" in rows["h100dp"]


def test_with_wraparound_the_same_gather_is_the_ring() -> None:
    """`ag1` with wraparound: 377 us (the book rounds 33.55 MB to 34 MB)."""
    ring = 1e6 * formulas.torus_gather(4, 2.0 * 2048 * 8192, 9e10, True, 2e-6)
    assert ring == pytest.approx(377, rel=0.015)
    assert float(_published()["ag1"]) == 377


def test_scalable_unit_intensity() -> None:
    assert _intensity("h100", 400e9) == pytest.approx(2475, rel=0.002)


def test_all_to_all_is_a_quarter_of_a_gather_on_a_ring() -> None:
    assert formulas.torus_all_to_all(1e9, [(16, 9e10)], 0) == pytest.approx(
        formulas.torus_gather(16, 1e9, 9e10, True, 0) / 4
    )


def test_switch_all_to_all_is_a_gather_divided_by_the_group() -> None:
    assert formulas.switch_all_to_all(8, 1e9, H100) == pytest.approx(formulas.switch_gather(8, 1e9, H100) / 8)
