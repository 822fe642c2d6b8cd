"""What is said of operations, loops and gradients that a model writes itself, and that give what they may
not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import price

B, D, L = mtf.Dim("batch", 8), mtf.Dim("d", 16), mtf.Dim("layers", 3)
RIGHT: dict[str, Any] = {
    "roles": lambda self, *inputs: mtf.Roles(parallel=inputs[0].shape.names),
    "infer": lambda self, *inputs: inputs[0],
    "kernel": lambda self, k, at, *slices: slices[0],
    "flops": lambda self, *local: 1.0,
    "gradient": lambda self, dy, inputs, output: (dy,),
}


def priced(facet: str, gives: Callable[..., Any]) -> float:
    """Seconds of a training step with an operation of which one facet is as given."""
    op = dataclass(frozen=True)(type("Mine", (mtf.Op,), {**RIGHT, facet: gives}))
    g = mtf.Graph("m")
    x, w = g.input("x", [B, D], "float32"), g.variable("w", [D], mtf.ONES)
    y = g.apply(op(), x * w)
    model = mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.SGD(0.1))
    return price(model.lower(mtf.Mesh("a:2"), mtf.Layout("batch:a")), load_hardware("a100")).step_seconds


def test_right_facets_are_priced() -> None:
    assert priced("flops", lambda self, *local: 2) > 0


@pytest.mark.parametrize("found", [None, (), "x", mtf.Shape([D])])
def test_infer(found: Any) -> None:
    with pytest.raises(mtf.UserError, match=r"it must return an mtf.TensorType or a non-empty tuple of them"):
        priced("infer", lambda self, *inputs: found)


@pytest.mark.parametrize(
    "gives", [lambda dy: None, lambda dy: dy, lambda dy: (dy, dy), lambda dy: (1.0,), lambda dy: ()]
)
def test_gradient(gives: Callable[[mtf.Tensor], Any]) -> None:
    with pytest.raises(mtf.UserError, match="operation Mine: gradient returned"):
        priced("gradient", lambda self, dy, inputs, output: gives(dy))


@pytest.mark.parametrize("found", [None, float("nan"), float("inf"), -1, "x"])
def test_flops(found: Any) -> None:
    with pytest.raises(mtf.UserError, match=r"operation Mine: flops\(\) returned .*; return a finite number"):
        priced("flops", lambda self, *local: found)


def backward(gives: Callable[..., Any]) -> Callable[[mtf.Tensor], Any]:
    """The gradient of a custom one that gives what it should not."""
    return lambda x: mtf.gradients(mtf.reduce_sum(mtf.custom_gradient(lambda a: a, gives, [x])), [x])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda x: mtf.scan(lambda h: None, x, L), "scan over layers:3: .* found None"),
        (lambda x: mtf.scan(lambda h: 1.0, x, L), r"scan over layers:3: .* found 1\.0"),
        (lambda x: mtf.scan(lambda h: (None, h[0]), [x, x], L), "scan over layers:3: .* found None, float32"),
        (lambda x: mtf.scan(lambda h: (h, [None]), x, L), "must be tensors, found None"),
        (lambda x: mtf.while_loop(lambda h: mtf.reduce_sum(h) > 0.0, lambda h: None, [x], 3), "found None"),
        (
            backward(lambda *_: None),
            "gradients, one for each input, found 0: None; return a list or",
        ),
        (
            backward(lambda dys, xs, ys: dys[0]),
            "gradients, one for each input, found 0",
        ),
        (backward(lambda *_: [3.0]), "custom_gradient: the gradient function must return a tensor or"),
    ],
)
def test_loops_and_gradients(make: Callable[[mtf.Tensor], Any], said: str) -> None:
    x = mtf.Graph("m").input("x", [B, D], "float32")
    with pytest.raises(mtf.UserError, match=said):
        make(x)
