"""Initial values: the same under every layout, with the moments that their names promise."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir import initializers

KINDS = [
    mtf.Normal(0.5),
    mtf.Normal(0.5, seed=3),
    mtf.Uniform(-1.0, 2.0),
    mtf.Constant(0.25),
    mtf.ZEROS,
    mtf.ONES,
]
A, B = mtf.Dim("a", 16), mtf.Dim("b", 8)


def start(initializer: object, layout: str, mesh: str = "x:2;y:4") -> np.ndarray:
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


@pytest.mark.parametrize("initializer", KINDS, ids=str)
@pytest.mark.parametrize(
    "extent", [(7, 3, 5), (1000, 7), (3, 400, 9), (2, 3, 500), (4000,)], ids=lambda e: "x".join(map(str, e))
)
def test_a_large_block_is_made_in_parts(
    initializer: mtf.Initializer, extent: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes, begin = tuple(n + 3 for n in extent), tuple(range(len(extent)))
    whole = np.asarray(initializer.piece("w", sizes, begin, extent)).astype(np.float32)
    monkeypatch.setattr(initializers, "PART", 50)
    found = initializer.values("w", sizes, begin, extent, np.float32)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, whole)


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
    with pytest.raises(mtf.UserError, match="Normal: stddev must be a finite number of at least 0, found"):
        mtf.Normal(stddev)


# -- arrays and functions of the model's own -----------------------------------------------------------------


def drawn(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Orthogonal rows or columns, for which the whole has to be known."""
    return np.linalg.qr(rng.normal(size=shape))[0]


TABLE = np.arange(128, dtype=np.float32).reshape(16, 8)
OWN = {"array": TABLE, "function": drawn, "function with a seed": mtf.FromFunction(drawn, 3), "number": 0.25}


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("layout", ["a:x", "a:y+x", "a:y;b:x"])
def test_own_initial_values_are_alike_under_every_layout(kind: str, layout: str) -> None:
    np.testing.assert_array_equal(start(OWN[kind], layout), start(OWN[kind], ""))


def test_own_initial_values() -> None:
    np.testing.assert_array_equal(start(TABLE, ""), TABLE)
    np.testing.assert_array_equal(start(0.25, ""), np.full((16, 8), 0.25))
    w, other = (start(OWN[k], "") for k in ("function", "function with a seed"))
    np.testing.assert_allclose(w.T @ w, np.eye(8), atol=1e-6)
    assert not np.isclose(w, other).all()


def stack(initial: object, layout: str) -> np.ndarray:
    """The initial value [n, a, b] of a variable in a stack of three layers."""
    g = mtf.Graph()
    x = g.input("x", [A], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        return h + mtf.reduce_sum(g.variable("w", [A, B], initial), B)

    y = mtf.scan(layer, x, mtf.Dim("n", 3))
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("x:2;y:4"), mtf.Layout(layout), {"y": y}))
    engine.initialize()
    return np.asarray(engine.read("w"))


def test_layers_of_a_stack() -> None:
    """A function is asked for each layer; an array is for one, or for all."""
    w = stack(drawn, "")
    np.testing.assert_array_equal(stack(drawn, "a:y;b:x"), w)
    np.testing.assert_allclose(np.einsum("nab,nac->nbc", w, w), np.stack([np.eye(8)] * 3), atol=1e-6)
    assert not np.isclose(w[0], w[1]).all()
    np.testing.assert_array_equal(stack(TABLE, "b:x"), np.stack([TABLE] * 3))
    every = np.stack([TABLE, -TABLE, TABLE + 1])
    np.testing.assert_array_equal(stack(every, "b:x"), every)


def test_an_array_given_does_not_change_afterwards() -> None:
    given = TABLE.copy()
    g = mtf.Graph()
    w = g.variable("w", [A, B], given)
    given[:] = 0
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout(""), {"w": w}))
    np.testing.assert_array_equal(engine.step({})["w"], TABLE)


def test_changed_by_the_model_around() -> None:
    g = mtf.Graph()
    with g.initialized(lambda name, found: TABLE if name == "w" else found):
        w = g.variable("w", [A, B], mtf.ZEROS)
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("x:2"), mtf.Layout("a:x"), {"w": w}))
    np.testing.assert_array_equal(engine.step({})["w"], TABLE)


@pytest.mark.parametrize(
    ("initial", "message"),
    [
        (TABLE.T, "the initial array has shape"),
        (
            lambda rng, shape: np.random.normal(size=shape),
            "returned different numbers in two calls with the same seed, so",
        ),
        (lambda rng, shape: rng.normal(size=shape).T, "returned an array of shape"),
        (mtf.Normal, r"Normal is a class; write mtf.Normal\(...\)"),
        ("normal", "expected an array of numbers, found dtype"),
        ([[1.0], [1.0, 2.0]], "give nested lists of equal lengths, or an array"),
    ],
)
def test_refused(initial: object, message: str) -> None:
    with pytest.raises(mtf.UserError, match=message):
        start(initial, "a:x")


def test_an_initial_array_is_never_cut_off() -> None:
    with pytest.raises(mtf.UserError, match=r"initial array: int32 cannot represent 0.5"):
        mtf.Graph().variable("w", [A], np.full(16, 0.5), "int32", trainable=False)
