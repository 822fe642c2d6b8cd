"""The sources of dimension names: the function's arguments, and the names given so far."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from layoutopt.importers.arrays.classes import Classes, FactorNode
from layoutopt.importers.arrays.contract import EquationBlock, Leaf, Operand, Var
from layoutopt.importers.arrays.relations import AxisPart, Copies

_KINDS = ("kernel", "weight", "w", "bias", "b", "scale", "embedding", "embeddings", "gamma", "beta", "value")


@dataclass(frozen=True)
class ArgumentArrays:
    """The arguments: variables of the block with their arrays.

    Attributes:
      stacks: variable that several layers' arrays became -> these.
    """

    parameters: Sequence[tuple[Var, Leaf]]
    state: Sequence[tuple[Var, Leaf]]
    batch: Sequence[tuple[Var, Leaf]]
    stacks: Mapping[Var, Sequence[Leaf]] = field(default_factory=dict)

    def all(self) -> Iterator[tuple[Var, Leaf]]:
        yield from self.parameters
        yield from self.state
        yield from self.batch

    def given(self) -> Iterator[tuple[Leaf, Var, int]]:
        """The arrays as the user gives them: their variable, and which of its axes is their first."""
        for v, leaf in self.all():
            for own in self.stacks.get(v, (leaf,)):
                yield own, v, int(v in self.stacks)


class ClassNames:
    """Every class's name, the first that it is given; every name is one dimension.

    Attributes:
      found: class -> its name.
      taken: the names.
      in_parameters: number of axes of parameters in a class.
      held: the classes of each parameter.
      counts: classes that count the pieces that an axis is cut into.
    """

    def __init__(self, block: EquationBlock, classes: Classes, arrays: ArgumentArrays) -> None:
        self.block, self.classes, self.arrays = block, classes, arrays
        self.found: dict[FactorNode, str] = {}
        self.taken: set[str] = set()
        self.in_parameters: Counter[FactorNode] = Counter()
        for v, _ in arrays.parameters:
            self.in_parameters.update(classes.all(v))
        self.held = [set(classes.all(v)) for v, _ in arrays.parameters]
        self.of_batch = {n for v, _ in arrays.batch for n in classes.all(v)}
        self.counts: set[FactorNode] = set()
        for _, relation in classes.factors.related:
            if isinstance(relation, AxisPart) and not isinstance(relation, Copies):
                own, inner = classes.of(*relation.x), classes.of(*relation.y)
                self.counts.update(own[: len(own) - len(inner)])

    def give(self, node: FactorNode, name: str) -> None:
        """A name for a class that has none; numbered if another has it."""
        root = self.classes.find(node)
        if root in self.found:
            return
        self.found[root] = self.free(name)
        self.taken.add(self.found[root])

    def give_axis(self, v: Operand, axis: int, name: str) -> None:
        """A name for the outermost factor of an axis, if it has any."""
        for node in self.classes.of(v, axis)[:1]:
            self.give(node, name)

    def free(self, name: str) -> str:
        name = re.sub(r"[^\w.\-]+", "_", name) or "dim"
        number, full = 2, name
        while full in self.taken:
            full, number = f"{name}_{number}", number + 1
        return full


def last(path: str, numbered: bool = False) -> str:
    """The most specific part of a path, with the number of its layer."""
    parts = [p for p in path.split("/") if p]
    names = [i for i, p in enumerate(parts) if not re.fullmatch(r"\d+(-\d+)?", p)]
    kept = [i for i in names if parts[i].lower() not in _KINDS] or names
    if not kept:
        return "dim"
    at = kept[-1]
    found = parts[at]
    if not numbered:
        return re.sub(r"_?\d+(-\d+)?$", "", found) or found
    return f"{found}_{parts[at + 1]}" if at + 1 < len(parts) and parts[at + 1].isdigit() else found
