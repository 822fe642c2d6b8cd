"""Similar layers that did not become a loop, and the line that prevents it.

Layers are similar if their parameters have the same paths except for one number, and the same shapes and
types. The equations from the first that reads a parameter of one layer to the first that reads one of the
next are compared with those of the following layer. The reported line is that of the first equation that
differs, or that reads a value that a loop could not provide.
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

from layoutopt.importers.arrays.contract import Equation, Var
from layoutopt.importers.arrays.layers import LoopFit, RerolledBlock

_FEWEST = 3
"""Layers that are worth a note; what lies behind the last one's first equation is not known to be its own."""
_MATRICES = 2
"""A layer has as many parameters of two or more axes: one alone is part of a layer, as `Dense_0`."""


def why_apart(program: RerolledBlock, parameters: Sequence[Var]) -> list[str]:
    """A note about each sequence of similar layers that did not become a loop."""
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
