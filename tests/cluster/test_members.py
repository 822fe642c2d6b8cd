"""Who takes part: TF_CONFIG, explicit addresses, and what is wrong with them."""

from __future__ import annotations

import json
from typing import Any

import pytest

import mesh_tf_core as mtf
from mesh_tf_core.cluster import Members
from mesh_tf_core.cluster.members import from_environment

TWO = ["host0:2222", "host1:2222"]


def environment(cluster: dict[str, Any], kind: str, index: int, **more: Any) -> dict[str, str]:
    task = {"type": kind, "index": index}
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": task, **more})}


def test_workers() -> None:
    found = from_environment(environment({"worker": TWO}, "worker", 1, devices_per_process=2))
    assert found == Members(tuple(TWO), 1, 2)
    assert found.name(1) == "worker 1 (host1:2222, devices 2 to 3)"
    assert Members(tuple(TWO), 1).name(0) == "worker 0 (host0:2222)"


def test_the_chief_comes_first() -> None:
    cluster = {"worker": {"1": "c:1", "0": "b:1"}, "chief": ["a:1"]}
    assert from_environment(environment(cluster, "worker", 1)) == Members(("a:1", "b:1", "c:1"), 2)
    assert from_environment(environment(cluster, "chief", 0)).index == 0


def test_the_meeting_point_is_free_of_workers() -> None:
    members = Members(("a:10", "a:11", "b:12", "a:12"), 3)
    assert members.meeting_point == ("a", 13)
    assert members.neighbours == (0, 1, 3)
    assert members.job != Members(("a:10", "a:11", "b:12"), 0).job


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({}, "TF_CONFIG is not set; set it as .*layoutopt launch"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is malformed .*write it as"),
        ({"TF_CONFIG": '{"cluster": {}}'}, "TF_CONFIG is malformed"),
        (environment({"worker": TWO}, "worker", 2), "says worker 2, but has 2 of them"),
        (environment({"worker": TWO, "ps": ["a:1"]}, "worker", 0), "has ps, worker .*only chief and worker"),
        (environment({"worker": TWO}, "evaluator", 0), "this process is a evaluator"),
        (environment({"worker": ["host0"]}, "worker", 0), "address 'host0' is not HOST:PORT"),
        (environment({"worker": ["a:1", "a:1"]}, "worker", 0), "two processes have the address a:1"),
        (
            environment({"worker": TWO}, "worker", 0, devices_per_process=0),
            "needs a device at least, found 0",
        ),
    ],
)
def test_a_bad_configuration_is_told(config: dict[str, str], text: str) -> None:
    with pytest.raises(mtf.UserError, match=text):
        from_environment(config)


def test_explicit_addresses() -> None:
    assert mtf.Cluster(TWO, 0).is_writer and not mtf.Cluster(TWO, 1).is_writer
    with pytest.raises(mtf.UserError, match="which of the addresses is this process"):
        mtf.Cluster(TWO)
    with pytest.raises(mtf.UserError, match="number 2, but there are 2 addresses"):
        mtf.Cluster(TWO, 2)
    with pytest.raises(mtf.ClusterError, match="has not joined"):
        mtf.Cluster(TWO, 0).check()


def test_devices_are_dealt_out() -> None:
    assert Members(tuple(TWO), 0).devices_of(8) == 4
    with pytest.raises(mtf.UserError, match="mesh has 3 devices, the cluster 2 processes; give every"):
        Members(tuple(TWO), 0).devices_of(3)
    with pytest.raises(mtf.UserError, match="mesh has 4 devices, the cluster 2 processes of 4 devices"):
        Members(tuple(TWO), 0, 4).devices_of(4)


@pytest.mark.parametrize(
    "config",
    [
        {"task": {"type": [], "index": 0}},
        {"task": {"type": "worker", "index": float("inf")}},
        {"devices_per_process": []},
        {"devices_per_process": "2"},
        {"devices_per_process": 1.5},
        {"cluster": {"worker": ["host:²", "host:1"]}},
        {"cluster": "[" * 5000},
    ],
)
def test_what_a_description_must_not_hold(config: dict[str, Any]) -> None:
    """Damage that the fuzz suite found."""
    whole = {"cluster": {"worker": ["a:1", "b:2"]}, "task": {"type": "worker", "index": 0}, **config}
    text = json.dumps(whole).replace('"' + "[" * 5000 + '"', "[" * 5000)
    with pytest.raises(mtf.UserError, match=r"^cluster: "):
        from_environment({"TF_CONFIG": text})
