"""An axis that synchronises rarely (Douillard et al. 2023, "DiLoCo", algorithm 1): replicas of the variables
train separately for some steps, each on its own batches, and then synchronise.

A training step becomes graphs on the same variables, with a copy for each replica: [replica, own dims]. The
inner step, here, is the step as it was, side by side for every replica (`Block.spread`): nothing in it reads
another one's numbers. The optimizer's state stays with its replica. State that depends on no batch and no
random number, as the number of the step, is one for all.

The outer (synchronisation) steps make one update of the common variables from the mean progress of the
replicas, so with H inner steps one sum of the variables crosses the axis in H steps: a graph for every
fragment of the variables.

  came = mean over replicas of (before - now)
  m = mu m + came      before = now = before - rate (came + mu m)

In few bits (`ops.few_bits`) a replica's part of the mean is (before - now + lost), rounded, and the rounding
error is the next `lost`. Codes and scales are gathered, so every replica sees the same mean.

With a delay an outer step is two graphs: the exchange, which stores `came`, and some steps later the merge,
in which replicas keep a share of their progress since: now = alpha now + (1 - alpha) before.

Of a stack, a fragment has every so manyth layer (`diloco.fragments_of`): [layers, ...] is seen as
[layers / fragments, fragments, ...], and one element of that dimension is read and written in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA, Assign, Feed, Node, Read
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS, Initializer, Variable
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Constant
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.few_bits import WHOLE, coded, packed, unpacked
from mesh_tf_core.ops.index import dynamic_slice, dynamic_update
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.ops.shape import rename, reshape
from mesh_tf_core.tracing.batch_linearity import outer_reads
from mesh_tf_core.tracing.copying import CopiedTensors, LoopedCopy
from mesh_tf_core.tracing.diloco import DiLoCo, ParameterSlice, fragments_of, outer_step, wide
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Alike(Initializer):
    """Every replica begins with the value of one variable."""

    one: Initializer

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        own = self.one.piece(name, sizes[1:], begin[1:], extent[1:])
        return np.broadcast_to(own, tuple(extent))


class InnerStep(LoopedCopy):
    """A training step of every replica, side by side, under construction.

    Args:
      graph: of a whole step, with its updates.

    Attributes:
      own: variables of which each replica has its own: all but those whose new value no input, random number
        or own variable has a part in.
    """

    def __init__(self, graph: Graph, replicas: int) -> None:
        super().__init__(graph)
        self.dim, behind = Dim(REPLICA, replicas), set[int]()
        self.own, count = {v.name for v in graph.variables.values() if v.trainable}, -1
        while count < len(self.own):
            count = len(self.own)
            for node in graph.nodes:
                op = node.op
                begins = isinstance(op, Feed) or (isinstance(op, Read) and op.variable.name in self.own)
                inside = (n for n, _ in (node.body.walk() if node.body else ()))
                begins |= any(n.op.derives_key for n in (node, *inside))
                if begins or not behind.isdisjoint(outer_reads(graph, node)):
                    behind.update(node.made)
                    self.own.update([op.variable.name] if isinstance(op, Assign) else ())

    def run(self, results: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """The new graph and its results [replica, their dims], of some at the top level by name; inputs are
        [replica, their dims]."""
        old, new, made = self.old, self.new, dict[str, Tensor]()
        new.variables.clear()
        for v in old.variables.values():
            if v.name in self.own:
                shape, initial = Shape([self.dim, *v.shape]), Alike(v.initializer)
                v = replace(v, shape=shape, initializer=initial, stacked=v.stacked + 1)
            new.declare(v)
        wanted, needed = {*(t.id for t in results.values()), *old.gradient_of}, set[int]()
        for node in reversed(old.nodes):
            stores = isinstance(node.op, Assign) and node.op.variable.name in self.own
            if stores or not wanted.isdisjoint(node.made):
                needed.add(node.index)
                wanted |= outer_reads(old, node)
        for node in old.nodes:
            if isinstance(node.op, Read):
                self.outside[node.outputs[0]] = new.read(new.variables[node.op.variable.name])
        with new.loop(self.dim, spread=True) as body:
            self.number, self.tensors = new.number(body), CopiedTensors({}, self.whole)
            for node in old.nodes:  # the step of one replica
                op = node.op
                if isinstance(op, Read) and op.variable.name in self.own:
                    (tensor,) = node.outputs
                    self.tensors[tensor] = new.slice_into(body, self.outside[tensor])
                elif isinstance(op, Feed):
                    fed = new.input(op.feed, [self.dim, *op.type.shape], op.type.dtype)
                    self.tensors[node.outputs[0]] = new.slice_into(body, fed)
                elif isinstance(op, Assign) and op.variable.name in self.own:
                    made[op.variable.name] = new.stack_output(body, self.tensors[node.inputs[0]])
                elif node.index in needed:
                    self._node(node)
            found = {name: new.stack_output(body, self.tensors[t.id]) for name, t in results.items()}
            new.deliver(
                (self.tensors[t], name) for t, name in old.gradient_of.items() if not old.tensor(t).block
            )
        new.close_loop(body, [])
        for node in old.nodes:
            if isinstance(node.op, Assign):
                with new.phase(node.phase, node.scope):
                    name, value = node.op.variable.name, node.inputs[0]
                    new.assign(new.variables[name], made[name] if name in made else self.whole(value))
        return new, found

    def _applied(self, op: Op, inputs: Sequence[Tensor], node: Node) -> tuple[Tensor, ...]:
        """Every replica derives keys of its own, with its number."""
        if op.derives_key and self.number is not None and not any(map(self._derived, node.inputs)):
            inputs = [*inputs, self.number]
        return super()._applied(op, inputs, node)

    def _derived(self, tensor: int) -> bool:
        node = self.old.producer.get(tensor)
        return node is not None and node.op.derives_key


BEFORE, MOMENTUM, LOST, CAME = "outer", "outer_momentum", "outer_lost", "outer_came"
"""Suffixes of a variable's name: the values that all replicas began from, the outer momentum, the rounding
error of each replica, and exchanged values that are not merged yet."""
SENDER = "sender"
"""The dimension of replicas where a device has all of them."""


@dataclass(frozen=True)
class Named(Initializer):
    """An initial value that is the initial value of another variable."""

    name: str
    one: Initializer

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        return self.one.piece(self.name, sizes, begin, extent)


@dataclass(frozen=True)
class FragmentOuterStep:
    """The graphs of one fragment's outer step.

    Attributes:
      exchange: the messages over the axis; without a delay, the whole outer step.
      merge: after the delay; None without one.
    """

    exchange: Graph
    merge: Graph | None = None

    @property
    def graphs(self) -> tuple[Graph, ...]:
        return (self.exchange,) if self.merge is None else (self.exchange, self.merge)


def outer_steps(graph: Graph, inner: Graph, diloco: DiLoCo) -> tuple[FragmentOuterStep, ...]:
    """The outer steps of the fragments, in order.

    Args:
      graph: of a whole step; inner: the graph of `replicas.InnerStep`.

    Raises:
      UserError: the fragments do not divide the layers of a stack.
    """
    trained = [v for v in graph.variables.values() if v.trainable]
    parts = fragments_of(trained, diloco.fragments)
    for v in trained:
        count, layers = diloco.fragments, v.shape.sizes[0] if v.stacked else 0
        if layers >= count and layers % count:
            raise UserError(
                f"diloco: the number of fragments, {count}, must divide the {layers} layers of "
                f"{v.name!r}; choose a divisor of {layers}"
            )
    known = {v.name: (v, inner.variables[v.name]) for v in trained}
    return tuple(_meeting(graph.name, known, own, diloco) for own in parts)


def _meeting(
    name: str,
    known: Mapping[str, tuple[Variable, Variable]],
    parts: Mapping[str, ParameterSlice],
    diloco: DiLoCo,
) -> FragmentOuterStep:
    """The meeting of a fragment.

    Args:
      known: name -> the variable of one replica, and the copies of all.
    """
    exchange = Graph(f"{name}/outer")
    merge = Graph(f"{name}/merge") if diloco.delay else None
    for variable, copies in (known[n] for n in parts):
        layers = parts[variable.name]
        stack = variable.shape.names[0] if isinstance(layers, slice) else ""
        one, every = (_FragmentPart(exchange, v, layers, stack) for v in (variable, copies))
        with exchange.phase(Phase.UPDATE, variable.name):
            came = _exchanged(one, every, diloco)
            flying = replace(one.beside(CAME).variable, shape=came.shape, dtype=came.dtype)
            if merge is not None:
                exchange.assign(exchange.declare(flying), came)
            else:
                _merged(one, every, came, diloco)
        if merge is not None:
            with merge.phase(Phase.UPDATE, variable.name):
                came = merge.read(merge.declare(flying))
                _merged(replace(one, graph=merge), replace(every, graph=merge), came, diloco)
    return FragmentOuterStep(exchange, merge)


def _exchanged(one: _FragmentPart, every: _FragmentPart, diloco: DiLoCo) -> Tensor:
    """How far the replicas came, in their mean."""
    start, now = one.before.read().cast(one.wide), every.read()
    if diloco.bits == WHOLE:
        return start - reduce_mean(now.cast(one.wide), REPLICA)
    return _rounded(start, now, every.beside(LOST), diloco.bits)


def _merged(one: _FragmentPart, every: _FragmentPart, came: Tensor, diloco: DiLoCo) -> None:
    """The update of what all began from, and what they go on with."""
    start, now, held = one.before.read().cast(one.wide), every.read(), one.beside(MOMENTUM)
    after, momentum = outer_step(start, held.read(), came, diloco.learning_rate, diloco.momentum)
    held.write(momentum)
    one.before.write(after.cast(one.variable.dtype))
    if not diloco.delay:
        every.write(broadcast(after.cast(one.variable.dtype), now.shape))
        return
    mixed = now.cast(one.wide) * diloco.alpha + broadcast(after * (1 - diloco.alpha), now.shape)
    every.write(mixed.cast(one.variable.dtype))


def _rounded(start: Tensor, now: Tensor, lost: _FragmentPart, bits: int) -> Tensor:
    """How far the replicas came in their mean, as their codes say it."""
    wide, row = start.dtype, start.shape.dims[-1] if len(start.shape) else None
    came = broadcast(start, now.shape) - now.cast(wide) + lost.read()
    codes, scales = coded(came, row, bits)
    lost.write(came - (codes * scales).cast(wide))
    sent = rename(packed(codes, row, bits), **{REPLICA: SENDER})
    all_scales = rename(scales, **{REPLICA: SENDER})
    return reduce_mean((unpacked(sent, row, bits) * all_scales).cast(wide), SENDER)


@dataclass(frozen=True)
class _FragmentPart:
    """A variable in the graph of an outer step, of which a fragment has some layers.

    Attributes:
      layers: every so manyth, or all of the variable; `stack`: their dimension.
    """

    graph: Graph
    variable: Variable
    layers: ParameterSlice
    stack: str

    @property
    def wide(self) -> str:
        """The dtype in which replicas meet."""
        return wide(self.variable.dtype)

    @property
    def before(self) -> _FragmentPart:
        """The values that all replicas began from."""
        v = self.variable
        return self.beside(BEFORE, Named(v.name, v.initializer), v.dtype)

    def beside(self, name: str, first: Initializer = ZEROS, dtype: str = "") -> _FragmentPart:
        """The same layers of what is kept beside the variable, by default in the dtype of meetings."""
        v = self.variable
        own = replace(v, name=f"{v.name}/{name}", initializer=first, dtype=dtype or self.wide)
        return replace(self, variable=replace(own, trainable=False, slot_of=v.name))

    def read(self) -> Tensor:
        """[layers / fragments, ...]; all of a variable that is in no stack."""
        whole = self.graph.read(self.graph.declare(self.variable))
        return whole if self.layers is ... else dynamic_slice(self._apart(whole), self._place, self._phase)

    def write(self, value: Tensor) -> None:
        if self.layers is not ...:
            whole = self._apart(self.graph.read(self.variable))
            value = reshape(dynamic_update(whole, value, self._place, self._phase), self.variable.shape)
        self.graph.assign(self.variable, value)

    def _apart(self, whole: Tensor) -> Tensor:
        assert isinstance(self.layers, slice)
        dims, at = whole.shape.dims, whole.shape.index(self.stack)
        few = Dim(self.stack, dims[at].size // self.layers.step)
        return reshape(whole, [*dims[:at], few, Dim(self._phase, self.layers.step), *dims[at + 1 :]])

    @property
    def _phase(self) -> str:
        return f"{self.stack}_phase"

    @property
    def _place(self) -> Tensor:
        assert isinstance(self.layers, slice)
        place: Tensor = self.graph.apply(Constant(self.layers.start, "int32"))
        return place
