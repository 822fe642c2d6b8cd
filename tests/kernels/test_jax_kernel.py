"""JAX's kernel agrees with NumPy's: every function and dtype, and every operation under a split layout."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.kernel import BINARY, REDUCE, UNARY, Edge
from mesh_tf_core.kernels import jax_experts
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.kernels.jax_kernel import JaxKernel
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel
from mesh_tf_core.ops.convgrid import correlated
from mesh_tf_core.ops.windows import padded
from tests.conformance.helper import Built, Sample, check_close, legal_layouts
from tests.conformance.samples import SAMPLES
from tests.kernels.test_tf_kernel import (
    _POSITIVE,
    EINSUMS,
    FLOATS,
    INTS,
    NUMBERS,
    binary_dtypes,
    reduce_dtypes,
    sample,
    unary_dtypes,
)
from tests.marks import by_day

NP, JAX = NumpyKernel(), JaxKernel()
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 0.02}
KEPT = 50
"""Tests after which JAX forgets what it compiled: all of them together take 3 GB."""


@pytest.fixture(autouse=True)
def wide_numbers() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="module")
def compiled() -> Iterator[Iterator[int]]:
    """Thousands of functions, each compiled for one call: as quickly as can be, and not kept for others."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield itertools.count(1)
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def forgotten(compiled: Iterator[int]) -> None:
    if next(compiled) % KEPT == 0:
        jax.clear_caches()


def agree(expected: Any, found: Any, exact: bool = False) -> None:
    if isinstance(expected, tuple):
        for e, f in zip(expected, found, strict=True):
            agree(e, f, exact)
        return
    expected, found = np.asarray(expected), np.asarray(found)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    tolerance = 0 if exact else TOLERANCE.get(str(expected.dtype), 0)
    np.testing.assert_allclose(
        found.astype(np.float64), expected.astype(np.float64), rtol=tolerance, atol=tolerance
    )


def both(method: str, *args: Any, exact: bool = False) -> None:
    """Runs one method of both kernels on the same arrays."""

    def arrays(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return jnp.asarray(x)
        return [arrays(y) for y in x] if isinstance(x, list) and isinstance(x[0], np.ndarray) else x

    agree(getattr(NP, method)(*args), getattr(JAX, method)(*map(arrays, args)), exact)


def test_products_of_eight_bits_are_exact_also_as_a_gpu_has_them() -> None:
    rng = np.random.default_rng(0)
    slope = jnp.asarray(rng.normal(size=(8, 8)) * 2e4, jnp.float8_e5m2)
    weight = jnp.asarray(rng.normal(size=(8, 4)) * 100, jnp.float8_e4m3fn)
    want = np.asarray(slope, np.float64) @ np.asarray(weight, np.float64)
    assert np.abs(want).max() > np.finfo(np.float16).max
    for platform in ("cpu", "gpu"):
        found = JaxKernel(platform).einsum("ab,bc->ac", slope, weight)
        assert found.dtype == jnp.float32
        np.testing.assert_allclose(found, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("fn", "dtype"), by_day((f, d) for f in UNARY for d in unary_dtypes(f)))
def test_unary(fn: str, dtype: str) -> None:
    both("unary", fn, sample(dtype, positive=fn in _POSITIVE))


@pytest.mark.parametrize(("fn", "dtype"), by_day(((f, d) for f in BINARY for d in binary_dtypes(f)), every=3))
def test_binary_broadcasts(fn: str, dtype: str) -> None:
    x = sample(dtype, (3, 1, 5), 1, fn in _POSITIVE)
    y = sample(dtype, (4, 5), 2, fn in _POSITIVE)
    if fn == "pow" and dtype in INTS:
        y = y % 4
    if fn == "shift_right":
        y = np.abs(y % 31).astype(y.dtype)
    if fn in ("floordiv", "mod") and dtype == "bfloat16":
        x, y = np.floor(x * 8 + 1), np.floor(y * 2 + 1)
    both("binary", fn, x, y)


@pytest.mark.parametrize("fn", ["add", "sub", "mul", "bit_xor", "shift_right"])
def test_uint32_wraps_exactly(fn: str) -> None:
    x = sample("uint32", (1000,), 3)
    y = sample("uint32", (1000,), 4) % (32 if fn == "shift_right" else 2**32 - 1)
    both("binary", fn, x, y.astype(np.uint32), exact=True)


@pytest.mark.parametrize(("fn", "dtype"), by_day(((f, d) for f in REDUCE for d in reduce_dtypes(f)), every=3))
@pytest.mark.parametrize("axes", [(), (1,), (0, 2), (0, 1, 2)])
def test_reduce(fn: str, dtype: str, axes: tuple[int, ...]) -> None:
    both("reduce", fn, sample(dtype, positive=fn == "sum" and dtype == "uint32"), axes)


@pytest.mark.parametrize(
    ("spec", "dtype"), by_day(itertools.product(EINSUMS, [*FLOATS, "int32", "uint32", "bool"]), every=9)
)
def test_einsum(spec: str, dtype: str) -> None:
    sizes = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6}
    xs = [sample(dtype, [sizes[c] for c in t], i) for i, t in enumerate(spec.split("->")[0].split(","))]
    if dtype == "bool":
        counts = NP.einsum(spec, *(x.astype(np.int32) for x in xs))
        agree(counts > 0, JAX.einsum(spec, *map(jnp.asarray, xs)))
    elif dtype == "bfloat16" and len(xs) > 2:
        wide = [x.astype(np.float32) for x in xs]
        agree(NP.einsum(spec, *wide), JAX.einsum(spec, *map(jnp.asarray, wide)))
    else:
        both("einsum", spec, *xs)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("spatial", "taps", "strides", "dilations"),
    [
        ((9,), (3,), (2,), (1,)),
        ((11,), (3,), (2,), (2,)),
        ((9, 7), (3, 3), (2, 3), (2, 1)),
        ((5, 4, 6), (3, 2, 2), (1, 1, 1), (1, 2, 2)),
    ],
)
def test_conv(
    dtype: str,
    spatial: tuple[int, ...],
    taps: tuple[int, ...],
    strides: tuple[int, ...],
    dilations: tuple[int, ...],
) -> None:
    both("conv", sample(dtype, (2, *spatial, 3)), sample(dtype, (*taps, 3, 4), 1), strides, dilations)


@pytest.mark.parametrize(
    ("edges", "strides", "dilations"),
    [
        ([(1, 1, 11), (1, 2, 9)], (1, 2), (1, 1)),
        ([(2, 2, 19), (3, 1, 20)], (1, 1), (2, 1)),
        ([(1, -2, 7), (2, -1, 10)], (1, 1), (1, 1)),
    ],
)
def test_padded_conv(
    edges: list[tuple[int, int, int]], strides: tuple[int, ...], dilations: tuple[int, ...]
) -> None:
    """It is the convolution of what is padded before, and no padded array is made."""
    x, w = sample("float32", (2, 9, 7, 3)), sample("float32", (3, 2, 3, 4), 1)
    found = [Edge(*e) for e in edges]
    assert NP.padded_conv(x, w, strides, dilations, found) is None
    expected = NP.conv(padded(NP, x, found), w, strides, dilations)
    agree(expected, JAX.padded_conv(jnp.asarray(x), jnp.asarray(w), strides, dilations, found))
    made = jax.make_jaxpr(lambda x, w: correlated(JAX, x, w, strides, dilations, found))
    said = str(made(x[..., None, :], w[..., None, :, :]))
    assert "conv_general_dilated" in said and " pad[" not in said


@pytest.mark.parametrize(("dtype", "axis"), by_day(itertools.product(FLOATS, range(3)), every=4))
def test_softmax_and_logsumexp(dtype: str, axis: int) -> None:
    both("softmax", sample(dtype), axis)
    both("logsumexp", sample(dtype), axis)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_exp_less_and_add_at(axis: int) -> None:
    x = sample("float32")
    others = tuple(n for i, n in enumerate(x.shape) if i != axis)
    ids = np.random.default_rng(2).integers(0, x.shape[axis], others).astype(np.int32)
    both("exp_less", x, np.log(np.exp(x).sum(axis, keepdims=True)), axis, True)
    both("add_at", x, sample("float32", others, 1), ids, axis)


@pytest.mark.parametrize(
    ("dtype", "exclusive", "reverse"),
    by_day(
        itertools.product(["float32", "float64", "int32", "uint32"], (False, True), (False, True)), every=5
    ),
)
def test_cumsum(dtype: str, exclusive: bool, reverse: bool) -> None:
    both("cumsum", sample(dtype), 1, exclusive, reverse)


@pytest.mark.parametrize("dtype", by_day([*NUMBERS, "bool"], every=3, first=2))
def test_moving_data(dtype: str) -> None:
    x = sample(dtype)
    both("reshape", x, (12, 5), exact=True)
    both("transpose", x, (2, 0, 1), exact=True)
    both("broadcast_to", x[:, :1], (3, 4, 5), exact=True)
    both("concat", [x, x], 1, exact=True)
    both("slice", x, (1, 0, 2), (2, 4, 3), exact=True)
    both("put", x, x[:, 0], 1, np.int32(2), exact=True)
    both("put", x, x[1], 0, np.int32(0), exact=True)
    both("pad", x, [(0, 1), (2, 0), (0, 0)], exact=True)
    both("flip", x, 1, exact=True)
    both("take", x, np.array([[2, 0], [1, 1]], np.int32), exact=True)
    both("where", sample("bool", (4, 1)), x, sample(dtype, (), 5), exact=True)
    both("full", (2, 3), 1, dtype, exact=True)
    if dtype != "bool":
        both("iota", 7, dtype, exact=True)
        both("array", [[1, 2], [3, 0]], dtype, exact=True)
        both("segment_sum", sample(dtype, positive=True), np.array([1, -1, 1], np.int32), 3)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32"])
def test_order(dtype: str) -> None:
    x = sample(dtype, (4, 9))
    x[:, 5] = x[:, 2]
    both("argmax", x, 1, exact=True)
    both("top_k", x, 5, exact=True)


@pytest.mark.parametrize(
    ("source", "target"), by_day(itertools.product([*NUMBERS, "bool"], repeat=2), every=3)
)
def test_cast(source: str, target: str) -> None:
    both("cast", sample(source, positive=True), target, exact=True)


def test_int32_casts_to_uint32_by_its_bits() -> None:
    both("cast", np.array([-1, -(2**31), 7], np.int32), "uint32", exact=True)
    both("cast", np.array([2**32 - 1, 2**31], np.uint32), "int32", exact=True)


def test_scalars() -> None:
    both("scalar", 0x9E3779B1, "uint32", exact=True)
    both("scalar", 0.5, "bfloat16", exact=True)
    agree(np.uint32(5), JAX.scalar(jnp.asarray(5), "uint32"))
    assert JAX.scalar(1, "bfloat16").dtype == np_dtype("bfloat16")


def test_slice_takes_traced_begins() -> None:
    x = sample("float32")
    agree(x[1:3, :, 2:5], jax.jit(lambda a, b: JAX.slice(a, [b, 0, 2], (2, 4, 3)))(x, jnp.asarray(1)))


class EagerKernel(JaxKernel):
    """Takes the engine's NumPy pieces of the batch in."""

    def slice(self, x: Any, begin: Sequence[Any], sizes: Sequence[int]) -> Any:
        return super().slice(jnp.asarray(x), begin, sizes)


def first_of_each() -> list[Any]:
    """The samples; by day the first of every ninth operation ("conv 1d", not "conv 1d wide")."""
    seen = Counter[str]()
    found = []
    for each in SAMPLES:
        operation = each.name.split()[0]
        seen[operation] += 1
        marks = pytest.mark.nightly if seen[operation] > 1 or len(seen) % 18 else ()
        found.append(pytest.param(each, id=each.name, marks=marks))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("sample", first_of_each())
@pytest.mark.one_in(4)
def test_operation(sample: Sample) -> None:
    built, mesh = Built(sample, "float32"), mtf.Mesh("x:2;y:2")
    tables = list(legal_layouts(built, mesh))
    # The first layout splits nothing; one in the middle splits most of what can be split.
    program = built.program(mesh, mtf.Layout(tables[len(tables) // 2]))
    got = LockstepEngine(program, EagerKernel()).step(built.batch)
    for name, value in built.run(program).items():
        check_close(name, got[name], value, 3e-5, f"{sample.name} in JAX under [{program.layout}]")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kernels_of_experts_on_tpus_are_the_products(dtype: str) -> None:
    """An expert without rows, and rows behind the last one's."""
    rng, sizes = np.random.default_rng(0), jnp.asarray([100, 0, 90], jnp.int32)
    shapes = (256, 128), (3, 128, 256), (256, 256)
    x, w, y = (jnp.asarray(rng.normal(size=s), dtype) for s in shapes)
    tiling = jax_experts.tiles(x.dtype, 256, 128, 256)
    assert tiling == (256, 128, 256) and jax_experts.tiles(x.dtype, 256, 100, 256) is None
    with jax.enable_x64(False):  # the interpreter of kernels mixes widths of integers
        made = jax_experts.product(x, w, sizes, tiling, interpret=True)[:190]
        outer = jax_experts.outer(x, y, sizes, tiling, interpret=True)
    rest = 1e-5 if dtype == "float32" else 1e-2
    scale = float(jnp.abs(y).max()) * 128**0.5
    want = jax.lax.ragged_dot(x, w, sizes)[:190]
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (made, want)), atol=rest * scale)
    ids = np.repeat([0, 2, 3], [100, 90, 66]).astype(np.int32)
    want = JaxKernel("cpu").grouped_outer(x, y, jnp.asarray(ids), 3, 3)
    np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (outer, want)), atol=rest * scale)
