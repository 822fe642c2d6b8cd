"""Graphs: append-only lists of operations on named-dimension tensors, with loop bodies as blocks.

A block is a list of nodes. Block 0 is the graph itself; `scan` opens a block for its body, which is written
once and runs once per element of the stacked dimension. Nothing here depends on devices.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from fractions import Fraction
from typing import Any, TypeVar

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Assign, Block, Feed, Node, Outline, Outlined, Read, Scan, per_graph
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import check_dtype
from mesh_tf_core.ir.initializers import ZEROS, Initial, Variable
from mesh_tf_core.ir.op import Op, TensorType, inferred
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.tensor import Inside, Tensor, caller, having
from mesh_tf_core.ops.basic import cast
from mesh_tf_core.ops.binary import binary
from mesh_tf_core.ops.random import FoldIn
from mesh_tf_core.ops.shape import Reshape
from mesh_tf_core.ops.unary import unary
from mesh_tf_core.tracing.residuals import Residuals

T = TypeVar("T")
MOST_OPERATIONS = 100_000
"""The largest number of operations in one graph, built in seconds: work on a larger one would not end in a
day."""


class Graph(Residuals):
    """The operations of a model, which model code adds one by one.

    Attributes:
      version: a number that differs after every change.
      count: number of nodes, including those of loops; nodes are numbered in the order of their creation.
      unsplit: dimensions that no search splits, with the reason.
      to_the_end: loops that backward recomputes run to their end a second time, not only to the last value
        that backward reads (`lower.rematerialization`).
      places: path of an operation -> 'file:line' of the model that creates it; `place` has that of another
        library's program.

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph = mtf.Graph("linear")
      >>> batch, d_model, d_ff = mtf.Dim("batch", 8), mtf.Dim("d_model", 4), mtf.Dim("d_ff", 16)
      >>> x = graph.input("x", [batch, d_model], "float32")
      >>> w = graph.variable("w", [d_model, d_ff], mtf.Normal(0.1))
      >>> print(mtf.einsum([x, w], [batch, d_ff]).shape)
      batch:8 d_ff:16
    """

    unary, binary, cast = staticmethod(unary), staticmethod(binary), staticmethod(cast)

    def __init__(self, name: str = "model") -> None:
        super().__init__()
        self.name = name
        self.tensors: list[Tensor] = []
        self.producer: dict[int, Node] = {}
        self.blocks: list[Block] = [Block(0)]
        self.inputs: dict[str, Tensor] = {}
        self.gradient_of: dict[int, str] = {}
        self.unsplit: dict[str, str] = {}
        self.to_the_end = False
        self.places: dict[str, str] = {}
        self.place: str | None = None
        self.gradient_functions: list[Callable[..., Any]] = []
        self.version = 0
        self._remembered: dict[Hashable, Any] = {}
        self._once: dict[tuple[int, Hashable], Any] = {}
        self._stack: list[Block] = [self.blocks[0]]
        self._reads: dict[str, Tensor] = {}
        # Tensors of equal shapes share one: shapes are looked up all the time, which is quickest by identity.
        self._shapes: dict[Shape, Shape] = {}
        self._assigned: list[tuple[Variable, Tensor, str]] = []
        self._keys = 0
        self.count = 0
        self._names: Counter[str] = Counter()

    # -- what follows from all of it -------------------------------------------------------------------------

    def changed(self) -> None:
        """Records a change: values derived from the graph are no longer valid. Whoever changes nodes, blocks
        or dictionaries of a graph directly calls this."""
        self.version += 1
        self._remembered.clear()

    @per_graph
    def outline(self) -> Outline:
        """The graph's current outline, as plain data; one object until the graph changes."""
        tensors = tuple(Outlined(t.type, t.block) for t in self.tensors)
        return Outline.of(self.blocks, tensors, self.gradient_of, frozenset(self.variables))

    def __getstate__(self) -> dict[str, Any]:
        """A copy, which may be changed, works everything out by itself."""
        return {**self.__dict__, "_remembered": {}}

    # -- structure -------------------------------------------------------------------------------------------

    @property
    def unroll(self) -> bool:
        """True if `scan` calls its body once per iteration, through `unrolled`, instead of building it."""
        return False

    @property
    def block(self) -> Block:
        """The block to which new operations are added."""
        return self._stack[-1]

    @property
    def _loops(self) -> list[Block]:
        """The loops around new operations, whose dimensions new variables have."""
        return [b for b in self._stack[1:] if not b.single]

    def tensor(self, id: int) -> Tensor:
        return self.tensors[id]

    @per_graph
    def dims(self) -> Mapping[str, Set[int]]:
        """Name -> sizes of every dimension that occurs."""
        out: dict[str, set[int]] = {}
        # Tensors of equal shapes share one.
        for shape in {id(t.shape): t.shape for t in self.tensors}.values():
            for d in shape:
                out.setdefault(d.name, set()).add(d.size)
        return out

    def new_tensor(self, type: TensorType, block: Block) -> Tensor:
        shape = self._shapes.setdefault(type.shape, type.shape)
        if shape is not type.shape:
            type = TensorType(shape, type.dtype)
        tensor = Tensor(self, len(self.tensors), type, block.id)
        self.tensors.append(tensor)
        self.changed()
        return tensor

    # -- operations ------------------------------------------------------------------------------------------

    def apply(self, op: Op, *inputs: Tensor) -> Any:
        taken = [self.visible(x, op) for x in inputs]
        types = op.infer(*(x.type for x in taken))
        outs = [self.new_tensor(t, self.block) for t in inferred(op, types)]
        self._append(op, taken, outs, None)
        return tuple(outs) if isinstance(types, tuple) else outs[0]

    def once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if self.unroll:
            return make()
        place = self.block.id, key
        if place not in self._once:
            self._once[place] = make()
        return self._once[place]

    def maker(self, x: Tensor) -> tuple[Any, Sequence[Tensor]]:
        node = self.producer.get(x.id)
        return (None, ()) if node is None else (node.op, [self.tensor(i) for i in node.inputs])

    def _append(self, op: Op, inputs: Sequence[Tensor], outs: Sequence[Tensor], body: Block | None) -> Node:
        if self.count == MOST_OPERATIONS:
            raise UserError(
                f"graph {self.name!r} has more than {MOST_OPERATIONS:,} operations; use fewer "
                "operations, or write equal layers as one mtf.scan, which counts as one operation"
            )
        node = Node(
            self.count,
            op,
            tuple(x.id for x in inputs),
            tuple(x.id for x in outs),
            "/".join(self._scope),
            self._phase,
            body,
            self._named or self._name(op),
            self._call,
        )
        self.count += 1
        if self._phase == Phase.FORWARD and node.path not in self.places:
            self.places[node.path] = caller() if self.place is None else self.place
        self.block.nodes.append(node)
        for x in outs:
            self.producer[x.id] = node
        self.changed()
        return node

    def _name(self, op: Op) -> str:
        """The name of an operation among those of its scope: einsum, einsum_2, and so on."""
        key = self.path(op.name)
        self._names[key] += 1
        return op.name if self._names[key] == 1 else f"{op.name}_{self._names[key]}"

    # -- inputs, variables, keys -----------------------------------------------------------------------------

    def input(self, name: str, dims: Sequence[Dim], dtype: str = "int32") -> Tensor:
        """A tensor fed with every batch under `name`."""
        if name in self.inputs:
            raise UserError(f"input {name!r} is declared twice; use the tensor of the first declaration")
        with self.at_root():
            self.inputs[name] = self.apply(Feed(name, TensorType(Shape(dims), check_dtype(dtype))))
        return self.inputs[name]

    def variable(
        self,
        name: str,
        dims: Sequence[Dim],
        initializer: Initial,
        dtype: str = "float32",
        activation_dtype: str | None = None,
        trainable: bool = True,
    ) -> Tensor:
        full = self.path(name)
        loops = self._loops[self._around : self._shared]
        shape = Shape([*(b.dim for b in loops), *dims])
        trained = trainable and not self._frozen
        type = TensorType(shape, check_dtype(dtype))
        initial = self._changed(full, initializer).bound(full, type, len(loops))
        variable = Variable(full, shape, dtype, initial, trained, len(loops))
        variable = self._shared_one(variable) or self.declare(variable)
        value = self.read(variable)
        for block in loops:
            value = self.slice_into(block, value)
        return value.cast(check_dtype(activation_dtype)) if activation_dtype else value

    def declare(self, variable: Variable) -> Variable:
        """Adds a variable under its whole name."""
        self.variables[variable.name] = variable
        self.changed()
        return variable

    def deliver(self, gradients: Iterable[tuple[Tensor, str]]) -> None:
        """Notes that tensors are the gradients of the variables of these names."""
        self.gradient_of.update((tensor.id, name) for tensor, name in gradients)
        self.changed()

    def read(self, variable: Variable) -> Tensor:
        if variable.name not in self._reads:
            with self.at_root():
                self._reads[variable.name] = self.apply(Read(variable))
        return self._reads[variable.name]

    def assign(self, variable: Variable, value: Tensor) -> None:
        loops = self._stack[1:]
        if any(b.runs is not None for b in loops):
            raise UserError(
                f"assign to variable {variable.name!r}: an assignment inside a branch or a while loop is "
                "not supported; return the value from the branch or loop and assign it outside"
            )
        shape = Shape([*(b.dim for b in self._loops), *value.shape])
        if TensorType(shape, value.dtype) != variable.lying:
            raise UserError(
                f"assign to variable {variable.name!r}: the value must have the variable's type "
                f"{variable.dtype}[{variable.shape}], found {value.type}"
                + (f" inside a loop over {', '.join(str(b.dim) for b in loops)}" if loops else "")
            )
        value = self.visible(value)
        for block in reversed(loops):
            value = self.stack_output(block, value)
        if not loops:
            self._append(Assign(variable), [value], [], None)
        else:
            self._assigned.append((variable, value, "/".join(self._scope)))

    def random_key(self, *extra: Tensor) -> Tensor:
        self._keys += 1
        indices = [self.tensors[b.index] for b in self._stack if b.index is not None]
        return self.apply(FoldIn(self._keys), self.step(), *indices, *extra)

    def step(self) -> Tensor:
        if "step" not in self.variables:
            self.declare(Variable("step", Shape(), "int32", ZEROS, False, 0))
        return self.read(self.variables["step"])

    def at_root(self) -> Inside:
        return having(self, _stack=self._stack[:1])

    # -- loops -----------------------------------------------------------------------------------------------

    @contextmanager
    def loop(
        self, dim: Dim, reverse: bool = False, forward: Block | None = None, spread: bool = False
    ) -> Iterator[Block]:
        """Opens the body of a loop over `dim`. The caller fills its carries and calls `close_loop`."""
        block = Block(len(self.blocks), self.block.id, dim, reverse, forward, spread=spread)
        self.blocks.append(block)
        block.index = self.new_tensor(TensorType(Shape(), "int32"), block).id
        self._stack.append(block)
        try:
            yield block
        finally:
            self._stack.pop()

    def number(self, block: Block) -> Tensor:
        """The number of a loop's iteration, in its body."""
        assert block.index is not None
        return self.tensors[block.index]

    @contextmanager
    def branch(self, runs: Tensor, share: Fraction) -> Iterator[Block]:
        """Opens a block that runs if a predicate holds: in `share` of the times, as a price counts it."""
        with self.loop(Dim(f"branch_{len(self.blocks)}", 1)) as block:
            block.single, block.runs, block.branch = True, runs.id, share
            yield block

    def runs_if(self, predicate: Tensor) -> None:
        """The iteration whose body is being built runs only if `predicate`, part of its state, is True."""
        self.block.runs = predicate.id

    def unrolled(
        self, body: Callable[..., Any], init: Sequence[Tensor], dim: Dim, stacks: Sequence[Tensor]
    ) -> Any:
        """`scan` iteration by iteration, for a graph whose operations run at once (see `eager`); None if the
        first iteration must not run."""
        raise NotImplementedError

    def body_input(self, block: Block, like: Tensor) -> Tensor:
        return self.new_tensor(like.type, block)

    def stack_output(self, block: Block, inner: Tensor, whole: Dim | None = None) -> Tensor:
        """An outer tensor that stacks a body tensor over the iterations; `whole`: its first dimension, if
        every iteration gives several elements of it, or it is longer than the loop (`Block.first`)."""
        dims = [whole or block.dim, *inner.shape.dims[whole is not None and block.first is None :]]
        outer = self.new_tensor(TensorType(Shape(dims), inner.dtype), self.outside(block))
        block.stacked.append((inner.id, outer.id))
        return outer

    def sum_output(self, block: Block, inner: Tensor) -> Tensor:
        """An outer tensor that sums a body tensor over the iterations."""
        outer = self.new_tensor(inner.type, self.outside(block))
        block.summed.append((inner.id, outer.id))
        return outer

    def close_loop(self, block: Block, init: Sequence[Tensor]) -> list[Tensor]:
        """Appends the loop to the block around it; returns the final carries."""
        finals = [self.new_tensor(x.type, self.block) for x in init]
        outs = [*finals, *(self.tensors[o] for _, o in block.results)]
        self._append(Scan(block.dim), init, outs, block)
        if not self.block.id:
            self._assign_stacked()
        return finals

    def _assign_stacked(self) -> None:
        """Assignments that were made inside the loop that has just been closed."""
        for variable, value, scope in self._assigned:
            with self.phase(self._phase, scope):
                # Blocks of one iteration have a dimension that the variable lacks.
                same = value.shape == variable.lying.shape
                whole = value if same else self.apply(Reshape(variable.lying.shape), value)
                self._append(Assign(variable), [whole], [], None)
        self._assigned.clear()


def graph_of(x: Tensor) -> Graph:
    """The graph of a tensor, with methods that model code does not use."""
    assert isinstance(x.graph, Graph)
    return x.graph
