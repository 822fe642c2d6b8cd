"""Unrolled layers as loops again.

A Python loop over equal layers traces to one sequence of equations again and again. Such a run becomes one
`scan` over stacked parameters, as if its author had written it so: the output of one layer is the carry of
the next, parameters of corresponding paths are stacked, and values that all layers read stay outside.
Candidates are sequences of equal equations (primitive, its parameters, shapes, constants). A run is accepted
only if each operand has the same origin in all layers: the same equation of its own layer or of the previous
one, the same value, or a parameter whose path differs only by numbers. The loop therefore computes the same
function.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from layoutopt.importers.arrays.classes import Classes
from layoutopt.importers.arrays.contract import KEY, Equation, EquationBlock, Operand, Var, live
from layoutopt.importers.arrays.layers import PRODUCTS, LoopFit, RerolledBlock

_NEAR = 32
"""How many later occurrences of an equation are tried as the next layer's."""
_STARTS = 48
"""How many equations are tried as the first of a layer."""


@dataclass(frozen=True)
class RerolledRun:
    """Layers that became a loop.

    Attributes:
      layers: their equations as they were traced, layer by layer.
      loop: the loop that replaces them.
    """

    layers: tuple[tuple[Equation, ...], ...]
    loop: Equation


@dataclass
class Rerolled:
    """A block with its runs of equal layers as loops.

    Attributes:
      stacks: parameters and state that were stacked, by their stack.
      twins: id of a value of the traced block -> the value of a loop's body that represents it.
      left: id of a value of the traced block that is read after its loop -> the stack of all layers'.
      notes: about layers that stayed on their own.
    """

    block: EquationBlock
    runs: list[RerolledRun] = field(default_factory=list)
    stacks: dict[Var, tuple[Var, ...]] = field(default_factory=dict)
    twins: dict[int, Operand] = field(default_factory=dict)
    left: dict[int, Var] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def alias(self, classes: Classes) -> None:
        """Gives the values of the traced block the dimensions of the values that represent them."""
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
    block: EquationBlock, parameters: Iterable[Var], state: Mapping[Var, int], keys: Iterable[Var]
) -> Rerolled:
    """The block with its runs of equal layers as loops.

    Args:
      state: stored values that are not trained -> index of the result with the new value, -1 for none.
      keys: random keys among the variables.
    """
    return _Rerolling(block, RerolledBlock(block, parameters, state, keys)).done()


class _Rerolling:
    def __init__(self, block: EquationBlock, program: RerolledBlock) -> None:
        self.ins, self.program = block.ins, program
        self.made = Rerolled(block, stacks=program.stacks)

    def done(self) -> Rerolled:
        while self._one():
            pass
        made = self.made
        made.notes = why_apart(
            self.program, [v for v in self.ins if self.program.roles.get(id(v)) == "params"]
        )
        if made.runs:
            self._read_elements()
            stacked = {id(v) for members in made.stacks.values() for v in members}
            ins = [v for v in self.ins if id(v) not in stacked]
            for v, n in self.program.state.items():
                if id(v) in self.program.member and n >= 0:
                    new, stack = self.program.traced_outs[n], self.program.member[id(v)][0]
                    self.program.outs[n] = stack if new is v else made.left.get(id(new), self.program.outs[n])
            # What went into loops may be left over.
            equations = live(self.program.equations, self.program.outs)
            made.block = EquationBlock([*ins, *made.stacks], equations, self.program.outs)
        return made

    def _one(self) -> bool:
        """Rolls up the run that saves most; whether there is one."""
        for first, period, length in self._candidates():
            fit = self._fitted(first, period, length)
            if fit is not None:
                self._replace(fit)
                self.program.index()
                return True
        return False

    def _candidates(self) -> list[tuple[int, int, int]]:
        """(first, period, length) of sequences that repeat after a period, those that save most first."""
        codes, n = self.program.codes, len(self.program.codes)
        at: dict[int, list[int]] = defaultdict(list)
        for i, e in enumerate(self.program.equations):
            if e.prim in PRODUCTS or any(id(x) in self.program.member for x in e.ins):
                at[int(codes[i])].append(i)
        periods = {b - a for own in at.values() for i, a in enumerate(own) for b in own[i + 1 : i + _NEAR]}
        found = []
        for period in periods:
            equal = np.concatenate(([False], codes[:-period] == codes[period:], [False]))
            edges = np.flatnonzero(equal[1:] != equal[:-1])
            for begin, end in zip(edges[::2], edges[1::2], strict=True):
                if end - begin >= period:
                    found.append((int(begin), period, int(end - begin) + period))
        assert all(first + length <= n for first, _, length in found)
        return sorted(found, key=lambda c: (-(c[2] // c[1] - 1) * c[1], c[1], c[0]))

    def _fitted(self, first: int, period: int, length: int) -> LoopFit | None:
        """The loop of a candidate. Of all places where a layer may begin, that where least is handed on."""
        widths = self._handed_on(first, period, length)
        most = length // period
        for count in (most, most - 1):
            if count < 2:
                return None
            starts = sorted(range(length - count * period + 1), key=lambda r: (widths[r % period], r))
            for r in starts[:_STARTS]:
                fit = LoopFit(self.program, first + r, period, count)
                if fit.holds():
                    return fit
        return None

    def _handed_on(self, first: int, period: int, length: int) -> list[int]:
        """Elements of what crosses from one layer to the next, for each equation that layers may begin at."""
        steps = [0] * (period + 1)
        for n in range(first, min(first + 2 * period, first + length)):
            for y in self.program.equations[n].outs:
                last = min(self.program.last.get(id(y), n), n + period)
                begin, end = max(n + 1, first + period), min(last, first + 2 * period - 1)
                if begin <= end and y.dtype != KEY:
                    steps[begin - first - period] += math.prod(y.shape)
                    steps[end + 1 - first - period] -= math.prod(y.shape)
        return list(np.cumsum(steps[:period]))

    def _replace(self, fit: LoopFit) -> None:
        equations, made = self.program.equations, self.made
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
        for e in fit.outside:
            self.program.forms.follow(e)
        self.program.equations = [*equations[: fit.first], *fit.outside, loop, *elements, *rest]
        self.program.outs = [renamed.get(id(x), x) for x in self.program.outs]
        made.runs.append(RerolledRun(layers, loop))

    def _left(
        self, fit: LoopFit, loop: Equation, slot: tuple[int, int], i: int, elements: list[Equation]
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
        read = {id(x) for e in self.program.equations for x in e.ins} | {id(x) for x in self.program.outs}
        first: list[Equation] = []
        names: dict[int, Operand] = {
            number: self._element(stack, i, first, "")
            for number, (stack, i) in self.program.member.items()
            if number in read
        }
        self.program.equations = [*first, *(self._renamed(e, names) for e in self.program.equations)]
        self.program.outs = [names.get(id(x), x) for x in self.program.outs]


def _pair(e: Equation, other: Equation, twins: dict[int, Operand]) -> None:
    """Notes of an equation that equals another one which value stands for which."""
    twins.update((id(y), x) for x, y in zip(e.outs, other.outs, strict=True))
    for a, b in ((e.body, other.body), (e.backward, other.backward)):
        if a is None or b is None:
            continue
        twins.update((id(y), x) for x, y in zip(a.ins, b.ins, strict=True))
        for x, y in zip(a.equations, b.equations, strict=True):
            _pair(x, y, twins)


_FEWEST = 3
"""Layers that are worth a note; what lies behind the last one's first equation is not known to be its own."""
_MATRICES = 2
"""A layer has as many parameters of two or more axes: one alone is part of a layer, as `Dense_0`."""


def why_apart(program: RerolledBlock, parameters: Sequence[Var]) -> list[str]:
    """A note about each sequence of similar layers that did not become a loop, with the line that is why.

    Layers are similar if their parameters have the same paths except for one number, and the same shapes and
    types. The equations from the first that reads a parameter of one layer to the first that reads one of the
    next are compared with those of the following layer. The line is that of the first equation that differs,
    or that reads a value that a loop could not provide.
    """
    found = []
    left = [v for v in parameters if id(v) not in program.member]
    for names, layers in _alike(left):
        begins = _begins(program, layers)
        line = _line(program, names, begins) if begins else ""
        if line:
            between = f"{names[0]} to {names[-1]}"
            found.append(
                f"{len(layers)} similar layers ({between}) did not become one loop, because they differ: "
                f"{line}"
            )
    return found


def _alike(parameters: Sequence[Var]) -> Iterator[tuple[list[str], list[dict[str, Var]]]]:
    """Paths and parameters of consecutive layers that are alike, of each such sequence."""
    stacks: dict[str, dict[int, dict[str, Var]]] = defaultdict(lambda: defaultdict(dict))
    for v in parameters:
        for number in re.finditer(r"\d+", v.path):
            stacks[v.path[: number.start()]][int(number[0])][v.path[number.end() :]] = v
    for before, numbered in stacks.items():
        run: list[int] = []
        for n in [*sorted(numbered), None]:
            if run and (n is None or _types(numbered[n]) != _types(numbered[run[-1]])):
                matrices = sum(len(v.shape) > 1 for v in numbered[run[0]].values())
                if len(run) >= _FEWEST and matrices >= _MATRICES:
                    yield [f"{before}{i}" for i in run], [numbered[i] for i in run]
                run = []
            run += [] if n is None else [n]


def _types(layer: Mapping[str, Var]) -> dict[str, tuple[tuple[int, ...], str]]:
    return {path: (v.shape, v.dtype) for path, v in layer.items()}


def _begins(program: RerolledBlock, layers: Sequence[Mapping[str, Var]]) -> list[int]:
    """Where each layer begins: the first equations that compute something of one of their parameters and of
    the batch, of the parameter of which they are most evenly apart. Empty if layers take turns."""
    owner = {id(v): {(path, n)} for n, layer in enumerate(layers) for path, v in layer.items()}
    begins: dict[str, dict[int, int]] = defaultdict(dict)
    for at, e in enumerate(program.equations):
        owners = set[tuple[str, int]]().union(*(owner[id(x)] for x in e.ins if id(x) in owner))
        if all(id(y) in program.forms.of_parameters for y in e.outs):
            owner.update((id(y), owners) for y in e.outs)
        else:
            for path, n in owners:
                begins[path].setdefault(n, at)
    found = ([each[n] for n in range(len(layers)) if n in each] for each in begins.values())
    rising = [x for x in found if len(x) == len(layers) and all(a < b for a, b in pairwise(x))]
    return min(rising, key=lambda x: (len({b - a for a, b in pairwise(x)}), x), default=[])


def _line(program: RerolledBlock, names: Sequence[str], begins: Sequence[int]) -> str:
    """File, line and primitive of what differs; '' if they are no loop for another reason."""
    forms, equations = program.forms, program.equations
    parts = [equations[a:b] for a, b in pairwise(begins)]
    for number, (one, other) in enumerate(pairwise(parts)):
        for e, like in zip(one, other, strict=False):
            if forms.code(e) != forms.code(like):
                return f"{names[number]} has {_named(e)}, where {names[number + 1]} has {_named(like, e)}"
        if len(one) != len(other):
            longer, which = (one, number) if len(one) > len(other) else (other, number + 1)
            return f"only {names[which]} has {_named(longer[min(len(one), len(other))])}"
    fit = LoopFit(program, begins[0], len(parts[0]), len(parts))
    if fit.holds() or fit.failed is None:
        return ""
    return f"{_named(fit.failed)} reads values that are not available in every layer"


def _named(e: Equation, beside: Equation | None = None) -> str:
    """An equation as its line and primitive, or what of these differs from another."""
    if beside is not None and (e.where, e.prim) == (beside.where, beside.prim):
        return "other constants or shapes"
    return f"{e.where or 'the loss'} ({e.prim})"
