"""Numbers of hardware set by name."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from costmodels import load_hardware
from costmodels.hardware import GpuCluster, preset_content
from mesh_tf_core.errors import UserError


def test_a_number_is_set_and_the_name_says_so() -> None:
    machine = load_hardware("a100, node_egress=100GB/s , gradient=0.25")
    assert isinstance(machine.topology, GpuCluster)
    assert machine.topology.node_egress.value == 100e9
    assert machine.hidden_fraction("gradient") == 0.25
    assert machine.name == "a100, node_egress=100GB/s, gradient=0.25"
    assert load_hardware(machine.name) == machine
    assert dict(machine.numbers())["topology.node_egress"].source == "set by the user"
    assert load_hardware("a100").name == "a100"


def test_a_number_for_every_group_size_and_one_that_the_file_lacks() -> None:
    machine = load_hardware("a100, node_bandwidth=200GB/s, launch_interval=20 us")
    assert isinstance(machine.topology, GpuCluster)
    assert {n.value for _, n in machine.topology.node_bandwidth} == {200e9}
    interval = machine.chip.launch_interval
    assert interval is not None and interval.value == pytest.approx(20e-6)


def test_a_path_may_be_given_whole_or_its_end() -> None:
    for key in ("chip.peak_flops.bfloat16", "peak_flops.bfloat16"):
        assert load_hardware(f"h100, {key}=900TFLOP/s").peak_flops("bfloat16") == 900e12


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("node_egres=100GB/s", "a100 has no number 'node_egres'; did you mean 'node_egress'?"),
        ("node_egress", "is not NAME=NUMBER with a unit, e.g. node_egress=100GB/s"),
        ("node_egress=fast", "is not NAME=NUMBER with a unit"),
        ("node_egress=100GB", "topology.node_egress: 'GB' is not a unit of bandwidth; use one of B/s, GB/s"),
        ("memory=-1GB", "chip.memory: the memory must be at least 0, found -1 GB"),
        ("peak_flops=1TFLOP/s", "could mean chip.peak_flops.float64, chip.peak_flops.bfloat16"),
        (
            "node_bandwidth=900GB/s",
            "node_bandwidth.2 must not be above node_bandwidth_spec, the physical limit",
        ),
    ],
)
def test_what_cannot_be_set_is_told(setting: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load_hardware(f"a100, {setting}")


def test_a_file_and_a_profile_take_settings_too(tmp_path: Path) -> None:
    path = tmp_path / "mine, too.json"
    path.write_text(json.dumps(preset_content("h100") | {"name": "mine"}))
    assert load_hardware(path).name == "mine"
    other = path.rename(tmp_path / "mine.json")
    assert load_hardware(f"{other}, memory=96GB").memory_bytes == 96e9
    other.rename(tmp_path / "h100.json")
    assert load_hardware("h100, memory=96GB", profiles=tmp_path).name == "mine, memory=96GB"
