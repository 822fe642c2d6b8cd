"""What operations of order, windows, indices and control say about bad operands."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf

A, B, C, K = mtf.Dim("a", 8), mtf.Dim("b", 4), mtf.Dim("c", 2), mtf.Dim("k", 3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x, w: mtf.clip(x, 2.0, 1.0), "clip: low must be at most high, found low=2.0, high="),
        (lambda x, w: mtf.top_k(x, "a", mtf.Dim("k", 9)), "elements are requested, but"),
        (lambda x, w: mtf.top_k(x > 0.0, "a", C), "top_k of bool.*: the tensor must contain numbers"),
        (lambda x, w: mtf.sort(x > 0.0, "a"), "sort of bool.*: the tensor must contain numbers"),
        (lambda x, w: mtf.argmax(x, "z"), "has no dimension 'z'; known: a, b"),
        (lambda x, w: mtf.cumsum(x > 0.0, "a"), "the tensor must contain numbers; cast it first, e.g. with"),
        (lambda x, w: mtf.take_along(x, x, "a"), "the indices must be int32 or int64, found"),
        (
            lambda x, w: mtf.take_along(x, x.cast("int32"), "a"),
            "the ids must not have dimension 'a', and dimensions that they",
        ),
        (
            lambda x, w: mtf.put_along(x, x.cast("int32"), A, ["b"]),
            "x must have all dimensions of the ids, but not",
        ),
        (lambda x, w: mtf.split(x, "a", 3), "is not divisible into 3 equal parts; pad the tensor, or list"),
        (lambda x, w: mtf.split(x, "a", [3, 4]), ", not to the size of 'a'"),
        (lambda x, w: mtf.stack([], "s"), "stack: found no tensors; pass at least one"),
        (lambda x, w: mtf.squeeze(x, "a"), "'a' has more than one element"),
        (
            lambda x, w: mtf.conv(x, w, [A], [K], B, pads="full"),
            "padding 'full': use 'same', 'valid', or pairs",
        ),
        (lambda x, w: mtf.conv(x, w, [A], [K], B, strides=0), "stride and dilation must be positive"),
        (
            lambda x, w: mtf.conv(x, w, [A], [K], B, strides=[1, 2]),
            "give 1 to 3 dimensions, and one size, stride and dilation for",
        ),
        (
            lambda x, w: mtf.conv(x, w, [A], [K], B, dilations=4, pads="valid"),
            "use a smaller window or more padding",
        ),
        (lambda x, w: mtf.conv(mtf.rename(x, b="z"), w, [A], [K], B), "has no dimension 'b'"),
        (
            lambda x, w: mtf.conv(x, mtf.rename(w, c="a"), [A], [K], B),
            "both operands have the dimensions a; rename them in one",
        ),
        (lambda x, w: mtf.conv_transpose(x, w, [A], [K], B), "has no dimension 'c'"),
        (
            lambda x, w: mtf.max_pool(x.cast("int32"), [A], [2]),
            "max_pool of.*the tensor must have a float dtype; cast it first, e.g. with",
        ),
        (lambda x, w: mtf.max_pool(x, [A], [9]), "use a smaller window or more padding"),
        (lambda x, w: mtf.cond(x, lambda: x, lambda: x), "the predicate must be a bool scalar"),
        (
            lambda x, w: mtf.cond(mtf.reduce_sum(x) > 0.0, lambda: x, lambda: w),
            "cond: both branches must return the same types, found",
        ),
        (
            lambda x, w: mtf.cond(mtf.reduce_sum(x) > 0.0, lambda: x, lambda: (x,)),
            "cond: both branches must return a tensor, or tuples of the same",
        ),
        (
            lambda x, w: mtf.while_loop(lambda h: h, lambda h: h, [], 3),
            "while_loop: found no tensor to carry; pass at least one",
        ),
        (
            lambda x, w: mtf.while_loop(lambda h: h, lambda h: h, [x], 0),
            "max_steps must be positive, found 0",
        ),
        (
            lambda x, w: mtf.while_loop(lambda h: mtf.reduce_sum(h) > 0.0, lambda h: w, [x], 3),
            "the body must return the types of its arguments",
        ),
        (
            lambda x, w: mtf.custom_gradient(lambda: x, lambda *_: [], []),
            "custom_gradient: found no inputs; pass at least one tensor",
        ),
    ],
)
def test_errors(make: Any, match: str) -> None:
    g = mtf.Graph()
    x, w = g.input("x", [A, B], "float32"), g.input("w", [K, B, C], "float32")
    with pytest.raises(mtf.UserError, match=match):
        make(x, w)


def test_custom_gradients_have_their_inputs_types() -> None:
    g = mtf.Graph()
    x = g.input("x", [A], "float32")

    def made(backward: Any) -> mtf.Tensor:
        y = mtf.custom_gradient(lambda t: t * 2.0, backward, [x])
        assert isinstance(y, mtf.Tensor)
        return mtf.reduce_sum(y)

    with pytest.raises(mtf.UserError, match="custom_gradient: the gradient function must return"):
        mtf.gradients(made(lambda dys, xs, ys: [dys[0], dys[0]]), [x])
    with pytest.raises(mtf.UserError, match="must have the same type as the input, found"):
        mtf.gradients(made(lambda dys, xs, ys: [mtf.reduce_sum(dys[0])]), [x])


def test_shifts_by_more_than_there_is() -> None:
    g = mtf.Graph()
    x = g.input("x", [A], "float32")
    assert mtf.shift(x, 0, "a") is x and mtf.shift(x, 8, "a", wrap=True) is x
    assert mtf.gradients(mtf.reduce_sum(mtf.shift(x, 9, "a")), [x]) == [None]
