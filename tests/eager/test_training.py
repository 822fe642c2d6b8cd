"""Three steps of a Transformer: eagerly, staged, by the Trainer, and a model file replayed give the same
losses and variables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples import transformer_lm

MESH, LAYOUT = "data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model"
B, S, V, M = mtf.Dim("batch", 4), mtf.Dim("length", 8), mtf.Dim("vocab", 16), mtf.Dim("d_model", 8)
RNG = np.random.default_rng(0)
BATCHES = [
    {n: RNG.integers(0, V.size, (B.size, S.size), dtype=np.int32) for n in ("tokens", "targets")}
    for _ in range(3)
]


def loss_of(tokens: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
    attention = mtf.layers.Attention(mtf.Dim("heads", 2), mtf.Dim("d_kv", 4), causal=True, dropout=0.1)
    feed_forward = mtf.layers.FeedForward(mtf.Dim("d_ff", 16), gated=True)

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        x = x + attention(mtf.layers.LayerNorm(name="norm_1")(x))
        return x + mtf.dropout(feed_forward(mtf.layers.LayerNorm(name="norm_2")(x)), 0.1)

    embedding = mtf.layers.Embedding(V, M)
    table = embedding.table(tokens.graph)
    x = mtf.layers.LearnedPositions(S.size)(embedding(table, tokens))
    x = mtf.scan(layer, x, mtf.Dim("layers", 2))
    return mtf.reduce_mean(mtf.layers.CrossEntropy(V)(embedding.logits(x, table), targets))


OPTIMIZER = mtf.Adam(0.01, clip_norm=1.0)


def train(tokens: mtf.Tensor, targets: mtf.Tensor) -> mtf.Tensor:
    loss = loss_of(tokens, targets)
    mtf.minimize(loss, OPTIMIZER)
    return loss


def by_hand(engine: str, unroll: bool, staged: bool) -> tuple[list[float], mtf.Eager]:
    run = mtf.Eager(MESH, LAYOUT, engine)
    step: Callable[..., Any] = run.staged(train) if staged else train
    losses = []
    for batch in BATCHES:
        with run.step(unroll=unroll) as g:
            loss = step(*(g.constant(batch[n], [B, S]) for n in ("tokens", "targets")))
        losses.append(float(loss))
    return losses, run


def check(losses: list[float], run: mtf.Eager, trainer: mtf.Trainer, want: list[float]) -> None:
    assert losses == pytest.approx(want, rel=1e-5)
    assert sorted(run.variables) == sorted(trainer.program.variables)
    for name in trainer.program.variables:
        if "/adam_" in name:
            np.testing.assert_allclose(
                run.read(name), trainer.engine.read(name), rtol=1e-3, atol=1e-6, err_msg=name
            )


@pytest.mark.parametrize("engine", ["lockstep", pytest.param("local", marks=pytest.mark.nightly)])
def test_three_steps(engine: str) -> None:
    g = mtf.Graph("lm")
    loss = loss_of(g.input("tokens", [B, S]), g.input("targets", [B, S]))
    trainer = mtf.Trainer(mtf.Model(loss, OPTIMIZER), MESH, LAYOUT, engine=engine)
    want = [trainer.step(batch)["loss"] for batch in BATCHES]
    assert len(set(want)) == 3
    for unroll, staged in ((False, False), (True, False), (False, True)):
        losses, run = by_hand(engine, unroll, staged)
        check(losses, run, trainer, want)


def test_a_model_file_replayed() -> None:
    hparams: dict[str, Any] = {
        "layers": 2, "d_model": 8, "d_kv": 4, "heads": 2, "d_ff": 16, "vocab": 16, "batch": 4, "length": 8,
        "dropout": 0.1,
    }  # fmt: skip
    trainer = mtf.Trainer(transformer_lm.model(**hparams), MESH, LAYOUT, engine="lockstep")
    want = [trainer.step(batch)["loss"] for batch in BATCHES]
    model, run = transformer_lm.model(**hparams), mtf.Eager(MESH, LAYOUT, "lockstep")
    losses = []
    for batch in BATCHES:
        with run.step(batch) as g:
            values = g.replay(model.step_graph)
        losses.append(float(values[model.loss]))
    check(losses, run, trainer, want)
    assert [str(v.type) for v in values.values()] == [str(t.type) for t in values]
    assert all(np.isfinite(v.numpy()).all() for t, v in values.items() if t.dtype == "float32")


def test_replay_names_the_place_of_an_illegal_layout() -> None:
    model = transformer_lm.model(layers=1, d_model=8, d_kv=4, heads=2, d_ff=16, vocab=16, batch=4, length=8)
    run = mtf.Eager("data:2", "d_ff:data;batch:data", "lockstep")
    with pytest.raises(mtf.LayoutError, match=r"scan at .*test_training.py:\d+: .*'batch' and 'd_ff'"):
        run.step(BATCHES[0]).replay(model.graph)
