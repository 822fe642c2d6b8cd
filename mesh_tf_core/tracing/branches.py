"""Choices and loops whose course depends on values, and blocks that backward may recompute.

Every device has the predicate, so all devices take the same branch and run the same collectives. The other
branch does not run, forward and backward. In a program both are loops that may not run (`program.Loop.runs`).
Predicted times use the mean of two branches, and all steps of a while loop; memory is that of the larger
branch.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from fractions import Fraction
from typing import Any

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.math import logical_not
from mesh_tf_core.ops.shape import reshape
from mesh_tf_core.tracing.graph import Graph, graph_of
from mesh_tf_core.tracing.scan import scan

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
    yes, no = _branch(graph, predicate, if_true), _branch(graph, logical_not(predicate), if_false)
    if isinstance(yes, Tensor) and isinstance(no, Tensor):
        return _chosen(predicate, yes, no)
    if not isinstance(yes, tuple) or not isinstance(no, tuple) or len(yes) != len(no):
        raise UserError("cond: both branches must return a tensor, or tuples of the same length")
    return tuple(_chosen(predicate, a, b) for a, b in zip(yes, no, strict=True))


def _branch(graph: Graph, runs: Tensor, fn: Callable[[], Any]) -> Any:
    """What fn() gives if `runs` holds, else zeros: a loop of one iteration that may not run."""
    return _once(graph, graph.branch(runs, HALF), fn)


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
