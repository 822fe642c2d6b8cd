"""A decoding program is a model: it is priced and searched as it is; the examples' texts follow their
training."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples import transformer_lm, transformer_seq2seq
from layoutopt.models.loading import load_model
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core import decoding
from mesh_tf_core.engines.lockstep import LockstepEngine

SMALL = {"layers": 2, "d_model": 16, "d_kv": 4, "heads": 4, "d_ff": 32, "vocab": 32, "batch": 4, "length": 8}


def test_it_is_priced() -> None:
    hardware = load_hardware("tpu-v3")
    model = transformer_lm.generate(beams=2, **SMALL)
    found = evaluate(model, mtf.Mesh("x:2"), mtf.Layout("heads:x"), hardware)
    assert found.cost.step_seconds > 0
    assert found.cost.communication_seconds > 0
    longer = transformer_lm.generate(beams=2, **{**SMALL, "length": 16})
    assert evaluate(longer, mtf.Mesh("x:2"), mtf.Layout("heads:x"), hardware).cost.flops > found.cost.flops
    copies = [i for i, _ in found.program.walk() if i.name == "dynamicupdate"]
    assert copies
    held = found.program.local(copies[0].inputs[0]).bytes
    piece = found.program.local(copies[0].inputs[1]).bytes
    assert held >= 2 * piece
    types = [[found.program.local(i) for i in side] for side in (copies[0].inputs, copies[0].outputs)]
    assert copies[0].op.moved(*types) == 3 * piece, "only what is written costs"  # type: ignore[attr-defined]


def test_it_is_searched() -> None:
    model = transformer_lm.generate(**{**SMALL, "layers": 1, "length": 4})
    plan = layoutopt.search(model, mesh=mtf.Mesh("x:2"), hardware="tpu-v3")
    assert plan.solver.status == "OPTIMAL"
    evaluation = evaluate(model, plan.mesh, plan.layout, load_hardware("tpu-v3"))
    assert evaluation.cost.step_seconds == pytest.approx(plan.predicted.step_seconds)


def test_it_is_not_trained() -> None:
    model = transformer_lm.generate(**SMALL)
    assert model.parameters == transformer_lm.model(**SMALL).parameters
    assert not model.training_step().gradients
    with pytest.raises(mtf.UserError, match="cannot be combined with 2 microbatches: decoding"):
        model.training_step(2)


def test_a_function_has_the_hyperparameters_of_the_model() -> None:
    loaded = load_model("examples/transformer_lm.py:generate", ["beams=3", "layers=1", "length=4"])
    assert {"beams": 3, "layers": 1, "temperature": 0.0}.items() <= loaded.hparams.items()
    with pytest.raises(mtf.UserError, match="no hyperparameter 'layer'; did you mean 'layers'"):
        load_model("examples/transformer_lm.py:generate", ["layer=1"])


@pytest.mark.parametrize("positions", ["learned", "relative", "rotary", "none"])
@pytest.mark.parametrize("example", [transformer_lm, transformer_seq2seq])
def test_variables_of_the_examples(example: ModuleType, positions: str) -> None:
    hparams = {**SMALL, "positions": positions, "kv_heads": 2, "gated": True, "tied": True}
    trained, decodes = example.model(**hparams), example.generate(**hparams)
    types = [{n: v.type for n, v in m.graph.variables.items()} for m in (trained, decodes)]
    assert types[0] == types[1]


@pytest.mark.nightly
def test_an_encoder_decoder_writes_what_it_has_learned() -> None:
    """Four pairs by heart, of targets of four lengths."""
    hparams = {**SMALL, "learning_rate": 0.01}
    rng = np.random.default_rng(0)
    targets = rng.integers(1, 32, (4, 8)) * (np.arange(8) < np.array([[2], [3], [5], [6]]))
    batch = {"source": rng.integers(1, 32, (4, 8)).astype(np.int32), "targets": targets.astype(np.int32)}
    engine = LockstepEngine(transformer_seq2seq.model(**hparams).lower(mtf.Mesh("one:1"), mtf.Layout()))
    for _ in range(60):
        engine.step(batch)
    decoder = transformer_seq2seq.generate(beams=2, **hparams)
    writer = LockstepEngine(decoder.lower(mtf.Mesh("x:2"), mtf.Layout("heads:x")))
    writer.initialize()
    for name in decoder.graph.variables:
        writer.write(name, engine.read(name))
    found = writer.step({"source": batch["source"]})
    np.testing.assert_array_equal(found["tokens"][:, 0, 1:], targets[:, :-1])
    assert (found["scores"][:, 0] > -0.5).all()


def test_text_and_tokens() -> None:
    assert transformer_lm.decode(transformer_lm.encode("naïve")["prompts"]) == "naïve"
    assert transformer_seq2seq.decode([*transformer_seq2seq.encode("a b")["source"], 0, 5]) == "a b"


def test_models_without_a_network() -> None:
    g = mtf.Graph()
    model = mtf.Model(mtf.reduce_sum(g.variable("w", [mtf.Dim("a", 2)], mtf.ONES)))
    with pytest.raises(mtf.UserError, match="cannot generate text, because it was made without a network"):
        decoding.generate(model)
    x = g.input("x", [mtf.Dim("a", 2)])
    model = mtf.Model(mtf.reduce_sum(x.cast("float32")), network=lambda g: lambda tokens: tokens)
    with pytest.raises(mtf.UserError, match=r"for prompts; call decoding.greedy with your own prompts"):
        decoding.generate(model)
