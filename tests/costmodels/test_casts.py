"""Casts and stacks as a compiler makes them: where casts run, what is held for them, what loops stack."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.fused import fused
from costmodels.kernels.fusion import Fuses
from costmodels.kernels.groups import FusedKernel
from costmodels.liveness import MemoryRules, memory
from costmodels.pricing.pricer import pricer
from mesh_tf_core import Dim, Layout, Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Local, Loop, Program
from mesh_tf_core.optimizers import by_name

B, D, F, LAYERS = Dim("batch", 64), Dim("d", 32), Dim("f", 128), Dim("layers", 3)
SIZE = D.size * F.size


def weight(g: mtf.Graph, name: str, *dims: Dim) -> mtf.Tensor:
    return g.variable(name, dims, mtf.ZEROS, activation_dtype="bfloat16")


def step(layers: bool, layout: str = "batch:x", microbatches: int = 1) -> Program:
    """Two products, one after the other; three times in a loop if `layers`."""
    g = mtf.Graph("m")

    def block(x: mtf.Tensor) -> mtf.Tensor:
        inner = mtf.gelu(mtf.einsum([x, weight(g, "wi", D, F)], [B, F]))
        return x + mtf.einsum([inner, weight(g, "wo", F, D)], [B, D])

    x = g.input("x", [B, D], "float32").cast("bfloat16")
    y = mtf.scan(block, x, LAYERS) if layers else block(x)
    loss = mtf.reduce_mean(mtf.square(y.cast("float32")))
    model = mtf.Model(loss, by_name("adam", 0.1), name="m")
    return model.lower(Mesh("x:2"), Layout(layout), mtf.Options(microbatches=microbatches))


def casts(program: Program, dtype: str) -> list[tuple[Local | FusedKernel, float]]:
    """Casts of arrays of a weight's size that are kernels of their own, and how often they run."""
    found = []
    for item, times in fused(program).items:
        instrs = item.instrs if isinstance(item, FusedKernel) else (item,)
        if len(instrs) == 1 and isinstance(instrs[0], Local) and instrs[0].name == "cast":
            value = program.values[instrs[0].outputs[0]]
            if value.dtype == dtype and value.shape.size == SIZE:
                found.append((item, times))
    return found


def update(program: Program, name: str) -> FusedKernel:
    (found,) = (
        k
        for k, _ in fused(program).items
        if isinstance(k, FusedKernel)
        and k.instrs[0].origin.phase == Phase.UPDATE
        and k.instrs[0].origin.scope == name
    )
    return found


@pytest.mark.parametrize("layout", ["batch:x", "", "f:x"])
def test_a_gradient_is_cast_where_the_update_reads_it(layout: str) -> None:
    program = step(layers=False, layout=layout)
    assert casts(program, "float32") == []
    share = SIZE // 2 if layout == "f:x" else SIZE
    assert update(program, "wi").read - share * (3 * 4 + 2) <= 16


def test_gradients_of_layers_are_stacked_as_they_are_made_and_added_up_in_float32() -> None:
    """A step keeps and sends a stack of bfloat16; over microbatches the sums are the variables' float32."""
    whole, parts = step(layers=True), step(layers=True, microbatches=2)
    (backward,) = (i for i in whole.code if isinstance(i, Loop) and i.origin.phase == Phase.BACKWARD)
    assert {whole.values[s.outer].dtype for s in backward.stacked} == {"bfloat16"}
    sent = [
        whole.values[i].dtype for instr in whole.code if isinstance(instr, AllReduce) for i in instr.inputs
    ]
    assert sorted(sent) == ["bfloat16", "bfloat16", "float32"]
    (around,) = (i for i in parts.code if isinstance(i, Loop))
    assert {parts.values[s.outer].dtype for s in around.summed} == {"float32"}
    assert len(parts.added) == 2


def test_a_cast_outside_of_loops_costs_what_its_readers_read_more() -> None:
    found = [k for k, _ in casts(step(layers=False), "bfloat16")]
    assert len(found) == 2
    for kernel in found:
        assert isinstance(kernel, FusedKernel)
        assert (kernel.read, kernel.written, kernel.elements) == (4.0 * SIZE, 0.0, 0)


def test_a_cast_in_a_loop_runs_once_in_a_step() -> None:
    found = casts(step(layers=True), "bfloat16")
    assert [times for _, times in found] == [LAYERS.size] * 2
    assert all(item.origin.phase == Phase.FORWARD for item, _ in found if isinstance(item, Local))


def test_casts_of_all_layers_are_held_from_loop_to_loop() -> None:
    program = step(layers=True)
    found = memory(program, MemoryRules(fuses=Fuses.ALL))
    held = [h for h in found.holdings if h.what in ("bfloat16[d:32 f:128]", "bfloat16[f:128 d:32]")]
    assert [h.bytes for h in held] == [2 * SIZE * LAYERS.size] * 2
    assert {h.origin.phase for h in held if h.origin} == {"forward"}
    inner = [p.bytes for p in found.points if p.depth]
    outside = [p.bytes for p in found.points if not p.depth and p.origin.phase == Phase.UPDATE]
    assert min(inner) > max(outside)


def test_a_part_of_a_stack_has_no_memory_and_a_stack_under_two_names_lies_once() -> None:
    g = mtf.Graph("m")
    s, q, m = Dim("length", 16), Dim("queries", 16), Dim("memory", 16)

    def block(x: mtf.Tensor) -> mtf.Tensor:
        y = mtf.tanh(x)
        queries, memories = mtf.rename(y, length="queries"), mtf.rename(y, length="memory")
        logits = mtf.einsum([queries, memories], [B, q, m])
        return x + mtf.rename(mtf.einsum([logits, memories], [B, q, D]), queries="length")

    x = g.input("x", [B, s, D], "float32")
    loss = mtf.reduce_mean(mtf.scan(block, x * g.variable("scale", [D], mtf.ONES), LAYERS))
    program = mtf.Model(loss, by_name("sgd", 0.1), name="m").lower(Mesh("x:2"), Layout("batch:x"))
    held = {fuses: memory(program, MemoryRules(fuses)).holdings for fuses in (Fuses.NONE, Fuses.ALL)}
    stack = LAYERS.size * x.type.bytes // 2
    stacks = {fuses: [h.what for h in found if h.bytes == stack] for fuses, found in held.items()}
    apart = stacks[Fuses.NONE]
    assert any("queries" in what for what in apart) and any("memory" in what for what in apart)
    assert len(stacks[Fuses.ALL]) == 1


def test_a_stack_written_from_its_end_is_set_to_zero_first() -> None:
    hardware = load_hardware("tpu-v5e")
    program = step(layers=True)
    stacked = [line for line in pricer(hardware, program).lines(program) if line.name == "stack"]
    gradients = [line for line in stacked if line.origin.phase == Phase.BACKWARD]
    assert [line.bytes for line in gradients] == [2 * 2.0 * SIZE * LAYERS.size] * 2
    forward = [line for line in stacked if line.origin.phase == Phase.FORWARD]
    assert forward and all(line.item.quantity.elements == 0 for line in forward)
    assert all(line.item.quantity.elements == SIZE * LAYERS.size for line in gradients)


@pytest.mark.parametrize("microbatches", [1, 2])
def test_logits_are_widened_where_the_loss_and_its_gradient_read_them(microbatches: int) -> None:
    """The float32 ones are never written: the TPU compiler's step of Llama 3 8B (24 sequences of 8192 on 8
    v6e, variables split, layers recomputed) holds 27.0 GiB, where they alone would take 11.7."""
    g = mtf.Graph("m")
    b, v = Dim("batch", 1024), Dim("vocab", 512)
    x, labels = g.input("x", [b, D], "float32").cast("bfloat16"), g.input("labels", [b])
    logits = mtf.einsum([x, weight(g, "w", D, v)], [b, v])
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, labels, v))
    model = mtf.Model(loss, by_name("sgd", 0.1), name="m")
    program = model.lower(Mesh("x:2"), Layout("batch:x"), mtf.Options(microbatches=microbatches))
    wide = [x for x in program.values if x.dtype == "float32" and x.shape.names == ("batch", "vocab")]
    assert wide
    priced = pricer(load_hardware("tpu-v6e"), program).cost(program)
    assert not [
        x for x in priced.lines if x.text == "cast" and x.origin.phase == Phase.FORWARD and x.bytes > 4 * SIZE
    ]
    rows = b.size // 2 // microbatches
    once, (read, *_) = 2 * rows * v.size, [x.bytes for x in priced.lines if "crossentropygrad" in x.text]
    assert read == pytest.approx(2 * once, rel=0.1)
    rules = [MemoryRules(fuses) for fuses in (Fuses.NONE, Fuses.ALL)]
    held = [[h.what for h in memory(program, each).holdings] for each in rules]
    assert [any("float32[batch" in what and "vocab" in what for what in found) for found in held] == [
        True,
        False,
    ]
