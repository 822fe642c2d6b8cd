"""What operations of order, windows, indices and control say about bad operands."""

from __future__ import annotations

from typing import Any

import pytest

import mesh_tf_core as mtf

A, B, C, K = mtf.Dim("a", 8), mtf.Dim("b", 4), mtf.Dim("c", 2), mtf.Dim("k", 3)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x, w: mtf.clip(x, 2.0, 1.0), "clip: low must not be above high, found 2.0 and 1.0"),
        (lambda x, w: mtf.top_k(x, "a", mtf.Dim("k", 9)), "k:9 is more than the 8 elements of 'a'"),
        (lambda x, w: mtf.top_k(x > 0.0, "a", C), "top_k of bool.*: needs numbers"),
        (lambda x, w: mtf.sort(x > 0.0, "a"), "sort of bool.*: needs numbers"),
        (lambda x, w: mtf.argmax(x, "z"), "has no dimension 'z'; known: a, b"),
        (lambda x, w: mtf.cumsum(x > 0.0, "a"), "cumsum of bool.*: needs numbers; cast it first"),
        (lambda x, w: mtf.take_along(x, x, "a"), "take_along: indices need int32 or int64"),
        (
            lambda x, w: mtf.take_along(x, x.cast("int32"), "a"),
            "the ids may not have 'a', and their dimensions in x",
        ),
        (
            lambda x, w: mtf.put_along(x, x.cast("int32"), A, ["b"]),
            "needs the dimensions of the ids, without",
        ),
        (lambda x, w: mtf.split(x, "a", 3), "'a' cannot be cut into 3 equal parts"),
        (lambda x, w: mtf.split(x, "a", [3, 4]), r"parts of 'a' \[3, 4\] add up to 7"),
        (lambda x, w: mtf.stack([], "s"), "stack: needs at least one tensor"),
        (lambda x, w: mtf.squeeze(x, "a"), "'a' has more than one element"),
        (
            lambda x, w: mtf.conv(x, w, [A], [K], B, pads="full"),
            "padding 'full': use 'same', 'valid', or pairs",
        ),
        (lambda x, w: mtf.conv(x, w, [A], [K], B, strides=0), "stride and dilation must be positive"),
        (lambda x, w: mtf.conv(x, w, [A], [K], B, strides=[1, 2]), "need 1 to 3 dimensions with"),
        (lambda x, w: mtf.conv(x, w, [A], [K], B, dilations=4, pads="valid"), "reaches over 9 elements of 8"),
        (lambda x, w: mtf.conv(mtf.rename(x, b="z"), w, [A], [K], B), "has no dimension 'b'"),
        (
            lambda x, w: mtf.conv(x, mtf.rename(w, c="a"), [A], [K], B),
            "both have a; rename it in one of them",
        ),
        (lambda x, w: mtf.conv_transpose(x, w, [A], [K], B), "has no dimension 'c'"),
        (
            lambda x, w: mtf.max_pool(x.cast("int32"), [A], [2]),
            "max_pool of .*: needs a floating-point tensor",
        ),
        (lambda x, w: mtf.max_pool(x, [A], [9]), "reaches over 9 elements of 8"),
        (lambda x, w: mtf.cond(x, lambda: x, lambda: x), "the predicate must be a bool scalar"),
        (
            lambda x, w: mtf.cond(mtf.reduce_sum(x) > 0.0, lambda: x, lambda: w),
            "the branches must give the same types",
        ),
        (lambda x, w: mtf.cond(mtf.reduce_sum(x) > 0.0, lambda: x, lambda: (x,)), "tuples of equally many"),
        (lambda x, w: mtf.while_loop(lambda h: h, lambda h: h, [], 3), "needs a tensor to carry"),
        (
            lambda x, w: mtf.while_loop(lambda h: h, lambda h: h, [x], 0),
            "max_steps must be positive, found 0",
        ),
        (
            lambda x, w: mtf.while_loop(lambda h: mtf.reduce_sum(h) > 0.0, lambda h: w, [x], 3),
            "the body must return the types of its arguments",
        ),
        (lambda x, w: mtf.custom_gradient(lambda: x, lambda *_: [], []), "needs at least one input"),
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

    with pytest.raises(mtf.UserError, match="1 inputs need as many gradients, found 2"):
        mtf.gradients(made(lambda dys, xs, ys: [dys[0], dys[0]]), [x])
    with pytest.raises(mtf.UserError, match=r"the gradient of .* must have its type"):
        mtf.gradients(made(lambda dys, xs, ys: [mtf.reduce_sum(dys[0])]), [x])


def test_shifts_by_more_than_there_is() -> None:
    g = mtf.Graph()
    x = g.input("x", [A], "float32")
    assert mtf.shift(x, 0, "a") is x and mtf.shift(x, 8, "a", wrap=True) is x
    assert mtf.gradients(mtf.reduce_sum(mtf.shift(x, 9, "a")), [x]) == [None]
