"""Loops over a stacked dimension: a stack of equal layers is written and lowered once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Half, reads
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.shape import transpose
from mesh_tf_core.tracing.graph import Graph, graph_of


@overload
def scan(fn: Any, carry: Tensor, dim: Dim, xs: Sequence[Tensor] = ()) -> Any: ...
@overload
def scan(fn: Any, carry: Sequence[Tensor], dim: Dim, xs: Sequence[Tensor] = ()) -> Any: ...
def scan(fn: Any, carry: Any, dim: Dim, xs: Sequence[Tensor] = ()) -> Any:
    """Runs `fn` once per element of `dim`: a stack of equal layers that is written and lowered once.

    Args:
      fn: fn(carry, *x) -> carry, or (carry, ys), where every y is stacked along `dim`. `carry` is a tensor,
        or a tuple if a sequence was given. Variables made inside have one value per iteration.
      carry: initial state; fn must return the same shapes and dtypes. (): only ys are returned.
      xs: tensors with dimension `dim`; fn gets one iteration's part of each.

    Returns:
      The final carry; with ys: (carry, tuple of stacked ys).

    Example:
      >>> import mesh_tf_core as mtf
      >>> graph, batch, d_model = mtf.Graph("stack"), mtf.Dim("batch", 8), mtf.Dim("d_model", 4)
      >>> x = graph.input("x", [batch, d_model], "float32")
      >>> def layer(h):
      ...     return h * graph.variable("scale", [d_model], mtf.Normal(0.1))
      >>> print(mtf.scan(layer, x, mtf.Dim("layers", 3)).shape)
      batch:8 d_model:4
      >>> print(graph.variables["scale"].shape)
      layers:3 d_model:4
    """
    single = isinstance(carry, Tensor)
    init = [carry] if single else list(carry)
    if not init and not xs:
        raise UserError("scan: found neither a tensor to carry nor xs; pass at least one tensor")
    graph: Graph = (*init, *xs)[0].graph
    init = [graph.visible(x, "scan") for x in init]
    stacks = along(xs, dim)

    def body(state: Sequence[Tensor], parts: Sequence[Tensor]) -> Body:
        return _called(fn, state, parts, single, dim)

    made = graph.unrolled(body, init, dim, stacks) if graph.unroll else None
    finals, stacked = made or _looped(graph, body, init, dim, stacks)
    done = finals[0] if single else tuple(finals)
    return done if stacked is None else (done, tuple(stacked))


Body = tuple[list[Tensor], list[Tensor] | None]
"""The state after an iteration, and its values to stack (None: the body gives none)."""


def _called(fn: Any, state: Sequence[Tensor], parts: Sequence[Tensor], single: bool, dim: Dim) -> Body:
    """One call of a scan's body."""
    result = fn(state[0] if single else tuple(state), *parts)
    ys: Sequence[Tensor] | None = None
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list):
        result, ys = result
    out = list(result) if isinstance(result, tuple | list) else [result]
    found = [x.type if isinstance(x, Tensor) else x for x in out]
    if found != [x.type for x in state]:
        raise UserError(
            f"scan over {dim}: the body must return the types of its arguments, "
            f"{', '.join(str(x.type) for x in state)}; found {', '.join(map(str, found))}"
        )
    for y in ys or ():
        if not isinstance(y, Tensor):
            raise UserError(f"scan over {dim}: the values that the body stacks must be tensors, found {y!r}")
    return out, None if ys is None else list(ys)


def _looped(
    graph: Graph, body: Callable[..., Body], init: Sequence[Tensor], dim: Dim, stacks: Sequence[Tensor]
) -> Body:
    """The body built once, in a loop."""
    with graph.loop(dim) as block:
        state = [graph.body_input(block, x) for x in init]
        out, ys = body(state, [graph.slice_into(block, x) for x in stacks])
        block.carry_in = tuple(x.id for x in state)
        block.carry_out = tuple(graph.visible(x).id for x in out)
        stacked = None if ys is None else [graph.stack_output(block, graph.visible(y)) for y in ys]
    return graph.close_loop(block, init), stacked


def along(xs: Sequence[Tensor], dim: Dim) -> list[Tensor]:
    """`xs` with `dim` as their first dimension, so that an iteration's part is a slice of memory."""
    for x in xs:
        if x.shape.dim(dim.name) != dim:
            raise UserError(
                f"scan over {dim}: the dimension {dim.name!r} of {x!r} must have size {dim.size}, one "
                "element for each iteration"
            )
    return [transpose(x, [dim, *x.shape.without(dim.name)]) for x in xs]


HalfFn = Callable[..., Tensor]


def reversible_scan(
    f: HalfFn, g: HalfFn, x1: Tensor, x2: Tensor, dim: Dim, xs: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """`scan` of y1 = x1 + f(x2), y2 = x2 + g(y1) over `dim`; activation memory does not grow with `dim`
    (Gomez et al. 2017, "The reversible residual network"; Kitaev et al. 2020, "Reformer").

    Backward finds x2 = y2 - g(y1), x1 = y1 - f(x2), almost exactly, since the subtraction rounds: use float32
    in deep stacks. It runs f and g a second time, with the same random numbers. Both must be functions of
    their arguments, of variables and of outer tensors; g cannot read tensors that f computes.

    Args:
      f: f(x2, *x) -> a tensor of x1's type. Variables made inside have one value per iteration.
      g: g(y1, *x) -> a tensor of x2's type.
      xs: tensors with dimension `dim`; f and g get one iteration's part of each.

    Returns:
      y1 and y2 of the last iteration.
    """
    graph = graph_of(x1)
    init = [graph.visible(x, "reversible_scan") for x in (x1, x2)]
    for x in init:
        if not is_float(x.dtype):
            raise UserError(
                f"reversible_scan over {dim}: the carried tensors must have a float dtype, found {x!r}"
            )
    if graph.unroll:

        def both(state: tuple[Tensor, Tensor], *x: Tensor) -> tuple[Tensor, Tensor]:
            y1 = state[0] + f(state[1], *x)
            return y1, state[1] + g(y1, *x)

        done: tuple[Tensor, Tensor] = scan(both, (x1, x2), dim, xs)
        return done
    stacks = along(xs, dim)
    with graph.loop(dim) as block:
        first, second = (graph.body_input(block, x) for x in init)
        parts = [graph.slice_into(block, x) for x in stacks]
        changed = _half(block, "f", f, second, parts, first)
        y1 = first + graph.tensor(changed.result)
        other = _half(block, "g", g, y1, parts, second)
        y2 = second + graph.tensor(other.result)
        block.carry_in = (first.id, second.id)
        block.carry_out = (y1.id, y2.id)
        block.halves = (changed, other)
    last1, last2 = graph.close_loop(block, init)
    return last1, last2


def _half(
    block: Block, name: str, fn: HalfFn, argument: Tensor, parts: Sequence[Tensor], like: Tensor
) -> Half:
    """Traces f or g. UserError if it gives another type, or reads more of the body than its arguments."""
    graph, begin = graph_of(argument), len(block.nodes)
    result = fn(argument, *parts)
    if not isinstance(result, Tensor) or result.type != like.type:
        raise UserError(f"reversible_scan over {block.dim}: {name} must return {like.type}, found {result!r}")
    half = Half(argument.id, graph.visible(result).id, tuple(block.nodes[begin:]))
    given = {argument.id, block.index, *(inner for _, inner in block.sliced)}
    given.update(o for node in half.nodes for o in node.outputs)
    read = {half.result}.union(*map(reads, half.nodes))
    for i in sorted(read - given):
        if graph.tensor(i).block == block.id:
            raise UserError(
                f"reversible_scan over {block.dim}: {name} reads {graph.tensor(i)!r}, which is neither "
                f"an argument of {name} nor computed in {name}; compute it in {name}, or before the loop"
            )
    return half
