"""The gradients of a step: from which stages of storage on they are split, as memory rows count them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from layoutopt.formulation.dependencies import Dependencies
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.structure import Scan
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.tracing.graph import Graph

NEVER = len(STAGES)
"""A stage that no variable has."""


@dataclass(frozen=True)
class Gradient:
    """A tensor that is a variable's gradient, or becomes one by casts or a loop.

    Attributes:
      split: stage from which it is split before the update.
      scattered: stage from which a pending sum of it is scattered.
      narrow: bytes of an element before the casts that it comes from, where they are fewest.
    """

    variable: str
    split: int
    scattered: int
    narrow: int = 0


def gradients(dependencies: Dependencies, decided: Callable[[str], bool]) -> dict[int, Gradient]:
    """Tensor -> what is known of it as a gradient; `decided` says of which variables the storage is."""
    graph = dependencies.graph
    found: dict[int, Gradient] = {}
    for tensor, owner in graph.gradient_of.items():
        if decided(owner):
            node = graph.producer.get(tensor)
            looped = node is not None and isinstance(node.op, Scan)
            inside = bool(graph.tensor(tensor).block)
            _enter(found, graph, tensor, Gradient(owner, 2 if looped else NEVER, 2 if inside else 1))
    for inner, outs in dependencies.outer.items():
        owners = {graph.gradient_of[o] for o in outs if o in graph.gradient_of}
        if inner not in found and len(owners) == 1 and all(map(decided, owners)):
            _enter(found, graph, inner, Gradient(owners.pop(), NEVER, 2))
    return found


def _enter(found: dict[int, Gradient], graph: Graph, tensor: int, gradient: Gradient) -> None:
    """Enters a gradient and what it is cast from."""
    chain = [tensor]
    node = graph.producer.get(tensor)
    while node is not None and node.op.converts:
        chain.append(node.inputs[0])
        node = graph.producer.get(node.inputs[0])
    sizes = [itemsize(graph.tensor(t).dtype) for t in chain]
    for i, t in enumerate(chain):
        found.setdefault(t, replace(gradient, narrow=min(sizes[i:])))
