"""TensorFlow's kernel agrees with NumPy's on every function and dtype."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tf_core.ir.kernel import BINARY, REDUCE, UNARY
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel
from mesh_tf_core.kernels.tf_kernel import TfKernel

NP, TF = NumpyKernel(), TfKernel()
FLOATS = ("float32", "float64", "bfloat16")
INTS = ("int32", "uint32")
NUMBERS = (*FLOATS, *INTS)
TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 0.02}
_POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "reciprocal", "pow", "div", "mod", "floordiv"}


def sample(dtype, shape=(3, 4, 5), seed=0, positive=False):
    rng = np.random.default_rng(seed)
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype == "int32":
        return rng.integers(1 if positive else -9, 10, shape).astype(np.int32)
    if dtype == "uint32":
        return rng.integers(1, 2**32 if not positive else 50, shape, dtype=np.uint64).astype(np.uint32)
    x = rng.uniform(0.2 if positive else -2, 2, shape)
    return x.astype(np_dtype(dtype))


def agree(expected, found, exact=False):
    if isinstance(expected, tuple):
        for e, f in zip(expected, found, strict=True):
            agree(e, f, exact)
        return
    expected, found = np.asarray(expected), found.numpy()
    found = np.asarray(found, expected.dtype) if np.isscalar(found) or not found.shape else found
    assert isinstance(found, np.ndarray)
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    tolerance = 0 if exact else TOLERANCE.get(str(expected.dtype), 0)
    wide = (expected.astype(np.float64), found.astype(np.float64))
    np.testing.assert_allclose(wide[1], wide[0], rtol=tolerance, atol=tolerance)


def both(method, *args, exact=False, **kwargs):
    """Runs one method of both kernels on the same arrays."""

    def tensors(x):
        if isinstance(x, np.ndarray):
            return tf.constant(x)
        return [tensors(y) for y in x] if isinstance(x, list) and x and isinstance(x[0], np.ndarray) else x

    expected = getattr(NP, method)(*args, **kwargs)
    agree(expected, getattr(TF, method)(*map(tensors, args), **kwargs), exact)


def unary_dtypes(fn):
    if fn == "not":
        return ("bool",)
    if fn in ("neg", "abs", "sign", "square", "relu", "floor", "is_finite"):
        return ("float32", "float64", "bfloat16", "int32") + (
            ("uint32",) if fn in ("square", "relu", "sign") else ()
        )
    return FLOATS


@pytest.mark.parametrize(("fn", "dtype"), [(f, d) for f in UNARY for d in unary_dtypes(f)])
def test_unary(fn, dtype):
    both("unary", fn, sample(dtype, positive=fn in _POSITIVE))


def binary_dtypes(fn):
    if fn in ("and", "or"):
        return ("bool",)
    if fn.startswith(("bit", "shift")):
        return INTS
    return (*NUMBERS, "bool") if fn in ("eq", "ne", "lt", "le", "gt", "ge", "max", "min") else NUMBERS


@pytest.mark.parametrize(("fn", "dtype"), [(f, d) for f in BINARY for d in binary_dtypes(f)])
def test_binary_broadcasts(fn, dtype):
    positive = fn in _POSITIVE
    x = sample(dtype, (3, 1, 5), 1, positive)
    y = sample(dtype, (4, 5), 2, positive)
    if fn == "pow" and dtype in INTS:
        y = y % 4
    if fn == "shift_right":
        y = y % 31
        y = np.abs(y).astype(y.dtype)
    if fn in ("floordiv", "mod") and dtype == "bfloat16":
        x, y = np.floor(x * 8 + 1), np.floor(y * 2 + 1)
    both("binary", fn, x, y)


@pytest.mark.parametrize("fn", ["add", "sub", "mul", "bit_xor", "shift_right"])
def test_uint32_wraps_exactly(fn):
    x = sample("uint32", (1000,), 3)
    y = sample("uint32", (1000,), 4) % (32 if fn == "shift_right" else 2**32 - 1)
    both("binary", fn, x, y.astype(np.uint32), exact=True)


def reduce_dtypes(fn):
    return ("bool",) if fn in ("any", "all") else NUMBERS


@pytest.mark.parametrize(("fn", "dtype"), [(f, d) for f in REDUCE for d in reduce_dtypes(f)])
@pytest.mark.parametrize("axes", [(), (1,), (0, 2), (0, 1, 2)])
def test_reduce(fn, dtype, axes):
    if fn == "sum" and dtype == "uint32":
        both("reduce", fn, sample(dtype, positive=True), axes)
    else:
        both("reduce", fn, sample(dtype), axes)


EINSUMS = [
    "ab,bc->ac",
    "ab,cb->ac",
    "ba,bc->ca",
    "abc,cd->abd",
    "abc,abd->cd",
    "abc,adc->abd",
    "abcd,aecd->acbe",
    "acbe,aecd->abcd",
    "abc,ab->c",
    "abc,abc->ab",
    "abc,abc->",
    "ab,c->cab",
    "abc->ca",
    "abc->b",
    "ab,ab->ba",
    "ab,bc,cd->ad",
    "abc,bd,dae->ce",
    "a,a->",
    "ab,b->a",
    "abc,cd->dab",
    "abe,bcd->ad",
]


@pytest.mark.parametrize("spec", EINSUMS)
@pytest.mark.parametrize("dtype", [*FLOATS, "int32", "uint32", "bool"])
def test_einsum(spec, dtype):
    sizes = {"a": 2, "b": 3, "c": 4, "d": 5, "e": 6}
    terms = spec.split("->")[0].split(",")
    xs = [sample(dtype, [sizes[c] for c in t], i) for i, t in enumerate(terms)]
    if dtype == "bool":
        counts = NP.einsum(spec, *(x.astype(np.int32) for x in xs))
        agree(counts > 0, TF.einsum(spec, *map(tf.constant, xs)))
    elif dtype == "bfloat16" and len(xs) > 2:
        agree(
            NP.einsum(spec, *(x.astype(np.float32) for x in xs)),
            TF.cast(TF.einsum(spec, *(tf.constant(x.astype(np.float32)) for x in xs)), "float32"),
        )
    else:
        both("einsum", spec, *xs)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_and_logsumexp(dtype, axis):
    both("softmax", sample(dtype), axis)
    both("logsumexp", sample(dtype), axis)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_exp_less_total(dtype, axis):
    x = sample(dtype)
    total = np.log(np.exp(x.astype(np.float64)).sum(axis, keepdims=True)).astype(x.dtype)
    both("exp_less", x, total, axis, True)
    both("exp_less", x, total + total, axis, False)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_add_at(dtype, axis):
    x = sample(dtype)
    others = tuple(n for i, n in enumerate(x.shape) if i != axis)
    values = sample(dtype, others, 1)
    ids = np.random.default_rng(2).integers(0, x.shape[axis], others).astype(np.int32)
    given = tf.constant(x)
    found = TF.add_at(given, tf.constant(values), tf.constant(ids), axis)
    agree(NP.add_at(x, values, ids, axis), found)
    agree(x, given, exact=True)


def test_softmax_of_many_dimensions():
    both("softmax", np.random.default_rng(0).normal(size=(2, 1, 3, 2, 1, 2, 4)).astype(np.float32), 6)


@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "uint32"])
@pytest.mark.parametrize(
    ("exclusive", "reverse"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_cumsum(dtype, exclusive, reverse):
    both("cumsum", sample(dtype), 1, exclusive, reverse)


@pytest.mark.parametrize("dtype", [*NUMBERS, "bool"])
def test_moving_data(dtype):
    x = sample(dtype)
    both("reshape", x, (12, 5), exact=True)
    both("transpose", x, (2, 0, 1), exact=True)
    both("transpose", x[:1], (1, 0, 2), exact=True)
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
def test_order(dtype):
    x = sample(dtype, (4, 9))
    x[:, 5] = x[:, 2]
    both("argmax", x, 1, exact=True)
    both("top_k", x, 5, exact=True)


@pytest.mark.parametrize("source", [*NUMBERS, "bool"])
@pytest.mark.parametrize("target", [*NUMBERS, "bool"])
def test_cast(source, target):
    both("cast", sample(source, positive=True), target, exact=True)


def test_int32_casts_to_uint32_by_its_bits():
    both("cast", np.array([-1, -(2**31), 7], np.int32), "uint32", exact=True)
    both("cast", np.array([2**32 - 1, 2**31], np.uint32), "int32", exact=True)


def test_scalars():
    both("scalar", 3, "uint32", exact=True)
    both("scalar", 0x9E3779B1, "uint32", exact=True)
    both("scalar", 0.5, "bfloat16", exact=True)
    agree(np.uint32(5), TF.scalar(tf.constant(5), "uint32"))


def test_slice_takes_tensors_as_begin():
    x = sample("float32")
    found = TF.slice(tf.constant(x), [tf.constant(1), 0, tf.constant(2)], (2, 4, 3))
    agree(x[1:3, :, 2:5], found)
