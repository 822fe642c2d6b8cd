"""Training: a model under a layout on this machine's devices."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mesh_tf_core import checkpoint as checkpoints
from mesh_tf_core.engines import Engine, open_engine
from mesh_tf_core.errors import UserError
from mesh_tf_core.layout import Layout
from mesh_tf_core.lower import Options
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model

DEFAULT = Options()
OnStep = Callable[[int, dict[str, Any], float], None]


class Trainer:
    """Runs training steps of a model.

    Args:
      mesh, layout: where and how; `layout="auto"` searches the best one for this machine (needs `layoutopt`).
      options: recomputation and storage, from a plan.
      engine: `auto`, `local` (TensorFlow) or `lockstep` (NumPy, exact and slow).

    Attributes:
      layout: the layout in use; plan: the plan that it came from, if it was searched.
      step_number: steps done so far, also those before a resumed checkpoint.
    """

    def __init__(
        self,
        model: Model,
        mesh: Mesh | str,
        layout: Layout | str = "",
        options: Options = DEFAULT,
        engine: str = "auto",
    ) -> None:
        self.model = model
        self.mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
        self.plan: Any = None
        if layout == "auto":
            layout, options = self._searched()
        self.layout = Layout(layout) if isinstance(layout, str) else layout
        self.program = model.lower(self.mesh, self.layout, options)
        self.engine: Engine = open_engine(self.program, engine)
        self.engine.initialize()
        self.step_number = 0

    def _searched(self) -> tuple[Layout, Options]:
        try:
            from importlib import import_module

            search = import_module("layoutopt").search
        except ImportError:
            raise UserError('layout="auto" needs the layoutopt package; give a layout instead') from None
        self.plan = search(self.model, mesh=self.mesh)
        return self.plan.layout, self.plan.options

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """One training step; returns the loss and the model's metrics (of before the update) as numbers."""
        self._check(batch)
        found = self.engine.step(self._shaped(batch))
        self.step_number += 1
        return {
            name: value.item() if getattr(value, "ndim", 1) == 0 else value for name, value in found.items()
        }

    def fit(
        self,
        batches: Iterable[Mapping[str, Any]],
        steps: int,
        checkpoint: str | Path | None = None,
        every: int = 100,
        on_step: OnStep | None = None,
    ) -> list[dict[str, Any]]:
        """Trains until `steps` steps are done; returns the results of those done here.

        Args:
          batches: one dict of arrays per step, from the first step on: a resumed run skips those already
            used.
          checkpoint: directory to resume from and to save into, every `every` steps and at the end.
          on_step: called with (step number, results, seconds of the step).
        """
        if checkpoint is not None:
            self.restore(checkpoint)
        history: list[dict[str, Any]] = []
        stream: Iterator[Mapping[str, Any]] = itertools.islice(iter(batches), self.step_number, steps)
        for batch in stream:
            began = time.perf_counter()
            history.append(self.step(batch))
            if on_step is not None:
                on_step(self.step_number, history[-1], time.perf_counter() - began)
            if checkpoint is not None and self.step_number % every == 0 and self.step_number < steps:
                self.save(checkpoint)
        if self.step_number < steps:
            raise UserError(
                f"the data ended after {self.step_number} of {steps} steps; give more batches or fewer steps"
            )
        if checkpoint is not None and history:
            self.save(checkpoint)
        return history

    def save(self, directory: str | Path) -> Path:
        """Writes a checkpoint that any mesh and layout can read."""
        names = list(self.program.variables)
        return checkpoints.save(
            directory, self.step_number, self.engine.read, names, {"layout": str(self.layout)}
        )

    def restore(self, directory: str | Path) -> bool:
        """Continues from the newest checkpoint of a directory, if it has one."""
        found = checkpoints.restore(directory)
        if found is None:
            return False
        for name, stored in self.program.variables.items():
            if name not in found.arrays:
                raise UserError(
                    f"checkpoint {str(directory)!r} has no variable {name!r}: it is of another model"
                )
            if tuple(found.arrays[name].shape) != stored.variable.shape.sizes:
                raise UserError(
                    f"checkpoint {str(directory)!r}: variable {name!r} has shape "
                    f"{tuple(found.arrays[name].shape)} there, "
                    f"{stored.variable.shape.sizes} here; use the same hyperparameters"
                )
            self.engine.write(name, found.arrays[name])
        self.step_number = found.step
        return True

    def _shaped(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The batch as the program takes it: with microbatches, in parts."""
        shapes = {name: self.program.values[i].shape.sizes for name, i in self.program.feeds.items()}
        return {name: np.reshape(batch[name], shape) for name, shape in shapes.items()}

    def _check(self, batch: Mapping[str, Any]) -> None:
        for name, tensor in self.model.graph.inputs.items():
            if name not in batch:
                raise UserError(
                    f"the batch has no {name!r}; the model reads {', '.join(self.model.graph.inputs)}"
                )
            shape = tuple(getattr(batch[name], "shape", ()))
            if shape != tensor.shape.sizes:
                raise UserError(
                    f"the batch's {name!r} has shape {shape}; the model was built for [{tensor.shape}]"
                )
