"""Operations that are one in the graph too: attention, normalisation, cross entropy, rows at experts."""

from collections.abc import Mapping, Sequence

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import Equation, Operand
from layoutopt.importers.arrays.keys import Keys, key_of
from layoutopt.importers.arrays.refusals import refuse
from layoutopt.importers.arrays.relations import FROM, PRODUCT, TO
from layoutopt.importers.arrays.writer import Handler, Writer, having, our_dtype
from mesh_tf_core.ir.dims import Dim, SparseDim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.experts import ExpertProduct, FromExperts, ToExperts


def _normalize(w: Writer, e: Equation) -> None:
    """Root mean square 1 along the last axis; with `center`, mean 0 too."""
    x, y = e.ins[0], e.out
    t = having(w.drawn(w.elementwise(x, y), x), own := w.dims(y, len(y.shape) - 1))
    w.put(y, mtf.normalize(t, own, e.params["epsilon"], e.params["center"]))


def _cross_entropy(w: Writer, e: Equation) -> None:
    """-log softmax of logits [.., classes] at the class numbers [..]."""
    (x, ids), y = e.ins, e.out
    t = w.renamed(w.full(x), w.between(x, y, [(a, a) for a in range(len(y.shape))]))
    t, classes = w.along(t, w.dims(x, len(x.shape) - 1))
    targets = mtf.broadcast(w.drawn(w.elementwise(ids, y), ids), w.shape(y)).cast("int32")
    w.put(y, mtf.softmax_cross_entropy(t, targets, classes).cast(our_dtype(y.dtype)))


def _attention(w: Writer, e: Equation) -> None:
    """Queries [.., heads, (group,) length, d], keys and values [.., heads, memory, d]."""
    (q, k, v), extras, y = e.ins[:3], list(e.ins[3:]), e.out
    rows, keys = len(y.shape), len(k.shape)
    lead = [(a, a) for a in range(keys - 2)]
    query = w.renamed(w.whole(q), w.between(q, y, [(a, a) for a in range(rows - 1)]))
    taken = {d.name for a in range(rows - 1) for d in w.dims(y, a)}
    query, length = _one(w, query, w.dims(y, rows - 2), set())
    query, inner = _one(w, query, w.dims(q, rows - 1), taken)
    sides = list[Tensor]()
    memory, width = "", inner
    for x in (k, v):
        places, own = w.dims(x, keys - 2), w.dims(x, keys - 1)
        # Under names of their own first: a key's place may be called as a query's.
        apart = {d.name: w.fresh(d.name) for d in (*places, *own)}
        t = w.renamed(w.whole(x), {**w.between(x, y, lead), **apart})
        t, one = _one(w, t, [Dim(apart[d.name], d.size) for d in places], set())
        t, width = _one(w, t, [Dim(apart[d.name], d.size) for d in own], set())
        if not memory:
            free = len(places) == 1 and places[0].name not in {*taken, inner.name}
            memory = places[0].name if free else w.fresh("memory_length")
        last = inner.name if x is k else _width(w, y, width, inner, taken | {memory})
        sides.append(mtf.rename(t, **{one.name: memory, width.name: last}))
        width = Dim(last, width.size)
    p = e.params
    options = mtf.AttentionOptions(causal=p["causal"], window=p["window"], scale=p["scale"])
    if p["rate"]:
        drawn = w.value(extras.pop())
        assert isinstance(drawn, Keys)
        options["dropout"], options["random_key"] = p["rate"], key_of(w.graph, drawn)
    if p["extra"]:
        (x,) = extras
        shift = rows - len(x.shape)
        names = w.between(x, y, [(a, a + shift) for a in range(len(x.shape) - 1)])
        names |= dict.fromkeys((d.name for d in w.dims(x, len(x.shape) - 1)), memory)
        options["mask" if p["extra"] == "mask" else "bias"] = w.renamed(w.tensor(x), names)
    made = mtf.attention(query, sides[0], sides[1], length, memory, inner, **options)
    names = {}
    for one, axis in ((length, rows - 2), (width, rows - 1)):
        made = w.onto(made, one, w.dims(y, axis), names)
    w.put(y, w.renamed(made, names).cast(our_dtype(y.dtype)))


def _one(w: Writer, t: Tensor, own: Sequence[Dim], taken: set[str]) -> tuple[Tensor, Dim]:
    """t with an axis as one dimension, under a name that is not taken."""
    if len(own) != 1:
        return w.as_one(t, own)
    if own[0].name not in taken:
        return t, own[0]
    one = Dim(w.fresh(own[0].name), own[0].size)
    return mtf.rename(t, **{own[0].name: one.name}), one


def _width(w: Writer, y: Operand, width: Dim, inner: Dim, taken: set[str]) -> str:
    """What the last axis of values is called: as the result's, where that is free."""
    own = w.dims(y, len(y.shape) - 1)
    if len(own) != 1 or own[0].name in taken or (own[0].name == inner.name and width.size != inner.size):
        return width.name
    return own[0].name


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


TABLE: Mapping[str, Handler] = {
    "normalize": _normalize,
    "cross_entropy": _cross_entropy,
    "attention": _attention,
    TO: _to,
    PRODUCT: _product,
    FROM: _from,
}
