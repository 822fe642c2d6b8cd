"""Picking one element along a dimension, also where flat positions would not fit into 32 bits."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.kernel import At
from mesh_tf_core.kernels.jax_kernel import JaxKernel
from mesh_tf_core.lower import lower
from mesh_tf_core.ops import index


@pytest.mark.parametrize("most", [2**31, 1])
@pytest.mark.parametrize("layout", ["", "v:m", "b:m"])
def test_both_ways_pick_the_same(monkeypatch: pytest.MonkeyPatch, most: int, layout: str) -> None:
    monkeypatch.setattr(index, "_MOST_POSITIONS", most)
    g = mtf.Graph()
    b, v = mtf.Dim("b", 4), mtf.Dim("v", 8)
    picked = mtf.pick(g.input("x", [b, v], "float32"), g.input("ids", [b]), v)
    program = lower(g, mtf.Mesh("m:2"), mtf.Layout(layout), {"picked": picked})
    x, ids = np.arange(32.0).reshape(4, 8), np.array([1, 0, 7, 3])
    found = LockstepEngine(program).step({"x": x, "ids": ids})["picked"]
    np.testing.assert_array_equal(found, x[np.arange(4), ids])


def test_where_xla_compiles_nothing_is_gathered(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make a flat copy of all logits to gather from: 3.9 GiB of float32 for one text of 8192 tokens
    and 128,256 words."""
    monkeypatch.delattr(JaxKernel, "take")
    b, v = mtf.Dim("b", 4), mtf.Dim("v", 8)
    types = mtf.TensorType(mtf.Shape([b, v]), "float32"), mtf.TensorType(mtf.Shape([b]), "int32")
    op = index.Pick("v")
    at = At(types, (op.infer(*types),), frozenset(), lambda name: 0)
    x, ids = np.arange(32, dtype=np.float32).reshape(4, 8), np.array([1, 0, 7, 3], np.int32)
    np.testing.assert_array_equal(op.kernel(JaxKernel(), at, x, ids), x[np.arange(4), ids])
