"""Random models under random layouts give what the dense run gives; planted faults are found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mesh_tf_core.ir.kernel import At
from mesh_tf_core.lower.base import Lowering
from mesh_tf_core.tracing.batch_linearity import BatchLinearity
from tests.fuzz.programs import check, expected, model
from tests.jax_process import printed
from tests.marks import by_day

ROOT = Path(__file__).resolve().parents[2]
BLOCK = 25
"""Models of one test."""
PAIRS = 5
"""Layouts of a model."""


def pairs(seeds: range, count: int = PAIRS) -> int:
    """How many pairs of these models there are; AssertionError at the first that is wrong."""
    return sum(check(seed, number) for seed in seeds for number in range(count))


@pytest.mark.parametrize("block", by_day(range(4), every=4))
def test_500_pairs(block: int) -> None:
    first = block * BLOCK
    assert pairs(range(first, first + BLOCK)) >= 100


@pytest.mark.nightly
@pytest.mark.parametrize("block", range(50))
def test_5000_pairs(block: int) -> None:
    first = 1000 + block * BLOCK
    assert pairs(range(first, first + BLOCK)) >= 100


@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(s, marks=pytest.mark.nightly) for s in range(1, 25))]
)  # fmt: skip
def test_tensorflow(seed: int) -> None:
    assert any(check(seed, number, "local", 1e-7) for number in range(2))


@pytest.mark.parametrize("seeds", ["0,1", pytest.param("2,30", marks=pytest.mark.nightly)])
def test_jax(seeds: str) -> None:
    assert printed("tests.fuzz.on_jax", seeds) >= 1


# -- planted faults ------------------------------------------------------------------------------------------


def lost_maximum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices keep the maximum of their own pieces."""
    joined = Lowering.joined

    def only_sums(self: Lowering, id: int, axes: tuple[str, ...], combine: str) -> int:
        return joined(self, id, axes, combine) if combine == "sum" else id

    monkeypatch.setattr(Lowering, "joined", only_sums)


def no_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every device believes that it holds the first piece."""
    monkeypatch.setattr(At, "offset", lambda self, name: 0)


def totals_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """A running sum begins at what its own piece adds up to."""
    monkeypatch.setattr(At, "shard", lambda self, name: 1)


def forgotten(monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    """What is noted of every operation under a name is lost."""
    made = BatchLinearity._made

    def losing(self: BatchLinearity, node: Any, output: Any) -> Any:
        found = made(self, node, output)
        getattr(self, known)[node.index] = set()
        return found

    monkeypatch.setattr(BatchLinearity, "_made", losing)


def whole_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of the batch adds all of what does not depend on it."""
    forgotten(monkeypatch, "shared")


def part_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every part of the batch divides by its own sum."""
    forgotten(monkeypatch, "whole")


FAULTS: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    lost_maximum,
    no_offset,
    totals_twice,
    whole_shares,
    part_is_whole,  # which few programs show
)


@pytest.mark.usefixtures("forget")
@pytest.mark.parametrize("plant", [*FAULTS[:-1], pytest.param(FAULTS[-1], marks=pytest.mark.nightly)])
@pytest.mark.one_in(4)
def test_planted_faults_are_found(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among the pairs of a day."""
    for cached in (model, expected):
        cached.cache_clear()
    plant(monkeypatch)
    try:
        with pytest.raises((AssertionError, ValueError)):
            pairs(range(5 * BLOCK))
    finally:
        for cached in (model, expected):
            cached.cache_clear()
