"""Gathers and scatters in chunks beside products: what is sent, and the numbers of one device."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

import mesh_tf_core as mtf
from examples import moe_lm, transformer_lm, transformer_seq2seq
from mesh_tf_core.ir.program import AllGather, Loop, Permute, Program, ReduceScatter
from tests.core.test_elsewhere import SEQUENCE, grown
from tests.examples.helper import SMALL
from tests.examples.hunt import Hunt
from tests.marks import by_day

PRODUCTS = frozenset({"d_ff", "heads", "vocab"})
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "language model": (transformer_lm, {**SMALL, "gated": True, "clip_norm": 1.0, "kv_heads": 2}),
    "mixture of experts": (moe_lm, {**SMALL, "experts": 4, "optimizer": "adafactor"}),
    "encoder and decoder": (transformer_seq2seq, {**SMALL, "optimizer": "sgd"}),
}
WAYS: tuple[dict[str, Any], ...] = tuple(
    {**more, "collective_matmul": dims}
    for more in ({}, {"microbatches": 2}, {"recompute": True}, {"storage": "zero3"}, {"storage": "zero2@x"})
    for dims in (PRODUCTS, frozenset({"d_ff"}), frozenset({"heads", "batch", "d_model"}))
)


def lowered(devices: int, dims: frozenset[str], layout: str = SEQUENCE, **sizes: Any) -> Program:
    found = {**SMALL, "layers": 2, "batch": 4, "length": 64, "d_ff": 64, "heads": 32, **sizes}
    mesh = mtf.Mesh(f"data:2;model:{devices}")
    return transformer_lm.model(**found).lower(
        mesh, mtf.Layout(layout), mtf.Options(collective_matmul=dims)
    )


HUNT = Hunt(MODELS, WAYS, grown)


@pytest.mark.parametrize(
    ("name", "seed"),
    by_day([*(("language model", s) for s in range(1, 5)), *((n, 4) for n in [*MODELS][1:])]),
)
def test_the_numbers_of_one_device(name: str, seed: int) -> None:
    HUNT.check(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("name", MODELS)
def test_many_layouts(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        HUNT.check(name, 1000 + seed)
