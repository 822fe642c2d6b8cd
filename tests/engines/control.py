"""Small programs with branches and loops that stop early, forward and backward; sums over devices inside."""

from __future__ import annotations

from typing import Any

import numpy as np

import mesh_tf_core as mtf
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower.verify import verify

N, A, L = mtf.Dim("n", 8), mtf.Dim("a", 4), mtf.Dim("l", 3)


def branches(dtype: str = "float64") -> Program:
    """A branch in every layer of a loop: a mean over the split dimension, or a root, whose gradient at zero
    is infinite."""
    g = mtf.Graph()
    x, w = g.input("x", [N, A], dtype), g.input("w", [A], dtype)
    means = g.input("means", [L], dtype)

    def layer(h: Any, flag: Any) -> Any:
        def mean() -> Any:
            return mtf.broadcast(mtf.reduce_mean(h * w, N), [N, A]) + h

        return mtf.cond(flag > 0.0, mean, lambda: mtf.sqrt(mtf.relu(h)) * w)

    y = mtf.scan(layer, x, L, [means])
    loss = mtf.reduce_sum(mtf.square(y))
    return _program(g, {"loss": loss, "y": y}, [x, w])


def until(dtype: str = "float64") -> Program:
    """Steps with a sum over devices until the state is large, three of at most six."""
    g = mtf.Graph()
    x, w = g.input("x", [N, A], dtype), g.input("w", [A], dtype)

    def step(n: Any, h: Any) -> Any:
        return n + 1, h * w + mtf.broadcast(mtf.reduce_mean(h, N), [N, A])

    start = mtf.reduce_sum(x).cast("int32") * 0
    n, y = mtf.while_loop(lambda n, h: n < 3, step, [start, x], 6)
    loss = mtf.reduce_sum(mtf.tanh(y) * y)
    return _program(g, {"loss": loss, "y": y, "n": n}, [x, w])


def _program(g: mtf.Graph, results: dict[str, Any], wrt: list[Any]) -> Program:
    found = mtf.gradients(results["loss"], wrt)
    results |= {f"gradient {i}": dx for i, dx in enumerate(found)}
    return verify(mtf.lower(g, mtf.Mesh("x:2;y:2"), mtf.Layout("n:x;a:y"), results))


def batches(program: Program) -> list[dict[str, Any]]:
    """Both branches in different layers; zeros where a root's gradient would be infinite if it ran."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(8, 4)) + 2.0
    out = []
    for flags in ([1.0, 1.0, 1.0], [0.0, 1.0, 0.0]):
        fed = {"x": x * (np.arange(8)[:, None] > 0) if flags[0] else np.abs(x), "w": rng.uniform(0.5, 1, 4)}
        out.append(fed | ({"means": np.array(flags)} if "means" in program.feeds else {}))
    return out


PROGRAMS = {"branches": branches, "until": until}
