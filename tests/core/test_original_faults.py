"""What Mesh-TensorFlow 0.1.19 gets wrong, each case right here (run on its last release; see the table in the
docs)."""

from __future__ import annotations

import re
import subprocess
import sys

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import text
from mesh_tf_core.lower.verify import verify

A, B = mtf.Dim("a", 4), mtf.Dim("b", 4)


def run(
    graph: mtf.Graph, mesh: str, layout: str, batch: dict[str, object], **results: mtf.Tensor
) -> dict[str, object]:
    return LockstepEngine(verify(mtf.lower(graph, mtf.Mesh(mesh), mtf.Layout(layout), results))).step(batch)


def test_rename_from_one_split_to_another() -> None:
    """It splits before it gathers on a 2x2 mesh: silently wrong values."""
    g = mtf.Graph()
    x = g.input("x", [A], "float32")
    values = np.arange(4, dtype=np.float32)
    got = run(g, "x:2;y:2", "a:x;c:y", {"x": values}, y=mtf.rename(x, a="c"))
    np.testing.assert_array_equal(got["y"], values)


def test_a_sum_carried_by_a_loop() -> None:
    """`s = reduce_sum(x * s)`: it carries the delayed all-reduce unreduced."""
    g = mtf.Graph()
    x = g.input("x", [A], "float32")
    s = mtf.scan(lambda s: mtf.reduce_sum(x * s), mtf.reduce_sum(x), mtf.Dim("steps", 3))
    values = np.array([0.1, 0.2, 0.3, 0.5], np.float32)
    got = run(g, "m:2", "a:m", {"x": values}, s=s)
    assert got["s"] == pytest.approx(values.sum() ** 4)


def test_gradient_of_a_loop() -> None:
    """It has none."""
    g = mtf.Graph()
    x = g.input("x", [A], "float32")
    s = mtf.scan(lambda s: mtf.reduce_sum(x * s), mtf.reduce_sum(x), mtf.Dim("steps", 3))
    (dx,) = mtf.gradients(s, [x])
    assert dx is not None
    values = np.array([0.1, 0.2, 0.3, 0.5], np.float32)
    got = run(g, "m:2", "a:m", {"x": values}, dx=dx)
    np.testing.assert_allclose(got["dx"], 4 * values.sum() ** 3, rtol=1e-6)


def test_concat_and_slice_on_a_split_dimension() -> None:
    """It refuses."""
    g = mtf.Graph()
    x = g.input("x", [A, B], "float32")
    y = mtf.slice_dim(mtf.concat([x, x * 2.0], "a"), "a", 2, 4)
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    got = run(g, "m:2;n:2", "a:m;b:n", {"x": values}, y=y)
    np.testing.assert_array_equal(got["y"], np.concatenate([values, 2 * values])[2:6])


def test_top_k_of_minus_infinity() -> None:
    """It gives a wrong value and the same index twice."""
    g = mtf.Graph()
    x = g.input("x", [A, B], "float32")
    values, places = mtf.top_k(x, "a", mtf.Dim("k", 2))
    low = np.full((4, 4), -np.inf, np.float32)
    low[3, 1] = 2.0
    for layout in ("", "a:m", "b:m"):
        got = run(g, "m:2", layout, {"x": low}, values=values, places=places)
        np.testing.assert_array_equal(got["places"], [[0, 1], [3, 0], [0, 1], [0, 1]])
        np.testing.assert_array_equal(got["values"][1], [2.0, -np.inf])


def test_convolution_on_a_split_dimension() -> None:
    """It refuses gradients of it; here only the borders are sent."""
    g = mtf.Graph()
    length = mtf.Dim("length", 64)
    channel, tap, out = mtf.Dim("in", 2), mtf.Dim("tap", 3), mtf.Dim("out", 2)
    x, w = g.input("x", [length, channel], "float32"), g.input("w", [tap, channel, out], "float32")
    dx, _ = mtf.gradients(mtf.reduce_sum(mtf.square(mtf.conv(x, w, [length], [tap], channel))), [x, w])
    assert dx is not None
    program = verify(mtf.lower(g, mtf.Mesh("m:4"), mtf.Layout("length:m"), {"dx": dx}))
    # Forward a column to each side (2 channels), backward one of the two outputs' to each side: 8 bytes each.
    assert program.communication_bytes() == {"m": 4 * 8.0}


RANDOM = """
import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
g = mtf.Graph()
w = g.variable("w", [mtf.Dim("a", 4), mtf.Dim("b", 8)], mtf.Normal(1.0))
y = mtf.dropout(w, 0.5)
program = mtf.lower(g, mtf.Mesh("m:2;n:2"), mtf.Layout("{layout}"), {{"y": y}})
print(LockstepEngine(program).step({{}})["y"].tobytes().hex())
"""


@pytest.mark.nightly
def test_random_numbers_do_not_depend_on_layout_or_hash_seed() -> None:
    """Its own differ by layout and by Python's hash seed, even when seeded."""
    seen = set()
    for seed, layout in (("0", ""), ("1", "a:m"), ("2", "b:n+m")):
        done = subprocess.run(
            [sys.executable, "-c", RANDOM.format(layout=layout)],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(p for p in sys.path if p)},
        )
        seen.add(done.stdout)
    assert len(seen) == 1


def test_two_runs_are_identical_and_momentum_applies_the_new_velocity() -> None:
    """Its step has a data race, and its momentum applies the velocity of the step before."""

    def losses() -> list[float]:
        g = mtf.Graph()
        w = g.variable("w", [A], mtf.ONES)
        model = mtf.Model(mtf.reduce_sum(mtf.square(w)), mtf.SGD(0.25, momentum=0.5))
        engine = LockstepEngine(model.lower(mtf.Mesh("m:2"), mtf.Layout("a:m")))
        return [float(engine.step({})["loss"]) for _ in range(20)]

    first = losses()
    assert first == losses()
    # w: 1 -> 1 - 0.25 * 2 = 0.5; v = 0.5 * 2 + 1 = 2, so w -> 0.
    assert first[:3] == [4.0, 1.0, 0.0]


def test_a_graph_is_lowered_as_often_as_asked() -> None:
    """It mutates the graph, so that no second layout can be tried."""
    g = mtf.Graph()
    w = g.variable("w", [A, B], mtf.ONES)
    model = mtf.Model(mtf.reduce_sum(mtf.square(w)))
    texts = [text(model.lower(mtf.Mesh("m:2"), mtf.Layout(layout))) for layout in ("a:m", "b:m", "a:m")]
    assert texts[0] == texts[2] != texts[1]


def test_an_embedding_is_not_a_product() -> None:
    """Its gather is a one-hot contraction: about a fifth of all multiply-adds of a small language model."""
    g = mtf.Graph()
    table, ids = g.input("table", [A, B], "float32"), g.input("ids", [mtf.Dim("c", 8)])
    y = mtf.gather(table, ids, "a")
    program = mtf.lower(g, mtf.Mesh("m:2"), mtf.Layout("a:m"), {"y": y})
    flops = [i.op.flops(*(program.local(j) for j in i.inputs)) for i, _ in program.walk() if hasattr(i, "op")]
    assert sum(flops) == 0


def test_program_size_does_not_grow_with_devices() -> None:
    """Its graphs grow with the number of devices: 90,000 nodes for two layers on 32 virtual devices."""
    g = mtf.Graph()
    a = mtf.Dim("a", 512)
    x, w = g.input("x", [a, B], "float32"), g.variable("w", [B, mtf.Dim("c", 4)], mtf.ONES)
    y = mtf.einsum([x, w], [a, w.dim("c")])
    sizes = [len(mtf.lower(g, mtf.Mesh(f"m:{n}"), mtf.Layout("a:m"), {"y": y}).code) for n in (2, 32, 512)]
    assert sizes[0] == sizes[1] == sizes[2]


@pytest.mark.parametrize(
    ("layout", "legal"),
    [("a:m;b:n", True), ("a:m;b:m", False), ("a:n+m", True), ("a:m+n;b:n", False)],
)
def test_legal_is_what_can_be_lowered(layout: str, legal: bool) -> None:
    """Its layout search calls legal layouts infeasible, and allows ones that cannot be lowered."""
    g = mtf.Graph()
    x = g.input("x", [A, B], "float32")
    results = {"y": mtf.softmax(x, "a")}
    if legal:
        verify(mtf.lower(g, mtf.Mesh("m:2;n:2"), mtf.Layout(layout), results))
    else:
        with pytest.raises(mtf.LayoutError, match=re.escape("has both 'a' and 'b' split over mesh axis")):
            mtf.lower(g, mtf.Mesh("m:2;n:2"), mtf.Layout(layout), results)
