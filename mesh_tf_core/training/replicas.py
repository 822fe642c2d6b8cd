"""Replicas that train alone for some steps (`tracing.replicas`), in a training: whose batch is whose, when
they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from mesh_tf_core.engines import Engine
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.lower.replicas import ReplicaPrograms
from mesh_tf_core.tracing.meeting import BEFORE


class Replicas:
    """The replicas of one training.

    Args:
      engine: of the inner program.
      programs: that, and those in which replicas meet.

    Attributes:
      count: of the replicas.
      meetings: an engine for each fragment's.
      shared: trained variable -> the one that all replicas began from: what is evaluated, and what is kept of
        the training in the end.
    """

    def __init__(self, engine: Engine, programs: ReplicaPrograms) -> None:
        self.diloco, self.count = programs.diloco, programs.count
        self.meetings = tuple(map(engine.beside, programs.outer))
        slots = [s.variable for s in programs.inner.variables.values()]
        self.shared: Mapping[str, Variable] = {
            v.slot_of: v for v in slots if v.slot_of and v.name == f"{v.slot_of}/{BEFORE}"
        }

    def after(self, step: int) -> Callable[[], object]:
        """Begins the meeting that follows this step, if one does; what it gives waits for it."""
        fragment = self.diloco.meets(step)
        return dict if fragment is None else self.meetings[fragment].begin({})

    def together(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Batches of a step: one for each replica, as they come."""
        return _Together(batches, self.count)

    def mean(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """A step's results, [replica, their dims], over the replicas."""
        return {name: np.asarray(x).mean(0) for name, x in results.items()}


class _Together(Iterator[Mapping[str, Any]]):
    """Batches stacked, as many at a time as there are replicas; a last few that are fewer are left out."""

    def __init__(self, batches: Iterator[Mapping[str, Any]], count: int) -> None:
        self._batches, self._count = batches, count

    def __next__(self) -> Mapping[str, Any]:
        found = [next(self._batches) for _ in range(self._count)]
        return {name: np.stack([np.asarray(batch[name]) for batch in found]) for name in found[0]}

    def __getattr__(self, name: str) -> Any:
        if name in ("get_state", "set_state"):  # if the data can tell its place, so can this
            return getattr(self._batches, name)
        raise AttributeError(name)
