"""Texts decoded eagerly, position by position, are those of the staged program."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import decoding
from tests.decoding.models import BATCH, KINDS, Decode, Net, decoded, feeds

MESH, LAYOUT = "data:2;model:2", "batch:data;heads:model"


def beams(logits: Any, prompts: mtf.Tensor, lengths: mtf.Tensor | None) -> decoding.Decoded:
    return decoding.beam_search(logits, prompts, mtf.Dim("beams", 2), lengths, end=0)


def greedy(logits: Any, prompts: mtf.Tensor, lengths: mtf.Tensor | None) -> decoding.Decoded:
    return decoding.greedy(logits, prompts, lengths, end=0)


@pytest.mark.parametrize("unroll", [False, True])
@pytest.mark.parametrize(
    ("decode", "kind"), [(greedy, "multi-head"), (greedy, "encoder"), (beams, "grouped-query")]
)
@pytest.mark.one_in(3)
def test_eager_texts(decode: Decode, kind: str, unroll: bool) -> None:
    want = decoded(decode, KINDS[kind], MESH, LAYOUT)
    with mtf.Eager(MESH, LAYOUT, "lockstep").step(feeds(), unroll) as g:
        model = Net(g, 8, fields=KINDS[kind])
        found = decode(
            model, g.input("prompts", [BATCH, mtf.Dim("length", 8)]), lengths=g.input("lengths", [BATCH])
        )
    np.testing.assert_array_equal(found.tokens.numpy(), want.tokens)
    np.testing.assert_allclose(found.scores.numpy(), want.scores, rtol=1e-6)
