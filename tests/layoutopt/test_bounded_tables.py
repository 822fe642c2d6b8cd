"""No table grows with the number of variables: what couples all of them is cut, and the proof is kept."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

import mesh_tf_core as mtf
from layoutopt import search
from layoutopt.formulation.shared import SharedContext
from mesh_tf_core import layers as nn


def dense(clip_norm: float) -> mtf.Model:
    """Five layers of different sizes."""
    g = mtf.Graph("dense")
    batch, *sizes = mtf.Dim("batch", 64), *(mtf.Dim(f"d{i}", 32 * (1 + i)) for i in range(6))
    x = g.input("x", [batch, sizes[0]], "float32")
    for before, after in itertools.pairwise(sizes):
        w = g.variable(f"{after.name}/w", [before, after], mtf.Normal(0.1))
        x = mtf.relu(mtf.einsum([x, w], [batch, after]) + g.variable(f"{after.name}/b", [after], mtf.ZEROS))
    return mtf.Model(mtf.reduce_mean(mtf.square(x)), mtf.Adam(0.01, clip_norm=clip_norm), name="dense")


def llama(clip_norm: float) -> mtf.Model:
    """A Llama in small, its layers written out."""
    b, s, d = mtf.Dim("batch", 8), mtf.Dim("length", 32), mtf.Dim("d_model", 64)
    g, vocab = mtf.Graph("llama"), mtf.Dim("vocab", 128)
    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    embedding = nn.Embedding(vocab, d, "float32")
    x = embedding(embedding.table(g), tokens)
    for i in range(2):
        with g.scope(f"layer_{i}"):
            heads, d_kv = mtf.Dim("heads", 4), mtf.Dim("d_kv", 16)
            attend = nn.Attention(heads, d_kv, 2, causal=True, rotary=nn.Rotary())
            x = x + attend(nn.LayerNorm(name="attention_norm")(x))
            feed_forward = nn.FeedForward(mtf.Dim("d_ff", 128), "silu", True)
            x = x + feed_forward(nn.LayerNorm(name="feed_forward_norm")(x))
    logits = embedding.logits(nn.LayerNorm(name="final_norm")(x))
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, vocab))
    return mtf.Model(loss, mtf.Adam(0.01, clip_norm=clip_norm), name="llama")


@pytest.mark.parametrize("build", [dense, llama])
def test_clipping_joins_no_variables(build: Callable[[float], mtf.Model]) -> None:
    plain, clipped = (SharedContext(build(limit)).clusters for limit in (0.0, 1.0))
    assert max(len(c.decisions) for c in clipped) == max(len(c.decisions) for c in plain)
    plan = search(build(1.0), mesh="data:2;model:4", hardware="h100")
    assert plan.solver.status == "OPTIMAL" and plan.solver.gap == 0
