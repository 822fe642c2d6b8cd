"""Evaluation: the forward pass on trained variables, exact for any number of examples.

Results that are sums over the rows of the batch (`rows`) are returned row by row, and the host adds the true
rows up, exactly rounded:

    mean = B / N  sum over the N true rows of r(b)          B: rows of a whole batch

so a short last batch is padded with copies of its last row, which are left out again, and neither the layout
nor the cut into batches has a say in the sum. A quotient of two such sums (a mean over weights, say) is the
quotient of their sums over all rows; a number that the divisor is at least, as in maximum(sum, 1.0), holds
for the sum over all rows. A result that mixes rows in another way (the statistics of a batch, the
capacity of experts) is averaged over batches, which must then be whole.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from mesh_tf_core.engines import Engine
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.structure import Assign, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower import Options, lower
from mesh_tf_core.model import Model
from mesh_tf_core.ops.basic import Cast, Constant
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.optimizers.base import EMA
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.training.prefetch import Prefetch
from mesh_tf_core.training.rows import Rows

NO_MEANS: Mapping[str, Variable] = {}
ABOVE, BELOW = "{} (rows)", "{} (weights of rows)"
"""Names of a result's sums in the program: of the sum itself or a quotient's dividend, and of its divisor."""


class Evaluation:
    """The forward pass of a model beside its training.

    Args:
      training: the engine whose variables are used.
      layout, options: of the training.
      means: variable -> its running mean (`Optimizer.ema`), which is read in its place.
    """

    def __init__(
        self,
        model: Model,
        training: Engine,
        layout: Layout,
        options: Options,
        means: Mapping[str, Variable] = NO_MEANS,
    ) -> None:
        graph = forward(model.graph, means)
        self.size, self.batched = _batch(model)
        self.wanted = tuple(dict.fromkeys(("loss", *model.metrics)))
        self.least: dict[str, float] = {}
        results, self.whole = self._results(model, graph)
        storage = {name: stage for name, stage in options.storage.items() if name in graph.variables}
        program = lower(graph, training.program.mesh, layout, results, Options(storage))
        self.engine = training.beside(program)

    def _results(self, model: Model, graph: Graph) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What the program returns; for results that are no sums over rows, the operation that is why."""
        tensors = {"loss": model.loss, **model.metrics}
        results: dict[str, Tensor] = {}
        whole: dict[str, str] = {}
        rows = None if model.batch_dim is None else Rows(graph, model.batch_dim, self.size)
        with graph.phase("forward", "evaluation"):
            for name in self.wanted:
                tensor = graph.tensor(tensors[name].id)
                sums, self.least[name] = (None, -math.inf) if rows is None else _sums(rows, tensor)
                if sums is None:
                    results[name] = tensor
                    whole[name] = "the inputs have no common batch" if rows is None else rows.why
                else:
                    results.update(zip((ABOVE.format(name), BELOW.format(name)), sums, strict=False))
        return results, whole

    def run(self, batches: Iterable[Mapping[str, Any]]) -> dict[str, float]:
        """Means of the loss and the metrics over all examples.

        Raises:
          UserError: no batch, a batch that is too large, a short one where a result needs whole ones.
        """
        counts: list[int] = []
        found: dict[str, list[Any]] = {}
        with Prefetch(self._counted(iter(batches), counts), self.engine.feed, None) as ready:
            for number, item in enumerate(ready):
                for name, value in self.engine.run(item.fed).items():
                    true = value[: counts[number]] if np.ndim(value) else value
                    found.setdefault(name, []).append(np.asarray(true, np.float64))
        if not counts:
            raise UserError("evaluate: no batches")
        sums = {name: math.fsum(np.concatenate(list(map(np.atleast_1d, v)))) for name, v in found.items()}
        return {name: self._mean(name, sums, sum(counts), len(counts)) for name in self.wanted}

    def _mean(self, name: str, sums: Mapping[str, float], examples: int, batches: int) -> float:
        above, below = ABOVE.format(name), BELOW.format(name)
        if name in self.whole:
            return sums[name] / batches
        if below in sums:
            divisor = max(sums[below], self.least[name])
            return sums[above] / divisor if divisor else math.nan
        return sums[above] * self.size / examples

    # -- batches ---------------------------------------------------------------------------------------------

    def _counted(self, stream: Iterator[Mapping[str, Any]], counts: list[int]) -> Iterator[dict[str, Any]]:
        """Whole batches; `counts` gets the number of true rows of each."""
        for batch in stream:
            short = {n: np.asarray(batch[n]) for n in self.batched if n in batch}
            sizes = {a.shape[0] if a.ndim else 1 for a in short.values()}
            count = min(sizes, default=self.size)
            if len(sizes) > 1 or not 0 < count <= self.size:
                raise UserError(
                    f"evaluate: a batch has {' and '.join(map(str, sorted(sizes)))} rows; its inputs need "
                    f"equally many, from 1 to {self.size}"
                )
            if count < self.size and self.whole:
                name, why = next(iter(self.whole.items()))
                raise UserError(
                    f"evaluate: a batch has {count} rows instead of {self.size}, and {name!r} is no sum over "
                    f"rows ({why}); leave the short batch out, or leave {name!r} out of the metrics"
                )
            counts.append(count)
            padded = {
                n: np.concatenate([a, np.repeat(a[-1:], self.size - count, 0)]) for n, a in short.items()
            }
            yield {**batch, **padded}


def forward(graph: Graph, means: Mapping[str, Variable] = NO_MEANS) -> Graph:
    """A copy of a graph's forward operations that stores nothing and drops nothing out.

    Args:
      means: variable -> the one to read in its place.
    """
    found = copy.deepcopy(graph)
    kept = [n for n in found.nodes if n.phase == "forward" and not isinstance(n.op, Assign)]
    found.nodes[:] = [new for node in kept for new in _read(found, node, means)]
    for block in found.blocks:
        block.saved.clear()
        for at, node in enumerate(block.nodes):
            instead = node.op.untrained()
            if instead is not None:
                op, count = instead
                block.nodes[at] = dataclasses.replace(node, op=op, inputs=node.inputs[:count])
                found.producer.update(dict.fromkeys(node.outputs, block.nodes[at]))
    found.changed()
    return found


def running_means(program: Program, steps: int, what: str) -> Mapping[str, Variable]:
    """Trained variable -> its running mean; UserError, in the name of `what`, if there is none (yet)."""
    slots = [s.variable for s in program.variables.values()]
    found = {v.slot_of: v for v in slots if v.slot_of and v.name == f"{v.slot_of}/{EMA}"}
    if not found:
        raise UserError(f"{what}: the optimizer keeps no running means; give it ema=0.999, say")
    if not steps:
        raise UserError(f"{what}: running means begin with the first step; train first, or leave out ema")
    return found


def _read(graph: Graph, node: Node, means: Mapping[str, Variable]) -> Iterator[Node]:
    """A node, or if it reads a variable, the reading of the mean in its place, in the variable's dtype."""
    mean = means.get(node.op.variable.name) if isinstance(node.op, Read) else None
    if mean is None:
        yield node
        return
    op, found = Read(graph.declare(mean)), graph.new_tensor(mean.type, graph.blocks[0])
    yield dataclasses.replace(node, index=graph.count, op=op, outputs=(found.id,))
    graph.count += 1
    yield dataclasses.replace(node, op=Cast(graph.tensor(node.outputs[0]).dtype), inputs=(found.id,))


def _batch(model: Model) -> tuple[int, tuple[str, ...]]:
    """Rows of a batch, and the inputs that have them."""
    name = model.batch_dim
    if name is None:
        return 1, ()
    inputs = {n: t for n, t in model.graph.inputs.items() if t.shape.names[:1] == (name,)}
    return next(iter(inputs.values())).shape.dims[0].size, tuple(inputs)


def _sums(rows: Rows, result: Tensor) -> tuple[tuple[Tensor, ...] | None, float]:
    """Sums over rows that a result is made of: one, or dividend and divisor of a quotient; and what the
    divisor is at least."""
    if not is_float(result.dtype):
        return None, -math.inf
    one = rows.of(result)
    if one is not None:
        return (one,), -math.inf
    node, behind = rows.graph.producer.get(result.id), list[Op]()
    while node is not None and _scales(node):
        behind += [] if node.op.converts else [node.op]
        node = rows.graph.producer.get(node.inputs[0])
    if node is None or not node.op.divides:
        return None, -math.inf
    why = rows.why
    divisor, least = _at_least(rows.graph, rows.graph.tensor(node.inputs[1]))
    above, below = rows.of(rows.graph.tensor(node.inputs[0])), rows.of(divisor)
    rows.why = rows.why or why
    if above is None or below is None:
        return None, -math.inf
    for op in reversed(behind):
        above = rows.graph.apply(op, above)
    return (above, below), least


def _at_least(graph: Graph, x: Tensor) -> tuple[Tensor, float]:
    """y and c where x is maximum(y, c) with a number c; else x."""
    node = graph.producer.get(x.id)
    if node is not None and isinstance(node.op, Binary) and node.op.fn == "max":
        for y, c in (node.inputs, node.inputs[::-1]):
            made = graph.producer.get(c)
            if made is not None and isinstance(made.op, Constant):
                return graph.tensor(y), float(made.op.value)
    return x, -math.inf


def _scales(node: Node) -> bool:
    """Whether a node multiplies by a number, or does not even that."""
    alone = len(node.inputs) == 1 and node.op.kind == "elementwise"
    return alone and (node.op.linear or node.op.converts)
