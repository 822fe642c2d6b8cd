"""Small programs whose text is kept in tests/core/golden: base lowering, and what each pass makes of it.

Remake the files after a change that is meant (and read the difference): python -m tests.core.golden
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.ir.program import Program, text
from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.pipeline import passes
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.lower.verify import verify

FOLDER = Path(__file__).parent / "golden"
B, D, F, L = mtf.Dim("batch", 8), mtf.Dim("d", 4), mtf.Dim("f", 8), mtf.Dim("layers", 2)
Built = tuple[mtf.Graph, dict[str, mtf.Tensor]]


def residual() -> Built:
    """Two products over the same split dimension, added up: one all-reduce."""
    g = mtf.Graph()
    x, y = g.input("x", [B, F], "float32"), g.input("y", [B, F], "float32")
    w = g.variable("w", [F, D], mtf.ONES)
    return g, {"out": mtf.einsum([x, w], [B, D]) + mtf.einsum([y, w], [B, D]) * 2.0}


def scattered() -> Built:
    """A sum whose result is split: a reduce-scatter."""
    g = mtf.Graph()
    x, w = g.input("x", [B, F], "float32"), g.variable("w", [F, D], mtf.ONES)
    return g, {"out": mtf.rename(mtf.einsum([x, w], [B, D]), d="out")}


def unused() -> Built:
    """Work that leads to no result."""
    g = mtf.Graph()
    x = g.input("x", [B, F], "float32")
    mtf.softmax(x, F)
    return g, {"out": mtf.reduce_max(x, F)}


def residual_layers() -> mtf.Model:
    g = mtf.Graph()
    x = g.input("x", [B, D], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        up, down = g.variable("up", [D, F], mtf.ONES), g.variable("down", [F, D], mtf.ONES)
        return h + mtf.einsum([mtf.tanh(mtf.einsum([h, up], [B, F])), down], [B, D])

    h = mtf.scan(layer, x, L) * g.variable("scale", [D], mtf.ONES) + g.variable("bias", [D], mtf.ZEROS)
    return mtf.Model(mtf.reduce_mean(mtf.square(h)))


def training_step() -> Built:
    """A residual layer, repeated, with its gradient and update: sums of the loop's gradients are taken
    once."""
    model = residual_layers()
    return model.step_graph, {"loss": model.loss}


def accumulated() -> Built:
    """The same in two microbatches: a layer's gradient is added to its part of the sum, which stays pending
    until all are done."""
    step = residual_layers().training_step(2)
    return step.graph, dict(step.results)


def moved() -> Built:
    """Half of a split dimension, put behind another tensor: only what changes devices is sent."""
    g = mtf.Graph()
    x, y = g.input("x", [B, D], "float32"), g.input("y", [mtf.Dim("batch", 4), D], "float32")
    return g, {"out": mtf.concat([y, mtf.slice_dim(x, B, 4, 4)], "batch")}


def chosen() -> Built:
    """A branch with a sum over devices, which stays inside, and one without; the gradient of both."""
    g = mtf.Graph()
    x, flag = g.input("x", [B, D], "float32"), g.input("flag", [], "bool")
    w = g.variable("w", [D], mtf.ONES)
    y = mtf.cond(flag, lambda: mtf.einsum([x, w], [D]), lambda: w)
    (dw,) = mtf.gradients(mtf.reduce_sum(mtf.tanh(y)), [w])
    assert dw is not None
    return g, {"dw": dw}


def stopped() -> Built:
    """A loop of at most three steps."""
    g = mtf.Graph()
    x = g.input("x", [D], "float32")
    (y,) = mtf.while_loop(lambda h: mtf.reduce_max(h) < 1.0, lambda h: h * 2.0, [x], 3)
    return g, {"y": y}


def attention() -> Built:
    """Queries and keys split alike: keys and values are gathered, their gradients reduce-scattered."""
    g = mtf.Graph()
    length, memory = mtf.Dim("length", 8), mtf.Dim("memory", 8)
    q, k, v = (
        g.input(n, [B, d, D], "bfloat16") for n, d in zip("qkv", (length, memory, memory), strict=True)
    )
    y = mtf.attention(q, k, v, length, memory, D, causal=True, window=4)
    dq, dk, dv = mtf.gradients(mtf.reduce_sum(y * y), [q, k, v])
    assert dq is not None and dk is not None and dv is not None
    return g, {"dq": dq, "dk": dk, "dv": dv}


def tabulated() -> Built:
    """A table that the model is given: no variable, and every device makes its own part."""
    g = mtf.Graph()
    x = g.input("x", [B, D], "float32")
    table = mtf.constant(g, np.arange(32).reshape(8, 4), [B, D], "float32")
    return g, {"out": mtf.reduce_sum(x * table, B)}


def refined() -> Built:
    """A product that splits the batch further than what it reads: the sum before it is scattered, and its
    weight is whole."""
    g = mtf.Graph()
    x, first = g.input("x", [B, F], "float32"), g.variable("first", [F, D], mtf.ONES)
    y = mtf.einsum([x, first], [B, D])
    with g.scope("second"):
        y = mtf.tanh(mtf.einsum([mtf.square(y), g.variable("w", [D, F], mtf.ONES)], [B, F]))
    model = mtf.Model(mtf.reduce_mean(y))
    return model.step_graph, {"loss": model.loss}


CASES: dict[str, tuple[Callable[[], Built], str, str]] = {
    "residual": (residual, "x:2;y:2", "batch:x;f:y"),
    "scattered": (scattered, "x:2;y:2", "batch:x;f:y;out:y"),
    "unused": (unused, "x:2", "f:x"),
    "moved": (moved, "x:2", "batch:x"),
    "chosen": (chosen, "x:2", "batch:x"),
    "stopped": (stopped, "x:2", "d:x"),
    "training_step": (training_step, "x:2;y:2", "batch:x;f:y"),
    "accumulated": (accumulated, "x:2;y:2", "batch:x;f:y"),
    "tabulated": (tabulated, "x:2;y:2", "batch:x;d:y"),
    "attention": (attention, "x:2;y:2", "batch:x;length:y;memory:y"),
    "refined": (refined, "x:2;y:2", "batch:x;f:y;batch@second:x+y;f@second:none"),
}


def record(name: str) -> str:
    """The program after base lowering in full, and the lines that each pass changes."""
    build, mesh, layout = CASES[name]
    graph, results = build()
    program: Program = lower_base(
        graph, Oracle(placement(graph, mtf.Mesh(mesh), mtf.Layout(layout))), results
    )
    parts = [f"== base lowering\n{text(verify(program))}"]
    for title, run in passes().items():
        before, program = text(program), verify(run(program))
        change = difflib.unified_diff(before.splitlines(), text(program).splitlines(), lineterm="", n=0)
        lines = [line for line in list(change)[2:] if not line.startswith("@@")]
        parts.append(f"== pass {title}\n" + ("\n".join(lines) or "(no change)") + "\n")
    return "\n".join(parts)


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    for name in CASES:
        (FOLDER / f"{name}.txt").write_text(record(name), encoding="utf-8")


if __name__ == "__main__":
    main()
