"""The loop of `Trainer.fit`: a step for each batch, and the work between steps.

After a step, in this order: its loss is checked, the callback runs, replicas synchronise, a checkpoint is
started, and the model is evaluated. Steps without any of the last three are in flight together, as many as
the engine likes.
"""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from mesh_tf_core.errors import UserError
from mesh_tf_core.training import checkpoint as checkpoints
from mesh_tf_core.training.decoupled import Met
from mesh_tf_core.training.finite import FiniteLoss
from mesh_tf_core.training.outer_step_rounds import Meetings
from mesh_tf_core.training.prefetch import Prefetch, Ready
from mesh_tf_core.training.saving import Saver

Results = dict[str, Any]
OnStep = Callable[[int, Results, float], None]


class Trained(Protocol):
    """The state of a training that the loop reads and saves.

    Attributes:
      step_number: steps begun so far.
      waited: share of the loop's time in which devices waited for input.
    """

    step_number: int
    waited: float

    def save(self, directory: str | Path, wait: bool = True) -> None:
        """Writes a checkpoint of the last step."""


@dataclass
class Fitting:
    """One call of `Trainer.fit`.

    Args:
      trainer: the trainer of the steps.
      begin: starts a step on a batch on the devices; the returned function waits for the results.
      in_flight: most steps that are begun and not done.
      saver: of the trainer.
      losses: ends a training with an infinite loss.
      steps, every, on_step, stop, evaluate, evaluate_every, keep, checkpoint: as in `Trainer.fit`.
      meetings: synchronisation with other jobs, if there are any; `on_met`: called with its results.
    """

    trainer: Trained
    begin: Callable[[Ready], Callable[[], Results]]
    in_flight: int
    saver: Saver
    losses: FiniteLoss
    steps: int
    every: int
    on_step: OnStep | None
    stop: Callable[[], bool]
    evaluate: Callable[[int], object] | None
    evaluate_every: int
    keep: bool
    checkpoint: str | Path | None
    meetings: Meetings | None = None
    on_met: Callable[[int, Met], object] | None = None

    def run(self, stream: Iterator[Mapping[str, Any]], prepare: Callable[[Any], Any]) -> list[Results]:
        """Trains until `steps` steps are done, or `stop`; the results of each, if they are kept.

        Args:
          stream: batches, from the next step's on.
          prepare: puts a batch on the devices; runs in the thread that reads the stream.

        Raises:
          UserError: the loss is not finite, the data ended, or a checkpoint cannot be written.
        """
        history: list[Results] = []
        trainer, meetings, left = self.trainer, self.meetings, max(0, self.steps - self.trainer.step_number)
        began = last = time.perf_counter()
        saved = trainer.step_number
        try:
            if meetings is not None and meetings.pending:
                if not self._met(meetings):
                    return history
                saved = -1
            with Prefetch(stream, prepare, left, self.stop) as ready:
                for step, results in self._results(ready):
                    now = time.perf_counter()
                    if self.keep:
                        history.append(results)
                    self._check(step, results["loss"])
                    if self.on_step is not None:
                        self.on_step(step, results, now - last)
                    last = now
                    trainer.waited = ready.waited / (now - began)
                    if meetings is not None and meetings.due(step):
                        meetings.pending = True
                        if self.checkpoint is not None:  # first, so that what is posted is never done again
                            trainer.save(self.checkpoint)
                            saved = step
                        if not self._met(meetings):
                            break
                    due = step == self.steps or (self._saves(step) and saved != step)
                    if self.checkpoint is not None and due:
                        trainer.save(self.checkpoint, wait=False)
                        saved = step
                    if self.evaluate is not None and self._evaluates(step):  # what ends it loses no step
                        self.evaluate(step)
                        last = time.perf_counter()
            if trainer.step_number < self.steps and not self.stop():
                raise UserError(
                    f"the data ended after {trainer.step_number} of {self.steps} steps; give more "
                    "batches, or request fewer steps"
                )
            if self.checkpoint is not None and trainer.step_number > saved:
                trainer.save(self.checkpoint, wait=False)
        finally:
            self.saver.wait()
        return history

    def _saves(self, step: int) -> bool:
        return self.checkpoint is not None and step % self.every == 0

    def _evaluates(self, step: int) -> bool:
        return self.evaluate is not None and step % self.evaluate_every == 0

    def _is_followed(self, step: int) -> bool:
        """Whether something reads the variables after a step, so that the next one must not have begun."""
        meets = self.meetings is not None and self.meetings.due(step)
        return self._saves(step) or self._evaluates(step) or meets

    def _results(self, ready: Iterable[Ready]) -> Iterator[tuple[int, Results]]:
        """Runs a step for each batch; its number and its results."""
        begun: collections.deque[tuple[int, Callable[[], Results]]] = collections.deque()
        for item in ready:
            results = self.begin(item)
            begun.append((self.trainer.step_number, results))
            most = 0 if self._is_followed(self.trainer.step_number) else self.in_flight - 1
            while len(begun) > most:
                step, results = begun.popleft()
                yield step, results()
        for step, results in begun:
            yield step, results()

    def _met(self, meetings: Meetings) -> bool:
        """Meets the other jobs; False if it was stopped."""
        found = meetings.meet(self.stop)
        if found is not None and self.on_met is not None:
            self.on_met(self.trainer.step_number, found)
        return found is not None

    def _check(self, step: int, loss: float) -> None:
        """Raises UserError for a loss that ends the training, with the checkpoint to go on from."""
        try:
            self.losses.check(step, loss)
        except UserError as error:
            if self.checkpoint is None:
                raise
            with contextlib.suppress(UserError):  # what is being written may be of the same numbers
                self.saver.wait()
            raise UserError(f"{error}; {checkpoints.going_on(self.checkpoint)}") from None
