"""Attention as one operation: what must hold whatever the numbers; its blocks, work, program and errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.liveness import memory
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.kernel import BLOCKS
from mesh_tf_core.ir.program import Local, Permute
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel
from mesh_tf_core.ops import blockwise
from mesh_tf_core.ops.attention import FusedAttention, FusedAttentionGrad
from mesh_tf_core.training.evaluation import forward
from tests.conformance.helper import Built, check_close
from tests.conformance.samples_attention import SAMPLES

B, H, G, L, M, D = (mtf.Dim(n, k) for n, k in {"b": 2, "h": 2, "g": 3, "l": 8, "m": 8, "d": 4}.items())
RNG = np.random.default_rng(0)
Q, K, V = (RNG.normal(size=(B.size, n.size, h.size, D.size)) for n, h in ((L, H), (M, H), (M, H)))


def results(build: Callable[..., mtf.Tensor], **arrays: Any) -> dict[str, Any]:
    """What `build` makes of float64 inputs, and the gradients of the sum of its squares, one device."""
    g = mtf.Graph()
    dims = {2: [B, M], 4: [B, M, H, D]}
    xs = {
        n: g.input(
            n, [B, L, H, D] if n == "q" else dims[np.ndim(x)], "int32" if np.ndim(x) == 2 else "float64"
        )
        for n, x in arrays.items()
    }
    y = build(g, **xs)
    floats = [n for n, x in xs.items() if x.dtype == "float64"]
    found = mtf.gradients(mtf.reduce_sum(y * y), [xs[n] for n in floats])
    asked = {"y": y, **{f"d{n}": dx for n, dx in zip(floats, found, strict=True) if dx is not None}}
    return LockstepEngine(mtf.lower(g, mtf.Mesh("one:1"), mtf.Layout(), asked)).step(arrays)


def attend(q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, **how: Any) -> mtf.Tensor:
    return mtf.attention(q, k, v, L, M, D, **how)


def alike(one: dict[str, Any], other: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert one.keys() == other.keys()
    for name, x in one.items():
        check_close(name, other[name], x, tolerance, "the two")


def test_causal_is_a_window_of_the_whole_length() -> None:
    given = {"q": Q, "k": K, "v": V}
    causal = results(lambda g, **x: attend(**x, causal=True), **given)
    alike(causal, results(lambda g, **x: attend(**x, causal=True, window=L.size), **given))
    whole = results(lambda g, **x: attend(**x), **given)
    alike(whole, results(lambda g, **x: attend(**x, window=L.size), **given))


def test_segments_are_a_mask() -> None:
    ids = np.array([[0] * 3 + [1] * 5, [0] * 6 + [1] * 2])

    def masked(g: mtf.Graph, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        own = mtf.rename(ids, m="l")
        return attend(q, k, v, mask=own.equal(ids), causal=True)

    def segmented(g: mtf.Graph, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor, ids: mtf.Tensor) -> mtf.Tensor:
        return attend(q, k, v, segments=(mtf.rename(ids, m="l"), ids), causal=True)

    given = {"q": Q, "k": K, "v": V, "ids": ids}
    found = results(segmented, **given)
    alike(found, results(masked, **given))
    # The texts do not see each other.
    other = results(segmented, **{**given, "v": np.where(ids[..., None, None] == 0, V, 99.0)})
    check_close("y", other["y"][0, :3], found["y"][0, :3], 1e-12, "first text")


def test_queries_that_share_a_key_are_keys_repeated() -> None:
    def repeated(g: mtf.Graph, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor) -> mtf.Tensor:
        one = [mtf.reshape(mtf.slice_dim(t, H, 0, 1), [B, M, D]) for t in (k, v)]
        return attend(q, *(mtf.broadcast(t, [B, M, H, D]) for t in one), causal=True)

    def shared(g: mtf.Graph, q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor) -> mtf.Tensor:
        return attend(q, *(mtf.reshape(mtf.slice_dim(t, H, 0, 1), [B, M, D]) for t in (k, v)), causal=True)

    alike(*(results(build, q=Q, k=K, v=V) for build in (repeated, shared)))


def test_dropout_keeps_the_mean_and_is_that_of_the_written_out() -> None:
    from mesh_tf_core.layers import Attention

    g = mtf.Graph()
    x = g.input("x", [B, mtf.Dim("length", 8), mtf.Dim("d_model", 4)], "float32")
    key = mtf.Dim("heads", 4), mtf.Dim("d_kv", 2)
    made: dict[str, Any] = {}
    for form in ("fused", "plain"):
        g = mtf.Graph()
        x = g.input("x", x.shape.dims, "float32")
        y = Attention(*key, kv_heads=2, causal=True, dropout=0.5, attention=form)(x)
        step = mtf.Model(mtf.reduce_sum(y * y), mtf.SGD(0.1)).training_step()
        program = mtf.lower(step.graph, mtf.Mesh("x:2"), mtf.Layout("length:x"), {**step.results, "y": y})
        engine = LockstepEngine(program)
        engine.initialize()
        batch = {"x": np.random.default_rng(1).normal(size=(2, 8, 4)).astype(np.float32)}
        made[form] = {**engine.step(batch), "q": engine.read("attention/q")}
    alike(made["plain"], made["fused"], 1e-5)
    many = 400
    g = mtf.Graph()
    q, k, v = (g.input(n, [d, D], "float32") for n, d in zip("qkv", (L, M, M), strict=True))
    draws = [attend(q, k, v, dropout=0.5) for _ in range(many)]
    program = mtf.lower(
        g, mtf.Mesh("one:1"), mtf.Layout(), {"mean": mtf.add_n(draws) / many, "all": attend(q, k, v)}
    )
    engine = LockstepEngine(program)
    engine.initialize()
    out = engine.step({"q": Q[0, :, 0], "k": K[0, :, 0], "v": V[0, :, 0] * 0 + 1})
    assert abs(out["mean"] - out["all"]).max() < 0.15 and abs((out["mean"] - out["all"]).mean()) < 0.03


def test_evaluation_drops_nothing_out() -> None:
    g = mtf.Graph()
    q, k, v = (g.input(n, [d, D], "float32") for n, d in zip("qkv", (L, M, M), strict=True))
    g.outputs = attend(q, k, v, dropout=0.5)  # type: ignore[attr-defined]
    (node,) = [n for n in forward(g).nodes if isinstance(n.op, FusedAttention)]
    assert isinstance(node.op, FusedAttention)
    assert node.op.rate == 0 and node.op.extras == () and len(node.inputs) == 3


@pytest.mark.parametrize("most", [4, 40])
@pytest.mark.parametrize("sample", SAMPLES, ids=[s.name for s in SAMPLES])
@pytest.mark.one_in(3)
def test_blocks_give_the_same(sample: Any, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(sample, "float64")
    want = built.dense()
    found: list[int] = []
    loop = NumpyKernel.loop
    monkeypatch.setattr(
        NumpyKernel, "loop", lambda self, n, *more: (found.append(n), loop(self, n, *more))[1]
    )
    monkeypatch.setattr(blockwise, "MOST", most)
    for name, x in built.dense().items():
        check_close(name, x, want[name], 1e-12, f"{sample.name} in blocks of {most}")
    assert found


def test_nobody_holds_all_keys_in_a_ring() -> None:
    """The most that a device holds, of keys and values of 64 KiB each on all devices."""
    peaks = {}
    for form, devices in itertools.product(("", "ring", "zigzag"), (4, 8)):
        g = mtf.Graph()
        q, k, v = (g.input(n, [mtf.Dim(d, 1024), D], "float32") for n, d in zip("qkv", "lmm", strict=True))
        y = mtf.attention(q, k, v, "l", "m", D, causal=True)
        options = mtf.Options(context=frozenset({("m", form)} if form else ()))
        program = mtf.lower(g, mtf.Mesh([("x", devices)]), mtf.Layout("l:x;m:x"), {"y": y}, options)
        peaks[form, devices] = memory(program).peak
    assert peaks["", 8] > 2 * 1024 * D.size * 4
    for form in ("ring", "zigzag"):
        assert peaks[form, 8] == peaks[form, 4] / 2 < 2 * 1024 * D.size * 4


def brute(n: int, m: int, causal: bool, window: int) -> np.ndarray:
    apart = np.arange(n)[:, None] - np.arange(m)
    seen = np.ones((n, m), bool)
    seen &= (apart >= 0) if causal else True
    return seen & (abs(apart) < window) if window else seen


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 100, 129, 700])
@pytest.mark.parametrize(("n", "m"), [(512, 768), (1024, 1024), (384, 1280)])
def test_blocks_with_a_pair_that_sees_each_other_count_whole(
    n: int, m: int, window: int, causal: bool
) -> None:
    op = FusedAttention("d", mtf.Dim("l", n), mtf.Dim("m", m), 1.0, causal, window)
    q, kv = (next(b for b in (512, 256, 128) if size % b == 0) for size in (n, m))
    blocks = brute(n, m, causal, window).reshape(n // q, q, m // kv, kv).any((1, 3))
    assert op.visible(n).pairs(BLOCKS) == blocks.sum() * q * kv
    large = replace(op, length=mtf.Dim("l", 2**40), memory=mtf.Dim("m", 2**40))
    exact, all_of = large.visible(2**40).pairs(), large.visible(2**40).pairs(BLOCKS)
    assert op.visible(n).pairs() <= exact <= all_of  # at once, and in bounds


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("window", [0, 1, 3, 9, 40])
@pytest.mark.parametrize(("n", "m"), [(12, 12), (12, 30), (30, 12)])
def test_flops_are_of_what_the_mask_leaves(n: int, m: int, window: int, causal: bool) -> None:
    op = FusedAttention("d", mtf.Dim("l", n), mtf.Dim("m", m), 1.0, causal, window)
    seen = brute(n, m, causal, window)
    assert op.visible(n).pairs() == seen.sum()
    pieces = [seen[i * n // 3 : (i + 1) * n // 3].sum() for i in range(3)]
    assert op.visible(n // 3).pairs() == max(pieces)
    types = [
        mtf.TensorType(mtf.Shape([b, d, D]), "float32") for b, d in ((B, op.length), *[(B, op.memory)] * 2)
    ]
    assert op.flops(*types) == 2 * 2 * B.size * D.size * seen.sum()
    grad = FusedAttentionGrad("d", op.length, op.memory, 1.0, causal, window)
    assert grad.flops(*types) == 2.5 * op.flops(*types)


@pytest.mark.parametrize(("window", "turns"), [(1, 0), (5, 1), (6, 2), (25, 6), (29, 7), (40, 7), (0, 7)])
def test_a_window_is_sent_no_further_than_it_is_seen(window: int, turns: int) -> None:
    """On eight devices with four keys each; the last one's work is its queries' pairs, no more."""
    g = mtf.Graph()
    q, k, v = (g.input(n, [mtf.Dim(d, 32), D], "float32") for n, d in zip("qkv", "lmm", strict=True))
    y = mtf.attention(q, k, v, "l", "m", D, causal=True, window=window)
    options = mtf.Options(context=frozenset({("m", "ring")}))
    program = mtf.lower(g, mtf.Mesh("x:8"), mtf.Layout("l:x;m:x"), {"y": y}, options)
    assert sum(times for i, times in program.walk() if isinstance(i, Permute)) == 2 * turns
    work = [
        i.op.flops(*map(program.local, i.inputs))
        for i, times in program.walk()
        for _ in range(times)
        if isinstance(i, Local) and isinstance(i.op, FusedAttention)
    ]
    assert len(work) == turns + 1
    assert sum(work) == 2 * 2 * D.size * brute(32, 32, True, window)[-4:].sum()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda q, k: mtf.attention(q, k, k, L, L, D), r"no dimension 'l'"),
        (lambda q, k: mtf.attention(q, k.cast("float32"), k, L, M, D), "the same float dtype"),
        (
            lambda q, k: mtf.attention(q, k, mtf.rename(k, d="l"), L, M, D),
            "the positions of queries and keys must have different names",
        ),
        (
            lambda q, k: mtf.attention(q, k, mtf.reduce_sum(k, H), L, M, D),
            "the value must have the key's dimensions, with another",
        ),
        (
            lambda q, k: mtf.attention(q, k, k, L, M, D, bias=mtf.rename(k, d="e")),
            "the bias has dimensions e:4, which the logits",
        ),
        (
            lambda q, k: mtf.attention(q, k, k, L, M, D, dropout=1.0),
            "dropout: rate must be at least 0 and less than 1",
        ),
        (
            lambda q, k: mtf.attention(q, k, k, L, M, D, window=-1),
            "window must be at least 0 positions, found",
        ),
        (
            lambda q, k: mtf.attention(q, k, k, L, M, D, casual=True),
            "attention: unknown option 'casual'; known",
        ),  # type: ignore[call-arg]
    ],
)
def test_errors(wrong: Callable[..., object], message: str) -> None:
    g = mtf.Graph()
    q, k = g.input("q", [B, L, H, D], "float64"), g.input("k", [B, M, H, D], "float64")
    with pytest.raises(mtf.UserError, match=message):
        wrong(q, k)


@pytest.mark.parametrize("engine", ["lockstep", "local", "jax"])
def test_rows_that_see_no_key_see_all_alike(engine: str) -> None:
    """Forward and backward: the log-sum-exp alone has lost how many keys there are."""
    graph, keys = mtf.Graph(), 64
    b, m, d = mtf.Dim("b", 2), mtf.Dim("m", keys), mtf.Dim("d", 4)
    rng = np.random.default_rng(0)
    given = {n: rng.normal(size=(2, 2 if n == "q" else keys, 4)).astype("float32") for n in "qkv"}
    q = graph.input("q", [b, mtf.Dim("l", 2), d], "float32")
    k, v = (graph.input(n, [b, m, d], "float32") for n in "kv")
    mask = graph.input("mask", [b, m], "int32").cast("bool")
    result = mtf.attention(q, k, v, "l", "m", "d", mask=mask)
    (dv,) = mtf.gradients(mtf.reduce_sum(result), [v])
    program = mtf.lower(graph, mtf.Mesh("x:1"), mtf.Layout(), {"result": result, "dv": dv})
    found = open_engine(program, engine).step({**given, "mask": np.zeros((2, keys), np.int32)})
    mean = given["v"].mean(1, keepdims=True)
    np.testing.assert_allclose(found["result"], np.broadcast_to(mean, (2, 2, 4)), rtol=0, atol=1e-6)
    np.testing.assert_allclose(found["dv"], np.full((2, keys, 4), 2 / keys), rtol=1e-5)


@pytest.mark.parametrize("least", [-1e9, -1e30, float(np.finfo(np.float32).min)])
def test_hidden_keys_stay_hidden_whatever_the_bias(least: float) -> None:
    graph, size = mtf.Graph(), mtf.Dim("m", 4)
    q = graph.input("q", [mtf.Dim("l", 4), mtf.Dim("d", 2)], "float32")
    k, v = (graph.input(n, [size, mtf.Dim("d", 2)], "float32") for n in "kv")
    bias = graph.input("bias", [size], "float32")
    result = mtf.attention(q, k, v, "l", "m", "d", bias=bias, causal=True)
    engine = open_engine(mtf.lower(graph, mtf.Mesh("x:1"), mtf.Layout(""), {"result": result}), "lockstep")
    rng = np.random.default_rng(0)
    given = {n: rng.normal(size=(4, 2)).astype("float32") for n in "qkv"}
    given["bias"] = np.array([least, least, 0, 0], np.float32)
    later = {**given, "v": given["v"] + np.array([0, 0, 100, 100], np.float32)[:, None]}
    first, second = (engine.step(x)["result"] for x in (given, later))
    np.testing.assert_array_equal(first[:2], second[:2])
    assert (first[2:] != second[2:]).all()
