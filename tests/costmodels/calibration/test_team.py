"""What several processes measure together, without them: what the others say is written down."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from costmodels.calibration import profile as profiles
from costmodels.calibration.clock import ClockNoise, TimingSample
from costmodels.calibration.profile import profile
from costmodels.calibration.runner import Partial, Team, assemble, together
from costmodels.hardware import write_profile
from mesh_tf_core import Cluster, Mesh, UserError
from tests.costmodels.calibration.test_fit import fitted, measured

HERE = {"processor": "a processor", "cores": 4, "system": "a system", "memory_bytes": 1 << 30}
MESH = Mesh("data:2;model:2")


class Written(Cluster):
    """A cluster of this process and another one, which says what is written here."""

    def __init__(self, index: int, said: list[Any]) -> None:
        super().__init__("a:1", 2, index)
        self.said, self.asked = said, list[str]()

    def gather(self, what: str, value: Any, patient: bool = False) -> list[Any]:
        self.asked.append(what)
        other = self.said.pop(0)
        return [value, other] if self.is_writer else [other, value]


def team(cluster: Cluster | None, hosts: tuple[str, ...], device: str = "/CPU:0") -> Team:
    return Team(MESH, (device, device), HERE, cluster, hosts, dict.fromkeys(hosts, 4))


def test_worker_0_tells_what_depends_on_time() -> None:
    assert team(Written(0, [[7]]), ("a", "a")).broadcast("numbers", [5]) == [5]
    assert team(Written(1, [[7]]), ("a", "a")).broadcast("numbers", [5]) == [7]
    assert team(None, ("",)).broadcast("numbers", [5]) == [5]


def test_a_sample_is_one_of_all() -> None:
    ran: list[int] = []
    cluster = Written(1, [[2.0, 3.0, 5.0]])
    found = team(cluster, ("a", "a")).sample(lambda: ran.append(1), 3)
    assert (len(ran), found.steps, found.cores) == (3, 3, 4)
    assert cluster.asked == ["a sample"]
    assert found.wall == 2.0
    assert found.own >= 3.0
    assert found.own + found.foreign == pytest.approx(8.0)


def test_nobody_takes_the_time_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others may use the cores meanwhile."""
    monkeypatch.setattr(
        "costmodels.calibration.runner.sample", lambda run, steps: TimingSample(1.0, 0.5, 2.0, 4)
    )
    assert team(None, ("",), "/GPU:0").sample(lambda: None, 1).seconds == 1.0
    assert team(None, ("",), "/CPU:0").sample(lambda: None, 1).seconds == 0.5


def test_cores_and_memory_of_all_machines_count() -> None:
    assert together([HERE]) == HERE
    assert together([HERE, {**HERE, "processor": "another", "cores": 2}]) == {
        **HERE, "cores": 6, "memory_bytes": 2 << 30, "machines": 2
    }  # fmt: skip


def test_cores_of_neighbours_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler may give every process its own ones, or all of them the same."""
    monkeypatch.setattr("costmodels.calibration.runner.machine", lambda: HERE)
    monkeypatch.setattr("costmodels.calibration.runner.cpus", lambda: {0, 1, 2})
    cluster = Cluster("a:1", 2, 1)
    cluster.hosts = "a", "a"
    monkeypatch.setattr(cluster, "start", lambda devices: ("cpu:0", "cpu:1", "cpu:2", "cpu:3"))
    monkeypatch.setattr(cluster, "gather", lambda what, value: [value, [HERE, [2, 3]]])
    found = assemble(MESH, cluster)
    assert (found.cores, found.machine["cores"], found.processes) == ({"a": 4}, 4, 2)
    assert "machines" not in found.machine
    assert found.devices == ("cpu:2", "cpu:3")


def test_devices_of_numpy_share_the_cores() -> None:
    assert not assemble(MESH, engine="lockstep").accelerated


def test_a_profile_says_how_devices_are_dealt_out(tmp_path: Path) -> None:
    found = measured(each=2)
    content = profile(
        team(Written(0, []), ("a", "b")), fitted(found, 2), [], ClockNoise(0.0, 0.0), quick=True
    )
    said = content["calibration"]["machine"]
    assert (said["processes"], said["devices_per_process"], said["mesh"]) == (2, 2, str(MESH))
    assert "over 2 processes" in content["collective_curves"][0]["source"]
    assert "of 2 processes, measured on" in content["summary"]
    hardware = write_profile(content, tmp_path / "two.json")
    assert hardware.devices_per_process == 2
    kinds = {(c.group_size, c.processes) for c in hardware.collective_curves}
    assert kinds == {(2, 1), (2, 2), (4, 2)}
    alone = profile(team(None, ("",)), fitted(measured()), [], ClockNoise(0.0, 0.0), quick=True)
    assert "devices_per_process" not in alone["topology"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("device", "kind"), [("/GPU:0", "gpu"), ("cuda:0", "gpu"), ("TPU_0(process=0,(0,0,0,0))", "tpu")]
)
def test_a_profile_of_accelerators(
    device: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They share no cores, have memory of their own, and exchange messages also inside of a process."""
    monkeypatch.setattr(profiles, "accelerator_memory_bytes", lambda: 80 << 30)
    content = profile(team(None, ("",), device), fitted(measured()), [], ClockNoise(0.0, 0.0), quick=True)
    hardware = write_profile(content, tmp_path / "own.json")
    assert (hardware.kind, hardware.contention(64)) == (kind, 1.0)
    assert (
        content["summary"].startswith(f"This machine's {kind.upper()}s,")
        and content["device"] == f"one {kind.upper()}"
    )
    assert hardware.usable_memory_bytes == 80 << 30
    assert hardware.devices_per_process == 2


def test_what_others_measured_is_gone_on_from_in_no_other_job(tmp_path: Path) -> None:
    file = tmp_path / "partial.json"
    Partial(file, {"mesh": "data:2", "processes": 1}).save()
    with pytest.raises(UserError, match=r"are of mesh data:2, processes 1, not of mesh data:2, processes 2"):
        Partial(file, {"mesh": "data:2", "processes": 2})
