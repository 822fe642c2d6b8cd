"""Writes a TensorFlow graph as plain data: one node costs microseconds instead of the tenth of a millisecond
that it takes to build it through TensorFlow's functions, so tracing hardly grows with the number of devices.
"""

from __future__ import annotations

import itertools
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute

from mesh_tf_core.tables import pairs

_HANDLE, _READ, _WRITE = "VarHandleOp", "ReadVariableOp", "AssignVariableOp"
_NAMES = ("Const", "Reshape", _HANDLE)
"""Operations that compute nothing: equal ones give the same value."""


def simplified(traced: Any, name: str) -> Any:
    """The definition of a concrete function, called `name`, with fewer nodes and the same numbers.

    TensorFlow writes a constant wherever a shape or a number is used and keeps the order of everything that
    touches variables, and every device gets a copy of every node and of its order, which takes a good part of
    the time before the first step. Work that is the same for all devices is done once here.

    Equal nodes with large results are kept apart, because the second may exist to save memory in between.
    """
    operations = {op.name: op for op in traced.graph.get_operations()}
    new = type(traced.function_def)()
    new.CopyFrom(traced.function_def)
    new.signature.name = name
    nodes = list(new.node_def)  # in the order in which they were traced: after what they are made of
    _order_variables(nodes)
    awaited = {i[1:] for node in nodes for i in node.input if i.startswith("^")} | {*new.control_ret.values()}
    first: dict[Any, str] = {}
    equal: dict[str, str] = {}  # a node that goes -> the one like it
    instead: dict[str, str] = {}  # an output that goes -> the value that it passes on
    made_of: dict[str, tuple[str, Any]] = {}  # a reshape -> what it is made of, and the shape of that

    def kept(value: str) -> str:
        node, colon, output = value.partition(":")
        value = equal.get(node, node) + colon + output
        return instead.get(value, value)

    for node in nodes:
        node.input[:] = [kept(i) for i in node.input]
        if node.name in awaited:
            continue
        operation = operations[node.name]
        if node.op == "Identity" and len(node.input) == 1:
            instead[f"{node.name}:output:0"] = node.input[0]
            continue
        if node.op == "Reshape" and len(node.input) == 2:
            made_from = node.input[0], operation.inputs[0].shape
            node.input[0], shape = made_of.get(node.input[0], made_from)
            if shape.is_fully_defined() and shape == operation.outputs[0].shape:
                instead[f"{node.name}:output:0"] = node.input[0]
                continue
            made_of[f"{node.name}:output:0"] = node.input[0], shape
        if node.op in _NAMES or _is_number(operation):
            attributes = sorted((k, v.SerializeToString(deterministic=True)) for k, v in node.attr.items())
            found = first.setdefault((node.op, node.device, *node.input, *attributes), node.name)
            if found != node.name:
                equal[node.name] = found
    for key, value in new.ret.items():
        new.ret[key] = kept(value)
    used = {value.partition(":")[0] for value in new.ret.values()} | awaited
    left = []
    for node in reversed(nodes):
        if node.name in used or (operations[node.name].op_def.is_stateful and node.op != _HANDLE):
            used.update(i.removeprefix("^").partition(":")[0] for i in node.input)
            left.append(node)
    new.ClearField("node_def")
    new.node_def.extend(left)
    return new


def _order_variables(nodes: Sequence[Any]) -> None:
    """Only a write waits, for the reads of the same variable. TensorFlow lets every handle wait for all that
    was done to any variable before."""
    at = {op: [i for i, node in enumerate(nodes) if node.op == op] for op in (_READ, _WRITE)}
    if at[_READ] and at[_WRITE] and at[_READ][-1] > at[_WRITE][0]:
        return  # what is read again after a write stays in its order
    handles = {node.name: node.attr["shared_name"].s for node in nodes if node.op == _HANDLE}
    waits = {f"^{name}" for name in handles}
    reads = defaultdict(list)
    for node in nodes:
        variable = handles.get(node.input[0].partition(":")[0]) if node.input else None
        inputs = [i for i in node.input if i not in waits and (node.op != _HANDLE or not i.startswith("^"))]
        if node.op == _READ:
            reads[variable].append(f"^{node.name}")
        elif node.op == _WRITE:
            inputs = [*inputs, *(read for read in reads[variable] if read not in inputs)]
        node.input[:] = inputs


def _is_number(operation: Any) -> bool:
    """Whether it computes one number from others, and nothing else."""
    values = [*operation.inputs, *operation.outputs]
    return not operation.op_def.is_stateful and all(value.shape.rank == 0 for value in values)


_steps = itertools.count()
_OUTPUT = pairs("AddN:sum AddV2:z Less:z LogicalAnd:z Maximum:z Minimum:z Sub:z ZerosLike:y")
"""Names of operations' outputs, where they are not "output"."""


@dataclass(frozen=True, slots=True)
class Wire:
    """An output of a node: its name in the graph, its dtype and its shape."""

    name: str
    dtype: Any
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        size = self.dtype.size
        for n in self.shape:
            size *= n
        return size


class GraphWriter:
    """A graph under construction. Every method appends a node to a device and returns its outputs."""

    def __init__(self) -> None:
        self.library = tf.compat.v1.GraphDef()
        self.body = self.library.library.function.add()
        self.functions: list[Any] = []
        self.inputs: list[Wire] = []
        self._names = itertools.count()
        self._calls: set[str] = set()
        self._parts: dict[Wire, list[Wire]] = {}
        self._constants: dict[tuple[int, str], Wire] = {}
        self._results: dict[str, list[tuple[str, Any, tuple[int, ...]]]] = {}

    def input(self, dtype: Any, shape: Sequence[int]) -> Wire:
        """An argument of the function that the graph becomes."""
        name = f"input_{len(self.inputs)}"
        self.body.signature.input_arg.add(name=name, type=dtype.as_datatype_enum)
        self.inputs.append(Wire(name, dtype, tuple(shape)))
        return self.inputs[-1]

    def node(
        self,
        op: str,
        device: str,
        inputs: Sequence[Wire],
        outputs: Sequence[tuple[Any, tuple[int, ...]]],
        types: Sequence[tuple[str, Any]] = (),
        numbers: Sequence[tuple[str, int]] = (),
        after: Sequence[str] = (),
    ) -> list[Wire]:
        """Appends a node.

        Args:
          types, numbers: attributes (name, dtype) and (name, integer).
          after: names of nodes that it waits for.
        """
        name = f"n{next(self._names)}"
        node = self.body.node_def.add(name=name, op=op, device=device)
        node.input.extend([*(w.name for w in inputs), *(f"^{n}" for n in after)])
        for key, dtype in types:
            node.attr[key].type = dtype.as_datatype_enum
        for key, number in numbers:
            node.attr[key].i = number
        output = _OUTPUT.get(op, "output")
        return [Wire(f"{name}:{output}:{i}", dtype, shape) for i, (dtype, shape) in enumerate(outputs)]

    def call(
        self, function: str, device: str, inputs: Sequence[Wire], after: Sequence[str] = ()
    ) -> list[Wire]:
        """A call of a traced function without captures. It is inlined where it runs, after devices are
        assigned."""
        self.node(function, device, inputs, [], after=after)
        node = self.body.node_def[-1].name
        self._calls.add(node)
        results = self._results[function]
        return [Wire(f"{node}:{argument}:0", dtype, shape) for argument, dtype, shape in results]

    def function(self, body: Callable[..., Any], specs: Sequence[tuple[Any, tuple[int, ...]]]) -> str:
        """Traces `body` once, to be called any number of times; returns its name."""
        signature = [tf.TensorSpec(shape, dtype) for dtype, shape in specs]
        traced = tf.function(body, autograph=False, input_signature=signature).get_concrete_function()
        self.functions.append(traced)  # what it calls itself goes with it
        name = f"layoutopt_traced_{next(_steps)}"
        made = simplified(traced, name)
        self.library.library.function.append(made)
        arguments = [argument.name for argument in made.signature.output_arg]
        types = [(t.dtype, tuple(t.shape)) for t in traced.outputs]
        self._results[name] = [(a, *t) for a, t in zip(arguments, types, strict=True)]
        return name

    def inside(self) -> GraphWriter:
        """The body of a function that `choice` may call, under construction."""
        new = GraphWriter()
        new.library, new.body = self.library, self.library.library.function.add()
        new.functions, new._results = self.functions, self._results
        return new

    def closed(self, outputs: Sequence[Wire], name: str = "part", stateful: bool = False) -> str:
        """Ends the function that is being written; returns its name."""
        signature = self.body.signature
        signature.name, signature.is_stateful = f"layoutopt_{name}_{next(_steps)}", stateful
        for i, wire in enumerate(outputs):
            signature.output_arg.add(name=f"result_{i}", type=wire.dtype.as_datatype_enum)
            self.body.ret[f"result_{i}"] = wire.name
        return str(signature.name)

    def choice(
        self, condition: Wire, if_true: str, if_false: str, inputs: Sequence[Wire], like: Sequence[Wire]
    ) -> list[Wire]:
        """The outputs (of the types of `like`) of one of two functions; the other one is not run."""
        outputs = [(w.dtype, w.shape) for w in like]
        found = self.node("StatelessIf", "", [condition, *inputs], outputs, [("Tcond", tf.bool)])
        attr = self.body.node_def[-1].attr
        attr["then_branch"].func.name, attr["else_branch"].func.name = if_true, if_false
        attr["Tin"].list.type.extend(w.dtype.as_datatype_enum for w in inputs)
        attr["Tout"].list.type.extend(dtype.as_datatype_enum for dtype, _ in outputs)
        attr["output_shapes"].list.shape.extend(tf.TensorShape(shape).as_proto() for _, shape in outputs)
        # Without this all of a branch would run on one device.
        attr["_lower_using_switch_merge"].b = True
        return found

    def repeated(self, condition: str, body: str, inputs: Sequence[Wire]) -> list[Wire]:
        """The state after `body` was run on it as long as `condition` holds: two functions of all of it."""
        state = [(w.dtype, w.shape) for w in inputs]
        found = self.node("StatelessWhile", "", inputs, state, numbers=[("parallel_iterations", 10)])
        attr = self.body.node_def[-1].attr
        attr["cond"].func.name, attr["body"].func.name = condition, body
        attr["T"].list.type.extend(w.dtype.as_datatype_enum for w in inputs)
        attr["output_shapes"].list.shape.extend(tf.TensorShape(shape).as_proto() for _, shape in state)
        # Without this all of the loop would run on one device.
        attr["_lower_using_switch_merge"].b = True
        return found

    # -- operations ------------------------------------------------------------------------------------------

    def both(self, x: Wire, y: Wire, device: str) -> Wire:
        """True if two bool scalars hold."""
        return self.node("LogicalAnd", device, [x, y], [(tf.bool, ())])[0]

    def less(self, x: Wire, y: Wire, device: str) -> Wire:
        """True if x < y, of scalars."""
        return self.node("Less", device, [x, y], [(tf.bool, ())], [("T", x.dtype)])[0]

    def constant(self, value: int, device: str) -> Wire:
        """An int32 scalar."""
        if (value, device) not in self._constants:
            (wire,) = self.node("Const", device, [], [(tf.int32, ())], [("dtype", tf.int32)])
            self.body.node_def[-1].attr["value"].tensor.CopyFrom(tf.make_tensor_proto(value, tf.int32))
            self._constants[value, device] = wire
        return self._constants[value, device]

    def zeros(self, dtype: Any, shape: tuple[int, ...], device: str) -> Wire:
        (wire,) = self.node("Const", device, [], [(dtype, shape)], [("dtype", dtype)])
        proto = tf.make_tensor_proto(0, dtype if dtype != tf.bool else tf.int32, shape)
        proto.dtype = dtype.as_datatype_enum
        self.body.node_def[-1].attr["value"].tensor.CopyFrom(proto)
        return wire

    def combined(self, combine: str, xs: Sequence[Wire], device: str) -> Wire:
        """The element-wise sum, max or min."""
        total, *rest = xs
        like = (total.dtype, total.shape)
        if combine == "sum" and rest and total.dtype != tf.uint32:
            return self.node("AddN", device, xs, [like], [("T", total.dtype)], [("N", len(xs))])[0]
        op = {"sum": "AddV2", "max": "Maximum", "min": "Minimum"}[combine]
        for x in rest:
            (total,) = self.node(op, device, [total, x], [like], [("T", x.dtype)])
        return total

    def concat(self, xs: Sequence[Wire], axis: int, device: str) -> Wire:
        if len(xs) == 1:
            return xs[0]
        dtype, shape = xs[0].dtype, list(xs[0].shape)
        shape[axis] = sum(x.shape[axis] for x in xs)
        types, numbers = [("T", dtype), ("Tidx", tf.int32)], [("N", len(xs))]
        return self.node(
            "ConcatV2", device, [*xs, self.constant(axis, device)], [(dtype, tuple(shape))], types, numbers
        )[0]

    def split(self, x: Wire, ways: int, axis: int, device: str) -> list[Wire]:
        """Equal parts; along the first axis they share the memory of x."""
        if ways == 1:
            return [x]
        part = (*x.shape[:axis], x.shape[axis] // ways, *x.shape[axis + 1 :])
        inputs = [self.constant(axis, device), x]
        return self.node(
            "Split", device, inputs, [(x.dtype, part)] * ways, [("T", x.dtype)], [("num_split", ways)]
        )

    def stack(self, xs: Sequence[Wire], device: str) -> Wire:
        """Along a new first axis."""
        out = [(xs[0].dtype, (len(xs), *xs[0].shape))]
        return self.node("Pack", device, xs, out, [("T", xs[0].dtype)], [("N", len(xs)), ("axis", 0)])[0]

    def unstack(self, x: Wire, device: str) -> list[Wire]:
        """The elements of the first axis; they share the memory of x."""
        if x not in self._parts:
            n = x.shape[0]
            outs = [(x.dtype, x.shape[1:])] * n
            numbers = [("num", n), ("axis", 0)]
            self._parts[x] = self.node("Unpack", device, [x], outs, [("T", x.dtype)], numbers)
        return self._parts[x]

    def chunk(self, x: Wire, first: Wire, size: int, device: str) -> Wire:
        """`size` elements of the first axis, from an int32 scalar on."""
        begin = self.stack([first, *(self.constant(0, device) for _ in x.shape[1:])], device)
        sizes = self.stack([self.constant(n, device) for n in (size, *x.shape[1:])], device)
        types = [("T", x.dtype), ("Index", tf.int32)]
        return self.node("Slice", device, [x, begin, sizes], [(x.dtype, (size, *x.shape[1:]))], types)[0]

    def within(self, x: Wire, first: Wire, stack: Wire, device: str) -> Wire:
        """A stack with its elements from an int32 scalar on replaced by x."""
        size, one = self.constant(x.shape[0], device), self.constant(1, device)
        (end,) = self.node("AddV2", device, [first, size], [(tf.int32, ())], [("T", tf.int32)])
        places = [self.stack([number], device) for number in (first, end, one)]
        types = [("T", x.dtype), ("Index", tf.int32)]
        inputs = [stack, *places, x]
        return self.node("TensorStridedSliceUpdate", device, inputs, [(x.dtype, stack.shape)], types)[0]

    def zeros_like(self, x: Wire, device: str) -> Wire:
        return self.node("ZerosLike", device, [x], [(x.dtype, x.shape)], [("T", x.dtype)])[0]

    def identity(self, x: Wire, device: str, after: Sequence[str] = ()) -> Wire:
        return self.node("Identity", device, [x], [(x.dtype, x.shape)], [("T", x.dtype)], after=after)[0]

    def done(self, x: Wire, device: str) -> str:
        """A node after which x is there: its own, or an identity, since waiting for a call would wait for its
        side effects only."""
        node = x.name.partition(":")[0]
        if node not in self._calls and node != x.name:
            return node
        return self.identity(x, device).name.partition(":")[0]

    def barrier(self, device: str, after: Sequence[str]) -> str:
        """A node that waits for others."""
        self.node("NoOp", device, [], [], after=after)
        return str(self.body.node_def[-1].name)

    # -- running ---------------------------------------------------------------------------------------------

    def compiled(self, outputs: Sequence[Wire]) -> Callable[..., Sequence[Any]]:
        """The graph as a function of its inputs.

        It runs without TensorFlow's graph rewriting: parts are rewritten where they are inlined anyway, and
        over the copies of all devices it only costs start-up time (a third of it, for no change per step).
        """

        count, name, config = len(outputs), self.closed(outputs, "step", True), _config()
        own, names = context.context(), [f.signature.name for f in self.library.library.function]
        for function in self.library.library.function:
            own.add_function_def(function)
        traced = self.functions  # TensorFlow forgets them with their last reference

        def run(*args: Any) -> Sequence[Any]:
            assert traced is not None
            attributes = ("executor_type", "", "config_proto", config)
            return execute.execute(name, count, list(args), attributes, own) or []

        # What TensorFlow knows and has prepared of a step is kept until it is told otherwise.
        weakref.finalize(run, _forget, own, names).atexit = False
        return run


def _forget(own: Any, names: Sequence[str]) -> None:
    for name in names:
        own.remove_function(name)


def _config() -> bytes:
    config = tf.compat.v1.ConfigProto()
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    return bytes(config.SerializeToString())
