"""TensorFlow's convolution agrees with NumPy's, whose definition is one sum."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel
from mesh_tf_core.kernels.tf_kernel import TfKernel

TOLERANCE = {"float32": 2e-5, "float64": 1e-12, "bfloat16": 0.05}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("spatial", "taps", "strides", "dilations"),
    [
        ((9,), (3,), (1,), (1,)),
        ((9,), (3,), (2,), (1,)),
        ((9,), (3,), (1,), (3,)),
        ((11,), (3,), (2,), (2,)),
        ((9, 7), (3, 2), (2, 1), (1, 1)),
        ((9, 7), (3, 3), (1, 1), (2, 1)),
        ((9, 7), (3, 3), (2, 3), (2, 1)),
        ((5, 4, 6), (3, 2, 2), (1, 2, 1), (1, 1, 1)),
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
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, *spatial, 3)).astype(np_dtype(dtype))
    w = rng.normal(size=(*taps, 3, 4)).astype(np_dtype(dtype))
    expected = NumpyKernel().conv(x, w, strides, dilations)
    found = TfKernel().conv(tf.constant(x), tf.constant(w), strides, dilations).numpy()
    assert found.shape == expected.shape and found.dtype == expected.dtype == x.dtype
    scale = np.abs(expected.astype(np.float64)).max()
    assert np.abs(found.astype(np.float64) - expected.astype(np.float64)).max() <= TOLERANCE[dtype] * scale


def test_numpy_by_hand() -> None:
    x, w = np.arange(5.0).reshape(1, 5, 1), np.array([1.0, 10.0]).reshape(2, 1, 1)
    np.testing.assert_array_equal(NumpyKernel().conv(x, w, (2,), (1,))[0, :, 0], [10.0, 32.0])
    np.testing.assert_array_equal(NumpyKernel().conv(x, w, (1,), (2,))[0, :, 0], [20.0, 31.0, 42.0])
