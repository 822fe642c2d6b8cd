"""Product-key memory, light convolutions, products of dense layers: against NumPy and under layouts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import layers
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce
from tests.layers.helper import check_layouts, run

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
H = mtf.Dim("heads", 2)
LAYOUTS = [
    ("x:2;y:2", "batch:x;heads:y"),
    ("x:2;y:2", "length:x;d_model:y"),
    ("x:4", "batch:x"),
]


def softmax(x: Any, axis: int = -1) -> Any:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


MEMORY = layers.ProductKeyMemory(H, mtf.Dim("keys", 4), mtf.Dim("d_key", 4), best=3)


def test_product_key_memory() -> None:
    """Against the best of all values' keys, which are every pair of half keys."""
    layouts = [*LAYOUTS, ("x:2;y:2", "memory_values:x;batch:y"), ("x:2;y:2", "keys:x;memory_values:x+y")]
    dense = check_layouts(lambda g, x: MEMORY(x), {"x": X}, layouts, atol=5e-5)
    w = {n.removeprefix("memory/"): v for n, v in dense.variables.items()}
    q = np.einsum("bld,dhnk->blhnk", X[1], w["query"])
    q = (q - q.mean(-1, keepdims=True)) / np.sqrt(q.var(-1, keepdims=True) + 1e-6)
    halves = np.einsum("blhnk,hnmk->blhnm", q, w["keys"])
    scores = (halves[..., 0, :, None] + halves[..., 1, None, :]).reshape(4, 8, 2, 16)
    ids = np.argsort(-scores, -1)[..., :3]
    weights = softmax(np.take_along_axis(scores, ids, -1))
    want = np.einsum("blhj,blhjd->bld", weights, w["values"][ids])
    np.testing.assert_allclose(dense.out, want, rtol=1e-3, atol=1e-5)
    assert w["values"].shape == (16, 8)


def test_a_split_memory_is_not_gathered() -> None:
    """Every device reads its own values; what was read is added up, not the table sent."""
    made = run(lambda g, x: MEMORY(x), {"x": X}, "x:4", "memory_values:x")
    forward = [i for i, _ in made.program.walk() if i.origin.phase == Phase.FORWARD]
    assert any(isinstance(i, AllReduce) for i in forward)
    assert not any(type(i).__name__ in ("AllGather", "AllToAll") for i in forward)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("size", [3, 4])
def test_light_conv(size: int, dynamic: bool, causal: bool) -> None:
    layer = layers.LightConv(H, size, dynamic, causal)
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, LAYOUTS)
    w = {n.removeprefix("light_conv/"): v for n, v in dense.variables.items()}
    y = np.einsum("bld,dhk->blhk", X[1], w["wi"])
    y = y / (1 + np.exp(-np.einsum("bld,dhk->blhk", X[1], w["wg"])))
    taps = (
        np.einsum("blgk,gkht->blht", y, w["taps"]) if dynamic else np.broadcast_to(w["taps"], (4, 8, 2, size))
    )
    taps = softmax(taps)
    before = size - 1 if causal else (size - 1) // 2
    padded = np.pad(y, ((0, 0), (before, size), (0, 0), (0, 0)))
    seen = sum(padded[:, j : j + 8] * taps[..., j, None] for j in range(size))
    want = np.einsum("blhk,hkd->bld", seen, w["wo"])
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)


def test_a_split_text_exchanges_borders_only() -> None:
    made = run(lambda g, x: layers.LightConv(H, 3)(x), {"x": X}, "x:4", "length:x")
    kinds = {type(i).__name__ for i, _ in made.program.walk() if i.origin.phase == Phase.FORWARD}
    assert "Permute" in kinds
    assert not kinds & {"AllGather", "AllToAll"}


def test_dense_product() -> None:
    layer = layers.DenseProduct(
        (mtf.Dim("d_ff", 16),), ("d_model",), ("relu", "sigmoid", "linear"), bias=True
    )
    layouts = [*LAYOUTS[1:], ("x:2;y:2", "batch:x;d_ff:y")]
    dense = check_layouts(lambda g, x: layer(x), {"x": X}, layouts)
    a, b, c = (X[1] @ dense.variables[f"dense_product/{i}/weight"] for i in range(3))
    np.testing.assert_allclose(dense.out, np.maximum(a, 0) / (1 + np.exp(-b)) * c, rtol=1e-4, atol=1e-5)


def test_unit_einsum_keeps_the_variance() -> None:
    def build(g: mtf.Graph, x: mtf.Tensor) -> mtf.Tensor:
        w = g.variable("w", [*x.shape.without("batch"), mtf.Dim("d_ff", 64)], mtf.Normal(1.0))
        return layers.unit_einsum([x, w], [x.dim("batch"), mtf.Dim("d_ff", 64)])

    dense = check_layouts(build, {"x": X}, [LAYOUTS[1], ("x:2;y:2", "batch:x;d_ff:y")])
    want = np.einsum("bld,ldf->bf", X[1], dense.variables["w"]) / 8
    np.testing.assert_allclose(dense.out, want, rtol=1e-4, atol=1e-5)
    assert 0.5 < dense.out.var() < 2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: layers.ProductKeyMemory(H, mtf.Dim("keys", 4), mtf.Dim("d_key", 4), 5),
            "ProductKeyMemory: best=5 must be from 1 to the number of keys, 4",
        ),
        (lambda: layers.LightConv(H, 0), "size must be positive, found 0"),
        (
            lambda: run(lambda g, x: layers.LightConv(mtf.Dim("heads", 3), 2)(x), {"x": X}),
            "heads, 3, must divide the size of 'd_model', 8",
        ),
        (
            lambda: layers.DenseProduct((H,), ("d_model",), ("sigmiod",)),
            "unknown activation 'sigmiod'; did you mean 'sigmoid'",
        ),
        (
            lambda: layers.DenseProduct((H,), ("d_model",), ()),
            "DenseProduct: `activations` must name at least one activation",
        ),
    ],
)
def test_errors(make: Any, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        make()
