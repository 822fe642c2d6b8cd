"""Which of a machine's GPUs a process takes."""

from __future__ import annotations

import pytest
import tensorflow as tf

import mesh_tf_core as mtf
from mesh_tf_core.engines.tf.cluster import _own_gpus

ADDRESSES = ["a:1", "b:1", "a:2"]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was made visible, on a machine with four GPUs."""
    found: list[str] = []
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [f"{kind}{i}" for i in range(4)])
    monkeypatch.setattr(tf.config, "set_visible_devices", lambda gpus, kind: found.extend(gpus))
    return found


@pytest.mark.parametrize(
    ("index", "count", "gpus"),
    [
        (0, 2, ["GPU0", "GPU1"]),
        (2, 2, ["GPU2", "GPU3"]),
        (1, 2, ["GPU0", "GPU1"]),
        (2, 1, ["GPU1"]),
        (2, 4, ["GPU0", "GPU1", "GPU2", "GPU3"]),  # the scheduler shows a process its own
    ],
)
def test_neighbours_share_them(taken: list[str], index: int, count: int, gpus: list[str]) -> None:
    assert _own_gpus(mtf.Cluster(ADDRESSES, index), count) == "GPU"
    assert taken == gpus


def test_too_few(taken: list[str]) -> None:
    text = "2 processes with 3 devices each are on this machine, which has 4 GPUs"
    with pytest.raises(mtf.UserError, match=text):
        _own_gpus(mtf.Cluster(ADDRESSES, 0), 3)


def test_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [])
    assert _own_gpus(mtf.Cluster(ADDRESSES, 0), 2) is None
