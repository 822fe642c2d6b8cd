"""Loops written by hand, one for each thing that a loop can do, and what NumPy says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.program import Carry, Local, Loop, Program, Result, Sliced
from mesh_tf_core.lower.verify import verify
from mesh_tf_core.ops.basic import Shift
from mesh_tf_core.ops.binary import Binary
from tests.engines.programs import HERE, Builder

A, T, U = Dim("a", 4), Dim("t", 4), Dim("u", 3)
SPLIT, STACKED = (("x",),), ((), ("x",))
Arrays = Mapping[str, np.ndarray]


class Loops(Builder):
    """Builds programs of vectors over one split dimension."""

    def __init__(self) -> None:
        super().__init__("x:2")

    def vector(self) -> int:
        return self.value([A], SPLIT)

    def number(self) -> int:
        return self.value([], (), dtype="int32")

    def flag(self) -> int:
        return self.value([], (), dtype="bool")

    def fed(self, name: str, *dims: Dim) -> int:
        return self.input(name, [*dims, A], (*((),) * len(dims), *SPLIT))

    def binary(self, fn: str, x: int, y: int) -> tuple[Local, int]:
        out = self.vector()
        return Local((x, y), (out,), HERE, Binary(fn)), out

    def loop(
        self, dim: Dim, body: list[Any], reverse: bool = False, index: int | None = None, **crossing: Any
    ) -> Any:
        names = ("carried", "sliced", "stacked", "summed")
        parts = [tuple(crossing.pop(name, ())) for name in names]
        index = self.number() if index is None else index
        return Loop((), (), HERE, dim, reverse, index, *parts, tuple(body), **crossing).closed()

    def ended(self, loop: Any, **results: int) -> Program:
        self.code.append(loop)
        self.results = dict(results)
        return verify(self.program())


def all_ways(reverse: bool, runs: bool = False) -> Program:
    """h = w h + part, from the last element if `reverse`; stacks h, adds up h part. With `runs`, only the
    iterations that a flag says."""
    b = Loops()
    x, w, parts = b.fed("x"), b.fed("w"), b.fed("parts", T)
    h, part, stack, total, final = b.vector(), b.vector(), b.value([T, A], STACKED), b.vector(), b.vector()
    first, scaled = b.binary("mul", h, w)
    second, new = b.binary("add", scaled, part)
    third, term = b.binary("mul", new, part)
    sliced, chosen = [Sliced(parts, part)], {}
    if runs:
        flags, chosen["runs"] = b.input("flags", [T], ((),), dtype="bool"), b.flag()
        sliced.append(Sliced(flags, chosen["runs"]))
    loop = b.loop(
        T,
        [first, second, third],
        reverse,
        carried=[Carry(x, h, new, final)],
        sliced=sliced,
        stacked=[Result(new, stack)],
        summed=[Result(term, total)],
        **chosen,
    )
    return b.ended(loop, final=final, stack=stack, total=total)


def np_all_ways(fed: Arrays, reverse: bool = False) -> Arrays:
    h, total, stack = fed["x"], np.zeros(4), np.zeros((4, 4))
    for at in reversed(range(4)) if reverse else range(4):
        if fed.get("flags", np.ones(4))[at]:
            h = h * fed["w"] + fed["parts"][at]
            stack[at] = h
            total = total + h * fed["parts"][at]
    return {"final": h, "stack": stack, "total": total}


def no_carry() -> Program:
    """Nothing is handed on; what lies outside is stacked as it is."""
    b = Loops()
    w, parts = b.fed("w"), b.fed("parts", T)
    part, stack, same, total = b.vector(), *(b.value([T, A], STACKED) for _ in range(2)), b.vector()
    times, y = b.binary("mul", part, w)
    stacked, summed = [Result(y, stack), Result(w, same)], [Result(y, total)]
    loop = b.loop(T, [times], sliced=[Sliced(parts, part)], stacked=stacked, summed=summed)
    return b.ended(loop, stack=stack, same=same, total=total)


def np_no_carry(fed: Arrays) -> Arrays:
    y = fed["parts"] * fed["w"]
    return {"stack": y, "same": np.stack([fed["w"]] * 4), "total": y.sum(0)}


def swapped() -> Program:
    """Two carries change places; a third is handed on as it came."""
    b = Loops()
    x, w, kept = b.fed("x"), b.fed("w"), b.fed("kept")
    p, q, r = b.vector(), b.vector(), b.vector()
    ends = {name: b.vector() for name in ("p", "q", "r")}
    both, made = b.binary("add", p, q)
    carried = [Carry(x, p, q, ends["p"]), Carry(w, q, made, ends["q"]), Carry(kept, r, r, ends["r"])]
    return b.ended(b.loop(T, [both], carried=carried), **ends)


def np_swapped(fed: Arrays) -> Arrays:
    p, q = fed["x"], fed["w"]
    for _ in range(4):
        p, q = q, p + q
    return {"p": p, "q": q, "r": fed["kept"]}


def nested() -> Program:
    """Backwards inside of forwards: the inner loop reads the parts of a part, what the outer one carries and
    the numbers of both; its sum and its stack leave both."""
    b = Loops()
    x, parts = b.fed("x"), b.fed("parts", T, U)
    h, part, numbers = b.vector(), b.value([U, A], STACKED), (b.number(), b.number())
    g, inner, end, final = b.vector(), b.vector(), b.vector(), b.vector()
    stack, stacks = b.value([U, A], STACKED), b.value([T, U, A], ((), *STACKED))
    total, totals = b.vector(), b.vector()
    first, y = b.binary("mul", g, inner)
    second, new = b.binary("add", y, h)
    order, orders, all_orders = (
        b.number(),
        b.value([U], ((),), dtype="int32"),
        b.value([T, U], ((), ()), dtype="int32"),
    )
    third = Local(numbers, (order,), HERE, Binary("sub"))
    inside = b.loop(
        U,
        [first, second, third],
        True,
        numbers[1],
        carried=[Carry(h, g, new, end)],
        sliced=[Sliced(part, inner)],
        stacked=[Result(new, stack), Result(order, orders)],
        summed=[Result(y, total)],
    )
    outside = b.loop(
        T,
        [inside],
        index=numbers[0],
        carried=[Carry(x, h, end, final)],
        sliced=[Sliced(parts, part)],
        stacked=[Result(stack, stacks), Result(orders, all_orders)],
        summed=[Result(total, totals)],
    )
    return b.ended(outside, final=final, stacks=stacks, totals=totals, orders=all_orders)


def np_nested(fed: Arrays) -> Arrays:
    h, stacks, totals = fed["x"], np.zeros((4, 3, 4)), np.zeros(4)
    for t in range(4):
        g = h
        for u in reversed(range(3)):
            totals = totals + g * fed["parts"][t, u]
            g = g * fed["parts"][t, u] + h
            stacks[t, u] = g
        h = g
    orders = np.arange(4)[:, None] - np.arange(3)[None]
    return {"final": h, "stacks": stacks, "totals": totals, "orders": orders.astype(np.int32)}


def added(reverse: bool) -> Program:
    """As gradients of stacked layers over microbatches: the outer loop adds up what the inner one stacks. One
    stack is added part by part; another one is read besides, so it is made."""
    b = Loops()
    x, parts = b.fed("x"), b.fed("parts", T, U)
    part, inner = b.value([U, A], STACKED), b.vector()
    stack, other, total, otherwise = (b.value([U, A], STACKED) for _ in range(4))
    every = b.value([T, U, A], ((), *STACKED))
    (first, y), mine = b.binary("mul", x, inner), b.vector()
    second = Local((y, y), (mine,), HERE, Binary("mul"))
    stacked = [Result(y, stack), Result(mine, other)]
    inside = b.loop(U, [first, second], reverse, sliced=[Sliced(part, inner)], stacked=stacked)
    outside = b.loop(
        T,
        [inside],
        sliced=[Sliced(parts, part)],
        stacked=[Result(other, every)],
        summed=[Result(stack, total), Result(other, otherwise)],
    )
    program = b.ended(outside, total=total, otherwise=otherwise, every=every)
    assert program.added == {stack: total}
    return program


def np_added(fed: Arrays) -> Arrays:
    y = fed["x"] * fed["parts"]
    return {"total": y.sum(0), "otherwise": (y * y).sum(0), "every": y * y}


def at_a_place(reverse: bool) -> Program:
    """As gradients of a stage's layers of which each turn has some: what is stacked is longer than the inner
    loop, which adds to its part of the sum, the first two and the last two of three elements by turns."""
    b, two = Loops(), Dim("u", 2)
    x, parts = b.fed("x"), b.fed("parts", T, two)
    part, inner = b.value([two, A], STACKED), b.vector()
    stack, total = b.value([U, A], STACKED), b.value([U, A], STACKED)
    places, place = b.input("places", [T], ((),), dtype="int32"), b.number()
    first, y = b.binary("mul", x, inner)
    own = [Sliced(part, inner)]
    inside = b.loop(two, [first], reverse, sliced=own, stacked=[Result(y, stack)], first=place)
    around = [Sliced(parts, part), Sliced(places, place)]
    outside = b.loop(T, [inside], sliced=around, summed=[Result(stack, total)])
    program = b.ended(outside, total=total)
    assert program.added == {stack: total}
    return program


PLACES = {"places": np.asarray([0, 1, 0, 1], np.int32)}


def np_at_a_place(fed: Arrays) -> Arrays:
    total = np.zeros((3, 4))
    for place, part in zip(fed["places"], fed["parts"], strict=True):
        total[place : place + 2] += fed["x"] * part
    return {"total": total}


def until(counted: bool) -> Program:
    """Doubles while a number that the state counts is under a limit that is fed, four times at most; with
    `counted` it also stacks and adds up."""
    b = Loops()
    x, limit = b.fed("x"), b.input("limit", [], (), dtype="int32")
    begins, goes = b.input("begins", [], (), dtype="int32"), b.flag()
    first = Local((begins, limit), (goes,), HERE, Binary("lt"))
    b.code.append(first)
    going, n, h = b.flag(), b.number(), b.vector()
    more, steps, final = b.flag(), b.number(), b.vector()
    doubled, new = b.binary("add", h, h)
    now, on = b.number(), b.flag()
    count = Local((n,), (now,), HERE, Shift(1))
    test = Local((now, limit), (on,), HERE, Binary("lt"))
    crossing: dict[str, Any] = {}
    results = {"n": steps, "final": final}
    if counted:
        results |= {"stack": b.value([T, A], STACKED), "total": b.vector()}
        crossing = {"stacked": [Result(new, results["stack"])], "summed": [Result(new, results["total"])]}
    carried = [Carry(goes, going, on, more), Carry(begins, n, now, steps), Carry(x, h, new, final)]
    return b.ended(b.loop(T, [doubled, count, test], carried=carried, runs=going, **crossing), **results)


def np_until(fed: Arrays, counted: bool = False) -> Arrays:
    n, h, stack = int(fed["begins"]), fed["x"], np.zeros((4, 4))
    for at in range(4):
        if n < fed["limit"]:
            n, h = n + 1, h + h
            stack[at] = h
    found = {"n": np.int32(n), "final": h}
    return found | ({"stack": stack, "total": stack.sum(0)} if counted else {})


@dataclass(frozen=True)
class Case:
    """A program, what it is fed beside random numbers, and its results by NumPy."""

    program: Callable[[], Program]
    expected: Callable[[Arrays], Arrays]
    fed: Mapping[str, Any] = ()  # type: ignore[assignment]

    def batch(self, program: Program) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        shapes = {name: program.values[id].shape.sizes for name, id in program.feeds.items()}
        return {name: rng.normal(size=shape) for name, shape in shapes.items()} | {
            name: np.asarray(array) for name, array in dict(self.fed).items()
        }

    def check(self, step: Callable[[Program, dict[str, Any]], Mapping[str, Any]]) -> None:
        """`step` runs one step of a program on a batch."""
        program = self.program()
        batch = self.batch(program)
        found, expected = step(program, batch), self.expected(batch)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            assert found[name].dtype == array.dtype, (name, found[name].dtype, array.dtype)
            np.testing.assert_allclose(found[name], array, 1e-12, 1e-12, err_msg=name)


def _flags(text: str) -> dict[str, Any]:
    return {"flags": [c == "1" for c in text]}


def _stops(begins: int, limit: int) -> dict[str, Any]:
    return {"begins": np.int32(begins), "limit": np.int32(limit)}


CASES = {
    "forward": Case(lambda: all_ways(False), np_all_ways),
    "reverse": Case(lambda: all_ways(True), lambda fed: np_all_ways(fed, True)),
    **{
        f"{'reverse' if reverse else 'forward'}, runs {text}": Case(
            lambda reverse=reverse: all_ways(reverse, True),
            lambda fed, reverse=reverse: np_all_ways(fed, reverse),
            _flags(text),
        )
        for reverse, text in ((False, "1011"), (True, "0110"), (False, "0000"))
    },
    "no carry": Case(no_carry, np_no_carry),
    "swapped": Case(swapped, np_swapped),
    "nested": Case(nested, np_nested),
    "added part by part": Case(lambda: added(False), np_added),
    "added part by part, reverse": Case(lambda: added(True), np_added),
    "added at a place": Case(lambda: at_a_place(False), np_at_a_place, PLACES),
    "added at a place, reverse": Case(lambda: at_a_place(True), np_at_a_place, PLACES),
    **{
        f"{'counted' if counted else 'state'} {what}": Case(
            lambda counted=counted: until(counted), lambda fed, counted=counted: np_until(fed, counted), fed
        )
        for counted in (False, True)
        for what, fed in (
            ("until 3", _stops(1, 3)),
            ("to the end", _stops(0, 9)),
            ("not once", _stops(5, 3)),
        )
    },
}
