"""Numbers at the edges of their types, against NumPy, SciPy and JAX's conventions: NaN, infinities, the least
integers, 16 bits, ids beyond 32 bits; on every engine, split and not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy import special

import mesh_tf_core as mtf
from mesh_tf_core.engines import open_engine
from mesh_tf_core.kernels.array_kernel import np_dtype

NAN, INF = np.nan, np.inf
MESH = "x:2"


@dataclass(frozen=True)
class Case:
    """One function of arrays whose axes are the dimensions a, b, c in order.

    Attributes:
      make: make(*tensors) -> a tensor or a tuple of them.
      arrays: its operands.
      want: what it gives.
      slopes: the gradient, in the first operand, of the sum of the first result times `weights`.
      tolerance: relative, and absolute beside numbers of about 1.
      split: dimensions that are split one after the other; by default all of even size.
    """

    make: Callable[..., Any]
    arrays: Sequence[Any]
    want: Any = None
    slopes: Any = None
    weights: Any = None
    dtype: str = ""
    tolerance: float = 1e-6
    split: str = "abc"
    kinds: Mapping[int, str] = field(default_factory=dict)


def array(*rows: Any, dtype: Any = np.float32) -> Any:
    return np.array(rows, dtype)


ORDER = array([1, NAN, 3, NAN], [NAN, INF, -1, 2], [0.0, -0.0, -INF, 5], [2, 2, 1, NAN])
LEAST = array([5, -(2**31), 7, -(2**31)], [2**31 - 1, 0, -(2**31), 3], dtype=np.int32)
UNSIGNED = array([5, 2**32 - 1, 0, 7], [2**31, 2**31 + 1, 2**31 - 1, 2**32 - 2], dtype=np.uint32)
MANY = np.full((4, 1024), 0.01, np.float32)
ROW = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)
B4 = mtf.Dim("best", 4)


def softmax(x: Any) -> Any:
    with np.errstate(all="ignore"):
        return special.softmax(x, -1)


MASK = np.array([[True, False, True, False], [False] * 4])
HIDDEN = array([1, INF, 2, NAN], [1, -INF, NAN, 3])
LOW = array([-5e9, 0, -5e9 + 1000, 1], [3, 4, 5, 6])

CASES: dict[str, Case] = {
    "argmax of NaN": Case(lambda x: mtf.argmax(x, "b"), [ORDER], np.argmax(ORDER, -1)),
    "argmin of NaN": Case(lambda x: mtf.argmin(x, "b"), [ORDER], np.argmin(ORDER, -1)),
    "argmin of the least integer": Case(lambda x: mtf.argmin(x, "b"), [LEAST], np.argmin(LEAST, -1)),
    "argmin of unsigned integers": Case(lambda x: mtf.argmin(x, "b"), [UNSIGNED], np.argmin(UNSIGNED, -1)),
    "argmax of the least integer": Case(lambda x: mtf.argmax(x, "b"), [LEAST], np.argmax(LEAST, -1)),
    "sort of NaN": Case(lambda x: mtf.sort(x, "b"), [ORDER], np.sort(ORDER, -1)),
    "argsort of NaN": Case(lambda x: mtf.argsort(x, "b"), [ORDER], np.argsort(ORDER, -1, kind="stable")),
    "descending sort of NaN": Case(
        lambda x: mtf.sort(x, "b", descending=True), [ORDER], np.sort(ORDER, -1)[:, ::-1]
    ),
    "top k of NaN": Case(
        lambda x: mtf.top_k(x, "b", mtf.Dim("best", 3)),
        [ORDER],
        (np.sort(ORDER, -1)[:, :0:-1], [[1, 3, 2], [0, 1, 3], [3, 0, 1], [3, 0, 1]]),
    ),
    "sort of the least integer": Case(lambda x: mtf.sort(x, "b"), [LEAST], np.sort(LEAST, -1)),
    "top k of integers beyond 2^53": Case(
        lambda x: mtf.top_k(x, "b", mtf.Dim("best", 2))[1],
        [array([2**60, 2**60 + 1, 3, 2**60 - 1], dtype=np.int64)],
        [[1, 0]],
    ),
    "nth smallest of NaN": Case(
        lambda x: tuple(mtf.nth_smallest(x, n, "b") for n in range(4)),
        [ORDER],
        tuple(np.sort(ORDER, -1)[:, n] for n in range(4)),
    ),
    "nth smallest of the least integer": Case(
        lambda x: mtf.nth_smallest(x, 1, "b"), [LEAST], np.sort(LEAST, -1)[:, 1]
    ),
    "nth smallest of unsigned integers": Case(
        lambda x: mtf.nth_smallest(x, 2, "b"), [UNSIGNED], np.sort(UNSIGNED, -1)[:, 2]
    ),
    "softmax in bfloat16": Case(
        lambda x: mtf.reduce_sum(mtf.softmax(x, "b").cast("float32"), "b"),
        [np.zeros((4, 1024))],
        np.ones(4),
        dtype="bfloat16",
        tolerance=1e-3,
    ),
    "logsumexp in bfloat16": Case(
        lambda x: mtf.logsumexp(x, "b"),
        [MANY * 0], np.full(4, np.log(1024)), dtype="bfloat16", tolerance=0.005
    ),
    "cumsum in bfloat16": Case(
        lambda x: mtf.cumsum(x, "b"),
        [MANY],
        np.cumsum(MANY.astype(np_dtype("bfloat16")).astype(np.float64), -1),
        dtype="bfloat16",
        tolerance=5e-3,
    ),
    "sum in bfloat16": Case(
        lambda x: mtf.reduce_sum(x, "b"), [MANY], np.full(4, 10.25), dtype="bfloat16", tolerance=8e-3
    ),
    "exclusive cumsum beside infinity": Case(
        lambda x: mtf.cumsum(x, "b", exclusive=True),
        [array([1, 2, INF, 4], [1e30, 1, 2, 3], [1, NAN, 1, 1])],
        array([0, 1, 3, INF], [0, 1e30, 1e30, 1e30], [0, 1, NAN, NAN]),
    ),
    "exclusive cumsum from the end": Case(
        lambda x: mtf.cumsum(x, "b", exclusive=True, reverse=True),
        [array([1, 2, INF, 4])],
        array([INF, INF, 4, 0]),
    ),
    "logsumexp of infinities": Case(
        lambda x: mtf.logsumexp(x, "b"),
        [array([-INF] * 4, [INF, 1, 2, 3], [-INF, 1, 2, 3], [INF, -INF, NAN, 1])],
        array(-INF, INF, special.logsumexp([1, 2, 3]), NAN),
    ),
    "logsumexp of infinities along the first": Case(
        lambda x: mtf.logsumexp(x, "a"),
        [array([-INF, INF, 1, -INF], [-INF, 1, 2, 3])],
        array(-INF, INF, special.logsumexp([1, 2]), 3),
    ),
    "masked softmax": Case(
        lambda x, m: mtf.masked_softmax(x, m, "b"),
        [HIDDEN, MASK],
        np.array([[special.expit(-1), 0, special.expit(1), 0], [0] * 4]),
        slopes=np.array([[-1, 0, 1, 0], [0] * 4]) * special.expit(1) * special.expit(-1),
        weights=array([0, 7, 1, 7], [1, 2, 3, 4]),
    ),
    "masked softmax of very low logits": Case(
        lambda x, m: mtf.masked_softmax(x, m, "b"), [LOW, MASK], np.array([[0, 0, 1.0, 0], [0] * 4])
    ),
    "slope of a power at 0": Case(
        lambda x, y: mtf.pow(x, y),
        [array([0, 0, 0, 2], [0, 3, 1, 0]), array([0, 2, 1, 3], [3, 0, 0.5, 1])],
        array([1, 0, 0, 8], [0, 1, 1, 0]),
        slopes=array([0, 0, 1, 12], [0, 0, 0.5, 1]),
    ),
    "slope of an exponent at 0": Case(
        lambda y, x: mtf.pow(x, y),
        [array([1, 2, 3, 0]), array([0, 0, 2, 0])],
        array([0, 0, 8, 1]),
        slopes=array([0, 0, 8 * np.log(2), 0]),
    ),
    "slope of a square by a number": Case(
        lambda x: x**2 + x**0.0, [array([0, 1, -3, 2])], array([1, 2, 10, 5]), slopes=array([0, 2, -6, 4])
    ),
    "division by the number 0": Case(
        lambda x: (mtf.divide(x, 0.0), x / 2e-38), [array([1, -1, 0, NAN])],
        (array([INF, -INF, NAN, NAN]), array([5e37, -5e37, 0, NAN])),
    ),
    "ids beyond 32 bits": Case(
        lambda ids, table: (
            mtf.gather(mtf.rename(table, a="v", b="w"), ids, "v"),
            mtf.one_hot(ids, mtf.Dim("u", 4)),
            # Engines refuse ids that the model sets apart nowhere.
            mtf.logical_and(ids >= 0, ids < 4),
        ),
        [array([1, 2**32 + 1, -(2**32), 2], dtype=np.int64).reshape(1, 4), ROW.reshape(4, 2)],
        (
            np.array([[ROW.reshape(4, 2)[1], [0, 0], [0, 0], ROW.reshape(4, 2)[2]]]),
            np.array([[[0, 1, 0, 0], [0] * 4, [0] * 4, [0, 0, 1, 0]]]),
            np.array([[True, False, False, True]]),
        ),
    ),
    "NaN through max-pooling": Case(
        lambda x: mtf.max_pool(x, [mtf.Dim("b", 4)], [2]),
        [array([1, NAN, 3, 2], [NAN, NAN, -INF, -INF])],
        array([NAN, 3], [NAN, -INF]),
        slopes=array([0, 5, 6, 0], [7, 0, 8, 0]),
        weights=array([5, 6], [7, 8]),
        split="a",
    ),
}  # fmt: skip


def graph_of(case: Case) -> tuple[mtf.Graph, dict[str, mtf.Tensor], dict[str, Any], dict[str, Any]]:
    """The graph of a case, its results, a batch, and what the results should be."""
    g = mtf.Graph()
    batch, inputs, results, want = {}, [], {}, {}
    for n, values in enumerate(case.arrays):
        made = np.asarray(values)
        name = case.dtype if case.dtype and made.dtype.kind == "f" else str(made.dtype)
        dims = [mtf.Dim(letter, size) for letter, size in zip("abc", made.shape, strict=False)]
        inputs.append(g.input(f"in{n}", dims, name))
        batch[f"in{n}"] = made.astype(np_dtype(name))
    made = case.make(*inputs)
    outs = made if isinstance(made, tuple) else (made,)
    expected = case.want if isinstance(case.want, tuple) else (case.want,)
    for n, (out, value) in enumerate(zip(outs, expected, strict=True)):
        results[f"out{n}"], want[f"out{n}"] = out, np.asarray(value)
    if case.slopes is not None:
        weights = np.ones(outs[0].shape.sizes) if case.weights is None else case.weights
        w = g.input("weights", outs[0].shape.dims, outs[0].dtype)
        batch["weights"] = np.asarray(weights).astype(np_dtype(outs[0].dtype))
        (slope,) = mtf.gradients(mtf.reduce_sum(outs[0] * w), [inputs[0]])
        assert slope is not None
        results["slope"], want["slope"] = slope, np.asarray(case.slopes)
    return g, results, batch, want


def layouts(case: Case) -> Iterator[str]:
    """No split, and every dimension split."""
    yield ""
    first = np.asarray(case.arrays[0]).shape
    yield from (f"{d}:x" for d, n in zip("abc", first, strict=False) if n % 2 == 0 and d in case.split)


def check(name: str, engine: str) -> None:
    """A case under every layout on one engine; AssertionError where it is wrong."""
    case = CASES[name]
    for layout in layouts(case):
        g, results, batch, want = graph_of(case)
        program = mtf.lower(g, mtf.Mesh(MESH), mtf.Layout(layout), results)
        running = open_engine(program, engine)
        found = running.step(batch)
        for key, value in want.items():
            np.testing.assert_allclose(
                np.asarray(found[key]).astype(np.float64 if value.dtype.kind == "f" else value.dtype),
                value,
                rtol=case.tolerance,
                atol=case.tolerance,
                err_msg=f"{name}: {key} on {engine} under [{layout}]",
            )
        running.close()
