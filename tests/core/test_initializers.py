"""Initial values: the same under every layout, with the moments that their names promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine

KINDS = [
    mtf.Normal(0.5),
    mtf.Normal(0.5, seed=3),
    mtf.Uniform(-1.0, 2.0),
    mtf.Constant(0.25),
    mtf.ZEROS,
    mtf.ONES,
]
A, B = mtf.Dim("a", 16), mtf.Dim("b", 8)


def start(initializer: mtf.Initializer, layout: str, mesh: str = "x:2;y:4") -> np.ndarray:
    g = mtf.Graph()
    w = g.variable("w", [A, B], initializer)
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh(mesh), mtf.Layout(layout), {"w": w}))
    return np.asarray(engine.step({})["w"])


@pytest.mark.parametrize("initializer", KINDS, ids=str)
@pytest.mark.parametrize("layout", ["a:x", "b:y", "a:x;b:y", "a:x+y", "a:y+x", "a:y;b:x"])
def test_every_layout_starts_alike(initializer: mtf.Initializer, layout: str) -> None:
    np.testing.assert_array_equal(start(initializer, layout), start(initializer, ""))


@given(st.integers(0, 15), st.integers(0, 7), st.integers(1, 16), st.integers(1, 8))
def test_any_block_is_a_block_of_the_whole(i: int, j: int, n: int, m: int) -> None:
    n, m = min(n, 16 - i), min(m, 8 - j)
    whole = KINDS[0].piece("w", (16, 8), (0, 0), (16, 8))
    np.testing.assert_array_equal(KINDS[0].piece("w", (16, 8), (i, j), (n, m)), whole[i : i + n, j : j + m])


def test_normal() -> None:
    x = mtf.Normal(0.5).piece("w", (400, 500), (0, 0), (400, 500))
    assert np.abs(x).max() <= 1.0
    # A normal cut at two deviations has 0.8796 of its deviation (Johnson & Kotz 1970, section 13.7.1).
    assert abs(x.std() - 0.5 * 0.8796) < 0.002 and abs(x.mean()) < 0.004
    rows = np.corrcoef(x[:20])
    assert np.abs(rows - np.eye(20)).max() < 0.2


def test_uniform() -> None:
    x = mtf.Uniform(-1.0, 2.0).piece("w", (100000,), (0,), (100000,))
    assert x.min() >= -1 and x.max() < 2 and abs(x.mean() - 0.5) < 0.01
    counts = np.histogram(x, 30, (-1, 2))[0]
    assert np.abs(counts - counts.mean()).max() < 6 * np.sqrt(counts.mean())


def test_names_and_seeds_make_different_numbers() -> None:
    made = [mtf.Normal(1.0, seed).piece(name, (64,), (0,), (64,)) for name in "vw" for seed in (0, 1)]
    for i, x in enumerate(made):
        for y in made[:i]:
            assert not np.isclose(x, y).any()


@pytest.mark.parametrize("stddev", [-1.0, float("nan"), float("inf")])
def test_bad_deviation(stddev: float) -> None:
    with pytest.raises(mtf.UserError, match="Normal: stddev must be a finite number >= 0"):
        mtf.Normal(stddev)
