"""Mixtures of experts whose tokens a program sorts by expert: products of each token's rows with the matrices
of its experts, without an order.

The rows of experts' products are a permutation of (token, choice), made by a sort of the numbers of the
chosen experts. All that is done with them row by row commutes with the permutation. So every value in that
order gets a twin at the experts (`to_experts`), grouped products become products with each row's expert, and
where the order of tokens is put back (a gather, or sums into tokens) the twin returns (`from_experts`). What
nobody reads any more, the sort with it, is left out. A row that is used in any other way keeps its sort.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import CapturedArray, Equation, EquationBlock, Operand, Var, live
from layoutopt.importers.arrays.elementwise import NUMBERS
from layoutopt.importers.arrays.relations import ELEMENTWISE, FROM, PRODUCT, TO
from mesh_tf_core.tables import words

_POINTWISE: Mapping[str, Callable[..., Any]] = {
    **{n: NUMBERS[n] for n in words("add sub mul div rem sign neg max min lt le gt ge eq ne and or not")},
    "convert_element_type": lambda a: a,
    "select_n": lambda which, no, yes: np.where(which, yes, no),
}
_KEEPS_ROWS = frozenset(("reshape", "broadcast_in_dim", "squeeze", "expand_dims"))


@dataclass
class _Sort:
    """A sort of choices by expert.

    Attributes:
      ids, ordered: the numbers before and after it; `rows`: number of (token, choice).
      experts: a parameter with an axis of all experts first.
      at: places of rows at which functions of them are compared.
      places, back: id of an index -> its value at these places of the order, or of its inverse.
      named: id of a function of the numbers before the sort -> its value for each expert.
      twins: id of a value in the order -> its twin at the experts.
    """

    ids: Operand
    ordered: Operand
    rows: int
    experts: Var
    at: Any
    choices: int = 0
    numbers: Var | None = None
    places: dict[int, Any] = field(default_factory=dict)
    back: dict[int, Any] = field(default_factory=dict)
    named: dict[int, Any] = field(default_factory=dict)
    twins: dict[int, Var] = field(default_factory=dict)

    @property
    def known(self) -> tuple[Mapping[int, Any], ...]:
        return self.places, self.back, self.named, self.twins


def without_sorts(block: EquationBlock) -> EquationBlock:
    """A block whose mixtures of experts have no order of rows."""
    if not any(e.prim == "ragged_dot_general" for e in block.equations):
        return block
    return _MixtureRewriting(block).done()


def sorts_left(block: EquationBlock) -> tuple[str, ...]:
    """A note where products of sorted rows are left."""
    grouped = any(e.prim == "ragged_dot_general" for e in block.equations)
    return (
        "the experts multiply tokens that are sorted by expert, and a sort is over the whole batch: every "
        "device computes all of it, whatever the layout; the search of a config.json splits mixtures of "
        "experts",
    ) * grouped


class _MixtureRewriting:
    def __init__(self, block: EquationBlock) -> None:
        self.block, self.out = block, list[Equation]()
        self.makers: dict[int, Equation] = {}
        self.instead: dict[int, Operand] = {}
        self.numbers: dict[int, Any] = {}
        self.about: dict[int, list[_Sort]] = {}
        self.made = {id(y): x for x in block.equations for y in x.outs}

    def done(self) -> EquationBlock:
        for n, e in enumerate(self.block.equations):
            if any(id(x) in self.instead for x in e.ins):
                e = replace(e, ins=[self.instead.get(id(x), x) for x in e.ins])
            self._emit(e)
            if e.prim == "sort" and (found := self._sorted(e, self.block.equations[n:])):
                for known in found.known:
                    for own in known:
                        self.about.setdefault(own, []).append(found)
            for sort in {id(s): s for x in e.ins for s in self.about.get(id(x), ())}.values():
                self._visit(sort, e)
                for y in e.outs:
                    if any(id(y) in known for known in sort.known):
                        self.about.setdefault(id(y), []).append(sort)
        outs = [self.instead.get(id(x), x) for x in self.block.outs]
        return EquationBlock(self.block.ins, live(self.out, outs), outs, self.block.equations)

    def _emit(self, e: Equation) -> Var:
        self.out.append(e)
        self.makers.update((id(y), e) for y in e.outs)
        same = e.prim == "broadcast_in_dim"
        rule = _POINTWISE["convert_element_type"] if same else _POINTWISE.get(e.prim)
        given = [self._number(x) for x in e.ins] if rule else ()
        if rule and not any(n is None for n in given):
            self.numbers[id(e.out)] = rule(*given)
        return e.outs[0]

    def _new(
        self, like: Equation, prim: str, ins: list[Operand], shape: Sequence[int], /, **params: Any
    ) -> Var:
        """The result of a new equation, of the line of another one."""
        out = Var(tuple(shape), like.outs[0].dtype)
        made = Equation(prim, ins, [out], params, like.where, like.scope)
        made.recomputed, made.call = like.recomputed, like.call
        return self._emit(made)

    def _reshaped(self, e: Equation, x: Operand, shape: Sequence[int]) -> Var:
        made = self._new(e, "reshape", [x], shape, new_sizes=tuple(shape), dimensions=None)
        made.dtype = x.dtype
        return made

    def _sorted(self, e: Equation, later: Sequence[Equation]) -> _Sort | None:
        """The sort of numbers of experts with their places, before products of groups."""
        key = e.ins[0]
        product = next((x for x in later if x.prim == "ragged_dot_general"), None)
        places = self.makers.get(id(e.ins[1])) if len(e.ins) == 2 else None
        if product is None or places is None or places.prim != "iota" or len(key.shape) != 1:
            return None
        weights = product.ins[1]
        made = self.made
        while id(weights) in made and made[id(weights)].prim in ("transpose", "convert_element_type"):
            weights = made[id(weights)].ins[0]
        first = product.ins[1].shape[:1]
        if not isinstance(weights, Var) or id(weights) in made or weights.shape[:1] != first:
            return None
        n = key.shape[0]
        at = np.unique(np.concatenate([np.arange(min(n, 64)), np.linspace(0, n - 1, 64).astype(int)]))
        told = self._by(self._first(key), "top_k")  # other numbers lie by row and token, or any other way
        choices = told.outs[1].shape[-1] if told is not None else 1
        found = _Sort(key, e.outs[0], n, weights, at, choices if choices > 1 else 0)
        found.places[id(e.outs[1])] = at
        for each in (key, e.outs[0]):
            found.named[id(each)] = np.arange(first[0])
        source = self.makers.get(id(key))
        begin = next((i for i, x in enumerate(self.out) if x is source), 0)
        for earlier in self.out[begin:]:
            self._follow(found.named, earlier)
        return found

    def _visit(self, s: _Sort, e: Equation) -> None:
        if id(e.outs[0]) in s.twins or e.prim in (TO, PRODUCT, FROM):
            return
        if e.prim == "sort":
            if s.places.get(id(e.ins[0])) is s.at and e.outs[0] is not s.ids:
                s.back[id(e.outs[1])] = s.at
            return
        for known in (s.places, s.back, s.named):
            self._follow(known, e)
        if e.prim == "scatter" and s.places.get(id(e.ins[1])) is not None and self._by(e.ins[2], "iota"):
            if (s.places[id(e.ins[1])] == s.at).all():
                s.back[id(e.outs[0])] = s.at
        elif e.prim == "gather":
            self._gathered(s, e)
        elif e.prim in ("scatter-add", "scatter_add"):
            self._summed(s, e)
        elif e.prim == "ragged_dot_general" and id(e.ins[0]) in s.twins:
            self._product(s, e)
        elif any(id(x) in s.twins for x in e.ins) and self._by_rows(s, e):
            ins = [s.twins.get(id(x), x) for x in e.ins]
            s.twins[id(e.out)] = self._new(e, e.prim, ins, e.out.shape, **e.params)

    def _first(self, x: Operand) -> Operand:
        """What an operand has the values of."""
        while (maker := self.makers.get(id(x))) and maker.prim in ("reshape", "convert_element_type"):
            x = maker.ins[0]
        return x

    def _by(self, x: Operand, prim: str) -> Equation | None:
        """The equation that computes a value, if it is of a primitive."""
        maker = self.makers.get(id(x))
        return maker if maker is not None and maker.prim == prim else None

    def _in_order(self, s: _Sort, x: Operand) -> bool:
        """True for the sorted numbers themselves."""
        x = self._first(x)
        e = self._by(x, "gather")
        places = s.places.get(id(e.ins[1])) if e is not None and self._numbered(s, e.ins[0]) else None
        alike = places is not None and bool((places == s.at).all())
        return x is s.ordered or (alike and x.shape == (s.rows,))

    def _numbered(self, s: _Sort, x: Operand) -> bool:
        return x.shape == (s.rows,) and self._first(x) is self._first(s.ids)

    def _counted(self, s: _Sort, sizes: Operand) -> bool:
        """True for each expert's number of rows: ones added up by number, or differences of counts."""
        x, bins = sizes, sizes
        adds = self._by(self._first(sizes), "scatter-add")
        if adds is not None:
            base, at, ones = adds.ins
            named = s.named.get(id(at))
            own = named is not None and bool((named == np.arange(sizes.shape[0])).all())
            numbers = self._number(base), self._number(ones)
            return own and sizes.shape == s.experts.shape[:1] and numbers == (0, 1)
        for prim in ("sub", "cumsum", "reduce_sum", "eq", "broadcast_in_dim"):
            e = self._by(self._first(x), prim)
            if e is None or e.params.get("axes", e.params.get("broadcast_dimensions", (0,))) != (0,):
                return False
            x, bins = e.ins[0], e.ins[1] if prim == "eq" else bins
        count = self._by(bins, "iota")
        whole = count is not None and count.params["dimension"] == 1 and sizes.shape == s.experts.shape[:1]
        return whole and (self._numbered(s, x) or self._in_order(s, x))

    def _number(self, x: Operand) -> Any:
        """The number that an operand is; None if it is none."""
        if isinstance(x, CapturedArray):
            return np.reshape(x.value, -1)[0] if np.size(x.value) == 1 else None
        return self.numbers.get(id(x))

    def _follow(self, known: dict[int, Any], e: Equation) -> None:
        """Follows functions of places, element by element."""
        if not any(id(x) in known for x in e.ins) or len(e.outs) != 1:
            return
        if e.prim in _KEEPS_ROWS and max(e.out.shape, default=0) == np.prod(e.out.shape):
            known[id(e.out)] = known[id(e.ins[0])]
        rule = _POINTWISE.get(e.prim)
        given = [known.get(id(x), self._number(x)) for x in e.ins]
        if rule is not None and not any(x is None for x in given):
            known[id(e.out)] = rule(*given)

    def _gathered(self, s: _Sort, e: Equation) -> None:
        x, at = e.ins
        rest = x.shape[1:]
        places, back = s.places.get(id(at)), s.back.get(id(at))
        if e.params["slice_sizes"] != (1, *rest) or e.out.shape != (s.rows, *rest):
            return
        if places is not None and s.rows % x.shape[0] == 0:
            choices = s.rows // x.shape[0]
            if choices == 1 and s.choices and (places == s.at).all():
                shape = (s.rows // s.choices, s.choices, *rest)
                wide, axes = self._by(self._first(x), "broadcast_in_dim"), (0, *range(2, len(shape)))
                if wide and (wide.out.shape, wide.params["broadcast_dimensions"]) == (shape, axes):
                    s.twins[id(e.out)] = self._sent(s, e, wide.ins[0], True)
                else:
                    s.twins[id(e.out)] = self._sent(s, e, self._reshaped(e, x, shape), False)
            elif choices > 1 and s.choices in (0, choices) and (places == s.at // choices).all():
                s.choices = choices
                s.twins[id(e.out)] = self._sent(s, e, x, True)
        elif back is not None and (back == s.at).all() and id(x) in s.twins:
            made = self._new(e, FROM, [self._apart(s, e, s.twins[id(x)])], self._shape(s, rest), alike=False)
            self.instead[id(e.out)] = self._reshaped(e, made, (s.rows, *rest))
        elif s.choices and self._in_order(s, at):
            numbers = self._numbers(s, e)
            index = self._reshaped(e, self._reshaped(e, numbers, (s.rows,)), at.shape)
            s.twins[id(e.out)] = self._new(e, "gather", [x, index], e.out.shape, **e.params)

    def _summed(self, s: _Sort, e: Equation) -> None:
        """Sums of rows into their tokens."""
        base, at, rows = e.ins
        places = s.places.get(id(at))
        if places is None or not s.choices or id(rows) not in s.twins:
            return
        if (places == s.at // s.choices).all() and base.shape[0] * s.choices == s.rows:
            made = self._new(e, FROM, [self._apart(s, e, s.twins[id(rows)])], base.shape, alike=True)
            alone = self._number(base) == 0
            self.instead[id(e.out)] = made if alone else self._new(e, "add", [base, made], base.shape)

    def _shape(self, s: _Sort, rest: Sequence[int]) -> tuple[int, ...]:
        return (s.rows // s.choices, s.choices, *rest)

    def _apart(self, s: _Sort, e: Equation, x: Var) -> Var:
        """Rows by token and choice."""
        maker, shape = self.makers[id(x)], self._shape(s, x.shape[1:])
        given = maker.ins[0] if maker.prim == "reshape" else x
        return given if isinstance(given, Var) and given.shape == shape else self._reshaped(e, x, shape)

    def _sent(self, s: _Sort, e: Equation, x: Operand, alike: bool) -> Var:
        rest = x.shape[1:] if alike else x.shape[2:]
        made = self._new(e, TO, [x, s.experts], self._shape(s, rest), alike=alike)
        made.dtype = x.dtype
        return self._reshaped(e, made, (s.rows, *rest))

    def _numbers(self, s: _Sort, e: Equation) -> Var:
        """The expert of each row, by token and choice."""
        if s.numbers is None:
            apart = self._reshaped(e, s.ids, self._shape(s, ()))
            s.numbers = self._apart(s, e, self._sent(s, e, apart, False))
        return s.numbers

    def _product(self, s: _Sort, e: Equation) -> None:
        rows = self._apart(s, e, s.twins[id(e.ins[0])])
        weights, made = e.ins[1], e.out.shape[1]
        (lc, rc), _ = e.params["ragged_dot_dimension_numbers"].dot_dimension_numbers
        alike = (tuple(lc), tuple(rc)) == ((1,), (1,)) and weights.shape[0] == s.experts.shape[0]
        if s.choices and alike and self._counted(s, e.ins[2]):
            shape = self._shape(s, (made,))
            out = self._new(e, PRODUCT, [rows, weights, self._numbers(s, e), s.experts], shape)
            s.twins[id(e.out)] = self._reshaped(e, out, e.out.shape)

    def _by_rows(self, s: _Sort, e: Equation) -> bool:
        """True if an operation treats every row alone."""
        p, rows = e.params, s.rows
        if len(e.outs) != 1 or e.out.shape[:1] != (rows,):
            return False
        others = [x for x in e.ins if id(x) not in s.twins]
        if e.prim in ELEMENTWISE or e.prim == "concatenate":
            alone = all(x.shape[:1] != (rows,) or self._spread(x) for x in others)
            return alone and (e.prim != "concatenate" or (p["dimension"] != 0 and not others))
        first = e.ins[0].shape[:1] == (rows,)
        axes = p.get("axes", p.get("dimensions")) or ()
        return first and {
            "reshape": True,
            "broadcast_in_dim": p.get("broadcast_dimensions", ())[:1] == (0,),
            "slice": p.get("start_indices", (1,))[0] == 0,
            "normalize": len(e.ins[0].shape) > 1,
            "transpose": p.get("permutation", (1,))[0] == 0,
        }.get(e.prim, e.prim.startswith(("reduce_", "squeeze", "expand_dims")) and 0 not in axes)

    def _spread(self, x: Operand) -> bool:
        """True for what is the same in every row."""
        maker = self._by(x, "broadcast_in_dim")
        axes = maker.params["broadcast_dimensions"] if maker is not None else (0,)
        return 0 not in axes or self._number(x) is not None
