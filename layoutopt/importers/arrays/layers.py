"""Rerolling: equal sequences of equations as iterations of one loop."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from layoutopt.importers.arrays.classes import classes, template
from layoutopt.importers.arrays.contract import CapturedArray, Equation, EquationBlock, Operand, Var, constant
from layoutopt.importers.arrays.factors import factors
from layoutopt.importers.arrays.forms import EquationForms

PRODUCTS = ("dot_general", "conv_general_dilated", "custom", "scan", "ragged_dot_general", "attention")
"""A layer has one of these: rolling up anything smaller gains nothing."""


class RerolledBlock:
    """A block while its runs of equal layers become loops.

    Attributes:
      equations, outs: as they are now.
      traced_outs: results as they were traced, in the order of `state`.
      roles: id of a parameter or of state -> "params" or "state".
      state: stored values that are not trained -> index of the result with the new value, -1 for none.
      stacks: parameters and state that were stacked, by their stack.
      member: id of a member -> its stack and its position there.
      place: id of a value -> which equation computes it, which of its results it is.
      last: id of a value -> the last equation that reads it.
      codes: of each equation, a number for the function that it computes.
    """

    def __init__(
        self, block: EquationBlock, parameters: Iterable[Var], state: Mapping[Var, int], keys: Iterable[Var]
    ) -> None:
        self.equations, self.outs = list(block.equations), list(block.outs)
        self.traced_outs, self.state = block.outs, state
        self.roles = {id(v): "params" for v in parameters} | {id(v): "state" for v in state}
        self.forms = EquationForms(block, keys, set(self.roles))
        self.stacks: dict[Var, tuple[Var, ...]] = {}
        self.stack_of: dict[tuple[int, ...], Var] = {}
        self.member: dict[int, tuple[Var, int]] = {}
        self.index()

    def index(self) -> None:
        """Notes where everything is, after equations changed."""
        self.place = {id(y): (n, o) for n, e in enumerate(self.equations) for o, y in enumerate(e.outs)}
        self.last = {id(x): n for n, e in enumerate(self.equations) for x in e.ins}
        self.codes = np.array([self.forms.code(e) for e in self.equations], np.int64)

    def stack(self, members: Sequence[Var]) -> Var:
        """The variable that stacks the equal variables of all layers."""
        names = tuple(map(id, members))
        if names not in self.stack_of:
            made = Var((len(members), *members[0].shape), members[0].dtype, _stacked_path(members))
            self.stack_of[names] = made
            self.stacks[made] = tuple(members)
            self.member.update((id(v), (made, i)) for i, v in enumerate(members))
        return self.stack_of[names]


def _stacked_path(members: Sequence[Var]) -> str:
    """The path of a stack: from the first number to the last where its members have different ones."""
    parts = [re.split(r"(\d+)", v.path) for v in members]
    if len({len(p) for p in parts}) > 1:
        return f"{members[0].path}-{members[-1].path}"
    return "".join(t[0] if len(set(t)) == 1 else f"{t[0]}-{t[-1]}" for t in zip(*parts, strict=True))


class LoopFit:
    """A loop over `count` sequences of `period` equations, if every operand allows it.

    Attributes:
      carries: (value that the previous layer computes, value that the first layer gets), one slot of the
        loop's state each.
      left: (equation of a layer, result) -> layers whose value is read after them.
      pulled: as `Rerolled.twins`: values that equations before the loop compute from each layer's parameters,
        moved inside.
      outside: equations that run before the loop: they make the keys of all layers one array.
      failed: the first layer's equation that reads a value that a loop could not provide.
    """

    def __init__(self, of: RerolledBlock, first: int, period: int, count: int) -> None:
        self.of, self.first, self.period, self.count = of, first, period, count
        self.end = first + period * count
        self.carries: dict[tuple[tuple[int, int], int], tuple[Operand, Var]] = {}
        self.left: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.pulled: dict[int, Operand] = {}
        self.stacked: list[tuple[int, int]] = []
        self._consts: dict[int, tuple[Operand, Var]] = {}
        self._members: dict[tuple[int, ...], tuple[Sequence[Var], Var]] = {}
        self._sources: dict[int, tuple[Var, Var]] = {}
        self._listed: dict[object, tuple[Operand, Var]] = {}
        self.outside: list[Equation] = []
        self.failed: Equation | None = None
        self._before: list[Equation] = []
        self._parts: dict[tuple[int, ...], Operand] = {}
        self._equations: list[Equation] = []

    def layer(self, i: int) -> list[Equation]:
        """The equations of a layer."""
        begin = self.first + i * self.period
        return self.of.equations[begin : begin + self.period]

    def holds(self) -> bool:
        """True if the layers are iterations of one loop."""
        layers = [self.layer(i) for i in range(self.count)]
        products = any(e.prim in PRODUCTS for e in layers[0])
        for rows in zip(*layers, strict=True):
            made = self._row(rows)
            if made is None:
                self.failed = rows[0]
                return False
            self._equations.append(made)
        if not self.carries or not (self._members or self._sources):
            return False
        if not products and not all(names in self.of.stack_of for names in self._members):
            return False
        self._read_after()
        return self._new_state_fits() and self._hands_on_its_own()

    def _hands_on_its_own(self) -> bool:
        """Whether layers hand on the dimensions that they are given. Those of a plain perceptron do not: as a
        loop all of them would be laid out alike, and none could follow another."""
        carried = [inner for _, inner in self.carries.values()]
        members = [inner for _, inner in self._members.values()]
        body = self.body()
        found = classes(body, factors(body), members, carried)
        pairs = zip(carried, body.outs, strict=False)
        return all(found.all(x) == found.all(y) for x, y in pairs if not self.of.forms.is_key(y))

    def _row(self, rows: Sequence[Equation]) -> Equation | None:
        """One equation of the body, from those of all layers."""
        # Layers that all take element i take it of parameters of their own, or of one that they share.
        if self.of.forms.is_element(rows[0]) and len({self.of.forms.said(e) for e in rows}) > 1:
            return self._element(rows)
        if self.of.forms.is_key(rows[0].out) and len({self.of.forms.said(e) for e in rows}) > 1:
            return self._keys_apart(rows)
        ins = []
        for slot in zip(*(e.ins for e in rows), strict=True):
            found = self._operand(slot, rows[0])
            if found is None:
                return None
            ins.append(found)
        return replace(rows[0], ins=ins)

    def _operand(self, slot: Sequence[Operand], row: Equation) -> Operand | None:
        """What the body reads where layers read these, in an equation like `row`."""
        first = slot[0]
        if all(isinstance(x, CapturedArray) and x.shape == () for x in slot):
            values = [np.asarray(x.value) for x in slot if isinstance(x, CapturedArray)]
            if len({x.tobytes() for x in values}) == 1:
                return first
            if not self.of.forms.is_key(row.out):
                return None
            numbers = np.stack(values)
            name = first.dtype, numbers.tobytes()
            return self._listed.setdefault(name, (constant(numbers, first.dtype), Var((), first.dtype)))[1]
        places = [self.of.place.get(id(x)) for x in slot]
        inside = [p is not None and self.first <= p[0] < self.end for p in places]
        if any(inside):
            return self._made_inside(slot, places, inside)
        if any(p is not None and p[0] >= self.end for p in places):
            return None
        if all(x is first for x in slot):
            return self._consts.setdefault(id(first), (first, Var(first.shape, first.dtype)))[1]
        return self._part(slot)

    def _made_inside(
        self, slot: Sequence[Operand], places: Sequence[tuple[int, int] | None], inside: Sequence[bool]
    ) -> Operand | None:
        if not all(inside[1:]):
            return None
        back = int(not inside[0])
        made = [(i, p) for i, p in enumerate(places[back:]) if p is not None]
        offset, *others = {(p[0] - self.first - i * self.period, p[1]) for i, p in made}
        if others or not 0 <= offset[0] < self.period:
            return None
        if inside[0]:
            return slot[0]
        first, second = slot[0], slot[1]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return None
        return self.carries.setdefault((offset, id(first)), (first, Var(first.shape, first.dtype)))[1]

    def _part(self, slot: Sequence[Operand]) -> Operand | None:
        """What differs from layer to layer and is made before them."""
        names = tuple(map(id, slot))
        if names not in self._parts:
            found = self._found_part(slot, names)
            if found is None:
                return None
            self._parts[names] = found
        return self._parts[names]

    def _found_part(self, slot: Sequence[Operand], names: tuple[int, ...]) -> Operand | None:
        of = self.of
        if all(number in of.forms.keys for number in names):
            return self._keys(slot, of.equations[self.first].where)
        variables = [x for x in slot if isinstance(x, Var)]
        if len(variables) < len(slot):
            return None
        if all(number in of.roles for number in names):
            return self._parameters(variables, names)
        places = [of.place.get(number) for number in names]
        if any(p is None or p[0] >= self.first for p in places):
            return None
        rows = [of.equations[p[0]] for p in places if p is not None]
        results = {p[1] for p in places if p is not None}
        if len(results) != 1 or len({of.forms.code(e) for e in rows}) != 1:
            return None
        if not all(id(y) in of.forms.of_parameters for e in rows for y in e.outs) or rows[0].body is not None:
            return None
        made = self._row(rows)
        if made is None:
            return None
        made = replace(made, outs=[Var(y.shape, y.dtype) for y in rows[0].outs])
        self._before.append(made)
        for e in rows:
            self.pulled.update((id(old), new) for old, new in zip(e.outs, made.outs, strict=True))
        return made.outs[results.pop()]

    def _keys(self, slot: Sequence[Operand], where: str) -> Operand:
        """Keys of all layers that are made before them."""
        first = slot[0]
        made = Var((len(slot), *first.shape), first.dtype)
        self.outside.append(Equation("stack", list(slot), [made], {"axis": 0}, where))
        inner = Var(first.shape, first.dtype)
        return self._listed.setdefault(tuple(map(id, slot)), (made, inner))[1]

    def _keys_apart(self, rows: Sequence[Equation]) -> Equation | None:
        """Layers that each take a key of what is made before them: so do equations before the loop."""
        places = [self.of.place.get(id(x)) for e in rows for x in e.ins]
        if any(p is not None and p[0] >= self.first for p in places):
            return None
        copies = [replace(e, outs=[Var(y.shape, y.dtype) for y in e.outs]) for e in rows]
        self.outside += copies
        columns = zip(*(e.outs for e in copies), strict=True)
        inner = [self._keys(values, rows[0].where) for values in columns]
        return replace(rows[0], prim="copy", ins=inner, params={})

    def _parameters(self, variables: Sequence[Var], names: tuple[int, ...]) -> Operand | None:
        of, first = self.of, variables[0]
        if len({(of.roles[id(v)], v.shape, v.dtype, template(v.path)) for v in variables}) != 1:
            return None
        if len(set(names)) < len(names):
            return None
        taken = {of.member[number][0] for number in names if number in of.member}
        if taken and names not in of.stack_of:
            return None
        if names not in self._members and any(not set(names).isdisjoint(others) for others in self._members):
            return None  # a parameter that two layers share has one place in one stack
        return self._members.setdefault(names, (variables, Var(first.shape, first.dtype)))[1]

    def _element(self, rows: Sequence[Equation]) -> Equation | None:
        """Layers that take one element after the other of a stack."""
        source = rows[0].ins[0]
        if any(e.ins[0] is not source for e in rows) or not isinstance(source, Var):
            return None
        if [e.params["start_indices"][0] for e in rows] != list(range(source.shape[0])):
            return None
        place = self.of.place.get(id(source))
        if place is not None and place[0] >= self.first:
            return None
        inner = self._sources.setdefault(id(source), (source, Var(source.shape[1:], source.dtype)))[1]
        shape = rows[0].out.shape
        params = {"shape": shape, "broadcast_dimensions": tuple(range(1, len(shape))), "sharding": None}
        return replace(rows[0], prim="broadcast_in_dim", ins=[inner], params=params)

    def _read_after(self) -> None:
        later = [x for e in self.of.equations[self.end :] for x in e.ins]
        for x in (*later, *self.of.outs):
            place = self.of.place.get(id(x))
            if place is not None and self.first <= place[0] < self.end:
                i, offset = divmod(place[0] - self.first, self.period)
                self.left[offset, place[1]].add(i)
        carried = {slot for slot, _ in self.carries}
        last = self.count - 1
        self.stacked = [slot for slot, at in self.left.items() if slot not in carried or at != {last}]

    def _new_state_fits(self) -> bool:
        """Whether the new values of stacked state are a stack too, or the old ones."""
        of = self.of
        for variables, _ in self._members.values():
            if of.roles[id(variables[0])] != "state":
                continue
            new = [of.traced_outs[of.state[v]] if of.state[v] >= 0 else v for v in variables]
            if all(x is v for x, v in zip(new, variables, strict=True)):
                continue
            at = [of.place.get(id(x)) for x in new]
            offsets = {(p[0] - self.first - i * self.period, p[1]) if p else None for i, p in enumerate(at)}
            if len(offsets) != 1 or None in offsets or not 0 <= (offsets.pop() or (-1, 0))[0] < self.period:
                return False
        return True

    def body(self) -> EquationBlock:
        """The values that the loop computes in every iteration."""
        layer = self.layer(0)
        outs: list[Operand] = [layer[n].outs[o] for (n, o), _ in self.carries]
        outs += [layer[n].outs[o] for n, o in self.stacked]
        inside = (self._consts, self.carries, self._members, self._sources, self._listed)
        ins = [inner for found in inside for _, inner in found.values()]
        return EquationBlock(ins, [*self._before, *self._equations], outs)

    def loop(self) -> Equation:
        """The loop."""
        body = self.body()
        given = [x for found in (self._consts, self.carries) for x, _ in found.values()]
        given += [self.of.stack(variables) for variables, _ in self._members.values()]
        given += [source for found in (self._sources, self._listed) for source, _ in found.values()]
        carry = len(self.carries)
        outs = [Var(x.shape, x.dtype) for x in body.outs[:carry]]
        outs += [Var((self.count, *y.shape), y.dtype) for y in body.outs[carry:]]
        params = {"length": self.count, "reverse": False, "consts": len(self._consts), "carry": carry}
        where = self.of.equations[self.first].where
        return Equation("scan", given, outs, params, where, body=body)
