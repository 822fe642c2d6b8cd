"""Unrolled layers as loops again.

A Python loop over equal layers traces to one sequence of equations again and again. Such a run becomes one
`scan` over stacked parameters, as if its author had written it so: what one layer hands to the next is
carried, parameters of corresponding paths are stacks, what all layers read stays outside. Candidates are
sequences of equal equations (primitive, its parameters, shapes, constants); a run is taken only if every
operand of every layer then is in the same place: computed by the same equation of its own layer or of the
one before, the same value in all, or a parameter whose path differs by numbers only. So the loop computes
what the function does.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from layoutopt.importers.jax.classes import Classes, classes, template
from layoutopt.importers.jax.equations import KEY, Block, Constant, Equation, Operand, Var, has_fractions
from layoutopt.importers.jax.factors import factors

PRODUCTS = ("dot_general", "conv_general_dilated", "custom", "scan", "ragged_dot_general")
"""A layer has one of these: rolling up anything smaller gains nothing."""
_NEAR = 32
"""How many later occurrences of an equation are tried as the next layer's."""
_STARTS = 48
"""How many equations are tried as the first of a layer."""


@dataclass(frozen=True)
class Run:
    """Layers that became a loop.

    Attributes:
      layers: their equations as they were traced, layer by layer.
      loop: what stands for them.
    """

    layers: tuple[tuple[Equation, ...], ...]
    loop: Equation


@dataclass
class Rerolled:
    """A block with its runs of equal layers as loops.

    Attributes:
      stacks: parameters and state that became one, by what they became.
      twins: id of a value of the traced block -> the value of a loop's body that stands for it.
      left: id of a value of the traced block that is read after its loop -> the stack of all layers'.
    """

    block: Block
    runs: list[Run] = field(default_factory=list)
    stacks: dict[Var, tuple[Var, ...]] = field(default_factory=dict)
    twins: dict[int, Operand] = field(default_factory=dict)
    left: dict[int, Var] = field(default_factory=dict)

    def alias(self, classes: Classes) -> None:
        """Gives the values of the traced block the dimensions of those that stand for them."""
        sizes = classes.factors.sizes
        for number, twin in self.twins.items():
            for a in range(len(twin.shape)):
                if (id(twin), a) in sizes and (id(twin), a) in classes.nodes:  # axes of keys have no factors
                    classes.nodes[number, a] = classes.nodes[id(twin), a]
                    sizes[number, a] = sizes[id(twin), a]
        for stack, members in self.stacks.items():
            for member in members:
                for a in range(len(member.shape)):
                    classes.nodes[id(member), a] = classes.nodes[id(stack), a + 1]
                    sizes[id(member), a] = sizes[id(stack), a + 1]


def rerolled(
    block: Block,
    parameters: Iterable[Var],
    state: Mapping[Var, int],
    keys: Iterable[Var],
) -> Rerolled:
    """The block with its runs of equal layers as loops.

    Args:
      state: what is stored and not trained -> which result is its new value, -1 for none.
      keys: random keys among the variables.
    """
    return _Rerolling(block, parameters, state, keys).done()


class _Rerolling:
    def __init__(
        self,
        block: Block,
        parameters: Iterable[Var],
        state: Mapping[Var, int],
        keys: Iterable[Var],
    ) -> None:
        self.ins, self.equations, self.outs = block.ins, list(block.equations), list(block.outs)
        self.traced_outs = block.outs
        self.roles = {id(v): "params" for v in parameters} | {id(v): "state" for v in state}
        self.state = state
        self.made = Rerolled(block)
        self.member: dict[int, tuple[Var, int]] = {}
        self.stack_of: dict[tuple[int, ...], Var] = {}
        self.forms = _Forms(block, keys, set(self.roles))
        self._place()

    def done(self) -> Rerolled:
        while self._one():
            pass
        made = self.made
        if made.runs:
            self._read_elements()
            stacked = {id(v) for members in made.stacks.values() for v in members}
            ins = [v for v in self.ins if id(v) not in stacked]
            for v, n in self.state.items():
                if id(v) in self.member and n >= 0:
                    self.outs[n] = made.left.get(id(self.traced_outs[n]), self.outs[n])
            made.block = Block([*ins, *made.stacks], self._live(), self.outs)
        return made

    def _place(self) -> None:
        self.place = {id(y): (n, o) for n, e in enumerate(self.equations) for o, y in enumerate(e.outs)}
        self.last: dict[int, int] = {}
        for n, e in enumerate(self.equations):
            self.last.update((id(x), n) for x in e.ins)
        self.codes = np.array([self.forms.code(e) for e in self.equations], np.int64)

    def _one(self) -> bool:
        """Rolls up the run that saves most; whether there is one."""
        for first, period, length in self._candidates():
            fit = self._fitted(first, period, length)
            if fit is not None:
                self._replace(fit)
                self._place()
                return True
        return False

    # -- candidates ----------------------------------------------------------------------------------------

    def _candidates(self) -> list[tuple[int, int, int]]:
        """(first, period, length) of sequences in which every equation equals the one a period later, those
        that save most equations first."""
        codes, n = self.codes, len(self.codes)
        at: dict[int, list[int]] = defaultdict(list)
        for i, e in enumerate(self.equations):
            if e.prim in PRODUCTS or any(id(x) in self.member for x in e.ins):
                at[int(codes[i])].append(i)
        periods = {
            b - a for where in at.values() for i, a in enumerate(where) for b in where[i + 1 : i + _NEAR]
        }
        found = []
        for period in periods:
            equal = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
            edges = np.flatnonzero(equal[1:] != equal[:-1])
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                if end - begin >= period:
                    found.append((int(begin), period, int(end - begin) + period))
        assert all(first + length <= n for first, _, length in found)
        return sorted(found, key=lambda c: (-(c[2] // c[1] - 1) * c[1], c[1], c[0]))

    def _fitted(self, first: int, period: int, length: int) -> _Fit | None:
        """The loop of a candidate. Of all places where a layer may begin, that where least is handed on."""
        widths = self._handed_on(first, period, length)
        most = length // period
        for count in (most, most - 1):
            if count < 2:
                return None
            starts = sorted(range(length - count * period + 1), key=lambda r: (widths[r % period], r))
            for r in starts[:_STARTS]:
                fit = _Fit(self, first + r, period, count)
                if fit.holds():
                    return fit
        return None

    def _handed_on(self, first: int, period: int, length: int) -> list[int]:
        """Elements of what crosses from one layer to the next, for each equation that layers may begin at."""
        steps = [0] * (period + 1)
        for n in range(first, min(first + 2 * period, first + length)):
            for y in self.equations[n].outs:
                last = min(self.last.get(id(y), n), n + period)
                begin, end = max(n + 1, first + period), min(last, first + 2 * period - 1)
                if begin <= end and y.dtype != KEY:
                    steps[begin - first - period] += math.prod(y.shape)
                    steps[end + 1 - first - period] -= math.prod(y.shape)
        return list(np.cumsum(steps[:period]))

    # -- rewriting -----------------------------------------------------------------------------------------

    def _replace(self, fit: _Fit) -> None:
        equations, made = self.equations, self.made
        layers = tuple(tuple(fit.layer(i)) for i in range(fit.count))
        loop = fit.loop()
        for others in layers[1:]:
            for e, other in zip(layers[0], others, strict=True):
                _pair(e, other, made.twins)
        made.twins.update(fit.pulled)
        renamed: dict[int, Operand] = {}
        elements: list[Equation] = []
        for (offset, o), values in fit.left.items():
            for i in sorted(values):
                old = layers[i][offset].outs[o]
                if (offset, o) in fit.stacked:
                    made.left[id(old)] = loop.outs[len(fit.carries) + fit.stacked.index((offset, o))]
                renamed[id(old)] = self._left(fit, loop, (offset, o), i, elements)
        rest = [self._renamed(e, renamed) for e in equations[fit.end :]]
        self.equations = [*equations[: fit.first], loop, *elements, *rest]
        self.outs = [renamed.get(id(x), x) for x in self.outs]
        made.runs.append(Run(layers, loop))

    def _left(
        self, fit: _Fit, loop: Equation, slot: tuple[int, int], i: int, elements: list[Equation]
    ) -> Operand:
        """What stands for layer i's value outside of the loop."""
        carried = next((n for n, (s, _) in enumerate(fit.carries) if s == slot), None)
        if i == fit.count - 1 and carried is not None:
            return loop.outs[carried]
        return self._element(loop.outs[len(fit.carries) + fit.stacked.index(slot)], i, elements, loop.where)

    def _element(self, stack: Var, i: int, out: list[Equation], where: str) -> Var:
        """Element i of a stack, by new equations."""
        begin = (i, *(0 for _ in stack.shape[1:]))
        one, value = Var((1, *stack.shape[1:]), stack.dtype), Var(stack.shape[1:], stack.dtype)
        cut = {"start_indices": begin, "limit_indices": (i + 1, *stack.shape[1:]), "strides": None}
        out.append(Equation("slice", [stack], [one], cut, where))
        out.append(Equation("squeeze", [one], [value], {"dimensions": (0,)}, where))
        return value

    def _renamed(self, e: Equation, names: Mapping[int, Operand]) -> Equation:
        if not any(id(x) in names for x in e.ins):
            return e
        return replace(e, ins=[names.get(id(x), x) for x in e.ins])

    def _read_elements(self) -> None:
        """Members of stacks that are read outside of loops too."""
        read = {id(x) for e in self.equations for x in e.ins} | {id(x) for x in self.outs}
        first: list[Equation] = []
        names: dict[int, Operand] = {
            number: self._element(stack, i, first, "")
            for number, (stack, i) in self.member.items()
            if number in read
        }
        self.equations = [*first, *(self._renamed(e, names) for e in self.equations)]
        self.outs = [names.get(id(x), x) for x in self.outs]

    def _live(self) -> list[Equation]:
        """Equations that a result needs: those that went into loops may be left over."""
        needed, kept = {id(x) for x in self.outs}, []
        for e in reversed(self.equations):
            if any(id(y) in needed for y in e.outs):
                kept.append(e)
                needed.update(map(id, e.ins))
        return kept[::-1]

    def stack(self, members: Sequence[Var]) -> Var:
        """The variable that stands for equal ones of all layers."""
        names = tuple(map(id, members))
        if names not in self.stack_of:
            made = Var((len(members), *members[0].shape), members[0].dtype, _stacked_path(members))
            self.stack_of[names] = made
            self.made.stacks[made] = tuple(members)
            self.member.update((id(v), (made, i)) for i, v in enumerate(members))
        return self.stack_of[names]


def _stacked_path(members: Sequence[Var]) -> str:
    """The path of a stack: from the first number to the last where its members have different ones."""
    parts = [re.split(r"(\d+)", v.path) for v in members]
    if len({len(p) for p in parts}) > 1:
        return f"{members[0].path}-{members[-1].path}"
    return "".join(t[0] if len(set(t)) == 1 else f"{t[0]}-{t[-1]}" for t in zip(*parts, strict=True))


def _pair(e: Equation, other: Equation, twins: dict[int, Operand]) -> None:
    """Notes of an equation that equals another one which value stands for which."""
    twins.update((id(y), x) for x, y in zip(e.outs, other.outs, strict=True))
    for a, b in ((e.body, other.body), (e.backward, other.backward)):
        if a is None or b is None:
            continue
        twins.update((id(y), x) for x, y in zip(a.ins, b.ins, strict=True))
        for x, y in zip(a.equations, b.equations, strict=True):
            _pair(x, y, twins)


class _Fit:
    """A loop over `count` sequences of `period` equations, if every operand allows it.

    Attributes:
      carries: (what the layer before computes, what the first is given), a slot of the loop's state each.
      left: (which equation of a layer, which result) -> layers whose value is read after them.
      pulled: as `Rerolled.twins`: what equations before the loop compute of each layer's parameters, inside.
    """

    def __init__(self, of: _Rerolling, first: int, period: int, count: int) -> None:
        self.of, self.first, self.period, self.count = of, first, period, count
        self.end = first + period * count
        self.carries: dict[tuple[tuple[int, int], int], tuple[Operand, Var]] = {}
        self.left: dict[tuple[int, int], set[int]] = defaultdict(set)
        self.pulled: dict[int, Operand] = {}
        self.stacked: list[tuple[int, int]] = []
        self._consts: dict[int, tuple[Operand, Var]] = {}
        self._members: dict[tuple[int, ...], tuple[Sequence[Var], Var]] = {}
        self._sources: dict[int, tuple[Var, Var]] = {}
        self._before: list[Equation] = []
        self._parts: dict[tuple[int, ...], Operand] = {}
        self._equations: list[Equation] = []

    def layer(self, i: int) -> list[Equation]:
        """The equations of a layer."""
        begin = self.first + i * self.period
        return self.of.equations[begin : begin + self.period]

    def holds(self) -> bool:
        """Whether the layers are iterations of one loop."""
        layers = [self.layer(i) for i in range(self.count)]
        products = any(e.prim in PRODUCTS for e in layers[0])
        for rows in zip(*layers, strict=True):
            made = self._row(rows)
            if made is None:
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
        return all(found.all(x) == found.all(y) for x, y in pairs if x.dtype != KEY)

    # -- operands ------------------------------------------------------------------------------------------

    def _row(self, rows: Sequence[Equation]) -> Equation | None:
        """One equation of the body, from those of all layers."""
        if self.of.forms.is_element(rows[0]):
            return self._element(rows)
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
        if all(isinstance(x, Constant) and x.shape == () for x in slot):
            values = {np.asarray(x.value).tobytes() for x in slot if isinstance(x, Constant)}
            return first if len(values) == 1 or self.of.forms.is_key(row.out) else None
        places = [self.of.place.get(id(x)) for x in slot]
        inside = [p is not None and self.first <= p[0] < self.end for p in places]
        if any(inside):
            return self._made_inside(slot, places, inside)
        if any(p is not None and p[0] >= self.end for p in places):
            return None
        if all(x is first for x in slot):
            return self._const(first)
        return self._part(slot)

    def _made_inside(
        self, slot: Sequence[Operand], places: Sequence[tuple[int, int] | None], inside: Sequence[bool]
    ) -> Operand | None:
        if not all(inside[1:]):
            return None
        back = int(not inside[0])
        offsets = set()
        for i, place in enumerate(places):
            if i >= back and place is not None:
                offsets.add((place[0] - self.first - (i - back) * self.period, place[1]))
        if len(offsets) != 1:
            return None
        (offset,) = offsets
        if not 0 <= offset[0] < self.period:
            return None
        if inside[0]:
            return slot[0]
        first, second = slot[0], slot[1]
        if (first.shape, first.dtype) != (second.shape, second.dtype):
            return None
        return self.carries.setdefault((offset, id(first)), (first, Var(first.shape, first.dtype)))[1]

    def _const(self, x: Operand) -> Operand:
        return self._consts.setdefault(id(x), (x, Var(x.shape, x.dtype)))[1]

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
        of, first = self.of, slot[0]
        if all(number in of.forms.keys for number in names):
            return self._const(first)
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

    def _parameters(self, variables: Sequence[Var], names: tuple[int, ...]) -> Operand | None:
        of, first = self.of, variables[0]
        if len({(of.roles[id(v)], v.shape, v.dtype, template(v.path)) for v in variables}) != 1:
            return None
        if len(set(names)) < len(names):
            return None
        taken = {of.member[number][0] for number in names if number in of.member}
        if taken and names not in of.stack_of:
            return None
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

    # -- results -------------------------------------------------------------------------------------------

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
            places = [of.place.get(id(x)) for x in new]
            offsets = {
                (p[0] - self.first - i * self.period, p[1]) if p else None for i, p in enumerate(places)
            }
            if len(offsets) != 1 or None in offsets or not 0 <= (offsets.pop() or (-1, 0))[0] < self.period:
                return False
        return True

    def body(self) -> Block:
        """What the loop computes in every iteration."""
        layer = self.layer(0)
        outs: list[Operand] = [layer[n].outs[o] for (n, o), _ in self.carries]
        outs += [layer[n].outs[o] for n, o in self.stacked]
        inside = (self._consts, self.carries, self._members, self._sources)
        ins = [inner for found in inside for _, inner in found.values()]
        return Block(ins, [*self._before, *self._equations], outs)

    def loop(self) -> Equation:
        """The loop."""
        body = self.body()
        given = [x for found in (self._consts, self.carries) for x, _ in found.values()]
        given += [self.of.stack(variables) for variables, _ in self._members.values()]
        given += [source for source, _ in self._sources.values()]
        carry = len(self.carries)
        outs = [Var(x.shape, x.dtype) for x in body.outs[:carry]]
        outs += [Var((self.count, *y.shape), y.dtype) for y in body.outs[carry:]]
        params = {"length": self.count, "reverse": False, "consts": len(self._consts), "carry": carry}
        where = self.of.equations[self.first].where
        return Equation("scan", given, outs, params, where, body=body)


class _Forms:
    """Equations by what they compute, whatever of: two of one code are the same but for their operands.

    Attributes:
      keys: ids of random keys; their constants do not count, since draws are the graph's own.
      of_parameters: ids of values that are made of parameters and constants alone.
    """

    def __init__(self, block: Block, keys: Iterable[Var], parameters: set[int]) -> None:
        self.keys = {id(v) for v in (*keys, *block.ins) if v.dtype == KEY} | {id(v) for v in keys}
        self.of_parameters = set(parameters)
        self._codes: dict[object, int] = {}
        self._known: dict[int, tuple[Equation, int]] = {}
        for e in block.equations:
            self._follow(e)

    def _follow(self, e: Equation) -> None:
        if any(self.is_key(x) for x in e.ins) and _gives_keys(e):
            self.keys.update(map(id, e.outs))
        self.keys.update(id(y) for y in e.outs if y.dtype == KEY)
        if e.ins and all(isinstance(x, Constant) or id(x) in self.of_parameters for x in e.ins):
            self.of_parameters.update(map(id, e.outs))

    def is_key(self, x: Operand) -> bool:
        return x.dtype == KEY or id(x) in self.keys

    def is_element(self, e: Equation) -> bool:
        """Whether it takes one element of the first axis of something made of parameters."""
        if e.prim != "slice" or id(e.ins[0]) not in self.of_parameters:
            return False
        x, y = e.ins[0].shape, e.out.shape
        return len(x) > 1 and x[0] > 1 and y[0] == 1 and x[1:] == y[1:]

    def code(self, e: Equation) -> int:
        """A number for what it computes."""
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

    def _plain(self, e: Equation, names: dict[int, int] | None) -> object:
        params = () if e.prim == "name" else tuple(sorted((k, _text(v)) for k, v in e.params.items()))
        # A sum may begin at a number.
        begun = names is None and e.prim == "add" and e.out.shape == ()
        ins = tuple((x.shape, x.dtype) if begun else self._operand(x, names or {}) for x in e.ins)
        bodies = tuple(b if b is None else self._block(b) for b in (e.body, e.backward))
        return e.prim, params, ins, bodies, e.recomputed

    def _operand(self, x: Operand, names: dict[int, int]) -> object:
        if isinstance(x, Constant):
            if x.shape == () and x.dtype != KEY:
                return x.dtype, np.asarray(x.value).tobytes()
            return id(x)
        return x.shape, x.dtype, names.get(id(x), -1)

    def _block(self, block: Block) -> object:
        names = {id(v): n for n, v in enumerate(block.ins)}
        found = []
        for e in block.equations:
            found.append((self._plain(e, names), tuple((y.shape, y.dtype) for y in e.outs)))
            for y in e.outs:
                names[id(y)] = len(names)
        types = tuple((v.shape, v.dtype) for v in block.ins)
        return types, tuple(found), tuple(self._operand(x, names) for x in block.outs)


def _text(value: object) -> object:
    return (value.shape, str(value.dtype), value.tobytes()) if isinstance(value, np.ndarray) else repr(value)


def _gives_keys(e: Equation) -> bool:
    draws = ("random_bits", "random_uniform", "random_normal")
    return e.prim not in draws and not any(map(has_fractions, e.outs))
