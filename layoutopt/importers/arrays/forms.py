"""The equations that compute the same, whatever their operands."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from layoutopt.importers.arrays.contract import KEY, CapturedArray, Equation, EquationBlock, Operand, Var


class EquationForms:
    """Equations by the function that they compute: two of one code differ only in their operands.

    Attributes:
      keys: ids of random keys; their index and folded numbers do not count, because layers get them one by
        one.
      of_parameters: ids of values that are made of parameters and constants alone.
    """

    def __init__(self, block: EquationBlock, keys: Iterable[Var], parameters: set[int]) -> None:
        self.keys = {id(v) for v in (*keys, *block.ins) if v.dtype == KEY} | {id(v) for v in keys}
        self.of_parameters = set(parameters)
        self._codes: dict[object, int] = {}
        self._known: dict[int, tuple[Equation, int]] = {}
        for e in block.equations:
            self.follow(e)

    def follow(self, e: Equation) -> None:
        """Records the form of an equation's results."""
        if any(self.is_key(x) for x in e.ins) and e.may_give_keys:
            self.keys.update(map(id, e.outs))
        self.keys.update(id(y) for y in e.outs if y.dtype == KEY)
        if e.ins and all(isinstance(x, CapturedArray) or id(x) in self.of_parameters for x in e.ins):
            self.of_parameters.update(map(id, e.outs))

    def is_key(self, x: Operand) -> bool:
        return x.dtype == KEY or id(x) in self.keys

    def is_element(self, e: Equation) -> bool:
        """True if it takes one element of the first axis of something made of parameters."""
        if e.prim != "slice" or id(e.ins[0]) not in self.of_parameters:
            return False
        x, y = e.ins[0].shape, e.out.shape
        return len(x) > 1 and x[0] > 1 and y[0] == 1 and x[1:] == y[1:]

    def code(self, e: Equation) -> int:
        """A number for the function that it computes."""
        known = self._known.get(id(e))
        if known is None or known[0] is not e:
            known = self._known[id(e)] = e, self._codes.setdefault(self._form(e), len(self._codes))
        return known[1]

    def _form(self, e: Equation) -> object:
        outs = tuple((y.shape, y.dtype) for y in e.outs)
        if all(self.is_key(y) for y in e.outs):
            return e.prim, outs, len(e.ins)
        if self.is_element(e):
            return e.prim, outs, e.ins[0].shape
        return self._plain(e, None), outs

    def said(self, e: Equation) -> object:
        """Its parameters."""
        told = {} if e.prim == "name" else e.params
        own = {k: (v.shape, str(v.dtype), v.tobytes()) for k, v in told.items() if isinstance(v, np.ndarray)}
        return tuple(sorted((k, own.get(k) or repr(v)) for k, v in told.items()))

    def _plain(self, e: Equation, names: dict[int, int] | None) -> object:
        params = self.said(e)
        # A sum may begin at a number.
        begun = names is None and e.prim == "add" and e.out.shape == ()
        ins = tuple((x.shape, x.dtype) if begun else self._operand(x, names or {}) for x in e.ins)
        bodies = tuple(b if b is None else self._block(b) for b in (e.body, e.backward))
        return e.prim, params, ins, bodies, bool(e.recomputed)

    def _operand(self, x: Operand, names: dict[int, int]) -> object:
        if isinstance(x, CapturedArray):
            if x.shape == () and x.dtype != KEY:
                return x.dtype, np.asarray(x.value).tobytes()
            return id(x)
        return x.shape, x.dtype, names.get(id(x), -1)

    def _block(self, block: EquationBlock) -> object:
        names = {id(v): n for n, v in enumerate(block.ins)}
        found = []
        for e in block.equations:
            found.append((self._plain(e, names), tuple((y.shape, y.dtype) for y in e.outs)))
            for y in e.outs:
                names[id(y)] = len(names)
        types = tuple((v.shape, v.dtype) for v in block.ins)
        return types, tuple(found), tuple(self._operand(x, names) for x in block.outs)
