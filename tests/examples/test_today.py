"""Examples of models of today: parameters as published, losses as plain NumPy computes them and alike under
every layout, layouts proven best."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from inspect import signature
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples import clip, deepseek_lm, diffusion, dlrm, mamba_lm, transformer_lm, vit
from mesh_tf_core.engines.lockstep import LockstepEngine
from tests.examples import forward
from tests.examples.helper import Result, batches, check_same, train
from tests.marks import by_day
from tests.searching import search


@dataclass(frozen=True)
class Case:
    """An example in a small size.

    Attributes:
      loss: the same in NumPy; layouts: on a mesh x:2;y:2.
    """

    example: ModuleType
    hparams: dict[str, Any]
    loss: Callable[..., float]
    layouts: tuple[str, str, str]


TEXT: dict[str, Any] = {"layers": 2, "d_model": 16, "heads": 4, "vocab": 32, "batch": 4, "length": 8}
LLAMA = {**TEXT, "d_kv": 4, "kv_heads": 2, "d_ff": 32, "gated": True, "positions": "rotary", "norm": "rms"}
EXPERTS = {**TEXT, "layers": 3, "d_kv": 8, "d_rotary": 4, "d_v": 6, "kv_rank": 10, "d_ff": 32, "d_expert": 16}
CASES = {
    "llama": Case(
        transformer_lm,
        {**LLAMA, "rotary_base": 500.0},
        forward.llama,
        ("batch:x+y", "batch:x;heads:y;d_ff:y;vocab:y", "length:x;d_model:y"),
    ),
    "vit": Case(
        vit,
        {"layers": 2, "d_model": 16, "heads": 2, "d_ff": 32, "size": 8, "patch": 4, "batch": 4},
        forward.vit,
        ("batch:x+y", "batch:x;heads:y;d_ff:y", "d_model:x;batch:y"),
    ),
    "dlrm": Case(
        dlrm,
        {"batch": 8, "numbers": 4, "tables": 4, "rows": 8, "features": 8, "bottom": 8, "top": 8},
        forward.dlrm,
        ("batch:x;tables:x", "batch:x+y;rows:x", "batch:y;features:x;tables:y"),
    ),
    "mamba": Case(
        mamba_lm,
        {**TEXT, "heads": 2, "d_head": 16, "d_state": 8, "chunk": 4},
        forward.mamba,
        ("batch:x;heads:y;vocab:y", "chunks:x;batch:y", "d_model:x;d_head:y"),
    ),
    "deepseek": Case(
        deepseek_lm,
        {**EXPERTS, "experts": 4, "capacity_factor": 2.0, "balance": 0.0},
        forward.deepseek,
        ("batch:x;experts:x;heads:y", "batch:x+y;experts:x", "batch:x;experts:y;d_expert:x;vocab:y"),
    ),
    "clip": Case(
        clip,
        {
            "batch": 4,
            "size": 8,
            "image_layers": 2,
            "image_width": 16,
            "image_heads": 2,
            "warmup": 0,
            "text_layers": 1,
            "text_width": 16,
            "text_heads": 2,
            "length": 8,
            "joint": 8,
        },
        forward.clip,
        ("batch:x+y", "batch:x;heads:y;d_ff:y", "joint:x;texts:y;vocab:x"),
    ),
    "diffusion": Case(
        diffusion,
        {"batch": 2, "size": 8, "channels": 4, "groups": 2, "attend": 4},
        forward.diffusion,
        ("batch:x;height:y", "height:x;width:y", "batch:x;channels:y"),
    ),
}
PUBLISHED = {
    "llama": (transformer_lm.llama3_8b, 8_030_261_248),
    "llama 405B": (transformer_lm.llama3_405b, 405_853_388_800),
    "vit": (vit.b16, 86_567_656),
    "mamba": (mamba_lm.mamba2_130m, 128_989_632),
    "deepseek": (deepseek_lm.v2_lite, 15_706_484_224),
    "deepseek v3": (deepseek_lm.v3, 671_026_404_352),
    "clip": (clip.b32, 151_277_313),
    "diffusion": (diffusion.cifar10, 35_746_307),
    # 26 tables of 2^20 rows, perceptrons of 13-512-512-512-128 and (128 + 351)-1024-1024-1024-1024-1.
    "dlrm": (dlrm.criteo, 3_493_900_417),
}


def test_every_example_takes_the_hyperparameters_of_training() -> None:
    files = (Path(__file__).parents[2] / "examples").glob("*.py")
    found = [importlib.import_module(f"examples.{file.stem}") for file in files if file.stem != "__init__"]
    models = [module.model for module in found if hasattr(module, "model")]
    assert len(models) > 13
    for model in models:
        known = signature(model).parameters
        assert {"dtype", "optimizer", "learning_rate", "clip_norm"} <= set(known)
        assert "training" not in known
    rated = vit.model(learning_rate=0.5, warmup=7, clip_norm=2.0)
    assert rated.optimizer == mtf.Adam(mtf.WarmupRsqrt(0.5, 7), clip_norm=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'learning_rat'"):
        vit.model(learning_rat=1.0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_those_published(name: str) -> None:
    build, parameters = PUBLISHED[name]
    assert build().parameters == parameters


@cache
def dense(name: str) -> Result:
    """Gradients of keys' biases are noise around 0, which Adam would make steps of."""
    return train(CASES[name].example, hparams_of(name), steps=2)


def hparams_of(name: str) -> dict[str, Any]:
    return {**CASES[name].hparams, "optimizer": "sgd", "learning_rate": 0.1, "clip_norm": 1.0}


@pytest.mark.parametrize("name", CASES)
def test_the_loss_is_that_of_numpy(name: str) -> None:
    case = CASES[name]
    model = case.example.model(**case.hparams)
    engine = LockstepEngine(mtf.lower(model.graph, mtf.Mesh("one:1"), mtf.Layout(""), {"loss": model.loss}))
    rng = np.random.default_rng(0)
    for n, x in model.graph.variables.items():
        # Initial biases and scales, 0 and 1, would hide mistakes.
        engine.write(n, rng.normal(scale=0.4, size=x.shape.sizes).astype(np.float32))
    (batch,) = batches(case.example, case.hparams, 1)
    values = {n: np.asarray(engine.read(n), np.float64) for n in model.graph.variables}
    usual = {n: p.default for n, p in signature(case.example.model).parameters.items()}
    want = case.loss(values, batch, {**usual, **case.hparams})
    assert float(engine.step(batch)["loss"]) == pytest.approx(want, rel=2e-5)


LAYOUTS = [(name, layout) for name, case in CASES.items() for layout in case.layouts]
BY_TURNS = [
    # Two of three by day, and of diffusion, whose convolutions take longest, one.
    pytest.param(
        *case,
        marks=pytest.mark.nightly if i % 3 == (i // 3) % 3 or (case[0] == "diffusion" and i % 3 == 2) else (),
    )
    for i, case in enumerate(LAYOUTS)
]


@pytest.mark.parametrize(("name", "layout"), BY_TURNS)
@pytest.mark.one_in(12)
def test_layouts(name: str, layout: str) -> None:
    check_same(train(CASES[name].example, hparams_of(name), "x:2;y:2", layout, steps=2), dense(name))


@pytest.mark.parametrize("name", by_day(["mamba", "llama", "vit", "dlrm", "deepseek"], every=5))
def test_microbatches(name: str) -> None:
    """Functions of variables alone, as the decay of a state, have gradients that are sums over the parts."""
    check_same(train(CASES[name].example, hparams_of(name), microbatches=2, steps=2), dense(name))


def test_images_and_texts_of_other_parts_would_not_meet() -> None:
    with pytest.raises(mtf.UserError, match=", but examples of different microbatches cannot be combined"):
        train(clip, hparams_of("clip"), microbatches=2)


SEARCHED = ["vit", "llama", "mamba", "deepseek", "dlrm", "clip", "diffusion"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", by_day(SEARCHED, every=4))
def test_the_best_layout_is_proven(name: str) -> None:
    case = CASES[name]
    plan = search(
        case.example.model(**case.hparams),
        mesh="data:2",
        hardware="tpu-v4",
        storage=("layout",),
        recompute=(False,),
        microbatches=(1,),
    )
    assert plan.data.solver.status == "OPTIMAL"
