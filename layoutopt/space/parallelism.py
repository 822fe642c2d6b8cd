"""The parallelism of the dimensions of a model, read off its graph: names decide nothing.

data      the first dimension of the inputs, and what it is called after renames and reshapes
sequence  other dimensions of inputs that no trained variable has (length, height), and their other names
weights   dimensions of trained variables that are neither: split, they make tensor parallelism. If there are
          others, not those that an operation needs whole (the size of a head) or that inputs have (an image's
          pixels): nobody splits them
inner     those of the weights over which a product of activations with a weight sums, and that layers neither
          carry on nor are given (d_ff, heads; not vocab, d_model); all of the weights if there are none
experts   those of the weights that never stand beside the batch, but under another name do: tokens are sent
          to them
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from mesh_tf_core.ir.blocks import Connection
from mesh_tf_core.ir.op import PRODUCTS
from mesh_tf_core.model import Model
from mesh_tf_core.ops.shape import SliceDim, groups
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Parallelism:
    """The dimensions of one model by the parallelism that splitting them gives.

    Attributes:
      data: the batch first.
      weights: those that the fewest variables have first.
      beside: pairs of dimensions that occur in one tensor.
    """

    data: tuple[str, ...]
    sequence: tuple[str, ...]
    weights: tuple[str, ...]
    inner: tuple[str, ...]
    experts: tuple[str, ...]
    beside: frozenset[frozenset[str]]

    def apart(self, name: str, others: Iterable[str]) -> bool:
        """True if no tensor has a dimension together with any of some others."""
        return not any(frozenset((name, other)) in self.beside for other in others if other != name)


def parallelism(model: Model) -> Parallelism:
    """The parallelism of the dimensions of a model."""
    graph = model.step_graph
    return graph.remembered("parallelism", lambda: _parallelism(model, graph))


def _parallelism(model: Model, graph: Graph) -> Parallelism:
    links = _links(graph)
    variables = Counter(n for v in graph.variables.values() if v.own_storage for n in v.shape.names)
    data = _closed([model.batch_dim] if model.batch_dim else [], links)
    given = [n for t in graph.inputs.values() for n in t.shape.names]
    sequence = _closed((n for n in given if n not in data and n not in variables), links)
    beside = {
        frozenset(pair)
        for names in {t.shape.names for t in graph.tensors}
        for pair in itertools.combinations(names, 2)
    }
    taken = {*data, *sequence, *looped(graph)}
    own = [n for n in sorted(variables, key=lambda n: variables[n]) if n not in taken]
    unusual = {*given, *_whole(graph)}
    weights = [n for n in own if n not in unusual] or own
    experts = [
        n
        for n in weights
        if frozenset((n, model.batch_dim)) not in beside
        and any(frozenset((other, model.batch_dim)) in beside for other in links.get(n, ()))
    ]
    summed = _summed(model, {*data, *sequence})
    inner = [n for n in weights if n in summed] or weights
    return Parallelism(
        tuple(data), tuple(sequence), tuple(weights), tuple(inner), tuple(experts), frozenset(beside)
    )


def _summed(model: Model, rows: set[str]) -> set[str]:
    """Dimensions over which products of weights with what has rows sum on the way to the loss, but those that
    layers carry on, and those that layers are given and do not make, as the width of a text or of a time."""
    found, given, graph = set[str](), set[str](), model.graph
    for outer in graph.blocks[0].nodes:
        nodes = [outer, *(inner for inner, _ in outer.body.walk())] if outer.body else [outer]
        made, summed = set[str](), set[str]()
        for node in nodes:
            if node.op.kind in PRODUCTS and node.outputs[0] < model.loss.id:  # gradients come after it
                shapes = [{*graph.tensor(t).shape.names} for t in node.inputs]
                sums = {*node.op.roles(*(graph.tensor(t).type for t in node.inputs)).reduced}
                summed.update(*(sums & shape for shape in shapes if not shape & rows))
                made.update(*(shape - sums for shape in shapes if not shape & rows))
        read = {t for node in nodes[1:] for t in node.inputs}.difference(*(n.outputs for n in nodes[1:]))
        shapes = [{*graph.tensor(t).shape.names} for t in read]
        given.update(*((summed - made) & shape for shape in shapes if shape & rows))
        found |= summed
    return found - given - {n for b in graph.blocks for t in b.carry_in for n in graph.tensor(t).shape.names}


def looped(graph: Graph) -> frozenset[str]:
    """The dimensions that count the iterations of loops, which no axis splits but stages."""
    return frozenset(b.dim.name for b in graph.blocks[1:])


def cut(graph: Graph) -> set[str]:
    """Dimensions of parts of the inputs, and of what these are called, before anything is computed."""
    held = {t.id for t in graph.inputs.values()}
    for node, _ in graph.walk():
        if (
            held.issuperset(node.inputs)
            and node.inputs
            and (node.op.regroups or isinstance(node.op, SliceDim))
        ):
            held.update(node.outputs)
    return {name for index in held for name in graph.tensor(index).shape.names}


def _whole(graph: Graph) -> set[str]:
    """Dimensions that some operation needs all of on every device."""
    found: set[str] = set()
    for node, _ in graph.walk():
        if not (isinstance(node.op, Connection) or node.op.expands() or node.op.lowers()):
            found.update(node.op.roles(*(graph.tensor(t).type for t in node.inputs)).whole)
    return found


def _links(graph: Graph) -> dict[str, dict[str, None]]:
    """Dimension -> what it becomes where elements are regrouped: a split of a group's first dimension stays
    one of the new group's first."""
    links: dict[str, dict[str, None]] = {}
    for node, _ in graph.walk():
        if not node.op.regroups or len(node.inputs) != 1 or len(node.outputs) != 1:
            continue
        before, after = (graph.tensor(t).shape.places for t in (*node.inputs, *node.outputs))
        for old, new in groups(before, after) if before.size == after.size else ():
            if old and new and old[0].name != new[0].name:
                links.setdefault(old[0].name, {})[new[0].name] = None
                links.setdefault(new[0].name, {})[old[0].name] = None
    return links


def _closed(names: Iterable[str], links: dict[str, dict[str, None]]) -> list[str]:
    """Names and all that they are linked to."""
    found = dict.fromkeys(names)
    todo = list(found)
    while todo:
        new = [n for n in links.get(todo.pop(), ()) if n not in found]
        found.update(dict.fromkeys(new))
        todo += new
    return list(found)
