"""Names of dimensions by their use in the operations: a dimension looked up by token numbers is `vocab`, one
summed out by a product of two activations and part of parameters is `d_kv`, and so on.

The sources of dimension names: the function's arguments, and the names given so far.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations

from layoutopt.importers.arrays.classes import PARAMETER, Classes, FactorNode
from layoutopt.importers.arrays.contract import Equation, EquationBlock, Leaf, Operand, Var
from layoutopt.importers.arrays.indexing import indexing
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
      counts: classes that count the pieces that an axis is cut into.
    """

    def __init__(self, block: EquationBlock, classes: Classes, arrays: ArgumentArrays) -> None:
        self.block, self.classes, self.arrays = block, classes, arrays
        self.found: dict[FactorNode, str] = {}
        self.taken: set[str] = set()
        self.in_parameters: Counter[FactorNode] = Counter()
        for v, _ in arrays.parameters:
            self.in_parameters.update(classes.all(v))
        self._held: dict[FactorNode, list[set[FactorNode]]] = defaultdict(list)
        for held in (set(classes.all(v)) for v, _ in arrays.parameters):
            for node in held:
                self._held[node].append(held)
        self.of_batch = {n for v, _ in arrays.batch for n in classes.all(v)}
        self.counts: set[FactorNode] = set()
        for _, relation in classes.factors.related:
            if isinstance(relation, AxisPart) and not isinstance(relation, Copies):
                own, inner = classes.of(*relation.x), classes.of(*relation.y)
                self.counts.update(own[: len(own) - len(inner)])

    def holding(self, nodes: Collection[FactorNode]) -> list[set[FactorNode]]:
        """The classes of each parameter that has some classes, at least one."""
        return [own for own in self._held.get(next(iter(nodes)), ()) if own.issuperset(nodes)]

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


GIVEN_LENGTH = "given_length"
"""The axis of tokens [batch, length + 1] from which a loss cuts its inputs and its targets."""


def name_roles(names: ClassNames) -> None:
    """Names the axes of the batch, and the axes that products, look-ups, convolutions and loops identify."""
    roles = _Roles(names)
    roles.batch()
    roles.operations()


class _Roles:
    def __init__(self, names: ClassNames) -> None:
        self.names = names
        self.block, self.classes, self.arrays = names.block, names.classes, names.arrays

    def batch(self) -> None:
        leaves = [(v, leaf) for v, leaf in self.arrays.batch if v.shape]
        places = self._places()
        for v, _ in sorted(leaves, key=lambda x: -len(x[0].shape)):
            if "batch" not in self.names.taken:
                self.names.give_axis(v, 0, "batch")
        self._others("batch", "other_batch")
        for v, leaf in leaves:
            self.names.give_axis(v, 0, f"{last(leaf.path)}_batch")
            if v.dtype.startswith("int") and len(v.shape) >= 2 and id(v) not in places:
                for part in self._shortened(v)[:1]:
                    self.names.give_axis(part, 1, "length")
                    self.names.give_axis(v, 1, GIVEN_LENGTH)
                taken = "length" in self.names.taken
                self.names.give_axis(v, 1, f"{last(leaf.path)}_length" if taken else "length")

    def _shortened(self, v: Var) -> list[Var]:
        """The parts of tokens [batch, length + 1] as inputs and targets; empty if anything reads them all."""
        reads = [e for e in self.block.walk() if any(x is v for x in e.ins)]
        cut = all(e.prim == "slice" and e.out.shape[1] < v.shape[1] for e in reads)
        return [e.out for e in reads] if cut else []

    def _places(self) -> set[int]:
        """ids of inputs whose numbers are places in other values, as the ends of a graph's edges are: none of
        tokens, which look up parameters."""
        found, tokens = set[int](), set[int]()
        for v, _ in self.arrays.batch:
            numbers = {id(v)}
            for e in self.block.walk() if v.dtype.startswith("int") else ():
                if e.prim.startswith(("gather", "scatter")) and id(e.ins[1]) in numbers:
                    at = indexing(e)
                    rows = e.ins[0] if e.prim == "gather" else e.ins[2]
                    made_of = self.classes.made_of.get(id(rows), 0)
                    if len(at.looked_up) == 1 and at.others:
                        (tokens if made_of == PARAMETER else found).add(id(v))
                if any(id(x) in numbers for x in e.ins):
                    numbers.update(id(y) for y in e.outs if y.dtype.startswith("int"))
        return found - tokens

    def operations(self) -> None:
        equations = list(self.block.walk())
        whole = {id(v) for v, leaf in self.arrays.batch if v.dtype.startswith("int")}
        from_batch = _reached(equations, whole)
        padded = {id(e.out): e.ins[0] for e in equations if e.prim == "pad"}
        for e in equations:
            if e.prim == "scan":
                stacks = [*e.ins[e.params["consts"] + e.params["carry"] :], *e.outs[e.params["carry"] :]]
                in_params = [n for x in stacks if x.shape for n in self.classes.of(x, 0)[:1]]
                for node in in_params[:1]:
                    self.names.give(node, "layers" if self.names.in_parameters[node] else "time")
        for e in equations:
            if e.prim == "gather":
                self._lookup(e, from_batch)
            elif e.prim == "cross_entropy":
                kind = "vocab" if "length" in self.names.taken else "classes"
                self.names.give_axis(e.ins[0], len(e.ins[0].shape) - 1, kind)
        for e in equations:
            if e.prim == "dot_general":
                (lc, _), (lb, _) = e.params["dimension_numbers"]
                self._attention(e, lc, lb, e.out)
            elif e.prim == "attention":
                rank = len(e.ins[1].shape)
                self._attention(e, (len(e.ins[0].shape) - 1,), range(rank - 2))
            elif e.prim == "conv_general_dilated":
                self._convolution(e, padded)
            elif e.prim == "top_k":
                for node in self.classes.of(e.ins[0], len(e.ins[0].shape) - 1):
                    if self.names.in_parameters[node]:
                        self.names.give(node, "experts")
                for node in self.classes.of(e.out, len(e.out.shape) - 1):
                    self.names.give(node, "top_k")
        for e in equations:
            if e.prim == "dot_general":
                self._heads(e)
            elif e.prim == "attention":
                for node in self.classes.of(e.out, len(e.out.shape) - 1):
                    if self.names.in_parameters[node]:
                        self.names.give(node, "d_v")
        self._feed_forward()
        self._others("length", "memory_length")

    def _others(self, known: str, name: str) -> None:
        """Names the other side of pairs of what has a name."""
        for pair in self.classes.refused:
            for one, other in permutations(map(self.classes.find, pair)):
                if self.names.found.get(one) == known and not self.names.in_parameters[other]:
                    self.names.give(other, name)

    def _lookup(self, e: Equation, from_batch: set[int]) -> None:
        """A table of parameters that numbers of the batch look up."""
        found, table = indexing(e), e.ins[0]
        if len(found.looked_up) != 1:
            return
        nodes = self.classes.of(table, found.looked_up[0][0])
        if len(nodes) != 1:
            return
        if found.common:
            if not self.names.in_parameters[nodes[0]]:
                return
            self.names.give(nodes[0], "vocab" if "length" in self.names.taken else "classes")
        elif self.names.in_parameters[nodes[0]] and len(table.shape) == 2:
            self.names.give(nodes[0], "vocab" if id(e.ins[1]) in from_batch else "positions")
            for a, _ in found.kept if id(e.ins[1]) in from_batch else ():
                self.names.give_axis(table, a, "d_model")

    def _attention(
        self, e: Equation, lc: Sequence[int], lb: Sequence[int], logits: Operand | None = None
    ) -> None:
        """A product of two activations over a dimension that parameters have too.

        Args:
          lc, lb: axes of the first that are summed out, and that both have.
          logits: the product; None where it is not a value.
        """
        x, y = e.ins[:2]
        if not lb or len(lc) != 1:
            return
        summed = self.classes.of(x, lc[0])
        if any(self.classes.made_of.get(id(v)) == PARAMETER for v in (x, y)):
            return
        heads = [n for a in lb for n in self.classes.of(x, a) if self.names.in_parameters[n]]
        shared = {n for a in lb for n in self.classes.of(x, a)}
        groups = [
            n
            for operand in (x, y)
            for n in self.classes.all(operand)
            if n not in shared and n not in summed and self.names.holding((n, *heads))
        ]
        if not heads or not summed:
            return
        if not self.names.holding((summed[-1], *heads)):
            # The product of weights and values sums out positions.
            left = [n for n in groups if n not in self.names.found]
            for node in left if len(left) == 1 else ():
                self.names.give(node, "d_v")
            return
        for node in summed[-1:]:
            self.names.give(node, "d_kv")
        for node in summed[:-1]:
            self.names.give(node, "d_kv_parts")
        if len(heads) == 2 and not groups:
            # Keys were repeated for every group of queries: fewer parameters have the groups.
            heads.sort(key=lambda n: -self.names.in_parameters[n])
            groups = [heads.pop()]
        for node in heads:
            self.names.give(node, "heads")
        for node in groups:
            self.names.give(node, "group")
        places = [n for v in (x, y) for n in self.classes.of(v, len(v.shape) - 2)]
        known = places if logits is None else self.classes.all(logits)
        ends = [n for n in known if n not in shared and n not in groups]
        if len(ends) == 2:
            ends.sort(key=lambda n: (n not in self.names.found, -self.names.in_parameters[n]))
            self.names.give(ends[0], "length")
            self.names.give(ends[1], "memory_length")
        projections = self.names.holding((*heads, *summed))
        others = Counter(n for nodes in projections for n in nodes if n not in self.names.counts)
        if others and not others.keys() & {n for n, name in self.names.found.items() if name == "d_model"}:
            left = [n for n, _ in others.most_common() if n not in self.names.found]
            for node in left[:1]:
                self.names.give(node, "d_model")

    def _heads(self, e: Equation) -> None:
        """The batch dimension of a product of two activations, if parameters have it and it has no name yet.

        `_attention` misses queries and keys whose last axis was taken apart and put together again, as
        rotary positions on even and odd elements do: no parameter has the axis of the result.
        """
        _, (lb, _) = e.params["dimension_numbers"]
        if any(self.classes.made_of.get(id(v)) == PARAMETER for v in e.ins[:2]):
            return
        shared = {n for a in lb for n in self.classes.of(e.ins[0], a) if self.names.in_parameters[n]}
        unnamed = [n for n in shared if n not in self.names.found]
        if len(shared) == len(unnamed) == 1:
            self.names.give(unnamed[0], "heads")

    def _convolution(self, e: Equation, padded: Mapping[int, Operand]) -> None:
        d = e.params["dimension_numbers"]
        (x, w), spatial = e.ins[:2], len(d.lhs_spec) - 2
        names = {1: ("length",), 2: ("height", "width"), 3: ("depth", "height", "width")}.get(spatial, ())
        for name, a, t in zip(names, d.lhs_spec[2:], d.rhs_spec[2:], strict=False):
            # An image is called so before what pads it.
            for operand in (padded.get(id(x), x), x):
                self.names.give_axis(operand, a, name)
            self.names.give_axis(w, t, f"{name}_taps")
        for node in self.classes.of(x, d.lhs_spec[1])[:1]:
            if node in self.names.of_batch:
                self.names.give(node, "channels")

    def _feed_forward(self) -> None:
        """What lies between two projections from and to d_model."""
        model = next((n for n, name in self.names.found.items() if name in ("d_model", "embed")), None)
        if model is None:
            return
        beside: Counter[FactorNode] = Counter()
        for v, _ in self.arrays.parameters:
            nodes = self.classes.all(v)
            if model in nodes:
                beside.update(
                    n
                    for n in nodes
                    if n != model and n not in self.names.found and n not in self.names.counts
                )
        for node, count in beside.most_common():
            if count >= 2:
                self.names.give(node, "d_ff")


def _reached(equations: Sequence[Equation], sources: set[int]) -> set[int]:
    """ids of what follows from some variables."""
    found = set(sources)
    for e in equations:
        if any(id(x) in found for x in e.ins):
            found.update(map(id, e.outs))
            for inner in (e.body, e.backward):
                if inner is not None:
                    found.update(id(v) for x, v in zip(e.ins, inner.ins, strict=False) if id(x) in found)
    return found
