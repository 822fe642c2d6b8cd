"""Hardware with other numbers."""

from __future__ import annotations

import statistics

import pytest

from costmodels.hardware import Hardware, drawn, hardware_names, load_hardware, varied, with_bandwidth
from costmodels.network.collectives import collective_seconds
from costmodels.network.topology import place
from mesh_tf_core.ir.mesh import Mesh


def seconds(hardware: Hardware, size: float) -> float:
    return collective_seconds(
        hardware, place(hardware, Mesh("data:2;model:4")), "all_reduce", ("model",), size
    )


@pytest.mark.parametrize("name", hardware_names())
def test_factors_of_one_change_nothing(name: str) -> None:
    hardware = load_hardware(name)
    assert varied(hardware, lambda path, uncertainty: 1.0) == hardware


@pytest.mark.parametrize("name", hardware_names())
def test_large_messages_take_their_time_by_the_bandwidth(name: str) -> None:
    hardware = load_hardware(name)
    now, half = seconds(hardware, 1e9), seconds(with_bandwidth(hardware, 0.5), 1e9)
    assert half == pytest.approx(2 * now, rel=0.05)


def test_latency_stays() -> None:
    hardware = load_hardware("tpu-v4")
    assert seconds(with_bandwidth(hardware, 0.5), 1) == pytest.approx(seconds(hardware, 1), rel=1e-3)


def test_only_uncertain_numbers_are_drawn_and_about_so_far() -> None:
    hardware = load_hardware("tpu-v4")
    machines = [drawn(hardware, seed) for seed in range(200)]
    assert {m.chip.memory_bandwidth.value for m in machines} == {hardware.chip.memory_bandwidth.value}
    ratios = [m.chip.vector_flops.value / hardware.chip.vector_flops.value for m in machines]  # type: ignore[union-attr]
    uncertainty = hardware.chip.vector_flops.uncertainty  # type: ignore[union-attr]
    assert statistics.pstdev(ratios) == pytest.approx(uncertainty, rel=0.25)
    assert drawn(hardware, 7) == drawn(hardware, 7) != drawn(hardware, 8)


def test_fractions_stay_fractions() -> None:
    for seed in range(50):
        assert drawn(load_hardware("tpu-v4"), seed).chip.memory_efficiency.value <= 1.0
