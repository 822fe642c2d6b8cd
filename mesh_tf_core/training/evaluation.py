"""Evaluation: the forward pass on trained variables, exact for any number of examples.

Results that are sums over the rows of the batch (`rows`) are returned row by row, and the host adds the true
rows up, exactly rounded:

    mean = B / N  sum over the N true rows of r(b)          B: rows of a whole batch

A short last batch is therefore padded, and the padding is removed again: the sum depends neither on the
layout nor on the sizes of batches. All devices of all processes take part; each process may get only the rows
that its devices read, and of a short batch only those that exist. A quotient of two such sums (such as a
weighted mean) is the quotient of their sums over all rows; a lower limit of the divisor, as in maximum(sum,
1.0), applies to the sum over all rows. A result that mixes rows in another way (the statistics of a batch,
the capacity of experts) is averaged over batches, which must then be whole.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from mesh_tf_core.arguments import BATCH, BATCHES, check
from mesh_tf_core.engines import Cluster, Engine
from mesh_tf_core.engines.feeds import rows_of, widened
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA, Assign, Node, Read
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower import Options, lower
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.model import Model
from mesh_tf_core.ops.basic import Cast, Constant
from mesh_tf_core.ops.binary import Binary
from mesh_tf_core.ops.reduce import reduce_any, reduce_max, reduce_mean
from mesh_tf_core.ops.shape import rename, slice_dim
from mesh_tf_core.ops.stacking import squeeze, stack
from mesh_tf_core.optimizers.base import EMA
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.microbatch import Accumulation
from mesh_tf_core.tracing.pipelined_step import PipelinedStep
from mesh_tf_core.tracing.virtual_stages import refused
from mesh_tf_core.training.prefetch import Prefetch
from mesh_tf_core.training.rows import Rows

VariablePlace = tuple[Variable, int | None]
"""A variable, and the place along its first dimension; None: all of it. Which layers are stacked depends on
the program, but the arrays of layers have the same names in every build of a model."""


def places(variables: Iterable[Variable]) -> dict[str, VariablePlace]:
    """Variable, or array of a stack -> where it is."""
    found: dict[str, VariablePlace] = {}
    for v in variables:
        found |= {v.name: (v, None)} | {name: (v, i) for i, name in enumerate(v.members)}
    return found


def read_elsewhere(
    variable: Variable, held: Mapping[str, VariablePlace], read: Callable[[Variable], Tensor]
) -> Tensor | None:
    """The value of a variable, from what is held under other names or dimensions; None if it is not held.

    Args:
      read: reads a variable that is held.
    """
    names = (variable.name,) if variable.name in held else variable.members
    stacked, own = names == variable.members, variable.shape
    first, row = own.names[0] if stacked and names else "", Shape(own.dims[int(stacked) :])
    found = [held[name] for name in names if name in held]
    shapes = [Shape([d for d in v.shape if d.name != REPLICA][int(p is not None) :]) for v, p in found]
    if not found or len(found) < len(names) or any(shape.sizes != row.sizes for shape in shapes):
        return None
    if not stacked and found[0][1] is None and shapes[0] == row:
        return None
    rows = []
    for v, place in found:
        x = read(v)
        if place is not None:
            layers = x.shape.names[0]
            x = squeeze(slice_dim(x, layers, place, 1), layers)
        rows.append(rename(x, **dict(zip(x.shape.names, row.names, strict=True))))
    return stack(rows, first) if stacked else rows[0]


EvaluationBatches = Iterable[Mapping[str, Any]] | Callable[[Any], Iterable[Mapping[str, Any]]]
"""Whole batches, or a function that makes batches of given rows."""
NO_MEANS: Mapping[str, Variable] = {}
NO_PLACES: Mapping[str, VariablePlace] = {}
ABOVE, BELOW = "{} (rows)", "{} (weights of rows)"
"""Names of a result's sums in the program: of the sum itself or a quotient's dividend, and of its divisor."""


class EvaluationPass:
    """The forward pass of a model, during its training.

    Args:
      training: the engine with the variables.
      layout, options: of the training.
      means: variable -> the value that replaces it: its running mean (`Optimizer.ema`), or, with replicas,
        [replica, its dims]: the values of all replicas, which are averaged.
      cluster: the processes that evaluate together.

    Attributes:
      rows: with a cluster, the rows of a batch that this process's devices read, int64 [n], or None.
      parts: in pipeline stages, the number of microbatches, and their rows.
    """

    def __init__(
        self,
        model: Model,
        training: Engine,
        layout: Layout,
        options: Options,
        means: Mapping[str, Variable] = NO_MEANS,
        cluster: Cluster | None = None,
    ) -> None:
        self.cluster = cluster
        held = (stored.variable for stored in training.program.variables.values())
        graph = forward(model.graph, means, places(v for v in held if v.slot_of is None))
        self.size, self.batched = _batch(model)
        self.wanted = tuple(dict.fromkeys(("loss", *model.metrics)))
        self.least: dict[str, float] = {}
        results, self.whole = self._results(model, graph)
        storage = {name: stage for name, stage in options.storage.items() if name in graph.variables}
        mesh = training.program.mesh
        self.parts: tuple[int, ...] = ()
        for dim, count in model.stages(mesh, layout).items():
            self.parts = (options.microbatches, self.size // options.microbatches)
            batch, refuse = str(model.batch_dim), partial(refused, options.schedule, dim)
            graph, results = Accumulation(graph, batch, options.microbatches, refuse).run(results)
            cut = graph, batch, options.microbatches, dim, count, options.schedule
            graph, results = PipelinedStep(*cut).run(results)
        how = Options(storage, context=options.context, offload=options.offload)
        # Without the update a graph does not say what may be padded; the training's variables do.
        padded = {
            name: frozenset({stored.padded.name})
            for name, stored in training.program.variables.items()
            if stored.padded is not None
        }
        where = placement(graph, mesh, layout, how, padded=padded)
        program = lower(graph, mesh, layout, results, how, where)
        self.engine = training.beside(program)
        has_rows = cluster is not None and model.batch_dim is not None
        self.rows = rows_of(program, str(model.batch_dim), self.engine.ranks) if has_rows else None

    def _results(self, model: Model, graph: Graph) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What the program returns; for results that are not sums over rows, the operation that is why."""
        tensors = {"loss": model.loss, **model.metrics}
        results: dict[str, Tensor] = {}
        whole: dict[str, str] = {}
        rows = None if model.batch_dim is None else Rows(graph, model.batch_dim, self.size)
        with graph.phase(Phase.FORWARD, "evaluation"):
            for name in self.wanted:
                tensor = graph.tensor(tensors[name].id)
                sums, self.least[name] = (None, -math.inf) if rows is None else _sums(rows, tensor)
                if sums is None:
                    results[name] = tensor
                    whole[name] = "the inputs have no common batch dimension" if rows is None else rows.why
                else:
                    results.update(zip((ABOVE.format(name), BELOW.format(name)), sums, strict=False))
        return results, whole

    def run(self, batches: EvaluationBatches) -> dict[str, float]:
        """Means of the loss and the metrics over all examples.

        Args:
          batches: whole ones; or a function of rows that makes batches of these (`rows`; None: whole ones).
            All processes run the same number of batches, including a process without rows of a short batch.

        Raises:
          UserError: there is no batch, a batch is too large, or it is short and a result needs whole ones.
        """
        if not callable(batches):
            check("evaluate", batches=(batches, BATCHES))
        rows = self.rows if callable(batches) else None
        stream = iter(batches(rows) if callable(batches) else batches)
        counts: list[int] = []
        found: dict[str, list[Any]] = {}
        with Prefetch(self._counted(stream, counts, rows), self.engine.feed, None) as ready:
            for item in ready:
                for name, value in self.engine.run(item.fed).items():
                    found.setdefault(name, []).append(np.asarray(value, np.float64))
        if not counts:
            raise UserError("evaluate: the data have no batches; give at least one")
        if rows is not None:
            counts = self._of_all(rows, counts)
        sums = {
            name: math.fsum(
                x for v, n in zip(vs, counts, strict=True) for x in v.reshape(-1)[: n if v.ndim else 1]
            )
            for name, vs in found.items()
        }
        return {name: self._mean(name, sums, sum(counts), len(counts)) for name in self.wanted}

    def _of_all(self, rows: Any, counts: list[int]) -> list[int]:
        """True rows of every batch, of how many of them each process has."""
        assert self.cluster is not None
        ends = [int(rows[count - 1]) + 1 if count else 0 for count in counts]
        told = self.cluster.gather("the end of the evaluation", ends, patient=True)
        if len({len(each) for each in told}) == 1:
            whole = [max(each) for each in zip(*told, strict=True)]
            if [int(np.searchsorted(rows, count)) for count in whole] == counts:
                return whole
        raise UserError(
            "evaluate: the data did not return all rows of this process; for a short last batch, yield "
            "the rows that exist (numbers[rows[rows < len(numbers)]]), or an array of zero rows"
        )

    def _mean(self, name: str, sums: Mapping[str, float], examples: int, batches: int) -> float:
        above, below = ABOVE.format(name), BELOW.format(name)
        if name in self.whole:
            return sums[name] / batches
        if below in sums:
            divisor = max(sums[below], self.least[name])
            return sums[above] / divisor if divisor else math.nan
        return sums[above] * self.size / examples

    # -- batches ---------------------------------------------------------------------------------------------

    def _counted(
        self, stream: Iterator[Mapping[str, Any]], counts: list[int], rows: Any
    ) -> Iterator[dict[str, Any]]:
        """Whole batches, of which those `rows` count (None: all); `counts` gets the number of true ones."""
        most, least = (self.size, 1) if rows is None else (len(rows), 0)
        for batch in stream:
            check("evaluate", batch=(batch, BATCH))
            short = {n: np.asarray(batch[n]) for n in self.batched if n in batch}
            if lone := next((n for n, a in short.items() if not a.ndim), ""):
                raise UserError(
                    f"evaluate: the batch's {lone!r} is a single number; give an array with one row for each "
                    "example"
                )
            sizes = {a.shape[0] for a in short.values()}
            count = min(sizes, default=most)
            if len(sizes) > 1 or not least <= count <= most:
                raise UserError(
                    f"evaluate: a batch has {' and '.join(map(str, sorted(sizes)))} rows; all inputs "
                    f"must have the same number of rows, from {least} to {most}"
                )
            if count < most and self.whole:
                name, why = next(iter(self.whole.items()))
                raise UserError(
                    f"evaluate: a batch has {count} rows instead of {most}, and {name!r} is not a sum "
                    f"over rows ({why}); omit the short batch, or remove {name!r} from the metrics"
                )
            counts.append(count)
            # Copies of the last row, or zeros where there is none.
            last = {n: a[-1:] if len(a) else np.zeros((1, *a.shape[1:]), a.dtype) for n, a in short.items()}
            padded = {n: np.concatenate([a, *[last[n]] * (most - count)]) for n, a in short.items()}
            if rows is not None:
                padded = {n: widened(a, rows, self.size) for n, a in padded.items()}
            if self.parts:
                padded = {n: a.reshape(*self.parts, *a.shape[1:]) for n, a in padded.items()}
            yield {**batch, **padded}


def forward(
    graph: Graph, means: Mapping[str, Variable] = NO_MEANS, held: Mapping[str, VariablePlace] = NO_PLACES
) -> Graph:
    """A copy of a graph's forward operations that stores nothing and drops nothing out.

    Args:
      means: variable -> the one to read in its place.
      held: where the training holds its arrays.
    """
    found = copy.deepcopy(graph)
    kept = [n for n in found.nodes if n.phase == Phase.FORWARD and not isinstance(n.op, Assign)]
    found.nodes[:] = [new for node in kept for new in _read(found, node, means, held)]
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
    """Trained variable -> its running mean; UserError, which names `what`, if there is none (yet)."""
    slots = [s.variable for s in program.variables.values()]
    found = {v.slot_of: v for v in slots if v.slot_of and v.name == f"{v.slot_of}/{EMA}"}
    if not found:
        raise UserError(
            f"{what}: the optimizer has no running means; set them in the optimizer, e.g. ema=0.999"
        )
    if not steps:
        raise UserError(
            f"{what}: there are no running means before the first step; train first, or remove ema"
        )
    return found


def _read(
    graph: Graph, node: Node, means: Mapping[str, Variable], held: Mapping[str, VariablePlace]
) -> Iterator[Node]:
    """A node, or if it reads a variable that has a mean, or that the training holds in another way, what
    reads that in its place, in the variable's dtype."""

    def read(variable: Variable) -> Tensor:
        found = graph.apply(Read(graph.declare(means.get(variable.name, variable))))
        return _of_all(found) if REPLICA in found.shape.names else found

    before, found = len(graph.nodes), None
    if isinstance(node.op, Read):
        with graph.phase(node.phase, node.scope):
            found = read_elsewhere(node.op.variable, held, read)
            if found is None and node.op.variable.name in means:
                found = read(node.op.variable)
    if found is None:
        yield node
        return
    made = graph.nodes[before:]
    del graph.nodes[before:]
    yield from made
    yield dataclasses.replace(node, op=Cast(graph.tensor(node.outputs[0]).dtype), inputs=(found.id,))


def _of_all(x: Tensor) -> Tensor:
    """What replicas have in common: their mean, of what has no fractions the largest."""
    if is_float(x.dtype):
        return reduce_mean(x.cast("float64" if x.dtype == "float64" else "float32"), REPLICA)
    return reduce_any(x, REPLICA) if x.dtype == "bool" else reduce_max(x, REPLICA)


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
