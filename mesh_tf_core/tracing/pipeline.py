"""Pipelines: a loop over equal layers as stages on different devices, which work on different microbatches at
the same time (Huang et al. 2019, "GPipe"; as one SPMD program: Xu et al. 2021, "GSPMD", section 3.3).

A loop over L layers becomes, of the forward graph, before its gradient is made,

  loop over ticks, whose state has the microbatches in flight [stage, microbatch's dims]
    loop over the stages, side by side (`Block.spread`): what the stage before handed on, at the first stage
      the microbatch that enters, through
      loop over the layers of the stage, as it was
    the state, moved on by one stage

so that its gradient, lowering, cost and memory follow from this graph. `ops.ticks` defines which microbatch
is where; an idle stage computes on numbers that are not used. Layers before and after work on the whole
batch.

In a circular schedule the output of the last stage goes to the first, and the loop over the layers of a stage
runs over those of the current chunk (`Block.first`). Variables that the layers slice are stored so that each
device has its chunks (`ir.stored_order`); other readers, and other stacks, are converted from one order to
the other.

Values of the batch that the layers read besides their state stay in place if they have no gradient; otherwise
they move through the stages with the state. `batch_linearity` classifies values as for gradient accumulation:
a state to which each microbatch adds, such as a router's loss, is their sum; other dependence on the whole
batch is refused. Random numbers are those of the microbatch's rows in the whole batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import MICROBATCH, Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import CIRCULAR, GPIPE, PipelineSchedule, StageAction
from mesh_tf_core.ir.stored_order import PADDING, Interleaved
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import scale, stop_gradient
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.math import logical_and, maximum
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.reduce import reduce_sum
from mesh_tf_core.ops.shape import reshape, slice_dim, transpose
from mesh_tf_core.ops.ticks import FromTicks, ToTicks
from mesh_tf_core.tracing.assigning import averages
from mesh_tf_core.tracing.batch_linearity import BatchLinearity, Linearity, outer_reads
from mesh_tf_core.tracing.copying import PartCopy
from mesh_tf_core.tracing.gradients import depends_on
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.stage_layers import check_stages, layers_of_stage, lying, reordered
from mesh_tf_core.tracing.table_rows import TableRows, layer_numbers


def pipelined(
    graph: Graph,
    batch: str,
    parts: int,
    stages: Mapping[str, int],
    wanted: Mapping[str, Tensor],
    rounds: int = 1,
) -> tuple[Graph, dict[str, Tensor]]:
    """The forward graph with loops as pipelines.

    Args:
      batch: name of the batch dimension, the first of every input.
      parts: number of microbatches.
      stages: dimension of loops -> number of stages.
      wanted: name -> tensor at the top level, of the forward operations.
      rounds: number of passes of microbatches through the stages.

    Returns:
      The new graph and its tensors for `wanted`.

    Raises:
      UserError: a loop cannot be a pipeline; with the reason and the remedy.
    """
    return _Pipelines(graph, batch, parts, stages, rounds).run(wanted)


@dataclass
class _Flow:
    """What goes through the stages with a microbatch.

    Attributes:
      kind: how it depends on the batch.
      entering: [microbatch, its dims].
      passes: it is only read.
    """

    kind: Linearity
    entering: Tensor
    passes: bool = False


class _Pipelines(PartCopy):
    """A graph with pipelines under construction."""

    def __init__(self, graph: Graph, batch: str, parts: int, stages: Mapping[str, int], rounds: int) -> None:
        super().__init__(graph, batch, parts)
        self.part, self.smaller = self.smaller, {}
        self.rows = replace(self.rows, ahead=1, step=parts)  # as `_Pipeline._split` takes them
        self.stages, self.rounds = stages, rounds
        for dim, count in stages.items():
            check_stages(graph, dim, count, rounds)
        self.raw: dict[int, Tensor] = {}
        self.kept = [n for n in graph.nodes if n.phase == Phase.FORWARD or averages(n, graph)]
        self.lying = lying(graph, self.kept, stages, rounds)
        for tensor, (order, _) in self.lying.items():
            variable = graph.producer[tensor].op.variable  # type: ignore[attr-defined]
            self.new.variables[variable.name] = replace(variable, order=order)
        trained = [v for v in graph.variables.values() if v.trainable]
        self.trained = depends_on(graph, [graph.read(v).id for v in trained])

    def run(self, wanted: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """Copies what leads to the tensors that are wanted, and what the forward pass stores."""
        needed = {t.id for t in wanted.values()}
        found: list[Node] = []
        for node in reversed(self.kept):
            made = {*node.outputs}
            if isinstance(node.op, Feed | Assign) or made & needed:
                found.append(node)
                needed |= outer_reads(self.old, node)
        for node in reversed(found):
            self._node(node)
        return self.new, {name: self.tensors[t.id] for name, t in wanted.items()}

    def _node(self, node: Node) -> None:
        op = node.op
        if isinstance(op, Read):
            x = self.new.read(self.new.variables[op.variable.name])
            self.raw[node.outputs[0]] = x
            order, elsewhere = self.lying.get(node.outputs[0], (None, False))
            dims = op.variable.shape.dims
            x = reordered(x, order, dims[0], lies=True) if order and elsewhere else x
            self.tensors[node.outputs[0]] = x
        elif isinstance(op, Feed):
            self.tensors[node.outputs[0]] = self.new.input(op.feed, op.type.shape.dims, op.type.dtype)
        elif isinstance(op, Assign):
            variable = self.new.variables[op.variable.name]
            with self.new.phase(node.phase, node.scope):
                x = self.tensors[node.inputs[0]]
                if variable.order is not None:
                    x = reordered(x, variable.order, variable.shape.dims[0], lies=False)
                self.new.assign(variable, x)
        else:
            super()._node(node)

    def _scan(self, node: Node, body: Block) -> None:
        dim = body.dim
        if self.number is not None or dim is None or dim.name not in self.stages:
            super()._scan(node, body)
            return
        before = dict(self.tensors)
        made = _Pipeline(self, node, body, dim).build()
        self.tensors, self.number, self.smaller = {**before, **made}, None, {}


class _Pipeline:
    """One loop as a pipeline."""

    def __init__(self, copy: _Pipelines, node: Node, body: Block, layers: Dim) -> None:
        self.copy, self.node, self.body, self.layers = copy, node, body, layers
        self.old, self.new = copy.old, copy.new
        kind = CIRCULAR if copy.rounds > 1 else GPIPE
        self.schedule = PipelineSchedule(kind, copy.stages[layers.name], copy.parts, copy.rounds)
        self.stage = Dim(layers.name, self.schedule.stages)
        self.order = Interleaved(self.schedule.stages, self.schedule.rounds)
        self.lie = Dim(layers.name, self.order.size(layers.size))
        self.own = Dim(layers_of_stage(layers.name), self.lie.size // self.schedule.stages)
        self.chunk = Dim(self.own.name, self.own.size // self.schedule.rounds)
        read = outer_reads(self.old, node)
        self.rows = {i for i in (*read, *node.inputs) if self._batch(i)}
        copy.linearity = self.linearity = BatchLinearity(self.old, copy.names, [node], self.rows)
        self._check()

    def _batch(self, tensor: int) -> bool:
        return any(d in self.copy.part for d in self.old.tensor(tensor).shape)

    def _refuse(self, what: str) -> UserError:
        return UserError(f"pipeline over {self.layers.name!r}: {what}; do not split {self.layers.name!r}")

    def _check(self) -> None:
        body = self.body
        inside = [n for n, _ in body.walk()]
        if any(n.body is not None and n.body.runs is not None for n in inside) or body.runs is not None:
            raise self._refuse("the layers have branches or end early, but all stages run the same program")
        made = {*body.carry_in, *(o for n in inside for o in n.outputs)}
        self.copy.smaller = self.copy.part
        self.copy.check_batch(map(self.old.tensor, (*made, *self.rows)))
        self.copy.smaller = {}
        whole = [i for i in body.carry_in if self.linearity.of(i).kind is Linearity.INSEPARABLE]
        if whole or any(self.linearity.of(i).kind is Linearity.INSEPARABLE for i, _ in body.stacked):
            known = [*whole, *(i for i, _ in body.stacked), *body.carry_out]
            causes = [self.linearity.why[i] for i in known if i in self.linearity.why]
            raise self._refuse(
                "the layers pass on a value of the whole batch that cannot be computed one microbatch at a "
                "time" + "".join(f" (caused by {why})" for why in causes[:1])
            )
        for outer, _ in body.sliced:
            if self._batch(outer):
                raise self._refuse("the layers read a stack with one part of the batch for each layer")
        for inner, _ in body.stacked:
            if self.linearity.of(inner).kind is Linearity.PER_EXAMPLE:
                raise self._refuse("the layers stack values that depend on single examples")
            if not is_float(self.old.tensor(inner).dtype):
                raise self._refuse("the layers stack integers, which cannot be summed over microbatches")

    # -- the batch as microbatches -------------------------------------------------------------------------

    def _split(self, x: Tensor) -> Tensor:
        """x with the batch as [microbatch, others]: of every device's rows one after the other, so that none
        moves to another device."""
        (batch,) = (d for d in x.shape if d in self.copy.part)
        own, parts = self.copy.part[batch], Dim(MICROBATCH, self.copy.parts)
        dims = [e for d in x.shape for e in ((own, parts) if d == batch else (d,))]
        apart = reshape(x, dims)
        return transpose(apart, [parts, *apart.shape.without(MICROBATCH)])

    def _joined(self, x: Tensor, like: Shape) -> Tensor:
        """The inverse; `like`: of the whole."""
        parts = x.shape.dims[0]
        own = {small: parts for _, small in self.copy.part.items()}
        dims = [e for d in x.shape.dims[1:] for e in ((d, own[d]) if d in own else (d,))]
        return reshape(transpose(x, dims), like)

    def _alike(self, x: Tensor) -> Tensor:
        """Every microbatch's copy of what has no batch."""
        return broadcast(x, Shape([Dim(MICROBATCH, self.copy.parts), *x.shape]))

    # -- what goes through the stages ----------------------------------------------------------------------

    def _states(self) -> list[_Flow]:
        shares = self.linearity.shared[self.node.index]
        found = []
        for at, (outer, inner) in enumerate(zip(self.node.inputs, self.body.carry_in, strict=True)):
            x, kind = self.copy.tensors[outer], self.linearity.of(inner).kind
            if kind is Linearity.PER_EXAMPLE and outer in self.rows:
                found.append(_Flow(kind, self._split(x)))
            elif kind is Linearity.PER_EXAMPLE:
                raise self._refuse(f"the initial state [{x.shape}] must have the batch dimension")
            else:
                x = scale(x, 1 / self.copy.parts) if at in shares else x
                found.append(_Flow(kind, self._alike(x)))
        return found

    def _read(self) -> tuple[dict[int, Tensor], dict[int, _Flow]]:
        """What the layers read of the batch besides their state: what stays, and what passes through."""
        read = {i for n in self.body.nodes for i in outer_reads(self.old, n)}
        read |= {i for i in self.body.carry_out if not self.old.tensor(i).block}
        stays: dict[int, Tensor] = {}
        passes: dict[int, _Flow] = {}
        for i in sorted(read & self.rows):
            entering = self._split(self.copy.tensors[i])
            if i in self.copy.trained:
                passes[i] = _Flow(Linearity.PER_EXAMPLE, entering, passes=True)
            else:
                stays[i] = entering
        return stays, passes

    def build(self) -> dict[int, Tensor]:
        """Builds the loops; old tensors -> what stands for them afterwards."""
        new, schedule = self.new, self.schedule
        states = self._states()
        stays, passes = self._read()
        stacks = {o: self._stack(o) for o, _ in self.body.sliced}
        flows = [*states, *passes.values()]
        entering = [new.apply(ToTicks(schedule, end=False, fill=True), f.entering) for f in flows]
        init = [self._begun(f.entering) for f in flows]
        rows = TableRows(new, schedule, self.stage, schedule.done(StageAction.FORWARD))
        with new.loop(rows.dim) as ticks:
            rows = rows.inside(ticks)
            held = [new.body_input(ticks, x) for x in init]
            come = [new.slice_into(ticks, x) for x in entering]
            with new.loop(self.stage, spread=True) as stages:
                stage = new.tensors[stages.index]  # type: ignore[index]
                work = rows.at(StageAction.FORWARD, stages)
                number, turn = work.number, work.chunk
                enters = stage < 1 if turn is None else logical_and(stage < 1, turn < 1)
                got = [where(enters, x, new.slice_into(stages, h)) for x, h in zip(come, held, strict=True)]
                self.copy.tensors.update((i, dynamic_slice(x, number, MICROBATCH)) for i, x in stays.items())
                self.copy.tensors.update(zip(passes, got[len(states) :], strict=True))
                self.copy.number, self.copy.smaller = number, self.copy.part
                ends, stacked = self._layers(stages, stage, turn, stacks, got[: len(states)])
                ends += got[len(states) :]
                handed = [new.stack_output(stages, x) for x in ends]
                last = stage > schedule.stages - 2
                last = last if turn is None else logical_and(last, turn > schedule.rounds - 2)
                left = [self._at(last, x) for x in ends[: len(states)]]
                done = [new.sum_output(stages, x) for x in left]
                parts = [self._at(work.works, x) for x in stacked]
                terms = [new.stack_output(stages, x, self.lie) for x in parts]
            new.close_loop(stages, [])
            ticks.carry_in = tuple(x.id for x in held)
            round_and_round = schedule.rounds > 1
            ticks.carry_out = tuple(shift(x, 1, self.stage, round_and_round).id for x in handed)
            leaving = [new.stack_output(ticks, x) for x in done]
            sums = [new.sum_output(ticks, x) for x in terms]
        new.close_loop(ticks, init)
        pairs = zip(self.node.outputs, leaving, states, strict=False)
        made = {old: self._left(old, x, flow.kind) for old, x, flow in pairs}
        for (inner, old), x in zip(self.body.stacked, sums, strict=True):
            same = self.linearity.of(inner).kind is Linearity.REPLICATED
            made[old] = scale(x, 1 / self.copy.parts) if same else x
            if self.order.moves(self.layers.size):
                made[old] = reordered(made[old], self.order, self.layers, lies=True)
        return made

    def _at(self, condition: Tensor, x: Tensor) -> Tensor:
        """x where a condition holds, else zeros."""
        return where(condition, x, 0)

    def _begun(self, entering: Tensor) -> Tensor:
        """What the stages have before the first tick: numbers like others."""
        first = reshape(slice_dim(entering, MICROBATCH, 0, 1), entering.shape.without(MICROBATCH))
        return broadcast(stop_gradient(first), Shape([self.stage, *first.shape]))

    def _left(self, old: int, x: Tensor, kind: Linearity) -> Tensor:
        """What a state is after the layers, of [tick, a microbatch's]."""
        shape = self.old.tensor(old).shape
        parts = self.new.apply(FromTicks(self.schedule, end=True), x)
        if kind is Linearity.PER_EXAMPLE:
            return self._joined(parts, shape)
        if kind is Linearity.REDUCIBLE:
            return reduce_sum(parts, MICROBATCH)
        return reshape(slice_dim(parts, MICROBATCH, 0, 1), shape)

    def _layers(
        self,
        stages: Block,
        stage: Tensor,
        turn: Tensor | None,
        stacks: Mapping[int, Tensor],
        init: Sequence[Tensor],
    ) -> tuple[list[Tensor], list[Tensor]]:
        """The layers of a stage, or of its chunk whose turn it is: their last states, and what they stack."""
        copy, new, body = self.copy, self.new, self.body
        outer = {o: new.slice_into(stages, stacks[o], self.own) for o, _ in body.sliced}
        numbers = layer_numbers(new, self.order, self.layers, stages, self.own)
        first = None if turn is None else turn * self.chunk.size
        begins = stage * self.own.size
        if turn is not None:
            begins = (turn * self.schedule.stages + stage) * self.chunk.size
        with new.loop(self.chunk) as block:
            assert block.index is not None and body.index is not None
            copy.blocks[body.id] = block
            layer = None if numbers is None else new.slice_into(block, numbers)
            number = begins + new.tensors[block.index]
            copy.tensors[body.index] = number if layer is None else maximum(layer, 0)
            for o, inner in body.sliced:
                copy.tensors[inner] = new.slice_into(block, outer[o])
            copy._body(self.node, body, block)
            block.first = None if first is None else first.id
            if layer is not None:
                # A layer that a stage lacks hands on what it got.
                pairs = zip(block.carry_out, block.carry_in, strict=True)
                ends = (where(layer > PADDING, new.tensors[x], new.tensors[h]) for x, h in pairs)
                block.carry_out = tuple(x.id for x in ends)
            whole = None if first is None else self.own
            stacked = [new.stack_output(block, copy.tensors[i], whole) for i, _ in body.stacked]
        return new.close_loop(block, init), stacked

    def _stack(self, outer: int) -> Tensor:
        """What layers read by parts, as variables lie."""
        if not self.order.moves(self.layers.size):
            return self.copy.tensors[outer]
        if outer in self.copy.lying:
            return self.copy.raw[outer]
        return reordered(self.copy.tensors[outer], self.order, self.layers, lies=False)
