"""Rows at experts (`mixtures`) as operations of the graph."""

from collections.abc import Mapping

from layoutopt.importers.arrays.contract import Equation, Operand
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.relations import FROM, PRODUCT, TO
from layoutopt.importers.arrays.writer import Handler, Writer, our_dtype
from mesh_tf_core.ir.dims import Dim, SparseDim
from mesh_tf_core.ops.experts import ExpertProduct, FromExperts, ToExperts


def _tokens(w: Writer, here: Operand, there: Operand) -> tuple[tuple[str, str], ...]:
    pairs = zip(w.dims(here, 0), w.dims(there, 0), strict=True)
    return tuple((old.name, new.name) for old, new in pairs)


def _rest(w: Writer, x: Operand, first: int) -> tuple[str, ...]:
    return tuple(d.name for a in range(first, len(x.shape)) for d in w.dims(x, a))


def _to(w: Writer, e: Equation) -> None:
    (x, weights), y, alike = e.ins, e.out, e.params["alike"]
    experts, places = w.dims(weights, 0), w.classes.of(y, 1)
    if len(experts) != 1 or len(places) != 1:
        refuse(e, "its experts are several dimensions", "give experts one axis of the weights")
    ((own,), count) = experts, y.shape[1]
    few = w.sparse[places[0]] = SparseDim(own.name, own.size, count, own.size)
    choice = Dim(w.fresh("choice"), count) if alike else w.dims(x, 1)[0]
    op = ToExperts(few, choice, _tokens(w, x, y), _rest(w, x, 1 if alike else 2), alike)
    w.put(y, w.graph.apply(op, w.full(x)))


def _product(w: Writer, e: Equation) -> None:
    x, weights, ids, _ = e.ins
    (experts,), dtype = w.dims(weights, 0), our_dtype(e.out.dtype)
    rows, matrices = w.full(x).cast(dtype), w.full(weights).cast(dtype)
    w.put(e.out, w.graph.apply(ExpertProduct(experts), rows, matrices, w.full(ids)))


def _from(w: Writer, e: Equation) -> None:
    x, y, alike = e.ins[0], e.out, e.params["alike"]
    few = w.shape(x)[len(w.dims(x, 0))]
    assert isinstance(few, SparseDim)
    choice = Dim(w.fresh("choice"), few.filled) if alike else w.dims(y, 1)[0]
    tokens = tuple((old, new) for old, new in _tokens(w, y, x))
    made = w.graph.apply(FromExperts(few, choice, tokens, _rest(w, x, 2), alike), w.full(x))
    w.put(y, made)


TABLE: Mapping[str, Handler] = {TO: _to, PRODUCT: _product, FROM: _from}
