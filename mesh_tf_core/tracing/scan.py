"""Loops over a stacked dimension, so that a stack of equal layers is written and lowered once; choices and
loops whose course depends on values; and blocks that backward may recompute.

Every device has the predicate of a choice, so all devices take the same branch and run the same collectives.
The other branch does not run, forward and backward. In a program both are loops that may not run
(`program.Loop.runs`). Predicted times use the mean of two branches, and all steps of a while loop; memory is
that of the larger branch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block, Half, reads
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import logical_not
from mesh_tf_core.ops.shape import reshape, transpose
from mesh_tf_core.tracing.graph import Graph, graph_of


def scan(fn: Any, carry: Tensor | Sequence[Tensor], dim: Dim, xs: Sequence[Tensor] = ()) -> Any:
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
    init = [carry] if isinstance(carry, Tensor) else list(carry)
    if not init and not xs:
        raise UserError("scan: found neither a tensor to carry nor xs; pass at least one tensor")
    graph = graph_of((*init, *xs)[0])
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


HALF = Fraction(1, 2)


def cond(
    predicate: Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]
) -> Tensor | tuple[Tensor, ...]:
    """Runs if_true() if the bool scalar `predicate` holds, else if_false(); only one of them runs.

    Both must return a tensor, or tuples of tensors of the same types.
    """
    if not isinstance(predicate, Tensor) or predicate.dtype != "bool" or len(predicate.shape):
        raise UserError(f"cond: the predicate must be a bool scalar, found {predicate!r}")
    graph = graph_of(predicate)
    predicate = graph.visible(predicate, "cond")
    # Each is a loop of one iteration that may not run, and then gives zeros.
    yes = _once(graph, graph.branch(predicate, HALF), if_true)
    no = _once(graph, graph.branch(logical_not(predicate), HALF), if_false)
    if isinstance(yes, Tensor) and isinstance(no, Tensor):
        return _chosen(predicate, yes, no)
    if not isinstance(yes, tuple) or not isinstance(no, tuple) or len(yes) != len(no):
        raise UserError("cond: both branches must return a tensor, or tuples of the same length")
    return tuple(_chosen(predicate, a, b) for a, b in zip(yes, no, strict=True))


def _once(graph: Graph, opened: AbstractContextManager[Block], fn: Callable[[], Any]) -> Any:
    """fn() as a loop of one iteration, which is opened here."""
    with opened as block:
        block.single = True
        made = fn()
        listed = list(made) if isinstance(made, tuple) else [made]
        for t in listed:
            if not isinstance(t, Tensor):
                raise UserError(f"a branch or block must return a tensor or a tuple of tensors, found {t!r}")
        stacks = [graph.stack_output(block, graph.visible(t, "block")) for t in listed]
    graph.close_loop(block, [])
    found = [reshape(t, t.shape.without(block.dim.name)) for t in stacks]
    return tuple(found) if isinstance(made, tuple) else found[0]


def recomputable(fn: Callable[..., Any], *xs: Tensor, name: str = "block") -> Any:
    """Runs fn(*xs), which returns a tensor or a tuple, as a block that backward may recompute.

    `mtf.Options(recompute={name})` recomputes it; intermediate values are then not stored. A search decides
    for all blocks of one name together.
    """
    if not xs:
        raise UserError("recomputable: found no tensor argument; pass at least one")
    graph = graph_of(xs[0])
    return _once(graph, graph.loop(Dim(name, 1)), lambda: fn(*xs))


def _chosen(predicate: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    if yes.type != no.type:
        raise UserError(f"cond: both branches must return the same types, found {yes!r} and {no!r}")
    return where(predicate, yes, no)


def while_loop(
    condition: Callable[..., Tensor], body: Callable[..., Any], state: Sequence[Tensor], max_steps: int
) -> tuple[Tensor, ...]:
    """Runs `body` on the state while `condition` holds, at most `max_steps` times; differentiable.

    No step runs after the condition has failed, and backward starts at the last step that ran.

    Args:
      condition: condition(*state) -> bool scalar.
      body: body(*state) -> the new state, of the same types.
    """
    if not state:
        raise UserError("while_loop: found no tensor to carry; pass at least one")
    if max_steps < 1:
        raise UserError(f"while_loop: max_steps must be positive, found {max_steps}")
    graph = graph_of(state[0])

    def going(*now: Tensor) -> Tensor:
        found = condition(*now)
        if not isinstance(found, Tensor) or found.dtype != "bool" or len(found.shape):
            raise UserError(f"while_loop: the condition must return a bool scalar, found {found!r}")
        return found

    def step(carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        runs, *now = carried
        graph.runs_if(runs)
        made = body(*now)
        new = tuple(made) if isinstance(made, tuple | list) else (made,)
        if [t.type if isinstance(t, Tensor) else t for t in new] != [t.type for t in now]:
            raise UserError(
                f"while_loop: the body must return the types of its arguments, {', '.join(map(repr, now))}; "
                f"found {', '.join(map(repr, new))}"
            )
        return (going(*new), *new)

    dim = Dim(f"step_{len(graph.blocks)}", max_steps)
    return tuple(scan(step, (going(*state), *state), dim)[1:])
