"""A step that runs while it is written: a graph whose operations are executed when they are added."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from mesh_tf_core.eager.machine import EagerMachine
from mesh_tf_core.eager.store import VariableStore
from mesh_tf_core.eager.tensor import EagerTensor
from mesh_tf_core.eager.unroll import Stopped, Unrolled, UnrolledIteration, taken_apart, whole
from mesh_tf_core.engines.feeds import Feeds
from mesh_tf_core.engines.pieces import DevicePieces
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.blocks import Assign, Block, Feed, Node, Read
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import check_dtype
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import Program
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.placement import check_counted
from mesh_tf_core.tracing.graph import Graph

PACKAGE = __name__.partition(".")[0]


@dataclass(frozen=True)
class PendingWrite:
    """A value to be stored when the step is finished.

    Attributes:
      version: of the variable when it was assigned.
    """

    variable: Variable
    pieces: DevicePieces
    version: int


class EagerStep(Graph):
    """One step of an eager context (`Eager.step` makes it); model code uses it as a graph.

    As in a staged step, variables keep the values that they had when the step began. Assigned values are
    stored when the step ends: at the end of `with`, or by `finish`. An error inside `with` leaves all
    variables as they were. Values are kept for gradients until the step ends.

    Args:
      batch: name -> array that `input` returns.
      unroll: run loops iteration by iteration (see `Eager.step`).
    """

    def __init__(
        self, machine: EagerMachine, store: VariableStore, batch: Mapping[str, Any], unroll: bool
    ) -> None:
        super().__init__("eager step")
        self.machine, self.store, self.batch, self._unroll = machine, store, batch, unroll
        self._sent_before = dict(machine.sent)
        self._constants: dict[str, Any] = {}
        self._written: dict[str, PendingWrite] = {}
        self._over = False
        self._apart: dict[int, list[Tensor]] = {}

    # -- what a user calls -----------------------------------------------------------------------------------

    def constant(self, value: Any, dims: Sequence[Dim] | Shape | None = None, dtype: str = "") -> EagerTensor:
        """An array as a tensor, cut into shards as in the layout.

        Args:
          value: an array; numbers in lists (float32, int32 or bool); or a tensor of another step or context,
            whose value is copied (gradients do not flow back into that step).
          dims: its dimensions; a tensor brings its own.
          dtype: by default the array's.
        """
        shape = Shape(value.shape if dims is None and isinstance(value, Tensor) else dims or ())
        array = value.numpy() if isinstance(value, Tensor) else _array(value)
        if array.shape != shape.sizes:
            raise UserError(
                f"constant: dimensions [{shape}] need an array of shape {list(shape.sizes)}, found shape "
                f"{list(array.shape)}"
            )
        name = f"constant {len(self.tensors)}"
        self._constants[name] = array
        try:
            with self.at_root():
                made: EagerTensor = self.apply(
                    Feed(name, TensorType(shape, check_dtype(dtype or array.dtype.name)))
                )
        finally:
            del self._constants[name]
        return made

    def replay(self, graph: Graph) -> dict[Tensor, EagerTensor]:
        """Runs the operations of a graph that was built before (`model.step_graph` of a model file), one by
        one, on the batch and the variables of this step. A loop is one operation.

        Returns:
          Every tensor outside of loops -> its value, in the order of computation.
        """
        made: dict[int, EagerTensor] = {}
        for node in graph.nodes:
            found = self._results(graph, node, lambda i: made[i]._held())
            for id, pieces in found.items():
                made[id] = EagerTensor(self, self.machine, len(self.tensors), graph.tensor(id).type)
                made[id].pieces = pieces
                self.tensors.append(made[id])
        return {graph.tensor(id): value for id, value in made.items()}

    @property
    def communication_bytes(self) -> dict[str, float]:
        """Bytes that a device has sent since the step began, per mesh axis."""
        return {axes: n - self._sent_before.get(axes, 0.0) for axes, n in self.machine.sent.items()}

    def finish(self) -> None:
        """Stores assigned values and ends the step.

        Raises:
          UserError: a staged function, or another step, has assigned one of these variables since; nothing
            is stored.
        """
        lost = [name for name, write in self._written.items() if self.store.version(name) != write.version]
        written = self._written if not lost else {}
        for write in written.values():
            self.store.put(write.variable, write.pieces)
        self._end()
        if lost:
            raise UserError(
                "finish: this step and a staged function or another step both assigned "
                f"{', '.join(lost[:5])}; assign each variable in only one of them"
            )

    def _end(self) -> None:
        self._over = True
        self._written.clear()
        self._apart.clear()
        super().__init__(self.name)

    def __enter__(self) -> EagerStep:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._over:
            return
        if kind is None:
            self.finish()
        else:
            self._end()

    # -- what a graph does, done at once ---------------------------------------------------------------------

    def new_tensor(self, type: TensorType, block: Block) -> Tensor:
        if block.id:
            return super().new_tensor(type, block)
        self.tensors.append(EagerTensor(self, self.machine, len(self.tensors), type))
        return self.tensors[-1]

    def visible(self, x: Tensor, user: object = "operation", level: int = -1) -> Tensor:
        self.check_open(user)
        name = getattr(user, "name", user)
        if not isinstance(x, Tensor):
            raise UserError(
                f"{name}: expected a tensor, found {type(x).__name__}; convert it with step.constant(x, dims)"
            )
        if x.graph is not self:
            raise UserError(f"{name}: {self._foreign(x)}")
        return super().visible(x, user, level)

    def check_open(self, user: object) -> None:
        """UserError if the step is over."""
        if self._over:
            raise UserError(
                f"{getattr(user, 'name', user)}: this eager step has ended; begin another with "
                "Eager.step and copy values into it with step.constant(x)"
            )

    def _foreign(self, x: Tensor) -> str:
        if not isinstance(x, EagerTensor):
            return (
                f"{x!r} belongs to graph {x.graph.name!r}, whose tensors have no values while it is "
                "being built; make all operands in that graph or in one eager step"
            )
        whose = "another step" if x.machine is self.machine else "another mtf.Eager object"
        return f"{x!r} belongs to {whose}; copy its value into the current step with step.constant(x)"

    def _append(self, op: Op, inputs: Sequence[Tensor], outs: Sequence[Tensor], body: Block | None) -> Node:
        self.check_open(op)
        node = super()._append(op, inputs, outs, body)
        if not self.block.id:
            try:
                self._run(node)
            except BaseException:
                self.block.nodes.remove(node)
                for o in node.outputs:
                    del self.producer[o]
                raise
        return node

    def _run(self, node: Node) -> None:
        for id, pieces in self._results(self, node, self._pieces).items():
            tensor = self.tensors[id]
            assert isinstance(tensor, EagerTensor)
            tensor.pieces = pieces

    def _results(
        self, graph: Graph, node: Node, pieces: Callable[[int], DevicePieces]
    ) -> dict[int, DevicePieces]:
        """Computes the outputs of a node, by tensor id; notes an assignment. A LayoutError says where."""
        op = node.op
        try:
            if isinstance(op, Feed):
                return {node.outputs[0]: self._fed_pieces(op)}
            if isinstance(op, Read):
                return {node.outputs[0]: self.store.pieces(op.variable)}
            if isinstance(op, Assign):
                name = op.variable.name
                self._written[name] = PendingWrite(
                    op.variable, pieces(node.inputs[0]), self.store.version(name)
                )
                return {}
            return self.machine.run(graph, node, pieces)
        except LayoutError as error:
            scope = f" in {node.scope!r}" if node.scope else ""
            raise LayoutError(f"{op.name}{scope} at {_line()}: {error}") from None

    def _fed_pieces(self, op: Feed) -> DevicePieces:
        """A constant, or an array of the batch."""
        if op.feed in self._constants:
            return self.machine.placed(self._constants[op.feed], op.type, "a constant")
        what = f"input {op.feed!r}"
        mesh, layout, value = self.machine.mesh, self.machine.layout, self.machine.value(op.type, what)
        asked = Program(mesh, layout, (value,), (), feeds={op.feed: 0})
        return self.machine.placed(Feeds(asked).checked(self.batch)[op.feed], op.type, what)

    def _pieces(self, id: int) -> DevicePieces:
        tensor = self.tensors[id]
        assert isinstance(tensor, EagerTensor)
        if tensor.pieces is None:
            self._save(id)
        assert tensor.pieces is not None
        return tensor.pieces

    # -- loops -----------------------------------------------------------------------------------------------

    @property
    def unroll(self) -> bool:
        return self._unroll and not self.block.id

    def unrolled(
        self, body: Callable[..., Any], init: Sequence[Tensor], dim: Dim, stacks: Sequence[Tensor]
    ) -> Any:
        layout = self.machine.layout
        try:
            check_counted(layout, dim.name, (*layout.axes(dim.name), *layout.further(dim.name)))
        except LayoutError as error:
            raise LayoutError(f"scan at {_line()}: {error}") from None
        made = Unrolled(self, self.apart, dim).run(body, init, stacks)
        self._assign_stacked()
        return made

    def runs_if(self, predicate: Tensor) -> None:
        if not isinstance(self.block, UnrolledIteration):
            super().runs_if(predicate)
        elif not predicate:
            raise Stopped

    def apart(self, x: Tensor, dim: Dim) -> list[Tensor]:
        """The parts of a stacked tensor, one per iteration of an unrolled loop."""
        if x.id not in self._apart:
            with self.at_root():
                self._apart[x.id] = taken_apart(x, dim)
        return self._apart[x.id]

    def slice_into(self, block: Block, outer: Tensor, part: Dim | None = None) -> Tensor:
        if not isinstance(block, UnrolledIteration):
            return super().slice_into(block, outer, part)
        return self.apart(outer, block.dim)[block.at]

    def stack_output(self, block: Block, inner: Tensor, whole: Dim | None = None) -> Tensor:
        return inner if isinstance(block, UnrolledIteration) else super().stack_output(block, inner, whole)

    def _assign_stacked(self) -> None:
        if len(self._stack) > 1:  # the outermost loop assigns, when all its parts are there
            return
        parts: dict[str, list[tuple[Variable, Tensor, str]]] = {}
        for entry in self._assigned:
            parts.setdefault(entry[0].name, []).append(entry)
        self._assigned.clear()
        for entries in parts.values():
            variable, _, scope = entries[0]
            with self.phase(self._phase, scope):
                value = whole(variable, [part for _, part, _ in entries])
                self._append(Assign(variable), [value], [], None)

    def _save(self, id: int) -> None:
        """Runs a loop again for values of its body that its backward turned out to read."""
        self._run(next(n for n in self.nodes if n.body is not None and id in n.body.saved.values()))


def _array(value: Any) -> Any:
    """A NumPy array; Python's numbers become float32 and int32, as everywhere in models."""
    array = np.asarray(value)
    if not hasattr(value, "dtype"):
        array = array.astype({"f": "float32", "i": "int32"}.get(array.dtype.kind, array.dtype))
    return array


def _line() -> str:
    """The line of the model that is being run: the innermost one outside of this package."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == PACKAGE:
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
