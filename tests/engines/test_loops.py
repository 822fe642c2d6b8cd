"""Every engine runs loops as NumPy does: forwards, backwards, in each other, with iterations left out."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.engines.loops import Iterations
from mesh_tf_core.engines.tf.local import TfLocalEngine
from tests.engines.loop_cases import CASES


def lockstep(program: Any, batch: Any) -> Any:
    return LockstepEngine(program).step(batch)


@pytest.mark.parametrize("name", CASES)
def test_lockstep(name: str) -> None:
    CASES[name].check(lockstep)


@pytest.mark.parametrize("name", CASES)
def test_tensorflow(name: str, devices: Any) -> None:
    CASES[name].check(lambda program, batch: TfLocalEngine(program, devices[:2]).step(batch))


@pytest.mark.parametrize("name", ["forward, runs 1011", "counted until 3"])
def test_the_comparison_can_fail(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration that should not run, runs."""
    monkeypatch.setattr(Iterations, "skip", Iterations.run)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        CASES[name].check(lockstep)


N, A, T = mtf.Dim("n", 4), mtf.Dim("a", 4), mtf.Dim("t", 3)
X = np.random.default_rng(1).normal(size=(4, 4)).astype(np.float32)
PARTS = np.random.default_rng(2).normal(size=(3, 4)).astype(np.float32)


def eagerly(g: mtf.Graph, limit: int) -> dict[str, Any]:
    """Of every kind of loop that a model can write: what it gives, and gradients of a value from outside."""
    x, parts = g.constant(X, [N, A]), g.constant(PARTS, [T, A])
    w = g.variable("w", [A], mtf.Constant(0.5))
    final, (stack,) = mtf.scan(lambda h, part: (h * w + part, [h * part]), x, T, [parts])
    _, (alone,) = mtf.scan(lambda _, part: ((), [part * w]), (), T, [parts])
    begin = mtf.reduce_sum(x).cast("int32") * 0
    n, y = mtf.while_loop(lambda n, h: n < limit, lambda n, h: (n + 1, h * w), [begin, x], 3)
    chosen = mtf.scan(
        lambda h, part: mtf.cond(mtf.reduce_sum(part) > 0.0, lambda: h * w, lambda: h), x, T, [parts]
    )
    found = {"final": final, "stack": stack, "alone": alone, "n": n, "y": y, "chosen": chosen}
    loss = mtf.add_n([mtf.reduce_sum(t) for name, t in found.items() if name != "n"])
    return found | {"dw": mtf.gradients(loss, [w])[0]}


def by_numpy(limit: int) -> dict[str, Any]:
    """The same, and the gradient by the product rule, iteration by iteration."""
    w, h, dh, dw, stack = 0.5, X, np.zeros_like(X), np.zeros(4), []
    for part in PARTS:
        stack.append(h * part)
        dw = dw + (dh * part).sum(0)
        h, dh = h * w + part, dh * w + h
    powers = {"y": limit, "chosen": int((PARTS.sum(1) > 0).sum())}
    dw = dw + dh.sum(0) + PARTS.sum(0)
    dw = dw + sum((X * k * w ** (k - 1)).sum(0) for k in powers.values() if k)
    found = {name: X * w**k for name, k in powers.items()}
    return found | {"final": h, "stack": np.stack(stack), "alone": PARTS * w, "n": limit, "dw": dw}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("unroll", [True, False], ids=["unrolled", "as one operation"])
@pytest.mark.parametrize("kind", ["lockstep", "local"])
@pytest.mark.parametrize("limit", [0, 2, 3])
def test_eager(kind: str, unroll: bool, limit: int) -> None:
    with mtf.Eager(mtf.Mesh("x:2;y:2"), mtf.Layout("n:x;a:y"), kind).step(unroll=unroll) as g:
        found = {name: value.numpy() for name, value in eagerly(g, limit).items()}
    for name, expected in by_numpy(limit).items():
        np.testing.assert_allclose(found[name], expected, 1e-5, 1e-5, err_msg=name)
