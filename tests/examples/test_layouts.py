"""Every example under several layouts gives the losses and weights of one device."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples import bert, moe_lm, reformer_lm, resnet, transformer_seq2seq, unet3d
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllGather, AllToAll, Permute, Program
from mesh_tf_core.lower.rematerialization import recomputable
from tests.examples.helper import SMALL, Result, batches, check_same, train
from tests.marks import by_day

EXAMPLES: dict[str, tuple[Any, dict[str, Any]]] = {
    "seq2seq": (transformer_seq2seq, SMALL),
    "seq2seq, relative": (
        transformer_seq2seq,
        {**SMALL, "positions": "relative", "tied": True, "kv_heads": 2},
    ),
    "seq2seq, rotary": (
        transformer_seq2seq,
        {**SMALL, "positions": "rotary", "gated": True, "encoder_layers": 1},
    ),
    "seq2seq, dropout": (transformer_seq2seq, {**SMALL, "dropout": 0.2, "warmup": 2, "decoder_layers": 1}),
    # A relu may flip by noise of float32, and Adam makes that visible: the gated experts are smooth.
    "moe": (moe_lm, {**SMALL, "experts": 4, "gated": True}),
    "moe, switch": (moe_lm, {**SMALL, "experts": 4, "chosen": 1, "gated": True, "positions": "rotary"}),
    "moe, dropout": (moe_lm, {**SMALL, "experts": 8, "gated": True, "dropout": 0.2, "capacity_factor": 1.0}),
    "bert": (bert, {**SMALL, "warmup": 2}),
    "reformer": (reformer_lm, {**SMALL, "chunk": 4, "gated": True}),
    "reformer, one chunk": (reformer_lm, {**SMALL, "chunk": 8, "ff_chunks": 2, "gated": True}),
    "reformer, chunks": (
        reformer_lm,
        {**SMALL, "chunk": 2, "ff_chunks": 2, "gated": True, "dropout": 0.2, "tied": True},
    ),
}
IMAGE: dict[str, Any] = {"batch": 4, "size": 16, "channels": 4, "groups": 2}
SPATIAL: dict[str, tuple[Any, dict[str, Any]]] = {
    "resnet": (resnet, {**IMAGE, "stages": 2, "blocks": 3}),
    "unet3d": (unet3d, {**IMAGE, "size": 8, "levels": 1, "learning_rate": 0.001}),
}
PARTITIONS = [
    ("x:2;y:2", "height:x;width:y"),
    ("x:2;y:2", "batch:x;height:y"),
    ("x:4", "width:x"),
    ("x:2;y:2", "batch:x;channels:y"),
    ("x:2;y:2", "channels:x;channels_in:y"),
    ("x:2;y:2", "channels:x;channels_groups:x;height:y"),
]
COMMON = [
    ("x:2;y:2", "batch:x+y"),
    ("x:2;y:2", "batch:x;d_ff:y;heads:y;vocab:y"),
    ("x:2;y:2", "d_model:x;batch:y"),
    ("x:2;y:2", "length:x;memory_length:y;vocab:y"),
]
EXPERTS = [
    ("x:4", "batch:x;experts:x"),
    ("x:2;y:2", "batch:x;experts:x;d_ff:y;heads:y;vocab:y"),
    ("x:2;y:2", "batch:x+y;experts:x"),
    ("x:2;y:2", "batch:x;expert_batch:x;experts:y;heads:y;vocab:y"),
    ("x:2;y:2", "batch:x;experts:y"),
    ("x:2;y:2", "length:x;experts:x;router:y"),
]
HASHED = [("x:2;y:2", "rounds:x;heads:y;vocab:y"), ("x:2;y:2", "batch:x;length:y;chunks:y")]
TASKS = [
    *(
        (name, *task)
        for name in EXAMPLES
        for task in COMMON
        if "reformer" not in name or "memory" not in task[1]
    ),
    *((name, *task) for name in EXAMPLES if name.startswith("moe") for task in EXPERTS),
    *((name, *task) for name in EXAMPLES if name in ("reformer", "reformer, chunks") for task in HASHED),
    *((name, *task) for name in SPATIAL for task in PARTITIONS),
    ("unet3d", "x:4", "depth:x"),
    ("unet3d", "x:2;y:2", "depth:x;width:y"),
]
ALL = {**EXAMPLES, **SPATIAL}


@cache
def dense(name: str) -> Result:
    return train(*ALL[name])


# By day one layout in nine: 9 and the four layouts of most examples share no factor, so that these turn.
BY_TURNS = by_day(TASKS, every=9)


@pytest.mark.parametrize(("name", "mesh", "layout"), BY_TURNS)
@pytest.mark.one_in(8)
def test_layouts(name: str, mesh: str, layout: str) -> None:
    check_same(train(*ALL[name], mesh, layout), dense(name))


@pytest.mark.parametrize("name", ["seq2seq, dropout", "moe, dropout", "bert", "reformer, chunks"])
@pytest.mark.one_in(4)
def test_recompute_and_split_storage(name: str) -> None:
    example, hparams = EXAMPLES[name]
    model = example.model(**hparams)
    variables = [v for v in model.graph.variables if v != "step"]
    loops = set(recomputable(model.step_graph))
    assert loops
    mesh, layout = COMMON[1]
    options = {"storage": dict.fromkeys(variables, 3), "recompute": frozenset(loops)}
    check_same(train(example, hparams, mesh, layout, **options), dense(name))


@pytest.mark.parametrize(
    ("name", "at"),
    by_day(itertools.product(["seq2seq", "moe", "bert", "reformer, one chunk"], [0, 1]), every=3),
)
@pytest.mark.one_in(4)
def test_microbatches(name: str, at: int) -> None:
    """The renamed batch of the experts is cut with the batch."""
    mesh, layout = COMMON[at]
    check_same(train(*EXAMPLES[name], mesh, layout, microbatches=2), dense(name))


def test_microbatches_of_split_experts() -> None:
    check_same(train(*EXAMPLES["moe"], *EXPERTS[0], microbatches=2), dense("moe"))


def test_experts_and_batch_on_one_axis_exchange_tokens() -> None:
    def seen(program: Program) -> None:
        kinds = [i for i, _ in program.walk() if isinstance(i, AllToAll) and "experts" in i.origin.scope]
        # Rows there and back; experts' numbers and gates there; the gates' gradients back.
        assert sum(i.origin.phase == Phase.FORWARD for i in kinds) == 4
        assert sum(i.origin.phase == Phase.BACKWARD for i in kinds) == 3

    train(*EXAMPLES["moe"], *EXPERTS[0], steps=1, seen=seen)


@pytest.mark.parametrize("name", SPATIAL)
def test_split_images_are_not_gathered(name: str) -> None:
    """Convolutions send borders to neighbours: no device gets more than its part of an image."""

    def seen(program: Program) -> None:
        moves = [
            i for i, _ in program.walk() if not i.origin.scope.endswith("norm") or isinstance(i, Permute)
        ]
        assert any(isinstance(i, Permute) for i in moves)
        assert not any(isinstance(i, AllGather | AllToAll) for i in moves)

    train(*SPATIAL[name], "x:4", "height:x", steps=1, seen=seen)


@pytest.mark.parametrize("name", SPATIAL)
@pytest.mark.one_in(2)
def test_microbatches_of_images(name: str) -> None:
    check_same(train(*SPATIAL[name], "x:2;y:2", "batch:x;height:y", microbatches=2), dense(name))


@pytest.mark.parametrize("name", ALL)
def test_batches_fit_the_model(name: str) -> None:
    example, hparams = ALL[name]
    (batch,) = batches(example, hparams, 1)
    inputs = example.model(**hparams).graph.inputs
    assert {n: x.shape for n, x in batch.items()} == {n: t.shape.sizes for n, t in inputs.items()}
    limits = {"positions": "length", "label": 10, "filled": 2}
    for n, x in batch.items():
        if x.dtype == np.int32:
            limit = limits.get(n, "vocab")
            assert x.min() >= 0
            assert x.max() < (hparams[limit] if isinstance(limit, str) else limit)


@pytest.mark.parametrize("example", [transformer_seq2seq, moe_lm, bert, reformer_lm, resnet, unet3d])
def test_held_out_batches_are_others(example: Any) -> None:
    hparams = {"batch": 8, "length": 64, "vocab": 256, "size": 8}
    train_batch = next(example.data(**hparams))
    held = next(example.data(**hparams, split="held-out"))
    assert any((train_batch[n] != held[n]).any() for n in held)
    with pytest.raises(ValueError, match="use 'train' or 'held-out'"):
        next(example.data(**hparams, split="test"))


def test_bad_sizes() -> None:
    with pytest.raises(mtf.UserError, match="heads=4 must be a multiple of kv_heads=3"):
        transformer_seq2seq.model(**{**SMALL, "kv_heads": 3})
    with pytest.raises(mtf.UserError, match="LearnedPositions: count=4 is less than length="):
        transformer_seq2seq.model(**{**SMALL, "positions": "4"})
    with pytest.raises(
        mtf.UserError,
        match="TopExperts: chosen=5 must be at most the number of experts in the chosen groups, 4",
    ):
        moe_lm.model(**{**SMALL, "experts": 4, "chosen": 5})
