"""An axis that synchronises rarely (Douillard et al. 2023, "DiLoCo", algorithm 1): replicas of the variables
that train alone for some steps, each on batches of its own, and then meet.

A training step becomes two graphs on the same variables, of which each replica has a copy: [replica, own
dims]. The inner step is the step as it was, side by side for every replica (`Block.spread`): nothing in it
reads another one's numbers. The outer step makes of how far the replicas came, in their mean, one update of
the variables that they all began from, by gradient descent with Nesterov's momentum,

  d = before - mean over replicas of now      m = mu m + d      before = now = before - rate (d + mu m)

so that with H inner steps what crosses the axis is one sum of the variables in H steps. What the optimizer
keeps stays with its replica. What no batch and no random number has a part in, as the number of the step, is
one for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.blocks import REPLICA, Block, Node
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import ZEROS, Initializer, Variable
from mesh_tf_core.ir.structure import Assign, Feed, Read
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.tracing.copying import StepCopy
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.standing import outer_reads

BEFORE, MOMENTUM = "outer", "outer_momentum"
"""Names, below a variable's own, of what all replicas began from and of the outer momentum."""
Settings = Mapping[str, tuple[str, Callable[[str], Any]]]
"""Name in a text -> field, and what its value is."""
_SETTINGS: Settings = {
    "period": ("period", int),
    "rate": ("learning_rate", float),
    "momentum": ("momentum", float),
}


def read_settings(what: str, text: str, pairs: str, known: Settings, cls: type) -> dict[str, Any]:
    """Fields of `cls` as `name=value,...` gives them.

    Args:
      what, text: as messages call it, and all that was said.

    Raises:
      UserError: a name that is not known, or no number where one is due.
    """
    said: dict[str, Any] = {}
    for pair in filter(None, map(str.strip, pairs.split(","))):
        name, _, value = (p.strip() for p in pair.partition("="))
        if name not in known:
            raise UserError(f"{what} {text!r}: {name!r} is unknown; {known_names(name, known)}")
        field, kind = known[name]
        try:
            said[field] = kind(value)
        except ValueError:
            due = "whole number" if kind is int else "number"
            usual = getattr(cls, field)
            raise UserError(
                f"{what} {text!r}: {name}={value!r} is no {due}; write {name}={usual}, say"
            ) from None
    return said


@dataclass(frozen=True)
class DiLoCo:
    """How an axis of the mesh synchronises rarely.

    Attributes:
      axis: of the mesh; each place along it holds a replica.
      period: inner steps between two outer ones.
      learning_rate, momentum: of the outer step (section 2: 0.7 and Nesterov's 0.9).

    As text: `sites`, or `sites:period=100,rate=0.7,momentum=0.9`, each of which may be missing.
    """

    axis: str
    period: int = 30
    learning_rate: float = 0.7
    momentum: float = 0.9

    def __str__(self) -> str:
        return f"{self.axis}:period={self.period},rate={self.learning_rate:g},momentum={self.momentum:g}"

    @classmethod
    def parse(cls, text: str) -> DiLoCo:
        """Its text; UserError if it is none."""
        axis, _, rest = text.partition(":")
        given = read_settings("diloco", text, rest, _SETTINGS, cls)
        if not axis.strip():
            raise UserError(f"diloco {text!r}: name the axis of the mesh, as sites:period=30")
        return cls(axis.strip(), **given)

    def __post_init__(self) -> None:
        if self.period < 1:
            raise UserError(f"diloco: the period must be at least one step, found {self.period}")
        if not self.learning_rate > 0:
            raise UserError(f"diloco: the outer learning rate must be positive, found {self.learning_rate}")
        if not 0 <= self.momentum < 1:
            raise UserError(f"diloco: the outer momentum must be in [0, 1), found {self.momentum}")


@dataclass(frozen=True)
class Alike(Initializer):
    """Every replica begins with what one variable would."""

    one: Initializer

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        own = self.one.piece(name, sizes[1:], begin[1:], extent[1:])
        return np.broadcast_to(own, tuple(extent))


@dataclass(frozen=True)
class Named(Initializer):
    """What the variable of another name begins with."""

    name: str
    one: Initializer

    def piece(self, name: str, sizes: Sequence[int], begin: Sequence[int], extent: Sequence[int]) -> Any:
        return self.one.piece(self.name, sizes, begin, extent)


def inner_step(graph: Graph, replicas: int, results: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
    """A training step of every replica.

    Args:
      graph: of a whole step, with its updates.
      results: name -> tensor at the top level.

    Returns:
      The new graph and its results [replica, their dims]; inputs are [replica, their dims].
    """
    return _Replicas(graph, Dim(REPLICA, replicas)).run(results)


def outer_step(graph: Graph, inner: Graph, diloco: DiLoCo) -> Graph:
    """The graph in which replicas meet.

    Args:
      graph: of a whole step; inner: what `inner_step` made of it.
    """
    new = Graph(f"{graph.name}/outer")
    for variable in [v for v in graph.variables.values() if v.trainable]:
        wide = "float64" if variable.dtype == "float64" else "float32"
        copies = new.declare(inner.variables[variable.name])
        named = Named(variable.name, variable.initializer)
        kept = replace(variable, initializer=named, trainable=False, slot_of=variable.name)
        began = new.declare(replace(kept, name=f"{variable.name}/{BEFORE}"))
        moving = Variable(
            f"{variable.name}/{MOMENTUM}",
            variable.shape,
            wide,
            ZEROS,
            False,
            variable.stacked,
            variable.name,
        )
        with new.phase("update", variable.name):
            before = new.read(began)
            start = before.cast(wide)
            came = start - reduce_mean(new.read(copies).cast(wide), REPLICA)
            momentum = new.read(new.declare(moving)) * diloco.momentum + came
            after = start - (came + momentum * diloco.momentum) * diloco.learning_rate
            after = after.cast(variable.dtype)
            new.assign(moving, momentum)
            new.assign(began, after)
            new.assign(copies, broadcast(after, copies.shape))
    return new


def _draws(node: Node) -> bool:
    """Whether a node, or one in its loop, makes a random key."""
    return node.op.derives_key or any(n.op.derives_key for n, _ in (node.body.walk() if node.body else ()))


class _Replicas(StepCopy):
    """A step side by side, under construction."""

    def __init__(self, graph: Graph, dim: Dim) -> None:
        super().__init__(graph)
        self.dim = dim
        self.own = self._own()

    def _own(self) -> set[str]:
        """Variables of which each replica has its own: all but those whose new value no input, random number
        or own variable has a part in."""
        nodes = self.old.nodes
        own = {v.name for v in self.old.variables.values() if v.trainable}
        while True:
            behind: set[int] = set()
            for node in nodes:
                op = node.op
                begins = isinstance(op, Feed) or (isinstance(op, Read) and op.variable.name in own)
                if begins or _draws(node) or not behind.isdisjoint(outer_reads(self.old, node)):
                    behind |= {*node.outputs, *(node.body.saved.values() if node.body else ())}
            more = {n.op.variable.name for n in nodes if isinstance(n.op, Assign) and n.inputs[0] in behind}
            if more <= own:
                return own
            own |= more

    def run(self, results: Mapping[str, Tensor]) -> tuple[Graph, dict[str, Tensor]]:
        """Builds the graph."""
        old, new = self.old, self.new
        new.variables.clear()
        for v in old.variables.values():
            new.declare(self._copies(v) if v.name in self.own else v)
        shared = self._shared()
        for node in old.nodes:
            if node.index in shared:
                self._alone(node)
        made: dict[str, Tensor] = {}
        with new.loop(self.dim, spread=True) as body:
            assert body.index is not None
            self.number = new.tensors[body.index]
            self._body_of(body, shared)
            for node in old.nodes:
                if isinstance(node.op, Assign) and node.index not in shared:
                    made[node.op.variable.name] = new.stack_output(body, self.tensors[node.inputs[0]])
            found = {name: new.stack_output(body, self.tensors[t.id]) for name, t in results.items()}
            new.deliver(
                (self.tensors[t], name) for t, name in old.gradient_of.items() if not old.tensor(t).block
            )
        new.close_loop(body, [])
        for node in old.nodes:
            if isinstance(node.op, Assign) and node.op.variable.name in made:
                with new.phase(node.phase, node.scope):
                    new.assign(new.variables[node.op.variable.name], made[node.op.variable.name])
        return new, found

    def _copies(self, v: Variable) -> Variable:
        return replace(
            v,
            shape=Shape([self.dim, *v.shape]),
            initializer=Alike(v.initializer),
            stacked=v.stacked + 1,
        )

    def _shared(self) -> set[int]:
        """The nodes that store what is one for all, and those that lead to it."""
        wanted: set[int] = set()
        found: set[int] = set()
        for node in reversed(self.old.nodes):
            stores = isinstance(node.op, Assign) and node.op.variable.name not in self.own
            if stores or not wanted.isdisjoint(node.outputs):
                found.add(node.index)
                wanted |= outer_reads(self.old, node)
        return found

    def _alone(self, node: Node) -> None:
        """A node outside of the replicas."""
        op = node.op
        if isinstance(op, Read):
            self.tensors[node.outputs[0]] = self.new.read(op.variable)
        elif isinstance(op, Assign):
            with self.new.phase(node.phase, node.scope):
                self.new.assign(op.variable, self.tensors[node.inputs[0]])
        else:
            self._node(node)

    def _body_of(self, body: Block, shared: Iterable[int]) -> None:
        """The step of one replica."""
        for node in self.old.nodes:
            op = node.op
            if node.index in shared or isinstance(op, Assign):
                continue
            if isinstance(op, Read):
                outer = self.new.read(self.new.variables[op.variable.name])
                own = op.variable.name in self.own
                self.tensors[node.outputs[0]] = self.new.slice_into(body, outer) if own else outer
            elif isinstance(op, Feed):
                fed = self.new.input(op.feed, [self.dim, *op.type.shape], op.type.dtype)
                self.tensors[node.outputs[0]] = self.new.slice_into(body, fed)
            else:
                self._node(node)
