"""Hardware files: every number sourced, every fault named, presets and profiles found by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodels import HardwareError, hardware_names, load_hardware
from costmodels.hardware import Curve, monotone, preset_content, read_hardware, write_profile
from mesh_tf_core.errors import UserError

NVIDIA = ("a100", "a100-40", "b200", "gb200", "gb300", "h100", "h100-hbm2e", "h200", "v100")
GPUS = (*NVIDIA, "mi300x", "mi325x", "mi355x")
TPUS = ("tpu-v2", "tpu-v3", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7")
PRESETS = sorted((*GPUS, *TPUS, "trainium2", "cpu-jax", "cpu-local"))


def test_the_presets() -> None:
    assert list(hardware_names()) == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_number_has_a_source_and_a_date(name: str) -> None:
    hardware = load_hardware(name)
    assert hardware.name == name
    numbers = dict(hardware.numbers())
    assert len(numbers) >= 13
    for path, number in numbers.items():
        assert number.source.strip(), path
        assert number.date[:2] == "20", path
        assert number.given.split()[0], path
    for path, curve in hardware.curves():
        assert curve.source.strip(), path


@pytest.mark.parametrize("name", PRESETS)
def test_no_source_is_a_place_that_readers_cannot_reach(name: str) -> None:
    text = json.dumps(preset_content(name)).lower()
    for word in ("shared/", "/work", "memory um", "unsourced"):
        assert word not in text


def test_numbers_are_per_device() -> None:
    v3 = load_hardware("tpu-v3")
    assert v3.peak_flops("bfloat16") == 123e12 / 2
    assert v3.memory_bytes == 16 * 2**30
    assert v3.memory_bandwidth == 450e9
    assert v3.usable_memory_bytes == 16 * 2**30 - 530 * 2**20
    assert load_hardware("tpu-v4").peak_flops("bfloat16") == 275e12


@pytest.mark.parametrize(
    ("name", "sold"),
    [("v100", 32), ("a100-40", 40), ("a100", 80), ("h100", 80), ("h200", 141)],
)
def test_a_gpu_has_the_memory_that_cuda_reports(name: str, sold: int) -> None:
    """The number that it is sold by, in GiB, but for 1 or 2 %; the runtime takes its reserve of that."""
    gpu = load_hardware(name)
    assert 0.98 < gpu.memory_bytes / (sold * 2**30) < 1
    assert 0.4 * 2**30 < gpu.memory_bytes - gpu.usable_memory_bytes < 1.6 * 2**30


def test_only_the_local_machine_is_marked_uncalibrated_by_word() -> None:
    local = load_hardware("cpu-local")
    assert not local.calibrated
    assert "UNCALIBRATED" in local.summary
    assert all("UNCALIBRATED" in n.source or n.source == "by definition" for _, n in local.numbers())


def test_unknown_names_and_missing_files(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match="hardware 'tpu-v5x' is not known; did you mean 'tpu-v5"):
        load_hardware("tpu-v5x")
    with pytest.raises(
        UserError,
        match=r"hardware file 'mine.json' does not exist; give an existing file, or the name of a preset",
    ):
        load_hardware("mine.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{\n  nothing")
    with pytest.raises(
        HardwareError, match=r"bad.json' is not valid JSON: Expecting property name .* \(line 2, column 3\)"
    ):
        load_hardware(bad)
    bad.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(HardwareError, match="is not UTF-8 text"):
        load_hardware(bad)


def _broken(tmp_path: Path, change: Callable[[dict[str, Any]], None], base: str = "tpu-v5e") -> str:
    """The message that a preset's file gets after `change`."""
    content = preset_content(base)
    change(content)
    path = tmp_path / "broken.json"
    path.write_text(json.dumps(content))
    with pytest.raises(HardwareError) as caught:
        read_hardware(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_fault_is_named_with_its_path_at_once(tmp_path: Path) -> None:
    def change(content: dict[str, Any]) -> None:
        del content["chip"]["memory"]
        content["chip"]["peak_flops"]["bfloat16"]["unit"] = "GB/s"
        content["chip"]["memory_bandwidth"]["value"] = -1
        content["topology"]["hop_latency"]["source"] = " "
        content["topology"]["hop_latency"]["date"] = "last year"
        content["topology"]["colour"] = "blue"

    message = _broken(tmp_path, change)
    assert "has 6 faults: " in message
    assert "chip.peak_flops.bfloat16: 'GB/s' is not a unit of compute rate; use one of FLOP/s" in message
    assert "chip.memory is missing" in message
    assert "chip.memory_bandwidth: the bandwidth must be at least 1, found -1 GB/s" in message
    assert "topology.hop_latency.source must not be empty" in message
    assert "topology.hop_latency.date must be a date" in message
    assert "topology.colour is not a known field" in message


@pytest.mark.parametrize(
    ("base", "path", "value", "message"),
    [
        ("tpu-v5e", "format", "layoutopt-hardware/9", "format must be 'layoutopt-hardware/1'"),
        (
            "tpu-v5e",
            "topology.kind",
            "ring",
            "topology must have a kind of 'torus'",
        ),
        (
            "tpu-v5e",
            "topology.link_bandwidth.value",
            60,
            "topology: link_bandwidth must not be above link_bandwidth_spec",
        ),
        ("tpu-v5e", "topology.wraparound", {"rule": "axis_size"}, "the rule 'axis_size' requires the field"),
        ("tpu-v5e", "chip.memory_reserve.value", 16, "chip: memory_reserve must be less than memory"),
        (
            "tpu-v5e",
            "chip.memory_efficiency.value",
            1.5,
            "chip.memory_efficiency: the fraction must be between",
        ),
        ("tpu-v5e", "chip.matmul_efficiency.points", [[1, 1.2]], "(a fraction of the peak) must be above 0"),
        (
            "tpu-v5e",
            "chip.matmul_efficiency.points",
            [[1e9, 0.1], [2e9, 0.9]],
            "a matmul of 2e+09 FLOPs would take less time than one of 1e+09 FLOPs",
        ),
        ("tpu-v5e", "chip.matmul_efficiency.points", [], "the curve has no points"),
        (
            "a100",
            "topology.node_bandwidth.8.value",
            301,
            "node_bandwidth.8 must not be above node_bandwidth_spec",
        ),
        ("a100", "topology.protocols", [], "topology.protocols must not be empty"),
        (
            "cpu-local",
            "collective_curves.0.points",
            [[2, 1], [1, 2]],
            "the x values of the curve must increase, but 1 follows 2",
        ),
        ("cpu-local", "collective_curves.0.points", [[1, 2], [2, 1]], "y falls from 2 to 1"),
        (
            "cpu-local",
            "collective_curves.0.collective",
            "gossip",
            "collective_curves.0: collective must be one of",
        ),
        (
            "cpu-local",
            "collective_curves.0.processes",
            9,
            "collective_curves.0: group_size is 2, which is fewer than the 9 processes",
        ),
        ("cpu-local", "topology.devices_per_process", 2, "topology.devices_per_process must be"),
        ("cpu-local", "calibrated", True, "'calibrated' is true but 'calibration' is missing"),
        ("cpu-local", "overlap", {"gradient": {"value": 1}}, "overlap.gradient.unit is missing"),
        ("tpu-v5e", "chip.memory", {"\n": None, "a\nb": 3}, "chip.memory.a b is not a known field"),
        ("tpu-v5e", "chip.memory", 3, "chip.memory must be a JSON object such as"),
    ],
)
def test_one_fault(tmp_path: Path, base: str, path: str, value: Any, message: str) -> None:
    def change(content: dict[str, Any]) -> None:
        target: Any = content
        *parents, last = path.split(".")
        for key in parents:
            target = target[int(key)] if isinstance(target, list) else target[key]
        target[last] = value

    said = _broken(tmp_path, change, base)
    assert message in said and "\n" not in said and "_NumberFile" not in said


@pytest.mark.parametrize("content", ["[]", "3", "null", "{}"])
def test_json_that_is_no_description(tmp_path: Path, content: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(content)
    with pytest.raises(HardwareError, match=r"has \d+ faults?: "):
        load_hardware(path)


# ----------------------------------------------------------------------------------------------- profiles


def _profile() -> dict[str, Any]:
    content = preset_content("cpu-local")
    content["calibrated"] = True
    content["calibration"] = {
        "date": "2026-11-20",
        "machine": {"cpu": "two cores", "repeat_spread": 0.05},
        "versions": {"tensorflow": "2.21.0"},
        "fit": {"method": "monotone", "held_out_error": 0.04},
        "measurements": [{"kind": "all_reduce", "group_size": 2, "bytes": 1024, "seconds": [1e-4, 1.1e-4]}],
        "base": "cpu-local",
    }
    content["compute_curves"] = [
        {
            "op_class": "matmul",
            "dtype": "float32",
            "against": "flops",
            "devices": 2,
            "points": [[1e6, 1e-5], [1e9, 5e-3]],
            "source": "measured by layoutopt calibrate",
            "date": "2026-11-20",
            "uncertainty": 0.05,
        }
    ]
    return content


def test_a_profile_replaces_the_preset_of_its_name(tmp_path: Path) -> None:
    written = write_profile(_profile(), tmp_path / "profiles" / "cpu-local.json")
    found = load_hardware("cpu-local", profiles=tmp_path / "profiles")
    assert found == written
    assert found.calibrated
    assert found.calibration is not None
    assert json.loads(found.calibration.measurements)[0]["seconds"] == [1e-4, 1.1e-4]
    assert found.compute_curves[0].seconds(1e6) == 1e-5
    assert not load_hardware("cpu-local").calibrated
    assert load_hardware("tpu-v4", profiles=tmp_path / "profiles") == load_hardware("tpu-v4")
    assert [p.name for p in (tmp_path / "profiles").iterdir()] == ["cpu-local.json"]


def test_a_malformed_profile_is_not_written(tmp_path: Path) -> None:
    content = _profile()
    content["compute_curves"][0]["points"] = [[1e6, 2e-5], [1e9, 1e-5]]
    path = tmp_path / "cpu-local.json"
    with pytest.raises(
        HardwareError,
        match=r"is invalid: compute_curves.0.points: the curve must not decrease, but y falls from 2e-05 to",
    ):
        write_profile(content, path)
    assert not path.exists()


def test_a_profile_of_several_processes(tmp_path: Path) -> None:
    content = _profile()
    assert read_hardware(write(content, tmp_path / "one.json")).devices_per_process is None
    first, *_ = curves = content["collective_curves"]
    curves.append({**first, "processes": 2, "points": [[1.0, 1.0]]})
    common = {"unit": "count", "source": "measured", "date": "2026-11-20"}
    content["topology"]["devices_per_process"] = {"value": 4, **common}
    found = write_profile(content, tmp_path / "two.json")
    assert found == read_hardware(tmp_path / "two.json")
    assert found.devices_per_process == 4
    assert [c.processes for c in found.collective_curves] == [1] * (len(curves) - 1) + [2]
    paths = [path for path, _ in found.curves()]
    assert len(paths) == len(set(paths))
    name = f"collective_curves.{first['collective']}.{first['group_size']} over 2 processes"
    assert name in paths
    assert dict(found.numbers())["topology.devices_per_process"].given == "4"


def write(content: dict[str, Any], path: Path) -> Path:
    write_profile(content, path)
    return path


def test_hardware_is_a_hashable_value() -> None:
    assert len({load_hardware(name) for name in PRESETS}) == len(PRESETS)


# ------------------------------------------------------------------------------------------------- curves


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(0, 10)), min_size=1, max_size=30), st.floats(0, 2000)
)
def test_a_fitted_curve_never_falls(samples: list[tuple[int, float]], x: float) -> None:
    curve = monotone([(float(a), b) for a, b in samples])
    ys = [y for _, y in samples]
    assert min(ys) - 1e-9 <= curve.points[0][1] <= curve.points[-1][1] <= max(ys) + 1e-9
    assert curve(x) <= curve(x + 1) + 1e-9


def test_pooling_averages_what_falls() -> None:
    assert monotone([(1, 1.0), (2, 3.0), (3, 2.0), (4, 5.0)]).points == (
        (1, 1.0),
        (2, 2.5),
        (3, 2.5),
        (4, 5.0),
    )


def test_a_curve_that_falls_cannot_be_built() -> None:
    with pytest.raises(ValueError, match="y falls from 2 to 1 between x = 1 and x = 2"):
        Curve(((1, 2), (2, 1)))


def test_a_file_like_a_preset_has_its_numbers_but_for_its_own(tmp_path: Path) -> None:
    own = {"value": 1000, "unit": "GB/s", "source": "mine", "date": "2026"}
    path = tmp_path / "slow.json"
    path.write_text(json.dumps({"like": "a100", "name": "slow", "chip": {"memory_bandwidth": own}}))
    found, base = load_hardware(path), load_hardware("a100")
    assert found.name == "slow" and found.topology == base.topology and found.summary == base.summary
    assert found.memory_bandwidth == 1e12 and found.chip.memory == base.chip.memory


def test_a_file_like_nothing_known_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps({"like": "a10"}))
    with pytest.raises(HardwareError, match=r"has \"like\": 'a10', which is not a preset; .*a100"):
        load_hardware(path)


@pytest.mark.parametrize("own", [{}, {"name": "a100"}], ids=["no name", "the preset's"])
def test_a_file_like_a_preset_needs_its_own_name(own: dict[str, str], tmp_path: Path) -> None:
    """Else the preset's known errors would be those of other numbers."""
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({"like": "a100", **own}))
    with pytest.raises(HardwareError, match=r'"like" \'a100\', but has no name of its own; add "name"'):
        load_hardware(str(path))


def test_faults_of_a_file_like_a_preset_have_their_paths(tmp_path: Path) -> None:
    path = tmp_path / "odd.json"
    path.write_text(
        json.dumps({"like": "a100", "name": "x", "chip": {"memory": {"value": 1, "unit": "GHz"}}, "extra": 1})
    )
    with pytest.raises(HardwareError, match=r"chip\.memory.*extra"):
        load_hardware(path)
