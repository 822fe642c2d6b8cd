"""Work that the devices of an axis repeat: every product counts, attention and convolutions too."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.kernels.quantities import flops_of
from costmodels.repeated import repeated
from examples.transformer_lm import model
from layoutopt.optimize.evaluation.evaluator import evaluate
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.program import Local


def test_kinds_of_products_are_kinds_of_operations() -> None:
    assert set(MATMUL_CLASSES) <= set(Op.FACTS["kind"])


def test_attention_that_is_not_split_counts() -> None:
    built = model(layers=2, length=512)
    layout = mtf.Layout("batch:data;d_ff:model;vocab:model")
    program = built.lower(mtf.Mesh("data:2;model:2"), layout)
    flops = {True: 0.0, False: 0.0}
    attention = 0.0
    for instr, times in program.walk():
        if isinstance(instr, Local) and instr.op.kind in ("matmul", "attention"):
            found = times * flops_of(instr.op, [program.local(i) for i in instr.inputs])
            values = [program.values[i] for i in (*instr.inputs, *instr.outputs)]
            flops[any("model" in split for v in values for split in v.splits)] += found
            attention += found * (instr.op.kind == "attention")
    share = repeated(program)["model"].share
    assert share == pytest.approx(flops[False] / sum(flops.values()))
    without = (flops[False] - attention) / (sum(flops.values()) - attention)
    assert attention and share > without + 0.05


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved:2"])
def test_ticks_of_a_pipeline_count_as_often_as_the_cost_counts_them(schedule: str) -> None:
    """A branch that few ticks take is not counted in every tick."""
    options = mtf.Options(microbatches=4, schedule=schedule)
    mesh, layout = mtf.Mesh("pipe:2"), mtf.Layout("layers:pipe")
    of = evaluate(model(layers=4, batch=8), mesh, layout, load_hardware("h100"), options)
    lines = [x for x in of.cost.lines if x.origin.scope == "output" and x.kind in MATMUL_CLASSES]
    counted = repeated(of.program)["pipe"].flops["output"]
    assert counted == pytest.approx(sum(x.flops * x.times for x in lines), rel=0.01)
