"""Context parallelism in whole models: beside other splits, storage, recomputation and microbatches, the
numbers of one device."""

from __future__ import annotations

import random
from typing import Any

import pytest

import mesh_tf_core as mtf
from examples import bert, transformer_lm
from tests.examples.helper import SMALL
from tests.examples.hunt import Hunt, Legal
from tests.marks import by_day

LANGUAGE = {**SMALL, "kv_heads": 2, "positions": "rotary", "clip_norm": 1.0}
CAUSAL: dict[str, tuple[Any, dict[str, Any]]] = {"language model": (transformer_lm, LANGUAGE)}
BOTH_SIDES: dict[str, tuple[Any, dict[str, Any]]] = {"bert": (bert, {**SMALL, "optimizer": "sgd"})}
WAYS: tuple[dict[str, Any], ...] = (
    {"context": "ring"},
    {"context": "zigzag", "storage": "zero3@x"},
    {"context": "all_to_all", "microbatches": 2},
    {"context": "ring", "recompute": True, "storage": "zero3"},
    {"context": "zigzag", "microbatches": 2, "storage": "zero2@y"},
    {"context": "all_to_all", "recompute": True, "storage": "zero1"},
    {"context": "zigzag", "recompute": True},
)
KEYS = ("length", "memory_length")


def grown(rng: random.Random, graph: mtf.Graph, legal: Legal) -> mtf.Layout:
    """Positions of queries and keys over the same axes, other rules at random, at times one for elsewhere."""
    axes, dims = rng.choice([("x",), ("y",), ("x", "y"), ("y", "x")]), sorted(graph.dims())
    layout = mtf.Layout(dict.fromkeys(KEYS, axes))
    for _ in range(rng.randint(2, 16)):
        rule = rng.choice([d for d in [*dims, "length@elsewhere", "d_model@elsewhere"] if d not in KEYS])
        more = mtf.Layout({**layout.written, rule: rng.choice([("x",), ("y",)])})
        layout = more if legal(more) else layout
    return layout


HUNTS = {
    **dict.fromkeys(CAUSAL, Hunt(CAUSAL, WAYS, grown)),
    **dict.fromkeys(BOTH_SIDES, Hunt(BOTH_SIDES, [w for w in WAYS if w["context"] != "zigzag"], grown)),
}


@pytest.mark.parametrize(
    ("name", "seed"), by_day([*(("language model", s) for s in range(1, 5)), ("bert", 1)])
)
def test_the_numbers_of_one_device(name: str, seed: int) -> None:
    HUNTS[name].check(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("name", HUNTS)
def test_many_layouts(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        HUNTS[name].check(name, 1000 + seed)
