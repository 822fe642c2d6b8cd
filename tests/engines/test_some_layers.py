"""So many layers of a loop run again in backward, and the others save what they make: the same numbers, and
time and memory between those of all and of none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from examples import transformer_lm
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.lower.remat_policy import Recomputed
from mesh_tf_core.lower.verify import verify

LAYERS = 5
SIZES = {"d_model": 16, "heads": 2, "d_kv": 8, "d_ff": 32, "vocab": 32, "batch": 8, "length": 8}
MODEL = transformer_lm.model(layers=LAYERS, **SIZES)
MESH, LAYOUT = mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;heads:model;d_ff:model")
BATCH = np.random.default_rng(0).integers(0, 32, (8, 8))
MATRICES = [v.name for v in MODEL.graph.variables.values() if len(v.shape) > 1]


def lowered(recompute: str, **options: Any) -> mtf.Program:
    chosen = mtf.Options(recompute=frozenset(filter(None, [recompute])), **options)
    return verify(MODEL.lower(MESH, LAYOUT, chosen))


def trained(program: mtf.Program, engine: Any = LockstepEngine) -> dict[str, Any]:
    ran = engine(program)
    ran.initialize()
    for _ in range(2):
        ran.step({n: BATCH.reshape(program.values[i].shape.sizes) for n, i in program.feeds.items()})
    if engine is LockstepEngine:
        assert ran.communication_bytes == program.communication_bytes()
    return {name: ran.read(name) for name in program.variables}


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("stage", ["", "zero3"])
@pytest.mark.parametrize("recompute", ["layers:count=1", "layers:keep=attention:count=4"])
@pytest.mark.one_in(6)
def test_the_numbers_stay(recompute: str, stage: str, parts: int) -> None:
    chosen = {"microbatches": parts, "storage": dict.fromkeys(MATRICES if stage else (), stage)}
    plain = trained(lowered("", **chosen))
    for name, value in trained(lowered(recompute, **chosen)).items():
        np.testing.assert_allclose(value, plain[name], rtol=2e-5, atol=2e-6, err_msg=name)


def compare(engine: Any) -> None:
    program = lowered("layers:count=2", microbatches=2)
    expected = trained(program)
    for name, value in trained(program, engine).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-3, atol=1e-3, err_msg=name)


@pytest.mark.nightly
def test_on_the_local_engine(devices: Any) -> None:
    from mesh_tf_core.engines.tf.local import TfLocalEngine

    compare(lambda program: TfLocalEngine(program, devices[:4]))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("framework", ["torch", None])
@pytest.mark.parametrize("parts", [1, 4])
def test_time_and_memory_lie_between_those_of_all_and_none(parts: int, framework: str | None) -> None:
    sizes = {**SIZES, "d_model": 1024, "heads": 16, "d_kv": 64, "d_ff": 4096, "length": 1024}
    model, hardware = transformer_lm.model(layers=8, **sizes), load_hardware("h100", framework)

    def price(recompute: str) -> tuple[float, int]:
        options = mtf.Options(recompute=frozenset(filter(None, [recompute])), microbatches=parts)
        found = evaluate(model, mtf.Mesh("data:2"), mtf.Layout("batch:data"), hardware, options)
        return found.cost.step_seconds, found.memory.peak

    (slow, least), (fast, most) = price("layers"), price("")
    for count in (2, 4, 6):
        (seconds, peak), before = price(f"layers:count={count}"), most
        assert (seconds - fast) / (slow - fast) == pytest.approx(count / 8, abs=0.07)
        assert least <= peak <= before and (peak < before or parts > 1)
        most = peak


def test_texts() -> None:
    for text in ("layers:count=3", "layers:keep=products+attention:count=12"):
        assert str(Recomputed.parse(text)) == text
    assert Recomputed.parse("layers:count=3:keep=wi") == Recomputed("layers", ("wi",), 3)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("layers:count=0", "DIM:count=N for N of its iterations"),
        ("layers:count=two", "DIM:count=N for N of its iterations"),
        ("layers:count=5", "a loop over 'layers' has 5 iterations here; write a smaller count"),
    ],
)
def test_numbers_that_no_loop_has_are_refused(text: str, why: str) -> None:
    with pytest.raises(mtf.UserError, match=why):
        lowered(text)
