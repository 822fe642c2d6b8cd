"""Numbers at the edges of their types, on the oracle; and what is refused because it has none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from tests.engines.number_cases import CASES, check


@pytest.mark.parametrize("name", CASES)
def test_against_numpy(name: str) -> None:
    check(name, "lockstep")


A = mtf.Dim("a", 4)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda x: mtf.reduce_mean(x), "cannot represent; cast the tensor first, e.g. with .cast"),
        (lambda x: x * 0.5, "of int32 and 0.5: int32 cannot represent 0.5; cast the tensor"),
        (lambda x: x + 1.5, "add of int32 and 1.5"),
        (lambda x: x - 0.25, "add of int32 and -0.25"),
        (lambda x: x >= 3.5, "ge of int32 and 3.5"),
        (lambda x: mtf.maximum(x, 0.5), "max of int32 and 0.5"),
        (lambda x: mtf.where(x > 1, x, 0.5), "where of int32 and 0.5"),
        (lambda x: mtf.clip(x, 0.5, 2.0), "clip of int32 and 0.5"),
        (lambda x: x / 2, "cannot represent; cast the tensor first, e.g. with .cast.*floordiv"),
        (lambda x: 1 / x, "div of int32"),
        (lambda x: x + 2.0**40, "int32 represents only -2147483648 to 2147483647"),
        (lambda x: x * float("nan"), "mul of int32 and nan"),
        (lambda x: mtf.sqrt(x), "cannot represent; cast the tensor first, e.g. with .cast"),
        (lambda x: mtf.dropout(x, 0.5), "dropout of int32"),
        (lambda x: mtf.constant(x.graph, 0.5, [A], "int32"), "constant of int32 and 0.5"),
        (lambda x: mtf.pad(x, A, 1, 1, 0.5), "pad of int32 and 0.5"),
        (lambda x: x.cast("uint32") - 1.0, "cast the tensor first, e.g. with .cast"),
        (lambda x: (x > 0).cast("bool") * 2.0, "cast the tensor first, e.g. with .cast"),
    ],
)  # fmt: skip
def test_fractions_are_never_cut_off(made: Callable[[mtf.Tensor], mtf.Tensor], said: str) -> None:
    with pytest.raises(mtf.UserError, match=said):
        made(mtf.Graph().input("x", [A], "int32"))


def test_whole_numbers_meet_integers() -> None:
    g = mtf.Graph()
    x = g.input("x", [A], "int32")
    results = {"scaled": x * 2.0 + 1.0, "compared": x >= 2.0, "chosen": mtf.where(x > 1, x, -1.0), "kept": -x}
    results["divided"] = mtf.floordiv(x, 2)
    found = LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("a:x"), results)).step(
        {"x": np.arange(4)}
    )
    assert {n: v.tolist() for n, v in found.items()} == {
        "scaled": [1, 3, 5, 7],
        "compared": [False, False, True, True],
        "chosen": [-1, -1, 2, 3],
        "kept": [0, -1, -2, -3],
        "divided": [0, 0, 1, 1],
    }


def test_adam_without_momentum() -> None:
    """beta1 = 0 is RMSProp with bias correction: the first step is the learning rate, against the slope."""
    for betas in ({"beta1": 0.0}, {"beta1": 0.0, "beta2": 0.0}):
        g = mtf.Graph()
        w = g.variable("w", [A], mtf.ONES)
        loss = mtf.reduce_sum(w * mtf.mtf_range(g, A, "float32"))
        program = mtf.Model(loss, mtf.Adam(0.1, **betas)).lower(mtf.Mesh("x:2"), mtf.Layout("a:x"))
        engine = LockstepEngine(program)
        engine.step({})
        np.testing.assert_allclose(engine.read("w"), [1, 0.9, 0.9, 0.9], rtol=1e-6)
