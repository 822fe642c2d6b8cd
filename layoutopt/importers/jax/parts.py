"""Microbatches of a JAX function's step: parts of the batch must add up to the loss."""

from __future__ import annotations

from layoutopt.importers.jax.origin import ImportedFunction
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.batch_linearity import BatchLinearity, Linearity
from mesh_tf_core.tracing.copying import batch_names
from mesh_tf_core.tracing.graph import graph_of


def why_whole(loss: Tensor, origin: ImportedFunction, batch: str) -> str:
    """Why a function cannot run on parts of its batch one after the other, with its line; '' if it can.

    Args:
      batch: the dimension that is cut.
    """
    return _auxiliary(origin) or _loss(loss, batch) or _inputs(origin, batch)


def _auxiliary(origin: ImportedFunction) -> str:
    if len(origin.block.outs) == 1:
        return ""
    return "the loss returns auxiliary values, which cannot be summed over microbatches"


def _loss(loss: Tensor, batch: str) -> str:
    graph = graph_of(loss)
    nodes = [n for n in graph.nodes if n.phase == Phase.FORWARD]
    linearity = BatchLinearity(graph, batch_names(graph, batch), nodes)
    found = linearity.of(loss.id)
    if found.kind is not Linearity.REDUCIBLE or found.after:
        why = linearity.why.get(loss.id, "its operations")
        return f"the loss is not a sum over the examples of the batch (see {why})"
    needed = {loss.id}
    for node in reversed(nodes):
        if needed.isdisjoint(node.outputs):
            continue
        needed.update(node.inputs)
        for each in (node, *(inner for inner, _ in node.body.walk())) if node.body else (node,):
            if linearity.shared.get(each.index):
                place = f" in {each.scope}" if each.scope else ""
                return (
                    "the loss has a term that does not depend on the batch, which every microbatch would "
                    f"add again ({each.op.describe()}{place})"
                )
    return ""


def _inputs(origin: ImportedFunction, batch: str) -> str:
    for path, array in origin.batch.items():
        if not array.axes or not array.axes[0] or array.axes[0][0] != batch:
            return f"the first axis of {path!r} is not the batch dimension"
    return ""
