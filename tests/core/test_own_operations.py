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
    with pytest.raises(mtf.UserError, match=r"operation Mine: infer gave .*; it must give mtf\.TensorType"):
        priced("infer", lambda self, *inputs: found)


@pytest.mark.parametrize(
    "gives", [lambda dy: None, lambda dy: dy, lambda dy: (dy, dy), lambda dy: (1.0,), lambda dy: ()]
)
def test_gradient(gives: Callable[[mtf.Tensor], Any]) -> None:
    with pytest.raises(mtf.UserError, match=r"operation Mine: gradient gave .* for each input, here 1"):
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
            "1 inputs need as many gradients, found 0, of None; give a list or a tuple",
        ),
        (
            backward(lambda dys, xs, ys: dys[0]),
            "1 inputs need as many gradients, found 0, of Tensor",
        ),
        (backward(lambda *_: [3.0]), r"a gradient must be a tensor or None, found \[3\.0\]"),
    ],
)
def test_loops_and_gradients(make: Callable[[mtf.Tensor], Any], said: str) -> None:
    x = mtf.Graph("m").input("x", [B, D], "float32")
    with pytest.raises(mtf.UserError, match=said):
        make(x)
