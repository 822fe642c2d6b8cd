"""What stays for backward in PyTorch: against bytes counted by hand from the sources of its kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kept import kept_values
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryProfile, MemoryRules, memory
from costmodels.pricing.compilers import COMPILERS, compiler_of
from costmodels.pricing.items import Computed, Sent
from examples.moe_lm import model as experts
from examples.transformer_lm import model as transformer
from mesh_tf_core import layers as nn
from mesh_tf_core.ir.instructions import GRADIENT
from mesh_tf_core.ir.op import PRODUCTS
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.layers.recurrent import KERNEL

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
    "gpipe": ("pipe:2", "layers:pipe", {"microbatches": 4}, 4 * 2 * 2),
    "1f1b": ("pipe:2", "layers:pipe", {"microbatches": 4, "schedule": "1f1b"}, 2 * 2 * 2),
    "interleaved:2": ("pipe:2", "layers:pipe", {"microbatches": 4, "schedule": "interleaved:2"}, 5 * 2),
}
"""Mesh, layout and options, and sequences times layers that a device keeps: those in flight."""
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
@pytest.mark.one_in(5)
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
            assert values.without_memory(Fuses.ALL).isdisjoint(node.inputs)


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


@pytest.mark.parametrize("rules", [EAGER, LAUNCHED])
def test_products_of_torch_keep_the_whole_sequence(rules: MemoryRules) -> None:
    layout = "heads:model;d_ff:model;length@elsewhere:model"
    runs = program("model:4", layout, gated=True)
    whole, shards = (kept(memory(runs, replace(rules, gathers=g))) for g in (1, 0))
    assert whole - shards == 2 * 2 * D * BATCH * LENGTH * LAYERS * 3 // 4


@pytest.mark.one_in(2)
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
    weights = 2 * (LAYERS * (2 * D * FF + 4 * D * KV * HEADS) + 2 * VOCAB * D)
    assert 0.98 * weights < held < 1.02 * weights


def test_numbers_that_frameworks_give() -> None:
    """Copies at the loss and in the optimizer's step, and the type of sums: against bytes by hand."""
    made = program("data:1", "", (("microbatches", 4),), optimizer="adam", vocab=8192)
    plain = memory(made, EAGER)
    logits = BATCH // 4 * LENGTH * 8192 * 4
    lossy = memory(made, replace(EAGER, loss_copies=3))
    assert lossy.peak - plain.peak == logits  # The program holds the logits and their gradient.
    trained = (s.variable for s in made.variables.values() if s.variable.trainable)
    weights = sum(variable.shape.size for variable in trained)
    update = [p.bytes for p in plain.points if p.origin.phase == Phase.UPDATE]
    stepped = memory(made, replace(EAGER, step_copies=2))
    assert max(p.bytes for p in stepped.points if p.origin.phase == Phase.UPDATE) - max(update) == 8 * weights
    for microbatches, own, other in ((4, 4, 2), (1, 2, 4)):  # bytes that the program has, and the framework
        made = program("data:1", "", (("microbatches", microbatches),), optimizer="adam", vocab=8192)
        had, held = (memory(made, replace(EAGER, gradient_bytes=n)).points for n in (own, other))
        there = [q.bytes - p.bytes for p, q in zip(had, held, strict=True)]
        assert max(there, key=abs) == pytest.approx((other - own) * weights, rel=0.01)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("storage", [None, "zero1", "zero2", "zero3"])
def test_a_buffer_of_gradients_is_as_large_for_one_microbatch_as_for_two(storage: str | None) -> None:
    """But for the embedding that zero1 gathers, which two microbatches keep."""

    def held(microbatches: int) -> int:
        model = transformer(**{**SIZES, "vocab": 16384, "optimizer": "adam", "batch": 4 * microbatches})
        return layoutopt.cost(
            model,
            "data:4",
            "batch:data",
            "h100",
            framework="megatron",
            microbatches=microbatches,
            storage=storage,
            recompute=["layers"],
        ).predicted.peak_memory_bytes

    two, embedding = held(2), 2 * 16384 * D
    assert two - 1.02 * embedding < held(1) <= two


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2"])
def test_sums_of_stages_have_the_bytes_of_their_framework(schedule: str) -> None:
    """The layers of a stage, and its embedding or head."""
    made = program("pipe:2", "layers:pipe", (("microbatches", 4), ("schedule", schedule)))
    narrow, wide = (memory(made, replace(LAUNCHED, gradient_bytes=n, buffers=1)).peak for n in (2, 4))
    layers = LAYERS // 2 * (2 * D * FF + 4 * D * KV * HEADS)
    assert wide - narrow == pytest.approx(2 * (layers + VOCAB * D), rel=0.01)


@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("where", [("data:1", ""), ("model:2", "vocab:model;vocab@crossentropy:none")])
def test_a_loss_holds_its_copies_of_whole_logits(where: tuple[str, str], overwrites: bool) -> None:
    """Also of those that tensor ranks gather, and where the gradient takes the place of the logits."""
    made = program(*where, vocab=8192)  # it holds the logits and their gradient
    rules = replace(EAGER, overwrites=overwrites)
    both = (memory(made, r).points for r in (replace(rules, loss_copies=3), rules))
    assert (
        max(p.bytes - q.bytes for p, q in zip(*both, strict=True))
        == (1 + overwrites) * BATCH * LENGTH * 8192 * 4
    )


@pytest.mark.parametrize(
    "text",
    [
        "torch",
        "torch:loss=in_place,optimizer=fused",
        "torch:kernels=fused",
        "torch:gradients=bfloat16",
        "torch-compile",
        "megatron",
    ],
)
def test_variants_of_frameworks_reach_the_peak(text: str) -> None:
    said = {name: number.value for name, number in load_hardware("a100", text).holds}
    assert (
        said
        == {
            "torch": {"gathers": 1, "loss_copies": 3, "step_copies": 1},
            "torch:loss=in_place,optimizer=fused": {"gathers": 1},
            "torch:kernels=fused": {"gathers": 1, "loss_copies": 3, "step_copies": 1},
            "torch:gradients=bfloat16": {
                "gathers": 1,
                "loss_copies": 3,
                "step_copies": 1,
                "gradient_bytes": 2,
            },
            "torch-compile": {"gathers": 1},
            "megatron": {"gradient_bytes": 4, "buffers": 1, "to_the_end": 1},
        }[text]
    )
    found = layoutopt.cost(transformer(**SIZES), "data:1", "", "a100", framework=text, microbatches=4)
    rules = compiler_of(load_hardware("a100", text)).rules
    assert found.evaluation.memory.peak == memory(found.evaluation.program, rules).peak


@pytest.mark.parametrize("microbatches", [1, 2])
def test_gradients_are_sent_in_the_type_that_a_framework_sums(microbatches: int) -> None:
    """Bytes of an element: of the framework where it says them, else of the program."""
    program_has = {1: 2, 2: 4}[microbatches]
    model = transformer(**SIZES)
    weights = sum(v.shape.size for v in model.graph.variables.values() if v.trainable)
    for text in (
        "torch",
        "megatron",
        "torchtitan",
        "torch:gradients=bfloat16",
        "megatron:gradients=bfloat16",
    ):
        said = {name: number.value for name, number in load_hardware("h100", text).holds}
        found = layoutopt.cost(
            model, "data:2", "batch:data", "h100", framework=text, microbatches=microbatches
        )
        sums = (x.item for x in found.evaluation.cost.lines if x.is_communication and x.purpose == GRADIENT)
        sent = sum(sum(item.payloads) for item in sums if isinstance(item, Sent))
        assert sent == pytest.approx(said.get("gradient_bytes", program_has) * weights, rel=0.01), text


@pytest.mark.parametrize(("framework", "outside"), [("megatron", 2), ("torch", 4)])
def test_gradients_are_added_up_in_the_type_that_a_framework_sums(framework: str, outside: int) -> None:
    """Four bytes more are read and written with sums of float32, beside a cast two (`outside` of layers)."""
    model = transformer(**SIZES)
    shapes = [v.shape for v in model.graph.variables.values() if v.trainable]
    layers = sum(shape.size for shape in shapes if "layers" in shape.names)
    moved = []
    for option in ("buffer" if framework == "torch" else "float32", "bfloat16"):
        asked = {"framework": f"{framework}:gradients={option}", "microbatches": 4}
        lines = layoutopt.cost(model, "data:1", "", "h100", **asked).evaluation.cost.lines
        moved.append(sum(x.times * x.item.quantity.bytes for x in lines if isinstance(x.item, Computed)))
    expected = 4 * (4 * layers + outside * (sum(shape.size for shape in shapes) - layers))
    assert moved[0] - moved[1] == pytest.approx(expected, rel=0.01)


MAMBA = mtf.Dim("inner", 64), mtf.Dim("d_state", 4), 8
HEAD = mtf.Dim("heads", 4)
DELTA = HEAD, 4, mtf.Dim("d_k", 16), mtf.Dim("d_v", 16)


@pytest.mark.parametrize(
    ("layer", "arrays"),
    [
        (nn.SelectiveStateSpace(*MAMBA, fused=True), 3),  # mamba_inner_fn: xz, out
        (nn.SelectiveStateSpace(*MAMBA, whole=False, fused=True), 6),  # conv, delta, out_z
        (nn.Mamba2(HEAD, mtf.Dim("d_head", 16), mtf.Dim("d_state", 4), fused=True), 3),  # xz, out
        (nn.GatedDeltaNet(*DELTA, fused=True), 9),  # q, k, v before and after conv, gate, y, out
    ],
)
@pytest.mark.parametrize("rules", [LAUNCHED, EAGER])
def test_layers_with_states_keep_what_their_libraries_do(layer: Any, arrays: int, rules: MemoryRules) -> None:
    """As saved by state-spaces/mamba @01887ed, selective_scan_interface.py and ssd_combined.py; arrays of 64
    elements of a token."""
    graph = mtf.Graph()
    x = graph.input("x", [mtf.Dim("batch", 2), mtf.Dim("length", 256), mtf.Dim("d_model", 32)], "bfloat16")
    y = mtf.scan(lambda h: h + layer(h), x, mtf.Dim("layers", 8))
    model = mtf.Model(mtf.reduce_mean(y.cast("float32")), mtf.SGD(0.1))
    found = memory(model.lower(mtf.Mesh("x:1"), mtf.Layout("")), rules).holdings
    kept = (h.bytes for h in found if "layers:" in h.what and "length" in h.what and "d_model" not in h.what)
    one = 8 * 2 * 256 * 64 * 2
    assert sum(each for each in kept if each % one == 0) == arrays * one
    inside = [
        h for h in found if h.origin and KERNEL in h.origin.scope.split("/") and "layers:" not in h.what
    ]
    assert sum(h.bytes for h in inside if not h.what.startswith("temporaries")) <= 2 * one / 8, (
        "as its kernels"
    )


@pytest.mark.parametrize(("storage", "shards"), [("layout", 1), ("zero1", 2)])
def test_a_bfloat16_buffer_of_gradients_is_copied_to_float32_for_the_step(storage: str, shards: int) -> None:
    """The copy is of a distributed optimizer's shard; with a float32 buffer there is none."""
    model = transformer(**{**SIZES, "optimizer": "adam"})
    weights = sum(v.shape.size for v in model.graph.variables.values() if v.trainable)
    for text, copied in (("megatron", 0), ("megatron:gradients=bfloat16", 4)):
        found = layoutopt.cost(model, "data:2", "batch:data", "h100", framework=text, storage=storage)
        plain = replace(compiler_of(load_hardware("h100", text)).rules, step_gradients=0)
        pairs = zip(
            found.evaluation.memory.points, memory(found.evaluation.program, plain).points, strict=True
        )
        more = {a.bytes - b.bytes for a, b in pairs if a.origin.phase == Phase.UPDATE}
        assert more == {copied * weights // shards}, text
