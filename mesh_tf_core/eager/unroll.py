"""Loops of an eager step run iteration by iteration, so that values inside their bodies can be looked at.

Variables, random numbers and assignments are those of the staged loop. `engines/loops.py` does not drive it:
there a lowered loop has named carries, here a Python function must still be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.ir.blocks import Block
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import Constant, constant_like
from mesh_tf_core.ops.custom import custom_gradient
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.stacking import stack, unstack
from mesh_tf_core.tracing.graph import Graph


class Stopped(Exception):
    """The iteration that has begun, and those after it, are not to run."""


@dataclass
class UnrolledIteration(Block):
    """The graph's own block, during iteration `at` of a loop."""

    at: int = 0


class Unrolled:
    """One loop of a step; `apart` returns the parts of a stacked tensor, one per iteration."""

    def __init__(self, step: Graph, apart: Callable[[Tensor, Dim], list[Tensor]], dim: Dim) -> None:
        self.step, self.apart, self.dim = step, apart, dim
        self._keys, self._names = step._keys, set(step.variables)
        # Counted as a loop that is built would be: `while_loop` names its dimension after the number.
        step.blocks.append(Block(len(step.blocks), 0, dim))

    def run(self, body: Callable[..., Any], init: Sequence[Tensor], stacks: Sequence[Tensor]) -> Any:
        """See `Graph.unrolled`."""
        state, collected = list(init), []
        parts = [self.apart(x, self.dim) for x in stacks]
        for at in range(self.dim.size):
            keys, variables = self.step._keys, dict(self.step.variables)
            try:
                with self._turn(at):
                    state, ys = body(state, [p[at] for p in parts])
            except Stopped:
                self.step._keys, self.step.variables = keys, variables
                if not at:  # which variables and random keys the body makes is not known: it is built
                    return None
                break
            collected.append(ys)
        if collected[-1] is None:
            return state, None
        return state, [stack(column, self.dim.name) for column in zip(*collected, strict=True)]

    @contextmanager
    def _turn(self, at: int) -> Iterator[None]:
        """One iteration: it makes the same variables and random keys as every other."""
        step = self.step
        step._keys = self._keys
        for name in set(step.variables) - self._names:
            del step.variables[name]
        root = step.blocks[0]
        turn = UnrolledIteration(0, dim=self.dim, nodes=root.nodes, at=at)
        turn.index = step.apply(Constant(at, "int32")).id
        step._stack.append(turn)
        try:
            yield
        finally:
            step._stack.pop()


def taken_apart(x: Tensor, dim: Dim) -> list[Tensor]:
    """One tensor per element of x's first dimension. Its gradient is assembled once, because each gradient of
    a slice would be as large as x."""

    def stacked(dys: list[Tensor | None], xs: list[Tensor], ys: list[Tensor]) -> list[Tensor]:
        pairs = zip(dys, ys, strict=True)
        known = [broadcast(constant_like(y, 0.0), y.shape) if dy is None else dy for dy, y in pairs]
        return [stack(known, dim.name)]

    parts = custom_gradient(lambda t: tuple(unstack(t, dim)), stacked, [x])
    assert isinstance(parts, tuple)
    return list(parts)


def whole(variable: Variable, parts: Sequence[Tensor]) -> Tensor:
    """The values that all iterations of the loops around gave to a variable, stacked; of several in one
    iteration, the last."""
    dims = variable.shape.dims[: len(variable.shape) - len(parts[0].shape)]
    each = len(parts) // Shape(dims).size
    values = list(parts[each - 1 :: each])
    for dim in reversed(dims):
        values = [stack(values[i : i + dim.size], dim.name) for i in range(0, len(values), dim.size)]
    return values[0]
