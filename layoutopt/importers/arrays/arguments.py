"""The function's arguments in the graph: variables, inputs, keys."""

import re
from collections.abc import Sequence, Set
from dataclasses import replace

import mesh_tf_core as mtf
from layoutopt.importers.arrays.contract import (
    KEY,
    EquationBlock,
    Leaf,
    Unimportable,
    Var,
    factors_of_values,
    has_fractions,
    layered,
)
from layoutopt.importers.arrays.keys import root, shape_of
from layoutopt.importers.arrays.names import ArgumentArrays
from layoutopt.importers.arrays.writer import Writer, beginning, our_dtype
from layoutopt.plan.units import some
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import DTYPES, is_float
from mesh_tf_core.ir.initializers import ONES, ZEROS, Initializer, Normal, Variable
from mesh_tf_core.ir.tensor import Tensor

_STDDEV = 0.02


def arguments(
    w: Writer,
    block: EquationBlock,
    arrays: ArgumentArrays,
    keys: Sequence[tuple[Var, Leaf]],
    changed: Set[int],
) -> None:
    """Gives values to the function's variables: graph variables, inputs, keys.

    Args:
      changed: ids of state that has new values.
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
        w.values[id(v)] = _variable(w, v, leaf, learns, id(v) in stacked, id(v) in scales, members)
    if apart:
        which = f"these {len(apart)} parameters" if apart[1:] else "this parameter"
        why = f"the loss does not depend on {which}; the model stores but does not train"
        w.notes.append(f"{some(apart, 3, 80)}: {why} {'them' if apart[1:] else 'it'}")
    for v, leaf in arrays.state:
        if v.dtype == KEY:
            w.values[id(v)] = replace(root(f"state/{v.path}", v.shape), stepped=id(v) in changed)
        elif id(v) in used:
            members = arrays.stacks.get(v, ())
            w.values[id(v)] = _variable(w, v, leaf, False, id(v) in stacked, False, members, "state/")
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
        even=True,
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
