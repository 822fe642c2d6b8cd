"""Recurrent layers of PyTorch, one loop over time for each layer and direction, and the CTC loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, reduce
from typing import Any

from layoutopt.importers.arrays.contract import EquationBlock, Operand, Var
from layoutopt.importers.torch.elementwise import TABLE, AtenRule, Type, rule
from layoutopt.importers.torch.emitter import Equations
from layoutopt.importers.torch.indexing import log_of_sum

States = tuple[Operand, ...]
RecurrentCell = Callable[[Equations, list[Operand], list[Operand], States], States]
"""cell(emitter, gates of the input, gates of the state, states) -> the states of the next step."""


def _lstm(m: Equations, x: list[Operand], h: list[Operand], now: States) -> States:
    dtype = now[1].dtype
    gates = [m.binary("add", a, b, dtype) for a, b in zip(x, h, strict=True)]
    take, forget, out = (m.unary("logistic", gates[i]) for i in (0, 1, 3))
    new = m.binary("mul", take, m.unary("tanh", gates[2]), dtype)
    cell = m.binary("add", m.binary("mul", forget, now[1], dtype), new, dtype)
    return m.binary("mul", out, m.unary("tanh", cell), dtype), cell


def _gru(m: Equations, x: list[Operand], h: list[Operand], now: States) -> States:
    dtype = now[0].dtype
    reset, keep = (m.unary("logistic", m.binary("add", x[i], h[i], dtype)) for i in (0, 1))
    new = m.unary("tanh", m.binary("add", x[2], m.binary("mul", reset, h[2], dtype), dtype))
    return (m.binary("add", m.binary("mul", m.binary("sub", now[0], new, dtype), keep, dtype), new, dtype),)


def _plain(prim: str) -> RecurrentCell:
    def cell(m: Equations, x: list[Operand], h: list[Operand], now: States) -> States:
        total = m.binary("add", x[0], h[0], now[0].dtype)
        return (m.unary("tanh", total) if prim == "tanh" else TABLE["relu"](m, None, total),)

    return cell


@contextmanager
def _apart(m: Equations) -> Iterator[EquationBlock]:
    """Equations that are written meanwhile are those of a block."""
    outer, block = m.equations, EquationBlock([])
    m.equations = block.equations
    try:
        yield block
    finally:
        m.equations = outer


def _over_time(
    m: Equations,
    cell: RecurrentCell,
    x: Operand,
    states: Sequence[Operand],
    weights: Sequence[Operand],
    back: bool,
    seen: Operand | None,
) -> tuple[Operand, list[Operand]]:
    """The result [time, rows, width] of a layer in one direction, and its last states.

    Args:
      seen: [time, rows, 1], which sequences have a step: others keep their states.
    """
    width = weights[1].shape[1]
    gates = weights[1].shape[0] // width
    of_input, of_state, *biases = (m.reshape(w, (gates, width, *w.shape[1:])) for w in weights)
    given: Operand = m.product(x, of_input, ([2], [2]))  # of all steps at once
    given = m.along("add", given, biases[0], [-2, -1]) if biases else given
    consts = [of_state, *biases[1:]]
    with _apart(m) as body:
        inner = [Var(c.shape, c.dtype) for c in consts]
        now = [Var(s.shape, s.dtype) for s in states]
        part = Var(given.shape[1:], given.dtype)
        on = [] if seen is None else [Var(seen.shape[1:], seen.dtype)]
        body.ins = [*inner, *now, part, *on]
        own: Operand = m.product(now[0], inner[0], ([1], [2]))
        own = own if len(inner) == 1 else m.along("add", own, inner[1], [-2, -1])
        each = [
            [TABLE["select"](m, Var(now[0].shape, y.dtype), y, 1, i) for i in range(gates)]
            for y in (part, own)
        ]
        after = cell(m, each[0], each[1], tuple(now))
        if on:
            after = tuple(m.select(on[0], a, b, a.dtype) for a, b in zip(after, now, strict=True))
        body.outs = [*after, after[0]]
    outs = [*(Var(s.shape, s.dtype) for s in states), Var((x.shape[0], *states[0].shape), states[0].dtype)]
    how = {"consts": len(consts), "carry": len(states), "length": x.shape[0], "reverse": back}
    *last, found = m.several("scan", [*consts, *states, given, *([seen] if seen else [])], outs, **how)
    m.equations[-1].body = body
    return found, list(last)


def _recurrent(cell: RecurrentCell) -> AtenRule:
    def write(
        m: Equations,
        v: Sequence[Any],
        x: Operand,
        hx: Any,
        params: Sequence[Operand],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        seen: Operand | None = None,
    ) -> list[Operand]:
        begin = hx if isinstance(hx, list | tuple) else [hx]
        ways, each = 1 + bidirectional, 4 if has_biases else 2
        if len(params) != num_layers * ways * each:
            raise NotImplementedError("it projects its states")
        said = (
            "priced step by step, each operation by itself; a GPU's library has one kernel for all of a step"
        )
        m.notes[f"{m.where}: recurrent layers are {said}"] = None
        x = m.transpose(x, [1, 0, 2]) if batch_first else x
        lasts: list[list[Operand]] = [[] for _ in begin]
        for layer in range(num_layers):
            found = []
            for way in range(ways):
                n = layer * ways + way
                states = [m.reshape(m.slice(s, 0, n, 1), s.shape[1:]) for s in begin]
                y, last = _over_time(m, cell, x, states, params[n * each : (n + 1) * each], way == 1, seen)
                found.append(y)
                for kept, s in zip(lasts, last, strict=True):
                    kept.append(m.reshape(s, (1, *s.shape)))
            x = m.concatenate(found, 2)
            if train and layer < num_layers - 1:
                x = m.dropout(x, dropout)
        return [m.transpose(x, [1, 0, 2]) if batch_first else x, *(m.concatenate(s, 0) for s in lasts)]

    return write


TABLE |= {"lstm": _recurrent(_lstm), "gru": _recurrent(_gru)}
TABLE |= {f"rnn_{prim}": _recurrent(_plain(prim)) for prim in ("tanh", "relu")}


def _until(m: Equations, lengths: Operand, steps: int) -> Operand:
    """[steps, rows, 1]: which sequences have a step."""
    shape = steps, *lengths.shape, 1
    wide = m.broadcast(m.cast(lengths, "int32"), shape, [1])
    return m.binary("lt", m.counted(shape, 0, "int32"), wide, "int32", "bool")


@rule("held")
def _packed(
    m: Equations, v: Any, x: Operand, lengths: Operand, steps: int, kind: str, states: Any, *given: Any
) -> list[Operand]:
    """A layer of packed sequences, whose rows [steps * rows, width] are of all steps."""
    own = m.reshape(x, (steps, *lengths.shape, *x.shape[1:]))
    y, *last = TABLE[kind](m, v, own, states, *given, False, _until(m, lengths, steps))
    return [m.reshape(y, (x.shape[0], y.shape[-1])), *last]


@rule("padded")
def _unpacked(m: Equations, v: Type, x: Operand, lengths: Operand, steps: int, value: float) -> Operand:
    seen = m.reshape(_until(m, lengths, steps), (steps, *lengths.shape, *(1 for _ in x.shape[1:])))
    return m.select(seen, m.reshape(x, v.shape), value, v.dtype)


_NEVER = -1e30
"""The logarithm of the probability of what cannot be: -inf has no difference."""


@rule("ctc_loss")
def _ctc(
    m: Equations, v: Type, x: Operand, y: Operand, lengths: Operand, counts: Operand, blank: int, zero: bool
) -> Operand:
    """Of logarithms [steps, rows, classes] and classes [rows, count]: the states of a row are its classes,
    and the blanks before, between and after them."""
    if len(y.shape) != 2:
        raise NotImplementedError("its classes are one line; give those of each row, [rows, count], padded")
    steps, rows, dtype, count = x.shape[0], x.shape[1], x.dtype, y.shape[1]
    none, wide = m.full(_NEVER, (rows, 1), dtype), (steps, rows, count)
    blanks = m.slice(x, 2, blank, 1)
    labels = TABLE["gather"](m, Type(wide, dtype), x, 2, m.broadcast(m.cast(y, "int32"), wide, [1, 2]))
    # A class that follows another one may follow it without a blank between.
    before = m.concatenate([m.full(-1, (rows, 1), y.dtype), m.slice(y, 1, 0, count - 1)], 1)
    other = m.binary("ne", y, before, y.dtype, "bool")

    begin = m.concatenate([m.full(0, (rows, 1), dtype), m.full(_NEVER, (rows, count), dtype)], 1)
    states = [begin, m.full(_NEVER, (rows, count), dtype)]
    given = [blanks, labels, _until(m, lengths, steps)]
    with _apart(m) as body:
        skip, never = Var(other.shape, "bool"), Var(none.shape, dtype)
        at_blank, at_label = (Var(s.shape, dtype) for s in states)
        blank_, label, on = (Var(z.shape[1:], z.dtype) for z in given)
        body.ins = [skip, never, at_blank, at_label, blank_, label, on]
        last = m.concatenate([never, at_label], 1)
        jump = m.select(skip, m.slice(last, 1, 0, count), _NEVER, dtype)
        each = (at_label, m.slice(at_blank, 1, 0, count), jump)
        new = [
            m.binary("add", log_of_sum(m, at_blank, last), blank_, dtype),
            m.binary("add", reduce(partial(log_of_sum, m), each), label, dtype),
        ]
        body.outs = [m.select(on, a, b, dtype) for a, b in zip(new, (at_blank, at_label), strict=True)]
    outs = [Var(s.shape, dtype) for s in states]
    how = {"consts": 2, "carry": 2, "length": steps, "reverse": False}
    ends = m.several("scan", [other, none, *states, *given], outs, **how)
    m.equations[-1].body = body
    found = []
    for n, end in enumerate(ends):  # the state after the last class, and that of the last class
        place = m.binary("sub", m.cast(counts, "int32"), n, "int32")
        at = m.binary("eq", m.counted(end.shape, 1, "int32"), m.reshape(place, (rows, 1)), "int32", "bool")
        found.append(m.reduced("reduce_sum", m.select(at, end, 0, dtype), [1]))
    found[1] = m.select(m.binary("gt", counts, 0, counts.dtype, "bool"), found[1], _NEVER, dtype)
    loss = m.unary("neg", log_of_sum(m, *found))
    lost = m.binary("gt", loss, -_NEVER / 2, dtype, "bool")
    return m.select(lost, 0 if zero else math.inf, loss, dtype)
