"""The whole path on the TensorFlow engine: one model, many layouts, the same losses, the bytes of the
plan."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from examples import text
from examples.transformer_lm import data, model
from tests.searching import search

SIZES = {
    "layers": 2,
    "d_model": 32,
    "d_kv": 8,
    "heads": 4,
    "d_ff": 64,
    "vocab": 256,
    "batch": 8,
    "length": 16,
}
MESH = "data:2;model:4"
ALL = dict.fromkeys(
    [
        "embedding/tokens",
        "embedding/positions",
        "attention/q",
        "attention/k",
        "attention/v",
        "attention/o",
        "feed_forward/wi",
        "feed_forward/wo",
        "output/projection",
    ]
)


def losses(layout: str, mesh: str = MESH, steps: int = 5, options: mtf.Options | None = None) -> list[float]:
    trainer = mtf.Trainer(model(**SIZES), mesh, layout, options or mtf.Options())
    history = trainer.fit(data(**SIZES), steps)
    assert trainer.engine.communication_bytes == trainer.program.communication_bytes()
    return [float(step["loss"]) for step in history]


@pytest.mark.slow
def test_the_loss_curve_does_not_depend_on_the_layout() -> None:
    reference, mesh = losses("", "data:1"), "data:2;model:2"
    assert reference[-1] < reference[0]
    searched = search(model(**SIZES), mesh=mesh, hardware="tpu-v3", microbatches=(1,), recompute=(False,))
    for layout, options in (
        ("batch:data+model", mtf.Options()),
        ("batch:data;heads:model;d_ff:model;vocab:model", mtf.Options()),
        (str(searched.layout), searched.options),
    ):
        assert losses(layout, mesh, options=options) == pytest.approx(reference, rel=1e-3), layout


FIRST = mtf.Options(storage=dict.fromkeys(ALL, 1), recompute=frozenset({"layers"}))
THIRD = mtf.Options(storage=dict.fromkeys(ALL, 3), microbatches=2)


PLAIN = mtf.Options()


@pytest.mark.nightly  # by day the loss curves count them
@pytest.mark.parametrize(
    ("layout", "options"),
    [
        # Plain ones are also among those of the loss curve.
        ("d_model:model", PLAIN),
        ("length:model;batch:data", PLAIN),
        ("length:data;memory_length:model", PLAIN),
        ("d_kv:model;d_model:data", PLAIN),
        ("", FIRST),
        ("batch:data+model", FIRST),  # eight devices cannot share the four sequences of half a batch
        ("batch:data", THIRD),
        ("batch:model;d_ff:data", THIRD),
        ("d_model:data;batch:model", THIRD),
        ("batch:data;heads:model;d_ff:model;vocab:model", THIRD),
        ("heads:model;d_ff:model;vocab:model", FIRST),
        ("length:data;memory_length:model", THIRD),
        ("length:model;batch:data", FIRST),
        ("d_model:model", FIRST),
        ("d_kv:model;d_model:data", FIRST),
    ],
)
def test_the_engine_counts_the_bytes_of_the_plan(layout: str, options: mtf.Options) -> None:
    losses(layout, steps=1, options=options)  # compares the counted bytes


def test_a_model_of_single_bytes_knows_the_unigram_entropy_of_its_text() -> None:
    assert 2.5 < text.unigram_entropy() < 4.0
    assert not set(map(bytes, [text.corpus("train")[:400].tobytes()])) & {
        text.corpus("held-out")[:400].tobytes()
    }
