"""Reversible stacks of layers (Gomez et al. 2017, "The reversible residual network"; Kitaev et al. 2020,
"Reformer"): backward finds the inputs of every layer from its outputs, so that none are kept.

    y1 = x1 + f(x2)        x2 = y2 - g(y1)
    y2 = x2 + g(y1)        x1 = y1 - f(x2)

The subtraction rounds, so inputs are recovered almost exactly: use float32 in deep stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Half, reads
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.graph import graph_of
from mesh_tf_core.tracing.scan import along, scan

HalfFn = Callable[..., Tensor]


def reversible_scan(
    f: HalfFn, g: HalfFn, x1: Tensor, x2: Tensor, dim: Dim, xs: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensor]:
    """`scan` of y1 = x1 + f(x2), y2 = x2 + g(y1) over `dim`; activation memory does not grow with `dim`.

    Backward runs f and g a second time, with the same random numbers. Both must be functions of their
    arguments, of variables and of outer tensors; g cannot read tensors that f computes.

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
