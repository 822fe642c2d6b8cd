"""Recurrent layers of PyTorch, one loop over time for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from layoutopt.importers.arrays.contract import EquationBlock, Operand, Var
from layoutopt.importers.torch.elementwise import TABLE, AtenRule
from layoutopt.importers.torch.emitter import Equations

RecurrentCell = Callable[[Equations, list[Operand], list[Operand], tuple[Operand, ...]], tuple[Operand, ...]]
"""cell(emitter, gates of the input, gates of the state, states) -> the states of the next step."""


def _lstm(m: Equations, x: list[Operand], h: list[Operand], now: tuple[Operand, ...]) -> tuple[Operand, ...]:
    dtype = now[1].dtype
    gates = [m.binary("add", a, b, dtype) for a, b in zip(x, h, strict=True)]
    take, forget, out = (m.unary("logistic", gates[i]) for i in (0, 1, 3))
    new = m.binary("mul", take, m.unary("tanh", gates[2]), dtype)
    cell = m.binary("add", m.binary("mul", forget, now[1], dtype), new, dtype)
    return m.binary("mul", out, m.unary("tanh", cell), dtype), cell


def _gru(m: Equations, x: list[Operand], h: list[Operand], now: tuple[Operand, ...]) -> tuple[Operand, ...]:
    dtype = now[0].dtype
    reset, keep = (m.unary("logistic", m.binary("add", x[i], h[i], dtype)) for i in (0, 1))
    new = m.unary("tanh", m.binary("add", x[2], m.binary("mul", reset, h[2], dtype), dtype))
    return (m.binary("add", m.binary("mul", m.binary("sub", now[0], new, dtype), keep, dtype), new, dtype),)


def _plain(prim: str) -> RecurrentCell:
    def cell(
        m: Equations, x: list[Operand], h: list[Operand], now: tuple[Operand, ...]
    ) -> tuple[Operand, ...]:
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
) -> tuple[Operand, list[Operand]]:
    """The result [time, rows, width] of a layer in one direction, and its last states."""
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
        body.ins = [*inner, *now, part]
        own: Operand = m.product(now[0], inner[0], ([1], [2]))
        own = own if len(inner) == 1 else m.along("add", own, inner[1], [-2, -1])
        each = [
            [TABLE["select"](m, Var(now[0].shape, y.dtype), y, 1, i) for i in range(gates)]
            for y in (part, own)
        ]
        after = cell(m, each[0], each[1], tuple(now))
        body.outs = [*after, after[0]]
    outs = [*(Var(s.shape, s.dtype) for s in states), Var((x.shape[0], *states[0].shape), states[0].dtype)]
    how = {"consts": len(consts), "carry": len(states), "length": x.shape[0], "reverse": back}
    *last, found = m.several("scan", [*consts, *states, given], outs, **how)
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
                y, last = _over_time(m, cell, x, states, params[n * each : (n + 1) * each], way == 1)
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
