"""One run of `layoutopt train`: its steps, its messages, its end and its results."""

from __future__ import annotations

import itertools
import signal
import statistics
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.cli.given import GivenOptions
from layoutopt.cli.measure import Trace
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.running import COMPILING, Session, evaluated_model, items_of, restored, warnings_said
from layoutopt.cli.terminal import facts, layout_text
from layoutopt.plan.units import duration_text, seconds_text, throughput_text, used_text
from layoutopt.runtime import signals

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.results import TrainResult
    from mesh_tf_core import Model
    from mesh_tf_core.training import Trainer
    from mesh_tf_core.training.decoupled import Decoupled, Met

LINES = 10
"""Messages of progress where there is no terminal to draw a bar on."""
PACE = 100
"""Number of steps whose median is the current speed of the training."""


@dataclass
class TrainingRun:
    """One training run and its state."""

    session: Session
    loaded: Loaded
    given: GivenOptions
    machine: Hardware
    steps: int
    trace: Trace
    checkpoint: Path | None = None
    resume: int | None = None
    checkpoint_mode: int | None = None
    trainer: Trainer | None = None
    began_at: int = 0
    losses: array[float] = field(default_factory=lambda: array("d"))  # eight bytes a step, in the longest
    seconds: array[float] = field(default_factory=lambda: array("d"))
    waited: float = 0.0
    load: float | None = None
    held_out: dict[str, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.terminal = self.session.terminal
        self.evaluation = self.given.priced(self.loaded, self.machine)
        from layoutopt.analysis.difference import runs_on

        plan = self.given.plan
        self.predicted = self.evaluation.predicted
        if plan is not None and plan.data.hardware == self.machine.name:
            self.predicted = plan.predicted
        # A number for other devices than those of the run says so wherever it stands.
        self.elsewhere = "" if runs_on(self.session.kind, self.machine) else f" for {self.machine.name}"
        self.notes = self.loaded.model.notes(self.given.options)
        for note in self.notes:
            self.terminal.say(f"note: {note}")
        self.items, self.item = items_of(self.loaded.model, self.given)

    # -- running ---------------------------------------------------------------------------------------------

    def train(self, every: int, held_out: int, evaluate_every: int, meet: Decoupled | None = None) -> None:
        """Trains; a signal ends the run after the current step and saves the progress."""
        from costmodels.calibration.clock import started

        for each in self.evaluation.undivided:
            self.terminal.say(f"note: {each}")
        trainer = self.trainer = self.session.trainer(self.loaded, self.given, self.checkpoint_mode)
        checkpoint = self.checkpoint
        if checkpoint is not None and restored(self.terminal, trainer, checkpoint, self.resume):
            self.terminal.say(
                f"resuming from step {trainer.step_number} of {checkpoint}{_saved_elsewhere(trainer)}"
            )
        self.began_at = trainer.step_number
        stopped, cluster = threading.Event(), trainer.cluster

        def stop() -> None:
            stopped.set()
            if cluster is not None:
                cluster.ask_to_stop()
            elif trainer.step_number == self.began_at:
                raise KeyboardInterrupt  # there is nothing to keep, and the first step compiles for long

        def ended() -> bool:
            return stopped.is_set() if cluster is None else not cluster.begins(trainer.step_number + 1)

        numbers = (signal.SIGINT,) if cluster is None else signals.ENDING
        with (
            StepProgress(self.terminal, "training", self.steps, lines=False) as bar,
            signals.handled(stop, numbers),
        ):
            count = self.steps - self.began_at
            if count > 0:
                self._told(bar, self.began_at, COMPILING)
            self.trace.at(0, count, self.evaluation)

            def tell(step: int, found: dict[str, Any], seconds: float) -> None:
                self.losses.append(found["loss"])
                self.seconds.append(seconds)
                self._told(bar, step, self._facts(step))
                self.trace.at(step - self.began_at, count, self.evaluation)

            def judge(step: int) -> None:
                found = self.evaluations[step] = self._judged(held_out)
                said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
                self.terminal.say(f"step {step}/{self.steps}: held-out {said}")

            def told_of(step: int, met: Met) -> None:
                assert meet is not None
                self.terminal.say(f"step {step}/{self.steps}: synchronised as {met.words(meet.count)}")

            judging = judge if held_out and evaluate_every else None
            data = self.loaded.data(rows=trainer.rows)
            try:
                asked = self.steps, checkpoint, every, tell, ended, judging, max(1, evaluate_every)
                sampled = started()
                with warnings_said(self.terminal):
                    trainer.fit(data, *asked, keep=False, meet=meet and replace(meet, on_met=told_of))
            except KeyboardInterrupt:  # the second one, or the data's own
                if checkpoint is not None and cluster is None and not stopped.is_set():
                    self._save(trainer, checkpoint)
                raise
            self.waited = trainer.waited
            if cluster is None:  # whose processes would count as others
                self.load = sampled(len(self.losses)).foreign_share
            self.trace.end(self.evaluation)
        if cluster is not None and trainer.step_number < self.steps:
            cluster.close()  # once all are here: the checkpoint is written
            raise KeyboardInterrupt
        if cluster is None and stopped.is_set():
            raise KeyboardInterrupt

    def _told(self, bar: StepProgress, step: int, facts: str) -> None:
        """Shows how far it is; without a terminal the first step is a line, and a few of the others."""
        bar.update(step, facts)
        if self.terminal.live:
            return
        if facts == COMPILING:
            self.terminal.say(facts)
        elif step == self.began_at + 1 or step % max(1, self.steps // LINES) == 0:
            self.terminal.say(f"step {step}/{self.steps}: {facts}")

    def _save(self, trainer: Trainer, checkpoint: Path) -> None:
        if trainer.step_number > self.began_at and not trainer.torn:
            trainer.save(checkpoint)

    def stopped(self) -> str:
        """The step at which training was interrupted, and what was saved."""
        from mesh_tf_core.training.checkpoint import listed

        trainer, checkpoint = self.trainer, self.checkpoint
        if trainer is None or trainer.step_number == self.began_at:
            kept = f"; {checkpoint} is unchanged" if checkpoint is not None else ""
            return f"stopped before the end of step {self.began_at + 1}{kept}"
        at = f"in step {trainer.step_number + 1}" if trainer.torn else f"after step {trainer.step_number}"
        text = f"stopped {at} of {self.steps}"
        if checkpoint is None:
            return f"{text}; without --checkpoint DIR nothing was saved"
        saved = next(iter(listed(checkpoint)), None)
        if saved is None:
            return f"{text}; {checkpoint} has no checkpoint yet"
        if saved[0] != trainer.step_number:
            return f"{text}; the newest checkpoint in {checkpoint} is of step {saved[0]}"
        return f"{text}, saved in {checkpoint}; the same command continues from there"

    def evaluate(self, count: int) -> None:
        """The loss on held-out data, beside the losses of simpler models."""
        if found := self.evaluations.get(self.steps):  # of these variables already
            self.held_out = found
        elif count:
            with self.terminal.waiting("evaluating on held-out data", said=True):
                self.held_out = self._judged(count)
        if self.loaded.function("reference_losses") is not None:
            self.references = dict(self.loaded.call("reference_losses"))

    def _judged(self, count: int) -> dict[str, float]:
        """Means over so many held-out batches."""
        assert self.trainer is not None

        def made(rows: Any) -> Iterator[dict[str, Any]]:
            return itertools.islice(self.loaded.data("held-out", rows, endless=False), count)

        batches = made if self.loaded.takes_rows else made(None)
        return self.trainer.evaluate(batches, self._evaluated)

    @cached_property
    def _evaluated(self) -> Model:
        return evaluated_model(self.loaded)

    @property
    def step_seconds(self) -> float:
        """The median of all."""
        return self._typical(len(self.seconds))

    def _typical(self, last: int) -> float:
        """The median of so many; the first step is left out, for it compiles."""
        timed = self.seconds[max(1, len(self.seconds) - last) :] or self.seconds
        return statistics.median(timed) if timed else float("nan")

    def _facts(self, step: int) -> str:
        if len(self.losses) == 1:
            return f"loss {self.losses[0]:.4f}, {seconds_text(self.seconds[0])} including compilation"
        actual = self._typical(PACE)
        left = (self.steps - step) * actual
        return (
            f"loss {self.losses[-1]:.4f}, {throughput_text(self.items / actual, self.item)}, "
            f"{seconds_text(actual)} a step ({seconds_text(self.predicted.step_seconds)} "
            f"predicted{self.elsewhere}), {duration_text(left)} left"
        )

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """The note where steps took another time than predicted."""
        from layoutopt.analysis.difference import difference_notes

        times, only = [(self.predicted.step_seconds, self.step_seconds)], len(self.seconds) == 1
        where = self.given.mesh, self.session.kind, self.machine
        return difference_notes(times, *where, self.load, compiled=only)

    # -- results ---------------------------------------------------------------------------------------------

    def result(self) -> TrainResult:
        """The object of `--json`."""
        from layoutopt.plan.build import axes_of, model_info
        from layoutopt.plan.results import TrainResult

        rate: dict[str, Any] = {f"{self.item}_per_second": self.items / self.step_seconds}
        return TrainResult(
            model=model_info(self.loaded.model),
            mesh=self.given.mesh.as_dict(),
            layout=axes_of(self.given.layout),
            hardware=self.machine.name,
            framework=self.machine.framework,
            predicted=self.predicted,
            first_step=self.began_at,
            steps=self.began_at + len(self.losses),
            loss=self.losses.tolist(),
            step_seconds=self.step_seconds,
            waited_for_input=self.waited,
            held_out=self.held_out,
            evaluations={str(step): found for step, found in self.evaluations.items()},
            reference_losses=self.references,
            notes=[*self.notes, *self.differing],
            **rate,
        )

    def show(self) -> None:
        """The end of a run, for people."""
        from layoutopt.plan.build import decided, model_info
        from reports.views import facts as told

        step, given = self.step_seconds, self.given
        stages = self.loaded.model.stages(given.mesh, given.layout)
        said = decided(given.options, given.layout, stages).listed()
        rows = [
            *told.model(model_info(self.loaded.model)),
            ("mesh", f"{self.given.mesh} ({self.given.mesh.devices} devices of {self.session.where})"),
            ("layout", layout_text(self.given.layout)),
            *((name, words) for name, words in said.items() if words),
        ]
        if self.losses:
            only = len(self.seconds) == 1  # the one that compiled says nothing of the speed
            saved = "" if self.checkpoint is None else f", saved in {self.checkpoint}"
            rows += [
                ("trained", f"steps {self.began_at + 1} to {self.began_at + len(self.losses)}{saved}"),
                (
                    "step",
                    f"{seconds_text(step)}{' including compilation' if only else ''} (predicted "
                    f"{seconds_text(self.predicted.step_seconds)} for {self.machine.name})",
                ),
                *([] if only else [("rate", throughput_text(self.items / step, self.item))]),
                (
                    "memory",
                    f"{used_text(self.predicted.peak_memory_bytes, self.machine.usable_memory_bytes)} "
                    "per device predicted",
                ),
                ("input", f"devices waited for input {100 * self.waited:.1f}% of the time"),
                ("loss", f"{self.losses[0]:.4f} at the first step, {self.losses[-1]:.4f} at the last"),
            ]
        else:
            rows.append(("trained", f"nothing to do: the checkpoint is already at step {self.began_at}"))
        rows += self._met()
        rows += [(f"held-out {name}", f"{value:.4f}") for name, value in self.held_out.items()]
        rows += [(name, f"{value:.4f}") for name, value in self.references.items()]
        self.terminal.show(facts(rows), *(f"\nnote: {note}" for note in self.differing))

    def _met(self) -> list[tuple[str, str]]:
        """What replicas that meet rarely did and have not in common: held-out data does not see it."""
        rare, step = self.given.options.diloco, self.began_at + len(self.losses)
        if rare is None or rare.met(step) == step:
            return []
        met = f"last synchronised after step {rare.met(step)}" if rare.met(step) else "not synchronised yet"
        return [("replicas", f"{met}; the held-out evaluation and saved weights use the last common state")]


def _saved_elsewhere(trainer: Trainer) -> str:
    """Where the run was that wrote the checkpoint, if it was on another mesh or in other processes."""
    now = str(trainer.mesh), 1 if trainer.cluster is None else trainer.cluster.processes
    mesh, processes = (
        trainer.resumed.get(name, own) for name, own in zip(("mesh", "processes"), now, strict=True)
    )
    if (mesh, processes) == now:
        return ""
    return f", saved on {mesh} in {processes} process{'es' if processes != 1 else ''}"
