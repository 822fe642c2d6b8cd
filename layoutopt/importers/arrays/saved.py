"""Saved values of a function with recomputed layers (`mesh_tf_core.lower.remat_policy`)."""

from layoutopt.importers.arrays.origin import ImportedFunction
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.rematerialization import Rematerialization, rematerialization
from mesh_tf_core.tracing.graph import Graph

SAVED = "layoutopt_saved"
"""The names that `jax.ad_checkpoint.checkpoint_name` gives them."""


def saved_values(graph: Graph, origin: ImportedFunction, recompute: Policies) -> frozenset[int]:
    """Ids of the values of the traced function that are saved.

    Args:
      graph: with the gradients.
      recompute: loops that backward recomputes, and the values that they keep.

    Raises:
      UserError: a kept value is not a value of the function (it is part of a fused operation).
    """
    remat = rematerialization(graph, recompute)
    kept = [
        (block, t) for block in graph.blocks if remat.again(block) for t in sorted(remat.second(block).kept)
    ]
    if not kept:
        return frozenset()
    first: dict[int, int] = {}
    for e in origin.rerolled.block.walk():
        for y in e.outs:
            if id(y) in origin.tensors:
                first.setdefault(_named_so(origin.tensors[id(y)], graph), id(y))
    found: set[int] = set()
    for block, tensor in kept:
        value = first.get(_named_so(tensor, graph))
        if value is None:
            raise _lacking(remat, block, tensor, graph, origin)
        found.add(value)
    found |= {number for number, twin in origin.rerolled.twins.items() if id(twin) in found}
    return frozenset(found.intersection(id(y) for e in origin.block.walk() for y in e.outs))


def _named_so(tensor: int, graph: Graph) -> int:
    """What a tensor is another name of."""
    node = graph.producer.get(tensor)
    while node is not None and node.op.free and node.inputs:
        tensor = node.inputs[0]
        node = graph.producer.get(tensor)
    return tensor


def _lacking(
    remat: Rematerialization, block: Block, tensor: int, graph: Graph, origin: ImportedFunction
) -> UserError:
    assert block.dim is not None
    maker, dim = graph.producer.get(tensor), block.dim.name
    what = maker.path if maker is not None else "a loop inside"
    return UserError(
        f"{origin.front_end.plan}: the plan keeps {'+'.join(remat.names[dim])} of the loop over {dim}, but "
        f"{what} computes a value that does not occur in {origin.front_end.program}; recompute everything "
        f"(--recompute {dim}), or keep another kind of value"
    )
