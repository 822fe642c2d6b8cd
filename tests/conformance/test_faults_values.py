"""The same of values and gradients, against the dense result and finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mesh_tf_core.ir.op import Op
from mesh_tf_core.ops import (
    basic,
    conv,
    cumulative,
    einsum,
    index,
    norm,
    order,
    pool,
    reduce,
    shape,
    softmax,
)
from mesh_tf_core.ops import random as random_ops
from tests.conformance.faults import BY_NAME
from tests.conformance.helper import Sample, check_dense

pytestmark = pytest.mark.usefixtures("forget")


def _half(inner: Callable[..., Any]) -> Callable[..., Any]:
    def gradient(self: Op, dy: Any, inputs: Any, output: Any) -> Any:
        return [g if g is None else g * 0.5 for g in inner(self, dy, inputs, output)]

    return gradient


@pytest.mark.parametrize(
    ("operation", "name"),
    [
        (einsum.Einsum, "matmul"),
        (basic.Shift, "add a number"),
        (reduce.Reduce, "max"),
        (cumulative.ReduceProd, "prod"),
        (softmax.Softmax, "softmax"),
        (norm.Normalize, "layer_norm"),
        (index.Gather, "gather"),
        (shape.Rename, "rename"),
        (random_ops.Dropout, "dropout"),
        (order.TopK, "top_k"),
        (cumulative.CumSum, "cumsum"),
        (index.DynamicUpdate, "dynamic_update"),
        (conv.Conv, "conv 1d"),
        (pool.Pool, "max_pool"),
    ],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_wrong_gradient(operation: type[Op], name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operation, "gradient", _half(operation.gradient))
    with pytest.raises(AssertionError, match="finite differences"):
        check_dense(BY_NAME[name])


def test_wrong_value() -> None:
    sample = BY_NAME["exp"]
    wrong = Sample("exp", "elementwise", sample.apply, sample.args, lambda x: 2.0**x)
    with pytest.raises(AssertionError, match="off the dense result"):
        check_dense(wrong)
