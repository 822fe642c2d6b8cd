"""Convolution layers and group normalisation against plain sums, and under layouts that split images."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from tests.layers.helper import check_layouts

RNG = np.random.default_rng(0)
X = ("batch:2 height:8 width:8 channels:4", RNG.normal(size=(2, 8, 8, 4)))
PLANE = ("height", "width")
C = mtf.Dim("channels", 4)
LAYOUTS = [
    ("x:2;y:2", "height:x;width:y"),
    ("x:2;y:2", "batch:x;channels:y"),
    ("x:2;y:2", "channels:x;channels_in:y"),
    ("x:4", "height:x"),
]


def correlated(x: Any, w: Any, stride: int) -> Any:
    """`same` padding, tap by tap."""
    n = x.shape[1]
    total = max(0, (-(-n // stride) - 1) * stride + w.shape[0] - n)
    around = (total // 2, total - total // 2)
    padded = np.pad(x, ((0, 0), around, around, (0, 0)))
    out = 0.0
    for i in range(w.shape[0]):
        for j in range(w.shape[1]):
            seen = padded[:, i : i + n : stride, j : j + n : stride]
            out = out + np.einsum("bhwc,co->bhwo", seen, w[i, j])
    return out


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("size", [1, 3])
def test_conv(size: int, stride: int) -> None:
    layer = layers.Conv(C, PLANE, size, stride, bias=True)
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, LAYOUTS)
    want = correlated(X[1], dense.variables["conv/weight"], stride)
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2])
def test_separable_conv(stride: int) -> None:
    layer = layers.SeparableConv(C, PLANE, 3, stride, bias=True)
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, LAYOUTS)
    own = dense.variables["separable/depthwise/weight"]
    each = [correlated(X[1][..., [c]], own[..., [c], None], stride) for c in range(4)]
    want = np.concatenate(each, -1) @ dense.variables["separable/pointwise/weight"]
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_transposed_conv() -> None:
    """The transpose: <conv(z), x> = <z, transposed(x)> for the same weights."""
    layer = layers.Conv(C, PLANE, 3, 2, transposed=True)
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, LAYOUTS)
    assert dense.out.shape == (2, 16, 16, 4)
    z = RNG.normal(size=dense.out.shape)
    weight = dense.variables["conv/weight"]
    # Stored as [taps, input, output] of this layer; as a convolution's, input and output change places.
    forward = correlated(z, weight.transpose(0, 1, 3, 2), 2)
    assert (forward * X[1]).sum() == pytest.approx((z * dense.out).sum(), rel=1e-4)


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_group_norm(groups: int) -> None:
    layer = layers.GroupNorm(PLANE, groups)
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, [LAYOUTS[0], ("x:2;y:2", "batch:x;height:y")])
    apart = X[1].reshape(2, 64, groups, -1)
    centred = apart - apart.mean((1, 3), keepdims=True)
    want = centred / np.sqrt(centred.var((1, 3), keepdims=True) + 1e-5)
    np.testing.assert_allclose(dense.out, want.reshape(X[1].shape), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_conv_along_a_text(causal: bool) -> None:
    """Mesh-TensorFlow's Conv1DLayer; causal, a position sees none after it."""
    text = ("batch:2 length:8 d_model:4", RNG.normal(size=(2, 8, 4)))
    layer = layers.Conv(mtf.Dim("d_model", 4), ("length",), 3, causal=causal, activation="relu")
    layouts = [("x:2;y:2", "batch:x;length:y"), ("x:4", "length:x"), ("x:2;y:2", "d_model:x;d_model_in:y")]
    dense = check_layouts(lambda g, x: layer(x), {"x": text}, layouts)
    padded = np.pad(text[1], ((0, 0), (2, 0) if causal else (1, 1), (0, 0)))
    want = sum(padded[:, j : j + 8] @ dense.variables["conv/weight"][j] for j in range(3))
    np.testing.assert_allclose(dense.out, np.maximum(want, 0), rtol=1e-4, atol=1e-5)


def test_errors() -> None:
    with pytest.raises(mtf.UserError, match="Conv: causal=True needs exactly one spatial dimension and"):
        layers.Conv(C, PLANE, causal=True)
    with pytest.raises(mtf.UserError, match="1 to 3 spatial dimensions"):
        layers.Conv(C, ())
    with pytest.raises(mtf.UserError, match="GroupNorm: groups=3 must divide the size of"):
        check_layouts(lambda g, x: layers.GroupNorm(PLANE, 3)(x), {"x": X}, [])
