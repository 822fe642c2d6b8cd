"""Kernels of a compiler that fuses: what joins, what breaks a chain, the bytes that are left, memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.fused import fused
from costmodels.kernels.fusion import Fuses, fusion
from costmodels.kernels.groups import FusedKernel
from costmodels.kernels.quantities import of_local
from costmodels.liveness import MemoryRules, memory
from costmodels.pricing.pricer import price, pricer
from mesh_tf_core import Dim, Layout, Mesh
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Local
from mesh_tf_core.lower import lower
from mesh_tf_core.optimizers import by_name

B, D, F = Dim("batch", 64), Dim("d", 32), Dim("f", 128)
S, M = Dim("length", 16), Dim("memory_length", 16)
Build = Callable[[mtf.Graph], mtf.Tensor]


def kernels(build: Build, layout: str = "", mesh: str = "x:2") -> list[FusedKernel]:
    g = mtf.Graph("m")
    out = build(g)
    program = lower(g, Mesh(mesh), Layout(layout), {"out": out})
    return [k for k, _ in fused(program).items if isinstance(k, FusedKernel)]


def names(found: list[FusedKernel]) -> list[list[str]]:
    return [[i.name for i in k.instrs] for k in found]


def x(g: mtf.Graph, *dims: Dim) -> mtf.Tensor:
    return g.input("x", dims or [B, D], "float32")


def w(g: mtf.Graph, *dims: Dim) -> mtf.Tensor:
    return g.variable("w", dims, mtf.ZEROS)


def test_a_chain_costs_its_ends() -> None:
    (kernel,) = kernels(lambda g: mtf.relu(x(g) * 2.0 + 1.0))
    assert len(kernel.instrs) == 3 and kernel.product is None
    assert kernel.read == kernel.written == 4.0 * B.size * D.size


def test_a_part_that_is_written_in_place_costs_no_more_than_it() -> None:
    part, place = 4.0 * B.size * D.size, mtf.Dim("place", 100)

    def build(g: mtf.Graph) -> mtf.Tensor:
        at = g.input("at", [], "int32")
        return mtf.dynamic_update(g.input("all", [place, B, D], "float32"), x(g) * 2.0, at, place)

    g = mtf.Graph()
    program = lower(g, Mesh("x:2"), Layout(), {"out": build(g)})
    assert [len(k.instrs) for k, _ in fused(program).items if isinstance(k, FusedKernel)] == [1]
    (write,) = (i for i, _ in program.walk() if isinstance(i, Local) and i.name == "dynamicupdate")
    done = of_local(write, program.local)
    assert (done.bytes, done.elements) == (3 * part, B.size * D.size)


def test_what_follows_a_product_joins_it_and_operands_do_not() -> None:
    (before, product) = kernels(lambda g: mtf.relu(mtf.einsum([mtf.tanh(x(g)), w(g, D, F)], [B, F]) * 2.0))
    assert names([before, product]) == [["tanh"], ["einsum", "scale", "relu"]]
    assert product.product is not None
    assert (product.read, product.written) == (
        4.0 * (B.size * D.size + D.size * F.size),
        4.0 * B.size * F.size,
    )


def test_a_collective_breaks_a_chain() -> None:
    def build(g: mtf.Graph) -> mtf.Tensor:
        return mtf.relu(mtf.einsum([x(g), w(g, D, F)], [B, F]))

    assert names(kernels(build)) == [["einsum", "relu"]]
    assert names(kernels(build, "d:x")) == [["einsum"], ["relu"]]


def test_several_readers_of_one_group_do_not_and_others_make_it_written() -> None:
    def inside(g: mtf.Graph) -> mtf.Tensor:
        y = mtf.tanh(x(g))
        return y * y + y

    def outside(g: mtf.Graph) -> mtf.Tensor:
        y = mtf.tanh(x(g))
        weight = w(g, D, F)
        return mtf.einsum([y, weight], [B, F]) + mtf.einsum([y * 2.0, weight], [B, F])

    (kernel,) = kernels(inside)
    assert kernel.written == 4.0 * B.size * D.size
    (chain,) = [k for k in kernels(outside) if k.product is None]
    assert names([chain]) == [["tanh", "scale"]]
    assert chain.written == 2 * 4.0 * B.size * D.size


def test_a_reduction_used_again_makes_a_second_kernel_that_computes_again() -> None:
    def build(g: mtf.Graph) -> mtf.Tensor:
        y = mtf.exp(x(g))
        return y / mtf.reduce_sum(y, "d")

    first, second = kernels(build)
    assert names([first, second]) == [["exp", "reduce_sum"], ["div"]]
    assert (first.written, second.read) == (4.0 * B.size, 4.0 * B.size * (D.size + 1))
    assert second.vector > B.size * D.size  # the exponential once more


def test_softmax_is_the_reductions_that_it_consists_of() -> None:
    found = kernels(lambda g: mtf.softmax(x(g), "d"))
    assert names(found) == [["softmax"]] * 3
    assert [len(k.ends) for k in found] == [0, 0, 1]
    assert sum(k.written for k in found) == 4.0 * (B.size * D.size + 2 * B.size)


def test_two_products_do_not_share_a_kernel() -> None:
    def build(g: mtf.Graph) -> mtf.Tensor:
        a = mtf.einsum([x(g), w(g, D, F)], [B, F])
        return a + mtf.einsum([mtf.relu(a), g.variable("v", [F, Dim("g", 8)], mtf.ZEROS)], [B, Dim("g", 8)])

    found = kernels(build)
    assert all(sum(i.name == "einsum" for i in k.instrs) <= 1 for k in found)


def test_no_kernel_waits_for_itself() -> None:
    """What a gather makes of a group cannot come back into it."""
    g = mtf.Graph("m")
    y = mtf.tanh(x(g))
    z = mtf.gather(g.variable("table", [D, F], mtf.ZEROS), mtf.argmax(y, D), D)
    back, direct = mtf.reduce_sum(z, "f"), mtf.reduce_sum(y, "d")
    total = back + direct
    groups = fusion(g.outline()).group
    first, late, early, last = (groups[g.producer[t.id].index] for t in (y, back, direct, total))
    assert first == early and late != first
    assert last in (first, late)


def test_groups_are_those_of_the_graph_as_it_is_now() -> None:
    """An assignment is a change, though it adds no tensor."""
    g = mtf.Graph("m")
    y = x(g) * 2.0
    mtf.tanh(y)
    before = fusion(g.outline())
    assert before is fusion(g.outline())
    with g.phase(Phase.UPDATE):
        g.assign(Variable("v", y.shape, "float32", mtf.ZEROS), y)
    (assigned,) = [n for n in g.nodes if not n.outputs]
    assert y.id not in before.leaving and y.id in fusion(g.outline()).leaving
    assert assigned.index not in fusion(g.outline()).group


@pytest.mark.parametrize(("hardware", "framework"), [("tpu-v4", None), ("a100", None), ("a100", "megatron")])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_an_update_reads_and_writes_its_state_once(
    optimizer: str, hardware: str, framework: str | None
) -> None:
    """Launched from Python, too: frameworks have an optimizer's step as one kernel."""
    g = mtf.Graph("m")
    y = mtf.einsum([x(g), w(g, D, F)], [B, F])
    model = mtf.Model(mtf.reduce_mean(mtf.square(y)), by_name(optimizer, 0.1), name="m")
    program = model.lower(Mesh("x:1"), Layout())
    kernels = pricer(load_hardware(hardware, framework), program).itemiser.compiler.kernels(program)
    assert kernels is not None
    updates = [
        k
        for k, _ in kernels.items
        if isinstance(k, FusedKernel)
        and k.instrs[0].origin.phase == Phase.UPDATE
        and k.instrs[0].origin.scope == "w"
    ]
    (kernel,) = updates
    size, state = 4.0 * D.size * F.size, 2 if optimizer == "adam" else 0
    assert kernel.written == size * (1 + state)
    assert kernel.read - size * (2 + state) <= 16  # and the number of the step


def written_out(q: mtf.Tensor, v: mtf.Tensor) -> mtf.Tensor:
    return mtf.einsum([mtf.softmax(mtf.einsum([q, v], [B, S, M]) * 0.1, M), v], [B, S, D])


def in_one(q: mtf.Tensor, v: mtf.Tensor) -> mtf.Tensor:
    return mtf.attention(q, v, v, S, M, D, scale=0.1)


def test_only_attention_that_is_one_operation_leaves_its_logits_out() -> None:
    logits, operands = 4.0 * B.size * S.size * M.size, 4.0 * B.size * S.size * D.size
    statistic, moved = 4.0 * B.size * S.size, []
    for attention in (in_one, written_out):
        g = mtf.Graph("m")
        out = attention(g.input("q", [B, S, D], "float32"), g.input("v", [B, M, D], "float32"))
        program = lower(g, Mesh("x:2"), Layout(), {"out": out})
        found = [item for item, _ in fused(program).items]
        kernels = [k.read + k.written for k in found if isinstance(k, FusedKernel)]
        moved.append(
            sum([*kernels, *(of_local(i, program.local).bytes for i in found if isinstance(i, Local))])
        )
    assert moved[0] == 4 * operands + statistic and moved[1] > moved[0] + 4 * logits


def test_fused_work_costs_no_more_and_holds_no_more() -> None:
    from tests.layoutopt.models import EXAMPLES

    program = EXAMPLES["transformer"]().lower(Mesh("data:2;model:2"), Layout("batch:data;heads:model"))
    hardware = load_hardware("tpu-v5e")
    alone = price(program, replace(hardware, compiler="none"))
    together = price(program, hardware)
    assert together.compute_seconds < alone.compute_seconds
    assert together.communication_seconds == pytest.approx(alone.communication_seconds, rel=1e-12)
    assert together.flops == pytest.approx(alone.flops, rel=1e-12)
    assert memory(program, MemoryRules(fuses=Fuses.ALL)).peak <= memory(program).peak


def test_kernels_are_those_of_the_graph_when_a_program_was_lowered() -> None:
    g = mtf.Graph("m")
    start = x(g)
    loss = mtf.reduce_sum(mtf.square(mtf.tanh(mtf.relu(start * 2.0) + 1.0)))
    program, hardware = lower(g, Mesh("x:2"), Layout(), {"loss": loss}), load_hardware("tpu-v4")
    before = price(program, hardware).step_seconds
    mtf.gradients(loss, [start])  # reads what forward would not have to write
    assert price(program, hardware).step_seconds == before
    assert price(lower(g, Mesh("x:2"), Layout(), {"loss": loss}), hardware).step_seconds > before
