"""Random numbers: their distributions, and that keys differ by call, step and loop iteration."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.dtypes import TensorType
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel
from mesh_tf_core.ops import random as random_ops

N, M = mtf.Dim("n", 400), mtf.Dim("m", 250)
KEY = {"key": np.array(7, np.int32)}


def draw(make: Any, layout: str = "n:x") -> np.ndarray:
    g = mtf.Graph()
    y = make(g, g.input("key", [], "int32"))
    return np.asarray(
        LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout(layout), {"y": y})).step(KEY)["y"]
    )


def moments(x: np.ndarray) -> list[float]:
    z = (x - x.mean()) / x.std()
    return [float(x.mean()), float(x.std()), float((z**3).mean()), float((z**4).mean())]


def test_uniform() -> None:
    x = draw(lambda g, key: mtf.random_uniform(key, [N, M], 1.0, 3.0))
    assert x.min() >= 1 and x.max() < 3
    assert moments(x) == pytest.approx([2, 2 / 12**0.5, 0, 1.8], abs=0.02)
    counts = np.histogram(x, 50, (1, 3))[0]
    assert np.abs(counts - 2000).max() < 6 * 2000**0.5


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_uniform_numbers_of_every_type_are_below_the_end(dtype: str) -> None:
    """Also from above to below, as those of imported programs are drawn."""
    least = 2.0 ** -random_ops.uniform_bits(dtype)
    for low, high in ((0.0, 1.0), (1 - least, -least)):
        x = draw(lambda g, key: mtf.random_uniform(key, [N, M], low, high, dtype)).astype(np.float64)  # noqa: B023
        assert x.min() >= 0 and x.max() < 1 and x.mean() == pytest.approx(0.5, abs=0.01)


def test_normal() -> None:
    x = draw(lambda g, key: mtf.random_normal(key, [N, M], 1.0, 2.0))
    assert np.isfinite(x).all()
    assert moments(x) == pytest.approx([1, 2, 0, 3], abs=0.06)
    assert (np.abs(x - 1) > 4).mean() == pytest.approx(0.0455, abs=0.003)


def test_neighbours_are_independent() -> None:
    x = draw(lambda g, key: mtf.random_normal(key, [N, M]))
    for a, b in ((x[:-1], x[1:]), (x[:, :-1], x[:, 1:]), (x[:-1, :-1], x[1:, 1:])):
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def test_dropout_keeps_its_share_and_the_mean() -> None:
    x = draw(lambda g, key: mtf.dropout(mtf.random_uniform(key, [N, M]) * 0.0 + 1.0, 0.3, key))
    assert set(np.unique(x)) == {np.float32(0), np.float32(1 / 0.7)}
    assert (x > 0).mean() == pytest.approx(0.7, abs=0.006)


def test_categorical_follows_the_softmax() -> None:
    kinds = mtf.Dim("kinds", 4)

    def make(g: mtf.Graph, key: mtf.Tensor) -> mtf.Tensor:
        logits = mtf.log(mtf.mtf_range(g, kinds, "float32") + 1.0)
        return mtf.random_categorical(mtf.broadcast(logits, [N, M, kinds]), kinds, key)

    for layout in ("n:x", "kinds:x"):
        share = np.bincount(draw(make, layout).ravel(), minlength=4) / 100_000
        np.testing.assert_allclose(share, np.arange(1, 5) / 10, atol=0.006)


def test_temperature() -> None:
    kinds = mtf.Dim("kinds", 4)

    def at(temperature: float) -> np.ndarray:
        def make(g: mtf.Graph, key: mtf.Tensor) -> mtf.Tensor:
            logits = mtf.broadcast(mtf.mtf_range(g, kinds, "float32"), [N, M, kinds])
            return mtf.sample_with_temperature(logits, kinds, temperature, key)

        return draw(make)

    assert (at(0.0) == 3).all()
    assert (at(0.2) == 3).mean() > 0.99 > (at(1.0) == 3).mean() > (at(5.0) == 3).mean()
    with pytest.raises(mtf.UserError, match="sample_with_temperature: temperature must be at least 0, found"):
        at(-1.0)


def test_keys_differ_by_call_step_and_iteration() -> None:
    g = mtf.Graph()
    w = g.variable("w", [mtf.Dim("a", 64)], mtf.ONES)
    first, second = mtf.dropout(w, 0.5), mtf.dropout(w, 0.5)
    _, (layers,) = mtf.scan(lambda h: (h, [mtf.dropout(w, 0.5)]), w, mtf.Dim("layers", 3))
    model = mtf.Model(mtf.reduce_sum(first))
    results = {"first": first, "second": second, "layers": layers}
    engine = LockstepEngine(mtf.lower(model.step_graph, mtf.Mesh("x:2"), mtf.Layout("a:x"), results))
    masks = []
    for _ in range(2):
        out = engine.step({})
        masks += [m > 0 for m in (out["first"], out["second"], *out["layers"])]
    for i, a in enumerate(masks):
        for b in masks[:i]:
            assert 0.2 < (a != b).mean() < 0.8


U32 = "uint32"


def words(k: Kernel, *values: int) -> tuple[Any, ...]:
    return tuple(k.full((1,), v, U32) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "bits"),
    [
        ((0, 0), (0, 0), (0x9D1C5EC6, 0x8BD50731)),
        ((0xFFFFFFFF,) * 2, (0xFFFFFFFF,) * 2, (0xFD36D048, 0x2D17272C)),
        ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xBA3E4725, 0xF27D669E)),
    ],
)
def test_the_generator_is_threefry(
    counter: tuple[int, int], key: tuple[int, int], bits: tuple[int, int]
) -> None:
    """Known answers of its authors (Random123, kat_vectors, threefry2x32 with 13 rounds)."""
    k = NumpyKernel()
    found = random_ops.threefry(k, words(k, *key), words(k, *counter))  # type: ignore[arg-type]
    assert tuple(int(x[0]) for x in found) == bits


def test_wide_tensors_do_not_repeat() -> None:
    """Rows of 2^25 elements, and 2^33 in all: two rows were the same, 16777619 places apart."""
    k, seen = NumpyKernel(), []
    whole = mtf.Shape([mtf.Dim("a", 256), mtf.Dim("b", 2**25)])
    op = random_ops.RandomUniform(whole, "float32", 0.0, 1.0)
    piece = TensorType(mtf.Shape([mtf.Dim("a", 1), mtf.Dim("b", 64)]), "float32")
    for row in (0, 1, 2, 128, 255):
        for first in (0, 64, 16777600, 16777664, 2**25 - 64):
            begins = {"a": row, "b": first}
            ways = {"a": 256, "b": 2**19}
            at = At((), (piece,), frozenset("ab"), begins.__getitem__, ways)
            seen.append(op.kernel(k, at, np.int32(7)).ravel())
    found = np.concatenate(seen)
    # 1600 numbers of 24 bits: 0.08 pairs are alike by chance.
    assert len(np.unique(found)) >= found.size - 2


def test_odd_rows_and_scalars() -> None:
    """Pairs of elements share a counter; pieces of odd rows may cut one."""
    odd = mtf.Dim("n", 6), mtf.Dim("m", 15)
    for layout in ("", "n:x"):
        x = draw(lambda g, key: mtf.random_uniform(key, odd), layout)
        assert len(np.unique(x)) == 90
    assert np.array_equal(draw(lambda g, key: mtf.random_uniform(key, odd), ""), x)
    scalar = draw(lambda g, key: mtf.random_uniform(key, []), "")
    assert scalar.shape == () and 0 <= scalar < 1


def test_every_kernel_draws_the_same() -> None:
    """To the last bit, whatever compiles them."""
    from mesh_tf_core.kernels.jax_kernel import JaxKernel
    from mesh_tf_core.kernels.tf_kernel import TfKernel

    op = random_ops.RandomUniform(mtf.Shape([N, M]), "float32", 0.0, 1.0)
    at = At((), (TensorType(op.shape, "float32"),), frozenset(), lambda name: 0)
    want = op.kernel(NumpyKernel(), at, np.int32(7))
    for k in (TfKernel(), JaxKernel()):
        np.testing.assert_array_equal(np.asarray(op.kernel(k, at, k.scalar(7, "int32"))), want)
