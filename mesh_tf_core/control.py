"""Choices and loops whose course depends on values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mesh_tf_core.dims import Dim
from mesh_tf_core.errors import UserError
from mesh_tf_core.loops import scan
from mesh_tf_core.ops.binary import where
from mesh_tf_core.tensor import Tensor


def cond(
    predicate: Tensor, if_true: Callable[[], Any], if_false: Callable[[], Any]
) -> Tensor | tuple[Tensor, ...]:
    """if_true() where the scalar `predicate` holds, else if_false().

    Both are computed, as on every SPMD machine whose devices must take part in the same collectives; the
    result and the gradients are those of the branch taken.
    """
    if predicate.dtype != "bool" or len(predicate.shape):
        raise UserError(f"cond: the predicate must be a bool scalar, found {predicate!r}")
    yes, no = if_true(), if_false()
    if isinstance(yes, Tensor) and isinstance(no, Tensor):
        return _chosen(predicate, yes, no)
    if not isinstance(yes, tuple) or not isinstance(no, tuple) or len(yes) != len(no):
        raise UserError("cond: both branches must give a tensor, or tuples of equally many tensors")
    return tuple(_chosen(predicate, a, b) for a, b in zip(yes, no, strict=True))


def _chosen(predicate: Tensor, yes: Tensor, no: Tensor) -> Tensor:
    if yes.type != no.type:
        raise UserError(f"cond: the branches must give the same types, found {yes!r} and {no!r}")
    return where(predicate, yes, no)


def while_loop(
    condition: Callable[..., Tensor],
    body: Callable[..., Any],
    state: Sequence[Tensor],
    max_steps: int,
) -> tuple[Tensor, ...]:
    """Runs `body` on the state while `condition` holds, at most `max_steps` times; differentiable.

    Once the condition has failed, the state stays as it is for the remaining steps, which are still run.

    Args:
      condition: condition(*state) -> bool scalar.
      body: body(*state) -> the new state, of the same types.
    """
    if not state:
        raise UserError("while_loop: needs a tensor to carry, found none")
    if max_steps < 1:
        raise UserError(f"while_loop: max_steps must be positive, found {max_steps}")
    graph = state[0].graph

    def step(carried: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # The body sees only state for which the condition holds or last held.
        made = body(*carried)
        new = (made,) if isinstance(made, Tensor) else tuple(made)
        if [t.type for t in new] != [t.type for t in carried]:
            raise UserError(
                f"while_loop: the body must return what it is given, {', '.join(map(repr, carried))}; "
                f"found {', '.join(map(repr, new))}"
            )
        going = condition(*carried)
        return tuple(where(going, a, b) for a, b in zip(new, carried, strict=True))

    final = scan(step, tuple(state), Dim(f"step_{len(graph.blocks)}", max_steps))
    return tuple(final)
