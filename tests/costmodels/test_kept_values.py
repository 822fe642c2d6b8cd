"""What stays for backward in PyTorch: against bytes counted by hand from the sources of its kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.kept import kept_values
from costmodels.liveness import MemoryProfile, memory
from costmodels.pricing.compilers import COMPILERS
from examples.moe_lm import model as experts
from examples.transformer_lm import model as transformer
from mesh_tf_core.ir.op import PRODUCTS
from mesh_tf_core.ir.program import Program

BATCH, LENGTH, D, KV, HEADS, FF, VOCAB, LAYERS = 8, 256, 64, 16, 4, 512, 512, 4
SIZES: dict[str, Any] = {
    "layers": LAYERS,
    "d_model": D,
    "d_kv": KV,
    "heads": HEADS,
    "d_ff": FF,
    "vocab": VOCAB,
    "batch": BATCH,
    "length": LENGTH,
    "dtype": "bfloat16",
    "norm": "rms",
    "positions": "rotary",
    "optimizer": "sgd",
}
ATTENTION = 2 * 4 * KV * HEADS + 4 * HEADS
"""Bytes a token: queries, keys, values, the result, and the statistics of its rows in float32."""
LAUNCHED, EAGER = COMPILERS["launched"].memory, COMPILERS["eager"].memory
LAYOUTS: dict[str, tuple[str, str, dict[str, Any], int]] = {
    "": ("data:1", "", {}, 8 * 4),
    "microbatches": ("data:1", "", {"microbatches": 4}, 2 * 4),
    "data": ("data:2", "batch:data", {}, 4 * 4),
    "gpipe": ("pipe:2", "layers:pipe", {"microbatches": 4}, 5 * 2 * 2),
    "1f1b": ("pipe:2", "layers:pipe", {"microbatches": 4, "schedule": "1f1b"}, 2 * 2 * 2),
    "interleaved:2": ("pipe:2", "layers:pipe", {"microbatches": 4, "schedule": "interleaved:2"}, 5 * 2),
}
"""Mesh, layout and options, and sequences times layers that a device keeps: of all ticks, or in flight."""
REMADE = {(True, "silu"): 2 * D + FF, (False, "gelu"): 2 * D, (False, "relu"): 2 * D}
"""Elements of a token that backward makes again: both norms without their scales, and SwiGLU's silu."""


@cache
def program(mesh: str, layout: str, options: tuple[tuple[str, Any], ...] = (), **sizes: Any) -> Program:
    model = transformer(**{**SIZES, **sizes})
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout), mtf.Options(**dict(options)))


def kept(found: MemoryProfile) -> int:
    """Bytes of stacks and rings of activations at the peak."""
    stacks = (h for h in found.holdings if h.value >= 0 and ("layers:" in h.what or "in_flight" in h.what))
    return sum(h.bytes for h in stacks if "length" in h.what)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("gated", "activation"), REMADE)
def test_fused_kernels_keep_their_operands_alone(layout: str, gated: bool, activation: str) -> None:
    """TransformerEngine's and Megatron-LM's: of a norm its operand and its result, of SwiGLU and GELU too, of
    relu the result."""
    mesh, rules, options, times = LAYOUTS[layout]
    runs = program(mesh, rules, tuple(options.items()), gated=gated, activation=activation)
    less, more = (kept(memory(runs, replace(LAUNCHED, remakes=r))) for r in (True, False))
    token = 2 * (4 * D + {"silu": 3, "gelu": 2, "relu": 1}[activation] * FF) + ATTENTION
    assert 0 <= less / LENGTH - times * token < token
    assert more - less == times * LENGTH * 2 * REMADE[gated, activation]


@pytest.mark.parametrize("build", [transformer, experts])
def test_what_backward_multiplies_is_kept(build: Any) -> None:
    """No product reads what is made again."""
    sizes = {"layers": 2, "d_model": 32, "d_kv": 8, "heads": 2, "d_ff": 64, "vocab": 64, "batch": 4}
    outline = build(**sizes, gated=True, length=16).lower(mtf.Mesh("data:1"), mtf.Layout("")).outline
    values = kept_values(outline)
    assert values.remade
    backward = [n for block in outline.blocks for n in block.nodes if n.phase == "backward"]
    for node in (n for n in backward if n.op.kind in PRODUCTS):
        types = [outline.tensor(i).type for i in node.inputs]
        work = node.op.work(*types)
        if work.product is None or min(work.product[1:]) > 1:
            assert values.without_memory.isdisjoint(node.inputs)


@pytest.mark.parametrize(
    ("mesh", "layout"), [("data:1", ""), ("data:2", "batch:data"), ("model:2", "vocab:model")]
)
def test_the_loss_has_logits_in_float32_and_their_gradient_in_bfloat16(mesh: str, layout: str) -> None:
    sizes = {"vocab": 1 << 15, "layers": 1, "d_ff": 64}
    runs = program(mesh, layout, **sizes)
    logits = BATCH * LENGTH * sizes["vocab"] // runs.mesh.devices
    assert 6 * logits < memory(runs, LAUNCHED).peak < 7 * logits
    # In float32: logits and their gradient; of a split vocabulary logits, these less their maximum, and exp.
    each = 12 if layout == "vocab:model" else 8
    assert each * logits < memory(runs, EAGER).peak < (each + 1) * logits


def test_products_of_eager_kernels_keep_the_whole_sequence() -> None:
    layout = "heads:model;d_ff:model;length@elsewhere:model"
    runs = program("model:4", layout, gated=True)
    whole, shards = (kept(memory(runs, replace(EAGER, gathers=g))) for g in (True, False))
    assert whole - shards == 2 * 2 * D * BATCH * LENGTH * LAYERS * 3 // 4


@pytest.mark.parametrize("layout", LAYOUTS)
def test_dropout_keeps_a_byte_of_an_element(layout: str) -> None:
    """Korthikanti et al. 2022, section 4.1: of what is added to the state twice, and of the hidden values."""
    mesh, rules, options, times = LAYOUTS[layout]
    runs = program(mesh, rules, tuple(options.items()), dropout=0.1)
    with_masks, without = (kept(memory(runs, replace(LAUNCHED, masks=m))) for m in (True, False))
    assert with_masks - without == times * LENGTH * (2 * D + FF)


@pytest.mark.parametrize("recompute", [(), ("layers",)])
def test_the_casts_of_weights_are_the_parameters_of_eager_models(recompute: tuple[str, ...]) -> None:
    runs = program("data:1", "", (("recompute", frozenset(recompute)),), batch=1, length=8)
    held = memory(runs, EAGER).peak - memory(runs, replace(EAGER, parameters=False)).peak
    weights = 2 * LAYERS * (2 * D * FF + 4 * D * KV * HEADS)
    assert 0.95 * weights < held < 1.05 * weights
