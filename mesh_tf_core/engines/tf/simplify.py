"""Traced functions with fewer nodes and the same numbers.

TensorFlow writes a constant wherever a shape or a number is used and keeps the order of everything that
touches variables, and every device gets a copy of every node and of its order, which takes a good part of the
time before the first step. Work that is the same for all devices is done once here.

Equal nodes with large results are kept apart, because the second may exist to save memory in between.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

_HANDLE, _READ, _WRITE = "VarHandleOp", "ReadVariableOp", "AssignVariableOp"
_NAMES = ("Const", "Reshape", _HANDLE)
"""Operations that compute nothing: equal ones give the same value."""


def simplified(traced: Any, name: str) -> Any:
    """The definition of a concrete function, called `name`."""
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
