"""Loops, and functions with custom derivatives."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import KEY, Equation, Operand, Var, has_fractions
from layoutopt.importers.arrays.keys import Keys, at_place, state
from layoutopt.importers.arrays.products import is_weight
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.writer import Handler, Writer, our_dtype
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor


def _whole(w: Writer, x: Operand, like: Operand) -> Tensor:
    """x with all dimensions of another operand of its shape, under its names."""
    return mtf.broadcast(w.drawn(w.elementwise(x, like), x), w.shape(like))


def _scan(w: Writer, e: Equation) -> None:
    body, graph = e.body, w.graph
    assert body is not None
    consts, carry, length = (e.params[k] for k in ("consts", "carry", "length"))
    for x, inner in zip(e.ins[:consts], body.ins, strict=False):
        w.values[id(inner)] = w.elementwise(x, inner)
    states, parts = body.ins[consts : consts + carry], body.ins[consts + carry :]
    init, stacks = e.ins[consts : consts + carry], e.ins[consts + carry :]
    if length == 1:
        _once(w, e, states, init, parts, stacks)
        return
    dim = _dim(w, e, length)
    keyed = {i: found for i, x in enumerate(init) if isinstance(found := w.value(x), Keys)}
    # A key that every iteration hands on as it is, is the same in all.
    kept = {i for i in keyed if body.outs[i] is states[i]}
    carried = [i for i in range(carry) if i not in kept]
    begin = [_scalar(w, e, keyed[i]) if i in keyed else _whole(w, init[i], states[i]) for i in carried]
    several: list[tuple[Var, Keys]] = []
    cut: list[tuple[Var, Tensor, bool]] = []
    for x, inner in zip(stacks, parts, strict=True):
        found = w.value(x)
        if isinstance(found, Keys):
            several.append((inner, found))
            continue
        t = w.tensor(x)
        lead = w.dims(x, 0)
        names = {a.name: b.name for a, b in zip(w.shape(x)[len(lead) :], w.shape(inner), strict=True)}
        if not any(d.name in t.shape.names for d in lead):
            w.values[id(inner)] = w.renamed(t, names)
            continue
        if len(lead) == 1:
            t = w.renamed(t, {**names, lead[0].name: dim.name})
        else:
            t, one = w.one(t, x, 0)
            t = w.renamed(t, {**names, one.name: dim.name})
        cut.append((inner, mtf.transpose(t, [dim, *t.shape.without(dim.name)]), is_weight(w, x)))
    w.values |= {id(states[i]): keyed[i] for i in kept}
    with graph.loop(dim, e.params["reverse"]) as block:
        now = [graph.body_input(block, x) for x in begin]
        for i, t in zip(carried, now, strict=True):
            w.values[id(states[i])] = Keys(t, stepped=keyed[i].stepped) if i in keyed else t
        for inner, keys in several:
            w.values[id(inner)] = _keys_of(w, keys, dim)
        for inner, outer, weight in cut:
            part = graph.slice_into(block, outer)
            w.values[id(inner)] = read = part.cast(our_dtype(inner.dtype))
            if weight:
                w.weights |= {part.id, read.id}
        w.block(body)
        after = [
            _handed_on(w, e, body.outs[i], keyed[i]) if i in keyed else _whole(w, body.outs[i], states[i])
            for i in carried
        ]
        block.carry_in = tuple(t.id for t in now)
        block.carry_out = tuple(graph.visible(t).id for t in after)
        stacked: list[tuple[Var, Tensor | None]] = []
        for y, inner_y in zip(e.outs[carry:], body.outs[carry:], strict=True):
            if isinstance(w.value(inner_y), Keys):
                stacked.append((y, None))
                continue
            t = w.tensor(inner_y)
            names = {
                a.name: b.name for a, b in zip(w.shape(inner_y), w.shape(y)[len(w.dims(y, 0)) :], strict=True)
            }
            stacked.append((y, graph.stack_output(block, graph.visible(w.renamed(t, names)))))
    finals = graph.close_loop(block, begin)
    done = dict(zip(carried, finals, strict=True))
    for i, y in enumerate(e.outs[:carry]):
        if i in keyed:
            w.put(y, Keys(done[i], stepped=keyed[i].stepped) if i in done else keyed[i])
        else:
            names = w.between(states[i], y, [(a, a) for a in range(len(y.shape))])
            w.put(y, w.renamed(done[i], names))
    for y, stack in stacked:
        of_loop = Keys(0, why=f"all iterations of the loop in {e.where or 'an unknown line'}")
        w.put(y, of_loop if stack is None else _stacked(w, stack, dim, y))


def _handed_on(w: Writer, e: Equation, x: Operand, before: Keys) -> Tensor:
    """The key that an iteration hands on to the next."""
    keys = w.value(x)
    assert isinstance(keys, Keys)
    if keys.stepped != before.stepped:
        refuse(
            e,
            "each iteration passes on a key that is not derived from the key that it received",
            "derive the next key from the received one with jax.random.split or fold_in",
        )
    return _scalar(w, e, keys)


def _scalar(w: Writer, e: Equation, keys: Keys) -> Tensor:
    """A key as a loop's state."""
    if keys.why or any(isinstance(x, np.ndarray) for x in keys.parts):
        refuse(
            e,
            f"each iteration passes on {keys.why or 'an array of keys'}",
            "pass on one key, or scan over the keys",
        )
    found = state(w.graph, keys)
    if isinstance(found, Tensor):
        return found
    return mtf.constant(w.graph, found - (2**32 if found >= 2**31 else 0), (), "int32")


def _keys_of(w: Writer, keys: Keys, dim: Dim) -> Keys:
    """The keys of one iteration, in the body of a loop."""
    block = w.graph.block
    assert block.index is not None

    def table(numbers: Any) -> Tensor:
        with w.graph.at_root():
            whole = w.stored(np.asarray(numbers).astype(np.uint32).view(np.int32), "int32", [dim])
        return w.graph.slice_into(block, whole)

    return at_place(keys, w.graph.tensor(block.index), table)


def _stacked(w: Writer, t: Tensor, dim: Dim, y: Var) -> Tensor:
    own = w.dims(y, 0)
    if len(own) == 1:
        return w.renamed(t, {dim.name: own[0].name})
    names = dict[str, str]()
    return w.renamed(w.onto(t, dim, own, names), names)


def _dim(w: Writer, e: Equation, length: int) -> Dim:
    """The dimension that counts the iterations: that of parameters, if there are any."""
    consts, carry = e.params["consts"], e.params["carry"]
    stacks = [x for x in (*e.ins[consts + carry :], *e.outs[carry:]) if x.shape and x.dtype != KEY]
    first = [
        x for x in e.ins[consts + carry :] if x.shape and not isinstance(w.value(x), Keys) and is_weight(w, x)
    ]
    ends = (*e.body.ins, *e.body.outs) if e.body else ()
    inner = {d.name for x in ends if x.dtype != KEY for d in w.shape(x)}
    for x in (*first, *stacks):
        found = w.dims(x, 0)
        if len(found) == 1 and found[0].name not in inner:
            return found[0]
    return Dim(w.fresh("step"), length)


def _once(
    w: Writer,
    e: Equation,
    states: Sequence[Var],
    init: Sequence[Operand],
    parts: Sequence[Var],
    stacks: Sequence[Operand],
) -> None:
    """A loop of one iteration is not a loop: axes of one element are not dimensions."""
    assert e.body is not None
    for x, inner in zip((*init, *stacks), (*states, *parts), strict=True):
        shift = len(x.shape) - len(inner.shape)
        found = w.value(x)
        if isinstance(found, Keys):
            w.values[id(inner)] = found.each(lambda a: a[0]) if shift else found
            continue
        w.values[id(inner)] = w.fitted(x, inner, [(a + shift, a) for a in range(len(inner.shape))])
    w.block(e.body)
    for y, inner_y in zip(e.outs, e.body.outs, strict=True):
        shift = len(y.shape) - len(inner_y.shape)
        found = w.value(inner_y)
        if isinstance(found, Keys):
            w.put(y, found.each(lambda a: a[None]) if shift else found)
            continue
        w.put(y, w.fitted(inner_y, y, [(a, a + shift) for a in range(len(inner_y.shape))]))


def _custom(w: Writer, e: Equation) -> None:
    """A function whose derivative its author wrote: both are taken as they are."""
    body, backward = e.body, e.backward
    assert body is not None and backward is not None
    real = e.params["real"]
    for x, inner in zip(e.ins, body.ins, strict=True):
        w.values[id(inner)] = w.elementwise(x, inner)
    floats = [i for i, y in enumerate(e.outs) if has_fractions(y)]

    def forward(*given: Tensor) -> tuple[Tensor, ...]:
        for i, t in zip(real, given, strict=True):
            w.values[id(body.ins[i])] = t
        w.block(body)
        return tuple(_whole(w, x, y) for x, y in zip(body.outs, e.outs, strict=True))

    def derivative(dys: list[Tensor | None], xs: list[Tensor], ys: list[Tensor]) -> list[Tensor | None]:
        given = dict(zip(real, xs, strict=True))
        for i, (x, inner) in enumerate(zip(e.ins, backward.ins, strict=False)):
            if i in given:
                names = w.between(body.ins[i], inner, [(a, a) for a in range(len(inner.shape))])
                w.values[id(inner)] = w.renamed(given[i], names)
            else:
                w.values[id(inner)] = w.elementwise(x, inner)
        for i, inner in zip(floats, backward.ins[len(e.ins) :], strict=True):
            y, dy = e.outs[i], dys[i]
            if dy is None:
                dy = mtf.zeros_like(ys[i])
            w.values[id(inner)] = w.renamed(dy, w.between(y, inner, [(a, a) for a in range(len(y.shape))]))
        w.block(backward)
        out: list[Tensor | None] = []
        for i, dx in zip(real, backward.outs, strict=True):
            t = _whole(w, dx, body.ins[i])
            out.append(mtf.transpose(t, xs[real.index(i)].shape))
        return out

    inputs = [mtf.broadcast(w.drawn(w.value(body.ins[i]), body.ins[i]), w.shape(body.ins[i])) for i in real]
    if not inputs:
        w.block(body)
        found: Sequence[Tensor] = [_whole(w, x, y) for x, y in zip(body.outs, e.outs, strict=True)]
    else:
        made = mtf.custom_gradient(forward, derivative, inputs)
        found = made if isinstance(made, tuple) else (made,)
    for y, t in zip(e.outs, found, strict=True):
        w.put(y, t)


TABLE: Mapping[str, Handler] = {"scan": _scan, "custom": _custom}
