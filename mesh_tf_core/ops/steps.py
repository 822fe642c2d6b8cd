"""Steps of a decomposed collective: while a device computes on the received shards, the next ones arrive
(Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models", ASPLOS; Liu et al. 2023, "Ring Attention with Blockwise Transformers").

    start     every shard that the next step needs is sent to a neighbour (`permute_start`)
    compute   the device works on what it has
    done      it waits for what is on its way (`permute_done`)

Ring attention, its gradient (`ops.ring`), and gathers and scatters of products (`lower.decomposed`) define
the moves and the compute. Here is the order, and which steps are a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from mesh_tf_core.ir.builder import ProgramBuilder
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.instructions import STEP
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Emitter

T = TypeVar("T")
Tree = list[Any]
"""Ids of values in nested lists."""


class CollectiveSteps:
    """The steps of one decomposed collective.

    Args:
      axes: that the shards lie split over.
      name: of its dimension; loops of steps are called after it.
    """

    def __init__(self, low: Emitter | ProgramBuilder, axes: Axes, name: str) -> None:
        self.low, self.axes, self.name = low, axes, name
        self._on_their_way: list[int] = []

    def start(self, id: int, shift: int, both_ways: bool = False) -> int:
        """Starts sending a shard to the device `shift` places further; returns the arriving shard."""
        came = self.low.sent(id, self.axes, shift, both_ways=both_ways, rule=STEP)
        self._on_their_way.append(came)
        return came

    def done(self) -> None:
        """Waits for arriving shards."""
        if self._on_their_way:
            self.low.done(self._on_their_way)
            self._on_their_way = []

    def run(
        self, state: Tree, steps: Sequence[T], step: Callable[[T, int | None, Tree], Tree], times: int = 1
    ) -> Tree:
        """The state after some steps, or after a loop of them.

        Args:
          step: (which, number of the iteration in a loop, state) -> state; ends with `done`.
          times: how often the steps run.
        """

        def all_of(number: int | None, state: Tree) -> Tree:
            for which in steps:
                state = step(which, number, state)
                self.done()
            return state

        if times == 1:
            return all_of(None, state)
        loop = Dim(f"{self.name}_steps", times)
        left = self.low.loop(
            loop, [*leaves(state)], lambda number, ids: [*leaves(all_of(number, rebuilt(state, iter(ids))))]
        )
        return rebuilt(state, iter(left))


def leaves(tree: Tree) -> Iterator[int]:
    """The ids of a tree, in order."""
    for x in tree:
        if isinstance(x, list):
            yield from leaves(x)
        else:
            yield x


def rebuilt(tree: Tree, ids: Iterator[int]) -> Tree:
    """A tree of the same form with other ids."""
    return [rebuilt(x, ids) if isinstance(x, list) else next(ids) for x in tree]
