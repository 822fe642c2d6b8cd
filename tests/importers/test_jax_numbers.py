"""Numbers at the edges: slopes at corners, places outside, equal indices, narrow whole numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import layoutopt
import mesh_tf_core as mtf
from tests.importers.jax_models import (
    compared,
    numbers,
)


def test_stacks_and_strides_and_reversals() -> None:
    def loss(params, batch):
        even, odd = jnp.unstack((batch["x"] @ params["w"]).reshape(4, 3, 2), axis=-1)
        x = jnp.stack([even, -odd, even * odd], 1)[:, :, ::-1]
        return (jnp.pad(x[..., ::2], ((0, 0), (1, 0), (0, 0))).cumsum(1) ** 2).mean()

    f = numbers()
    given = {"w": f(5, 6)}, {"x": f(4, 5)}
    off = compared(layoutopt.from_jax(loss, *given), loss, given, [("data:2", "batch:data")])
    assert max(off.values()) <= 1e-5


def test_bits_of_known_numbers_are_inverted() -> None:
    def loss(params, batch):
        return (params["w"] * ~jnp.full((3,), 5) + batch["x"]).sum()

    f = numbers()
    given = {"w": f(3)}, {"x": f(3)}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


@pytest.mark.parametrize("dtype", ["int8", "int32"])
def test_bits_that_either_number_has(dtype: str) -> None:
    def loss(params, batch):
        return (params["w"] * (batch["x"] | batch["y"] | 8)).sum()

    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.integers(-128, 127, 16), dtype) for _ in range(2))
    given = {"w": numbers()(16)}, {"x": x, "y": y}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


def test_halves_are_rounded_to_even_numbers() -> None:
    def loss(params, batch):
        return (params["w"] * jnp.round(batch["x"])).sum() + jax.lax.reduce_precision(params["w"], 8, 7).sum()

    given = {"w": jnp.array([1.0, 2.0, 3.001, 4.0])}, {"x": jnp.array([0.5, 1.5, -2.5, 2.6])}
    off = compared(layoutopt.from_jax(loss, *given), loss, given, [])
    assert max(off.values()) <= 1e-6


@pytest.mark.parametrize("at", [1e-4, -3e-3, 0.5, 5.0])
@pytest.mark.parametrize("fn", [jnp.sinh, jnp.cosh, jax.lax.erfc], ids=lambda fn: fn.__name__)
def test_small_and_large_numbers_keep_their_digits(fn: Any, at: float) -> None:
    """Value and slope of one number each: among others, a large relative error would be a small one."""

    def loss(params, batch):
        return (fn(params["w"]) + params["factor"] * fn(batch["x"])).sum()

    given = {"w": jnp.array([at]), "factor": jnp.array([1.0])}, {"x": jnp.array([at])}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


def test_exponents_are_whole_numbers_of_another_type() -> None:
    def loss(params, batch):
        slopes = 2.0 ** -jnp.arange(1, 5)
        return ((params["w"] * slopes) ** batch["n"] + jnp.power(params["w"], batch["x"])).sum()

    given = {"w": jnp.array([1.5, 0.5, 2.0, 0.3])}, {"n": jnp.array([1, 2, 3, -2]), "x": numbers()(4)}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


CORNERS = {
    "abs": jnp.abs,
    "maximum": lambda z: jnp.maximum(z, 0),
    "of two": lambda z: jnp.maximum(z, 2 * z) + jnp.minimum(3 * z, z),
    "clip": lambda z: jnp.clip(z, 0, 1),
    "clamp": lambda z: jax.lax.clamp(0.0, z, 1.0),
    "relu": jax.nn.relu,
    "relu6": lambda z: jax.nn.relu6(z) + jax.nn.relu6(6 + z),
    "logaddexp": lambda z: jnp.logaddexp(z, 2 * z),
    "softplus": jax.nn.softplus,
    "hard": lambda z: jax.nn.hard_tanh(1 + z) + jax.nn.hard_sigmoid(3 + z) + jax.nn.hard_swish(3 + z),
    "leaky": lambda z: jax.nn.leaky_relu(z) + jax.nn.elu(z) + jax.nn.selu(z) + jax.nn.celu(z),
    "rest": lambda z: jax.lax.rem(z, jnp.float32(0.7)) + jnp.mod(z, 0.5),
    "largest": lambda z: z.max() + z.min() + jnp.linalg.norm(z, jnp.inf) + jax.nn.logsumexp(z),
    "window": lambda z: jax.lax.reduce_window(z, -jnp.inf, jax.lax.max, (3,), (1,), "SAME"),
    "order": lambda z: jnp.sort(z) + jax.lax.top_k(z, 4)[0] + jnp.sign(z) * z,
}


def test_slopes_at_corners_are_those_of_jax() -> None:
    def loss(params, batch):
        return sum((i + 2) * (g(params[n]) * batch["x"]).sum() for i, (n, g) in enumerate(CORNERS.items()))

    given = {name: jnp.array([0.0, -0.5, 0.0, 0.7]) for name in CORNERS}, {"x": jnp.arange(1.0, 5.0)}
    off = compared(layoutopt.from_jax(loss, *given), loss, given, [])
    assert {name: by for name, by in off.items() if not by <= 1e-6} == {}


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (5 * (y := doubled(x)), y), lambda y, g: (g * y,))


def test_a_forward_of_ones_own_has_its_value() -> None:
    """Under differentiation, JAX takes what the forward gives, whatever the function itself says."""

    def loss(params, batch):
        return (doubled(jnp.tanh(batch["x"] @ params["w"])) ** 2).mean()

    f = numbers()
    given = {"w": f(4, 6)}, {"x": f(8, 4)}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


@pytest.mark.parametrize("mode", ["edge", "reflect"])
def test_padding_with_what_is_there(mode) -> None:
    def loss(params, batch):
        return (jnp.pad(batch["x"] @ params["w"], ((0, 0), (2, 1)), mode=mode) ** 3).mean()

    f = numbers()
    given = {"w": f(4, 6)}, {"x": f(8, 4)}
    off = compared(layoutopt.from_jax(loss, *given), loss, given, [("data:2", "batch:data")])
    assert max(off.values()) <= 1e-5


PLACES: dict[str, Any] = {
    "read": lambda h, i, j: h.at[i, j].get(mode="fill", fill_value=0),
    "clipped": lambda h, i, j: h.at[i, j].get(mode="clip"),
    "added": lambda h, i, j: jnp.zeros((4, 6)).at[i, j].add(h[0, :5], mode="drop"),
    "written": lambda h, i, j: h.at[i, j].set(h[0, :5] ** 2, mode="drop"),
    "rows": lambda h, i, j: jnp.zeros((4, 6, 3)).at[i, j].add(h[0, :3]),
}


def test_places_outside_of_the_second_axis_are_not_in_the_next_row() -> None:
    def loss(params, batch):
        h = batch["x"] @ params["w"]
        found = [f(h, batch["i"], batch["j"]) for f in PLACES.values()]
        return sum((y**2 * jnp.arange(1, y.size + 1.0).reshape(y.shape)).mean() for y in found)

    f = numbers()
    places = {"i": jnp.array([0, 1, 2, 3, 0]), "j": jnp.array([1, 7, 5, 9, 6])}
    given = {"w": f(8, 6)}, {"x": f(4, 8), **places}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


WRITTEN: dict[str, Any] = {
    "rows": lambda h, i: jnp.zeros((6, 6)).at[i].set(h[:5]),
    "elements": lambda h, i: h.at[i, i[::-1] % 3].set(h[0, :5] ** 2),
    "matrix": lambda h, i: jnp.ones(6).at[jnp.stack([i, i])].set(h[:2, :5]),
    "by row": lambda h, i: jax.vmap(lambda row: row.at[i].set(row[:5] * 3))(h),
    "windows": lambda h, i: jax.lax.scatter(
        jnp.ones(9), i[:, None], h[:5, :3],
        jax.lax.ScatterDimensionNumbers((1,), (), (0,)), mode="drop",
    ),
    "once": lambda h, i: h.at[jnp.arange(5)].set(h[:5] * i[:, None], unique_indices=True),
}  # fmt: skip


def test_the_last_of_what_is_written_to_one_place_stays() -> None:
    def loss(params, batch):
        h = batch["x"] @ params["w"]
        found = [f(h, batch["i"]) for f in WRITTEN.values()]
        return sum((y**2 * jnp.arange(1, y.size + 1.0).reshape(y.shape)).mean() for y in found)

    f = numbers()
    given = {"w": f(8, 6)}, {"x": f(6, 8), "i": jnp.array([2, 0, 2, 5, 0])}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


def test_too_many_places_to_compare_are_noted() -> None:
    def loss(params, batch):
        return (jnp.zeros((9, 4)).at[batch["i"]].set(batch["x"] @ params["w"]) ** 2).mean()

    given = {"w": numbers()(4, 4)}, {"x": numbers()(5000, 4), "i": jnp.zeros(5000, jnp.int32)}
    (note,) = layoutopt.from_jax(loss, *given).origin.notes
    assert "test_jax_numbers.py:" in note and "5,000 indices are too many to check for duplicates" in note


def test_narrow_whole_numbers_wrap() -> None:
    def loss(params, batch):
        i, j = batch["i"], batch["j"]
        wrapped = [
            i + i,
            i - j,
            i * i,
            -i,
            i.astype("int16") * 300,
            (i.astype("int32") * 77).astype("uint16"),
        ]
        wrapped += [jnp.float32(3.7) * i.astype("float32") // 1, (j.astype("float32") * -2).astype("uint8")]
        return sum((x.astype("float32") * params["w"] * (n + 1)).mean() for n, x in enumerate(wrapped))

    given = (
        {"w": numbers()(6)},
        {"i": jnp.array([0, 1, 100, 128, 200, 255], "uint8"), "j": jnp.arange(6, dtype="uint8")},
    )
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


TILED: dict[str, tuple[Any, list[tuple[str, str]]]] = {
    "axis": (lambda h, w: jnp.tile(h, (1, 3)), [("m:3", "copies:m"), ("m:2", "w:m")]),
    "all axes": (
        lambda h, w: jnp.tile(h, (3, 2, 4)),
        [("m:2", "batch:m"), ("m:2;n:2", "copies_2:m;copies_3:n")],
    ),
    "one element": (lambda h, w: jnp.tile(h.mean(1, keepdims=True), (1, 6)), [("m:3", "copies:m")]),
    "a parameter": (lambda h, w: jnp.tile(w[None], (4, 1, 1)) * h[:, None], [("m:2", "batch:m")]),
    "cut elsewhere": (
        lambda h, w: jnp.tile(h, (1, 2)).reshape(4, 3, 4),
        [("m:2", "w:m"), ("m:2", "batch:m")],
    ),
    "einops": (  # what einops.repeat(h, "b c -> b (r c) k", r=2, k=3) is in JAX
        lambda h, w: jnp.tile(h[:, None, :, None], (1, 2, 1, 3)).reshape(4, 12, 3),
        [("m:3", "copies_2:m"), ("m:2", "copies:m")],
    ),
    "positions": (lambda h, w: h[:, jnp.tile(jnp.argmax(h, 1), 2)], [("m:2", "batch:m")]),
}


@pytest.mark.parametrize("name", TILED)
def test_copies_are_a_dimension(name: str) -> None:
    made, layouts = TILED[name]

    def loss(params, batch):
        y = made(batch["x"] @ params["w"], params["w"])
        return (y**3 * jnp.arange(1, y.size + 1.0).reshape(y.shape)).mean()

    f = numbers()
    given = {"w": f(5, 6)}, {"x": f(4, 5)}
    model = layoutopt.from_jax(loss, *given)
    assert max(compared(model, loss, given, layouts).values()) <= 1e-5


def test_copies_in_a_loop_that_cuts_them_elsewhere() -> None:
    def loss(params, batch):
        def step(h, _):
            return jnp.tile(h.reshape(4, 3, 4)[:, :, :2].reshape(4, 6), (1, 2)), h

        h = batch["x"] @ params["w"]
        h, all_of_them = jax.lax.scan(step, jnp.concatenate([h, h * h], 1), None, length=3)
        return (h**3 * jnp.arange(12.0)).mean() + (all_of_them**3).mean()

    f = numbers()
    given = {"w": f(5, 6)}, {"x": f(4, 5)}
    model = layoutopt.from_jax(loss, *given)
    assert max(compared(model, loss, given, [("m:2", "batch:m")]).values()) <= 1e-5


@pytest.mark.parametrize(("length", "reverse"), [(2, False), (3, False), (8, True), (33, False)])
@pytest.mark.one_in(2)
def test_an_associative_scan_is_imported(length: int, reverse: bool) -> None:
    """It takes slices of no elements where a length is even."""

    def loss(params, batch):
        x = batch["x"] @ params["w"]
        kept = jax.nn.sigmoid(x * params["a"])

        def both(before, after):
            return before[0] * after[0], after[0] * before[1] + after[1]

        _, h = jax.lax.associative_scan(both, (kept, x), axis=1, reverse=reverse)
        return (h**2 * jnp.arange(1.0, length + 1)[:, None]).mean()

    f = numbers()
    given = {"w": f(3, 4), "a": f(4)}, {"x": f(4, length, 3)}
    off = compared(layoutopt.from_jax(loss, *given), loss, given, [("m:2;n:2", "batch:m;w:n")])
    assert max(off.values()) <= 1e-5


def test_arrays_without_elements_are_what_reductions_begin_with() -> None:
    def loss(params, batch):
        h = batch["x"] @ params["w"]
        none = h[:, :0]
        padded = jnp.pad(none, ((0, 0), (0, 2)), constant_values=3.0)
        return ((padded * h[:, :2]).sum() + none.sum() + none.prod() * h.sum()) ** 2

    f = numbers()
    given = {"w": f(3, 4)}, {"x": f(4, 3)}
    assert max(compared(layoutopt.from_jax(loss, *given), loss, given, []).values()) <= 1e-5


def test_an_array_that_counts_is_imported() -> None:
    count = np.arange(6, dtype=np.int32)

    def loss(params, batch):
        return ((batch["x"] @ params["w"]) * count).mean()

    f = numbers()
    given = {"w": f(5, 6)}, {"x": f(4, 5)}
    model = layoutopt.from_jax(loss, *given)
    assert not any(name.startswith("constants") for name in model.graph.variables)
    assert max(compared(model, loss, given, [("m:2", "w:m")]).values()) <= 1e-5


def test_another_number_for_what_is_outside_is_refused() -> None:
    def loss(params, batch):
        return (params["t"].at[batch["i"]].get(mode="fill", fill_value=7.0) ** 2).mean()

    with pytest.raises(
        mtf.UserError, match=r"test_jax_numbers.py:\d+: cannot import gather.*it returns 7\.0"
    ):
        layoutopt.from_jax(loss, {"t": numbers()(4, 6)}, {"i": jnp.array([0, 9])})
