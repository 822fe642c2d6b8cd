"""Where a library has a kernel for each of its calls, a call is priced and kept as one operation."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import mesh_tf_core as mtf
from costmodels import load_hardware
from costmodels.kept import kept_values
from costmodels.kernels.fusion import Fuses, fusion
from costmodels.liveness import memory
from costmodels.pricing.compilers import COMPILERS
from costmodels.pricing.pricer import price
from mesh_tf_core import Dim
from mesh_tf_core.ir.program import Program

ROWS, WIDTH, LAYERS = Dim("rows", 4096), Dim("width", 1024), Dim("layers", 4)


def step(called: bool) -> Program:
    """Layers of a product and a GELU of five operations, which are one call or not."""
    graph = mtf.Graph("gelus")
    x = graph.input("x", [ROWS, WIDTH], "float32")

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        w = graph.variable("w", [WIDTH, Dim("inner", 1024)], mtf.Normal(0.1))
        y = mtf.rename(mtf.einsum([x, w], [ROWS, Dim("inner", 1024)]), inner="width")
        with graph.in_call("gelu") if called else nullcontext():
            return (y * 0.5) * (mtf.erf(y * 0.70710678) + 1.0)

    loss = mtf.reduce_mean(mtf.scan(layer, x, LAYERS))
    return mtf.Model(loss, mtf.SGD(0.1), name="gelus").lower(mtf.Mesh("all:1"), mtf.Layout(""))


def test_a_call_is_one_kernel_forward_and_backward() -> None:
    machine = load_hardware("h200", "torch")
    called, apart = (price(step(each), machine).lines for each in (True, False))
    forward = [x for x in called if x.origin.phase == "forward" and x.times == LAYERS.size]
    (product, gelu), array = forward, ROWS.size * WIDTH.size * 4
    assert product.name == "einsum"
    assert gelu.bytes == 2 * array, "it reads its operand and writes its result"
    assert sum(x.times for x in called) < sum(x.times for x in apart) - 4 * LAYERS.size
    assert sum(x.seconds * x.times for x in called) < sum(x.seconds * x.times for x in apart)


def test_a_call_keeps_its_operand_alone() -> None:
    """Backward of GELU reads three arrays that it makes again from one."""
    rules, stack = COMPILERS["eager"].memory, LAYERS.size * ROWS.size * WIDTH.size * 4

    def kept(called: bool) -> int:
        return sum(h.bytes == stack for h in memory(step(called), rules).holdings)

    assert kept(True) == 2 < kept(False), "its operand, and its result, which the product reads"
    outline = step(True).outline
    values = kept_values(outline)
    assert values.inside and values.without_memory(Fuses.ALL) != values.without_memory(Fuses.CALLS)


def test_layer_norm_keeps_its_operand_and_its_result() -> None:
    """As `torch.nn.functional.layer_norm`: not the normalised rows before they are scaled."""
    graph = mtf.Graph("norms")
    x = graph.input("x", [ROWS, WIDTH], "float32")

    def layer(x: mtf.Tensor) -> mtf.Tensor:
        normed = mtf.layers.LayerNorm("width", bias=True)(x)
        w = graph.variable("w", [WIDTH, Dim("inner", 1024)], mtf.Normal(0.1))
        return x + mtf.rename(mtf.einsum([normed, w], [ROWS, Dim("inner", 1024)]), inner="width")

    model = mtf.Model(mtf.reduce_mean(mtf.scan(layer, x, LAYERS)), mtf.SGD(0.1), name="norms")
    program = model.lower(mtf.Mesh("all:1"), mtf.Layout(""))
    stack = LAYERS.size * ROWS.size * WIDTH.size * 4
    kept = sum(h.bytes == stack for h in memory(program, COMPILERS["eager"].memory).holdings)
    assert kept == 2


def test_compilers_that_fuse_do_not_ask_whose_call_it_is() -> None:
    machine = replace(load_hardware("h200"), compiler="xla-gpu")
    lines = [price(step(each), machine).lines for each in (True, False)]
    assert [(x.name, x.times, x.item) for x in lines[0]] == [(x.name, x.times, x.item) for x in lines[1]]


def test_operations_of_two_calls_share_no_kernel() -> None:
    outline = step(True).outline
    node = {n.index: n for n, _ in outline.walk()}
    groups: dict[int, set[tuple[str, str]]] = {}
    for index, group in fusion(outline, Fuses.CALLS).group.items():
        groups.setdefault(group, set()).add((node[index].call, node[index].phase))
    assert groups and all(len(found) == 1 and ("", "") not in found for found in groups.values())
