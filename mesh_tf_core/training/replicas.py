"""Replicas that train separately for some steps (`tracing.replicas`), in a training: the batch of each
replica, and their outer steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mesh_tf_core.engines import Engine
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.lower.pipeline import ReplicaPrograms
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.replicas import BEFORE, CAME, LOST, MOMENTUM
from mesh_tf_core.training.prefetch import BatchGroups


class TrainedReplicas:
    """The replicas of one training.

    Args:
      programs: the inner program, which the engine runs, and those of outer steps.

    Attributes:
      engine: of the inner program; count: of the replicas.
      meetings: an engine for each fragment's; merges: and for its end, with a delay.
      shared: trained variable -> the value that all replicas began from; it is evaluated, and stored at the
        end of the training.
      own: variables that are not synchronised, of which each replica has its own (a norm's moving averages):
        their mean is evaluated and stored, or the largest for integers.
    """

    def __init__(self, engine: Engine, programs: ReplicaPrograms) -> None:
        self.diloco, self.count = programs.diloco, programs.count
        self.engine = engine
        self.meetings = tuple(map(engine.beside, programs.outer))
        self.merges = tuple(map(engine.beside, programs.merges))
        slots = [s.variable for s in programs.inner.variables.values()]
        self.shared: Mapping[str, Variable] = {
            v.slot_of: v for v in slots if v.slot_of and v.name == f"{v.slot_of}/{BEFORE}"
        }
        alone = (v for v in slots if v.slot_of is None and v.name not in self.shared)
        self.own: Mapping[str, Variable] = {v.name: v for v in alone if _spread(v)}

    def after(self, step: int) -> Callable[[], object]:
        """Starts the outer step that begins or ends after this step; the returned function waits for it."""
        diloco = self.diloco
        begins, ends = diloco.meets(step), diloco.meets(step - diloco.delay) if diloco.delay else None
        if ends is not None:  # a meeting ends before the next one begins
            return self.merges[ends].begin({})
        return dict if begins is None else self.meetings[begins].begin({})

    def check_flight(self, where: str, step: int, written: str) -> None:
        """UserError if a checkpoint after this step has a fragment in flight that would not be merged here,
        or has none although one is expected: the settings of replicas differ.

        Args:
          where: name of the checkpoint in messages; written: settings of its replicas (`DiLoCo` as text).
        """
        had, has = DiLoCo.parse(written).flying(step), self.diloco.flying(step)
        if had != has:
            there, here = ("no fragment" if each is None else f"fragment {each}" for each in (had, has))
            raise UserError(
                f"checkpoint {where!r} was saved with the DiLoCo settings {written}, which do not match this "
                f"run's, {self.diloco}: after step {step}, the checkpoint has {there} in flight, but this "
                f"run expects {here}; resume with the settings of the checkpoint"
            )

    def together(self, batches: Iterator[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """Batches of a step: one for each replica, in order."""
        return BatchGroups(
            batches, self.count, lambda many: {n: np.stack([np.asarray(b[n]) for b in many]) for n in many[0]}
        )

    def layout(self, layout: Layout) -> Layout:
        """The layout of a program that reads each replica's values."""
        return layout.with_rules({REPLICA: (self.diloco.axis,)}) if self.own else layout

    def one(self, variable: Variable) -> Variable:
        """A variable of the inner program in the model's form: that of one replica."""
        if not _spread(variable):
            return variable
        return replace(variable, shape=Shape(variable.shape.dims[1:]), stacked=variable.stacked - 1)

    def read(self, name: str) -> Any:
        """An array of `shared`, or of `own` as one."""
        array = self.engine.read(name)
        if name not in self.own:
            return array
        own = self.own[name]
        if not is_float(own.dtype):
            return array.max(0)
        wide = np.float64 if own.dtype == "float64" else np.float32
        return array.astype(wide).mean(0).astype(array.dtype)

    def write(self, name: str, array: Any) -> None:
        """Sets a variable of the model in every replica, and in the state that they begin from; earlier outer
        steps no longer count."""
        held = self.engine.program.variables[name].variable
        array = np.asarray(array)
        self.engine.write(name, np.broadcast_to(array, held.shape.sizes) if _spread(held) else array)
        if name in self.shared:
            self.engine.write(self.shared[name].name, array)
        for meeting in (MOMENTUM, LOST, CAME):
            kept = self.engine.program.variables.get(f"{name}/{meeting}")
            if kept is not None:
                self.engine.write(
                    kept.variable.name, np.zeros(kept.variable.shape.sizes, kept.variable.dtype)
                )

    def mean(self, results: Mapping[str, Any]) -> dict[str, Any]:
        """A step's results, [replica, their dims], over the replicas."""
        return {name: np.asarray(x).mean(0) for name, x in results.items()}


def _spread(variable: Variable) -> bool:
    """Whether every replica has its own."""
    return variable.shape.dims[:1] != () and variable.shape.dims[0].name == REPLICA
