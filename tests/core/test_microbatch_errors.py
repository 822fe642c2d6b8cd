"""Batches that are renamed: cut with the batch, refused where examples of different parts must meet."""

from __future__ import annotations

import pytest

import mesh_tf_core as mtf


def test_pairs_of_examples_are_refused() -> None:
    """Every example against every other: parts would never see each other's."""
    g = mtf.Graph()
    b, d = mtf.Dim("batch", 4), mtf.Dim("d", 2)
    x = g.input("x", [b, d], "float32")
    y = mtf.einsum([x, g.variable("w", [d, mtf.Dim("e", 2)], mtf.ONES)], [b, mtf.Dim("e", 2)])
    pairs = mtf.einsum([y, mtf.rename(y, batch="others")], [b, mtf.Dim("others", 4)])
    model = mtf.Model(mtf.reduce_mean(pairs))
    with pytest.raises(mtf.UserError, match=r"has the batch twice \(batch and others\).*use one microbatch"):
        model.lower(mtf.Mesh("x:2"), mtf.Layout(""), mtf.Options(microbatches=2))
