"""A program as a graph: its loops, dimensions, names and operations.

The function's arguments in the graph: variables, inputs, keys.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import mesh_tf_core as mtf
from layoutopt.importers.arrays import drawing, elementwise, fused, indexed, loops, products, shapes
from layoutopt.importers.arrays.classes import classes
from layoutopt.importers.arrays.contract import (
    KEY,
    EquationBlock,
    Leaf,
    Operand,
    TracedProgram,
    Unimportable,
    Var,
    factors_of_values,
    has_fractions,
    layered,
    stacked_leaf,
)
from layoutopt.importers.arrays.factors import Factors, factors
from layoutopt.importers.arrays.keys import Keys, root, shape_of
from layoutopt.importers.arrays.naming import logical_axes, named, same_dimensions
from layoutopt.importers.arrays.placing import ArrayAxes, ImportedFunction, inner_dims
from layoutopt.importers.arrays.relations import Axis
from layoutopt.importers.arrays.reroll import Rerolled, rerolled
from layoutopt.importers.arrays.roles import GIVEN_LENGTH, ArgumentArrays
from layoutopt.importers.arrays.writer import Handler, Writer, beginning, our_dtype
from layoutopt.plan.units import some
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import DTYPES, is_float
from mesh_tf_core.ir.initializers import ONES, ZEROS, Initializer, Normal, Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.optimizers import Adam, Optimizer, by_name
from mesh_tf_core.tracing.graph import Graph

_STDDEV = 0.02


def arguments(
    w: Writer,
    block: EquationBlock,
    arrays: ArgumentArrays,
    keys: Sequence[tuple[Var, Leaf]],
    changed: Set[int],
    even: bool,
) -> None:
    """Gives values to the function's variables: graph variables, inputs, keys.

    Args:
      changed: ids of state that has new values.
      even: of variables.
    """
    used = {id(x) for e in block.walk() for x in e.ins} | {id(x) for x in block.outs}
    trained = _trained(block)
    stacked, scales = layered(block), factors_of_values(block)
    apart = []
    for v, leaf in arrays.parameters:
        reached = is_float(our_dtype(v.dtype)) and id(v) in trained
        learns = reached and leaf.trained
        if is_float(our_dtype(v.dtype)) and not reached and leaf.trained:
            apart.append(leaf.path)
        members = arrays.stacks.get(v, ())
        w.values[id(v)] = _variable(w, v, leaf, learns, id(v) in stacked, id(v) in scales, members, even)
    if apart:
        which = f"these {len(apart)} parameters" if apart[1:] else "this parameter"
        why = f"the loss does not depend on {which}; the model stores but does not train"
        w.notes.append(f"{some(apart, 3, 80)}: {why} {'them' if apart[1:] else 'it'}")
    for v, leaf in arrays.state:
        if v.dtype == KEY:
            w.values[id(v)] = replace(root(f"state/{v.path}", v.shape), stepped=id(v) in changed)
        elif id(v) in used:
            members = arrays.stacks.get(v, ())
            w.values[id(v)] = _variable(w, v, leaf, False, id(v) in stacked, False, members, even, "state/")
    for v, leaf in arrays.batch:
        if v.dtype == KEY:
            w.values[id(v)] = root(f"batch/{v.path}", v.shape)
        elif id(v) in used:
            w.values[id(v)] = _input(w, v, leaf)
    for v, _ in keys:
        w.values[id(v)] = root(f"rng/{v.path}", shape_of(v) if v.shape else ())


def _checked(dtype: str, path: str) -> str:
    if our_dtype(dtype) not in DTYPES:
        raise Unimportable(
            f"{path} has the unsupported element type {dtype}; convert the array to one of "
            f"{', '.join(DTYPES)}"
        )
    return our_dtype(dtype)


def _variable(
    w: Writer,
    v: Var,
    leaf: Leaf,
    trained: bool,
    stacked: bool,
    scales: bool,
    members: Sequence[Leaf],
    even: bool,
    role: str = "",
) -> Tensor:
    name, shape = role + (leaf.path or "params"), Shape(w.shape(v))
    lead = int(stacked and len(v.shape) > 0 and len(w.dims(v, 0)) == 1)
    variable = Variable(
        name,
        shape,
        _checked(leaf.dtype, leaf.path),
        _initial(leaf, shape, lead, scales),
        trained,
        lead,
        even=even,
        members=tuple(role + member.path for member in members),
    )
    if name in w.graph.variables:
        raise Unimportable(f"two parameters have the path {name!r}; rename one of the two")
    read = w.graph.read(w.graph.declare(variable))
    return read if lead else read.cast(our_dtype(v.dtype))  # of a stack, a loop converts its own part


def _initial(leaf: Leaf, shape: Shape, lead: int, scales: bool) -> Initializer:
    if leaf.value is not None:
        return beginning(leaf.value, shape)
    if len(leaf.shape) > 1 + lead:
        return Normal(_STDDEV)
    return ONES if scales or re.search(r"scale|gamma|weight|norm", leaf.path.rsplit("/", 2)[-1]) else ZEROS


def _input(w: Writer, v: Var, leaf: Leaf) -> Tensor:
    """An input of the shape that the user's arrays have, as its dimensions."""
    axes = []
    for a, n in enumerate(v.shape):
        own = w.dims(v, a)
        axes.append(own[0] if len(own) == 1 else Dim(w.fresh("axis"), n))
    t = w.graph.input(leaf.path or "batch", axes, _checked(v.dtype, leaf.path))
    return mtf.reshape(t, w.shape(v))


def _trained(block: EquationBlock) -> set[int]:
    """ids of the variables that the function's first result depends on through fractions."""
    needed = {id(block.outs[0])}

    def run(inner: EquationBlock) -> None:
        for e in reversed(inner.equations):
            if e.prim == "stop_gradient":
                continue
            if e.body is not None:
                needed.update(id(x) for x, y in zip(e.body.outs, e.outs, strict=True) if id(y) in needed)
                # Of a loop, whatever one result needs, all may.
                if e.prim == "scan" and any(id(y) in needed for y in e.outs):
                    needed.update(id(x) for x in e.body.outs)
                run(e.body)
                needed.update(id(x) for x, v in zip(e.ins, e.body.ins, strict=True) if id(v) in needed)
            elif any(id(y) in needed and has_fractions(y) for y in e.outs):
                needed.update(id(x) for x in e.ins if has_fractions(x))

    run(block)
    return needed


TABLE: Mapping[str, Handler] = {
    **elementwise.TABLE,
    **drawing.TABLE,
    **shapes.TABLE,
    **products.TABLE,
    **indexed.TABLE,
    **fused.TABLE,
    **loops.TABLE,
}
"""Primitive -> the function that writes it as operations of the graph."""


@dataclass(frozen=True)
class Imported:
    """A program as the arguments of `ImportedModel`."""

    loss: Tensor
    metrics: Mapping[str, Tensor]
    token_dims: tuple[str, ...]
    origin: ImportedFunction


def built(program: TracedProgram, names: Mapping[str, Any]) -> Imported:
    """The graph of a program.

    Args:
      names: of axes of arrays by path, and new names of dimensions.

    Raises:
      UserError: all that cannot be imported.
    """
    try:
        return _built(program, names)
    except Unimportable as error:
        raise UserError(f"{program.front_end.call}: {error}") from error


def _built(program: TracedProgram, said: Mapping[str, Any]) -> Imported:
    given = ArgumentArrays(program.parameters, program.state, program.batch)
    state = {v: program.new_state.get(v, -1) for v, _ in program.state}
    keys = [v for v, _ in program.keys]
    again = rerolled(program.block, [v for v, _ in program.parameters], state, keys)
    arrays = _stacked(given, again)
    block, cut = again.block, factors(again.block, (v for v, _ in arrays.batch))
    notes = [*program.notes, *again.notes]
    logical = logical_axes(list(arrays.all()), notes)
    parameters, inputs = [v for v, _ in arrays.parameters], [v for v, _ in arrays.batch]
    named_alike = same_dimensions(logical, {v.path for leaf, v, _ in arrays.given() if leaf.path in said})
    hints = [*_hints(said, arrays, cut, block)]
    firsts: list[Axis] = [(v, 0) for v in inputs if v.shape]
    if len({v.shape[0] for v, _ in firsts}) == 1 and said.keys().isdisjoint(v.path for v in inputs):
        hints.append(firsts)  # nothing but pairs of examples relates the two inputs of a contrastive loss
    dims = classes(block, cut, parameters, inputs, hints, named_alike, again.stacks)
    called = named(block, dims, arrays, said, logical, notes)
    again.alias(dims)
    writer = Writer(Graph(program.name), dims, called, TABLE)
    changed = {id(v) for v, n in program.new_state.items() if program.block.outs[n] is not v}
    arguments(writer, block, arrays, program.keys, changed, program.front_end.even)
    writer.function(block)
    for v, leaf in arrays.state:
        member = again.stacks.get(v, (v,))[0]
        if member in program.new_state:
            _store(writer, v, leaf, block.outs[program.new_state[member]])
    tokens = _tokens(writer, arrays)
    origin = ImportedFunction(
        program.function,
        program.types,
        program.roles,
        _in_order(given.parameters, _axes(writer, arrays, arrays.parameters)),
        _in_order(given.state, _axes(writer, arrays, arrays.state, "state/")),
        _axes(writer, arrays, arrays.batch),
        program.results,
        writer.sources,
        (*notes, *writer.notes),
        program.block,
        dims,
        called,
        again,
        {number: found.id for number, found in writer.values.items() if isinstance(found, Tensor)},
        program.front_end,
    )
    held = [*origin.parameters.values(), *origin.state.values(), *origin.batch.values()]
    writer.graph.unsplit.update(inner_dims(held, program.front_end.splits))
    metrics = {name: writer.tensor(block.outs[n]) for name, n in program.metrics.items()}
    return Imported(writer.tensor(block.outs[program.loss]), metrics, tokens, origin)


def optimizer_of(optimizer: str | Optimizer, call: str) -> Optimizer:
    """The optimizer that a user names."""
    if isinstance(optimizer, Optimizer):
        return optimizer
    if optimizer == "adamw":
        return Adam(1e-3, weight_decay=1e-4)
    if not isinstance(optimizer, str):
        raise UserError(
            f"{call}: optimizer {optimizer!r} is not supported; give adamw, adam, sgd, adafactor or an "
            "optimizer of mesh_tf_core, e.g. mtf.Adam(1e-3)"
        )
    return by_name(optimizer, 1e-3)


def _stacked(arrays: ArgumentArrays, again: Rerolled) -> ArgumentArrays:
    """The arguments, with those of several layers as one."""
    if not again.stacks:
        return arrays
    leaves = dict((*arrays.parameters, *arrays.state))
    owns = {stack: [leaves[v] for v in members] for stack, members in again.stacks.items()}
    gone = {v for members in again.stacks.values() for v in members}

    def kept(listed: Sequence[tuple[Var, Leaf]]) -> list[tuple[Var, Leaf]]:
        own = {v for v, _ in listed}
        rest = [(v, leaf) for v, leaf in listed if v not in gone]
        return rest + [(s, stacked_leaf(s, owns[s])) for s, m in again.stacks.items() if m[0] in own]

    return ArgumentArrays(kept(arrays.parameters), kept(arrays.state), arrays.batch, owns)


def _hints(
    names: Mapping[str, Any], arrays: ArgumentArrays, cut: Factors, block: EquationBlock
) -> Iterable[list[Axis]]:
    """Axes to which the user gives one name; and arrays of whole numbers of one shape in the batch (tokens,
    masks, labels) have the same axes."""
    same: dict[tuple[str, int], list[Axis]] = defaultdict(list)
    tables: dict[tuple[int, ...], list[Var]] = defaultdict(list)
    for v, _ in arrays.batch:
        if v.dtype.startswith("int"):
            tables[v.shape].append(v)
    for leaf, v, first in arrays.given():
        said = names.get(leaf.path)
        if not isinstance(said, tuple | list) or len(said) != len(leaf.shape):
            continue
        for a, text in enumerate(said, first):
            if isinstance(text, str) and len(cut.of(v, a)) == 1:
                same[text, v.shape[a]].append((v, a))
    found = list(same.values())
    for shape, listed in tables.items():
        found += [[(v, a) for v in listed] for a in range(len(shape))]
    return [*found, *_vocabularies(block, arrays)]


def _vocabularies(block: EquationBlock, arrays: ArgumentArrays) -> Iterable[list[Axis]]:
    """The rows of a table that numbers of the batch look up are the classes that are predicted, if they are
    as many: inputs and targets are tokens of one vocabulary."""
    whole = {id(v) for v, _ in arrays.batch if v.dtype.startswith("int")}
    tables = {id(v) for v, _ in arrays.parameters}
    axes: dict[int, list[Axis]] = defaultdict(list)
    for e in block.walk():
        if e.prim == "gather" and id(e.ins[0]) in tables and len(e.ins[0].shape) == 2:
            source = e.ins[1]
            if id(source) in whole:
                axes[e.ins[0].shape[0]].append((e.ins[0], 0))
        elif e.prim == "cross_entropy":
            axes[e.ins[0].shape[-1]].append((e.ins[0], len(e.ins[0].shape) - 1))
        elif e.prim in ("reshape", "convert_element_type") and id(e.ins[0]) in whole:
            whole.add(id(e.out))
    return axes.values()


def _store(w: Writer, v: Var, leaf: Leaf, value: Operand) -> None:
    variable = w.graph.variables.get(f"state/{leaf.path}")
    if variable is None or value is v or isinstance(w.value(value), Keys):
        return
    if value.shape != v.shape:
        raise Unimportable(
            f"the new state of {leaf.path} has shape {value.shape}, but the state has shape "
            f"{v.shape}; return new state of the same shape"
        )
    t = mtf.broadcast(w.drawn(w.elementwise(value, v), value), w.shape(v)).cast(variable.dtype)
    w.graph.assign(variable, mtf.stop_gradient(t))


def _tokens(w: Writer, arrays: ArgumentArrays) -> tuple[str, ...]:
    for v, _ in arrays.batch:
        given = w.graph.inputs.get(v.path)  # its axes may be one dimension where others see several
        names = [d.name for d in w.shape(v)] if given is None else [*given.shape.names]
        known = len(names) > 1 and names[0] == "batch" and names[1] in ("length", GIVEN_LENGTH)
        if v.dtype.startswith("int") and known and id(v) in w.values:
            return ("batch", names[1])
    return ()


def _axes(
    w: Writer, arrays: ArgumentArrays, listed: Sequence[tuple[Var, Leaf]], prefix: str = ""
) -> dict[str, ArrayAxes]:
    """The user's arrays by path, those of layers that became one too."""
    found = {}
    for v, whole in listed:
        dims = [w.dims(v, a) if v.dtype != KEY else () for a in range(len(v.shape))]
        stacked = v in arrays.stacks
        own = dims[int(stacked) :]
        for n, leaf in enumerate(arrays.stacks.get(v, (whole,))):
            found[leaf.path] = ArrayAxes(
                leaf.path,
                leaf.shape,
                v.dtype,
                tuple(tuple(d.name for d in axis) for axis in own),
                tuple(tuple(d.size for d in axis) for axis in own),
                prefix + whole.path or "params",
                n if stacked else None,
            )
    return found


def _in_order(given: Sequence[tuple[Var, Leaf]], found: Mapping[str, ArrayAxes]) -> dict[str, ArrayAxes]:
    return {leaf.path: found[leaf.path] for _, leaf in given}
