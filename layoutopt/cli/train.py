"""`layoutopt train`: real training on this machine's mesh under a searched, given or planned layout."""

from __future__ import annotations

import contextlib
import itertools
import signal
import statistics
import threading
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt import signals
from layoutopt.cli.job import ALONE, Job, in_job
from layoutopt.cli.options import (
    THIS_MACHINE,
    EngineName,
    EngineOption,
    Given,
    HardwareOption,
    JsonOption,
    MeshOption,
    MicrobatchesOption,
    ModelArgument,
    QuietOption,
    RecomputeOption,
    SetHardwareOption,
    SetOption,
    StorageOption,
    checkpoint_option,
    examples,
    read_hardware,
    read_layout,
    read_mesh,
)
from layoutopt.cli.progress import Bounds, Steps
from layoutopt.cli.results import layout_text
from layoutopt.cli.running import (
    evaluated_model,
    items_of,
    open_trainer,
    restored,
    start_devices,
    start_jax,
    where,
)
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.plan.units import duration_text, seconds_text, throughput_text

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan
    from layoutopt.plan.results import TrainResult
    from mesh_tf_core import Model
    from mesh_tf_core.engines import Cluster
    from mesh_tf_core.training import Trainer

AUTO = "auto"
EXAMPLES = examples(
    'layoutopt train examples/transformer_lm.py --layout auto --mesh "data:2;model:4" --steps 200',
    "layoutopt train examples/transformer_lm.py --layout plan.json --steps 1000 --checkpoint build/run",
    'layoutopt train examples/mlp.py --layout "batch:data" --mesh "data:4" --set hidden=256 --json',
)
LINES = 10
"""Messages of progress where there is no terminal to draw a bar on."""
PACE = 100
"""Steps of which the median says how fast the training goes now."""


@in_job
def train(
    model: ModelArgument,
    layout: Annotated[
        str, typer.Option(metavar="auto|LAYOUT|PLAN.json", help="auto searches the best one first.")
    ] = AUTO,
    mesh: MeshOption = None,
    storage: StorageOption = None,
    recompute: RecomputeOption = None,
    microbatches: MicrobatchesOption = 1,
    settings: SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Train until this step.")] = 100,
    checkpoint: Annotated[
        Path | None, checkpoint_option("Save there, and resume from there under any layout.")
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between two checkpoints.")] = 100,
    held_out: Annotated[
        int,
        typer.Option("--held-out", min=0, metavar="N", help="Held-out batches to evaluate on at the end."),
    ] = 8,
    evaluate_every: Annotated[
        int,
        typer.Option(min=0, metavar="K", help="Evaluate on them after every K steps too; 0: only then."),
    ] = 0,
    hardware: HardwareOption = THIS_MACHINE,
    set_hardware: SetHardwareOption = None,
    engine: EngineOption = EngineName.auto,
    job: Job = ALONE,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Train a model on this machine's mesh, under the best layout or one of yours."""
    from layoutopt.models.loading import load_model

    run: _Run | None = None
    with contextlib.ExitStack() as stack:
        members, terminal = stack.enter_context(job.open(engine, as_json, quiet))
        if checkpoint is not None and terminal.shown:
            _own(stack, terminal, checkpoint)  # before any work is done for it

        def stopped() -> None:
            terminal.say(run.stopped() if run is not None else "stopped before the training began")

        if members is None:  # the others of a cluster are told
            stack.enter_context(signals.nothing_to_keep(stopped))
        try:
            machine = read_hardware(hardware, set_hardware)
            start_jax(terminal, mesh, layout, engine, members)
            loaded = load_model(model, settings or ())
            loaded.needed("data")  # before any work is done for it
            if layout == AUTO:
                _refuse_decided(storage, recompute, microbatches)
                given = _searched(terminal, loaded, machine, mesh, engine, members)
            else:
                given = read_layout(loaded, mesh, layout, storage, recompute, microbatches)
            run = _Run(terminal, loaded, given, machine, steps, where(members), checkpoint)
            run.train(open_trainer(terminal, loaded, given, engine, members), every, held_out, evaluate_every)
            run.evaluate(held_out)
        except KeyboardInterrupt:
            stopped()
            raise
    terminal.result(run.result())
    run.show()


def _saved_elsewhere(trainer: Trainer) -> str:
    """Where the run was that wrote the checkpoint, if it was on another mesh or in other processes."""
    now = str(trainer.mesh), 1 if trainer.cluster is None else trainer.cluster.processes
    mesh, processes = (
        trainer.resumed.get(name, own) for name, own in zip(("mesh", "processes"), now, strict=True)
    )
    if (mesh, processes) == now:
        return ""
    return f", saved on {mesh} in {processes} process{'es' if processes != 1 else ''}"


def _own(stack: contextlib.ExitStack, terminal: Terminal, checkpoint: Path) -> None:
    """Keeps other jobs out of the directory until the end of `stack`."""
    from mesh_tf_core.training.checkpoint import owned

    trouble = stack.enter_context(owned(checkpoint))
    if trouble:
        terminal.say(f"warning: {trouble}")


def _refuse_decided(storage: list[str] | None, recompute: list[str] | None, microbatches: int) -> None:
    from mesh_tf_core.errors import UserError

    if storage or recompute or microbatches > 1:
        raise UserError("--layout auto decides storage, recompute and microbatches too; leave them out")


def _searched(
    terminal: Terminal,
    loaded: Loaded,
    machine: Hardware,
    mesh: str | None,
    engine: str,
    cluster: Cluster | None,
) -> Given:
    """The best layout; of a cluster's processes one searches it for all. Without a mesh it is the best of all
    meshes of as many devices as there are."""
    from layoutopt import search
    from layoutopt.plan.build import parse_plan
    from mesh_tf_core.engines import device_count

    count = device_count(engine, cluster) if mesh is None else None
    given = read_mesh(mesh) if count is None else None
    devices = count if given is None else given.devices
    assert devices is not None

    def found() -> Plan:
        with Bounds(terminal, "searching the layout", seconds_text) as bounds:
            return search(
                loaded.model,
                mesh=given,
                devices=count,
                hardware=machine,
                on_progress=bounds.show,
            )

    if cluster is None:
        plan = found()
    else:
        start_devices(terminal, devices, engine, cluster)
        plan = parse_plan(cluster.share("the search", lambda: found().to_json()), "worker 0's plan")
    on = "" if given else f" on {plan.mesh}"
    terminal.say(f"layout: {layout_text(plan.layout)}{on} ({plan.solver.status.lower()})")
    return Given(plan.mesh, plan.layout, plan.options, plan)


@dataclass
class _Run:
    """One training run and what is known about it."""

    terminal: Terminal
    loaded: Loaded
    given: Given
    machine: Hardware
    steps: int
    where: str
    checkpoint: Path | None = None
    trainer: Trainer | None = None
    began_at: int = 0
    losses: array[float] = field(default_factory=lambda: array("d"))  # eight bytes a step, in the longest
    seconds: array[float] = field(default_factory=lambda: array("d"))
    waited: float = 0.0
    held_out: dict[str, float] = field(default_factory=dict)
    evaluations: dict[int, dict[str, float]] = field(default_factory=dict)
    references: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.predicted = self.given.priced(self.loaded, self.machine).predicted
        self.items, self.item = items_of(self.loaded.model)

    # -- running ---------------------------------------------------------------------------------------------

    def train(self, trainer: Trainer, every: int, held_out: int, evaluate_every: int) -> None:
        """Trains; a signal ends it after the step that runs, and what was learned is saved."""
        self.trainer, checkpoint = trainer, self.checkpoint
        if checkpoint is not None and restored(self.terminal, trainer, checkpoint):
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
        with Steps(self.terminal, "training", self.steps) as bar, signals.told(stop, numbers):

            def tell(step: int, found: dict[str, Any], seconds: float) -> None:
                self.losses.append(found["loss"])
                self.seconds.append(seconds)
                bar.update(step, self._facts(step))
                if not self.terminal.live and step % max(1, self.steps // LINES) == 0:
                    self.terminal.say(f"step {step}/{self.steps}: {self._facts(step)}")

            def judge(step: int) -> None:
                found = self.evaluations[step] = self._judged(held_out)
                said = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
                self.terminal.say(f"step {step}/{self.steps}: held-out {said}")

            judging = judge if held_out and evaluate_every else None
            data = self.loaded.data(rows=trainer.rows)
            try:
                trainer.fit(
                    data, self.steps, checkpoint, every, tell, ended, judging, evaluate_every, keep=False
                )
            except KeyboardInterrupt:  # the second one, or the data's own
                if checkpoint is not None and cluster is None and not stopped.is_set():
                    self._save(trainer, checkpoint)
                raise
            self.waited = trainer.waited
        if cluster is not None and trainer.step_number < self.steps:
            cluster.close()  # once all are here: the checkpoint is written
            raise KeyboardInterrupt
        if cluster is None and stopped.is_set():
            raise KeyboardInterrupt

    def _save(self, trainer: Trainer, checkpoint: Path) -> None:
        if trainer.step_number > self.began_at and not trainer.torn:
            trainer.save(checkpoint)

    def stopped(self) -> str:
        """Where the training was interrupted, and what of it is kept."""
        from mesh_tf_core.training.checkpoint import listed

        trainer, checkpoint = self.trainer, self.checkpoint
        if trainer is None or trainer.step_number == self.began_at:
            kept = f"; {checkpoint} is as it was" if checkpoint is not None else ""
            return f"stopped before step {self.began_at + 1} was done{kept}"
        at = f"in step {trainer.step_number + 1}" if trainer.torn else f"after step {trainer.step_number}"
        text = f"stopped {at} of {self.steps}"
        if checkpoint is None:
            return f"{text}; nothing is saved without --checkpoint DIR"
        saved = next(iter(listed(checkpoint)), None)
        if saved is None:
            return f"{text}; nothing is saved in {checkpoint} yet"
        if saved[0] != trainer.step_number:
            return f"{text}; the newest checkpoint in {checkpoint} is of step {saved[0]}"
        return f"{text}, saved in {checkpoint}; the same command goes on from there"

    def evaluate(self, count: int) -> None:
        """The loss on data that was not trained on, beside what simpler models reach."""
        if found := self.evaluations.get(self.steps):  # of these variables already
            self.held_out = found
        elif count:
            with self.terminal.waiting("evaluating on held-out data"):
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
        actual = self._typical(PACE)
        left = (self.steps - step) * actual
        return (
            f"loss {self.losses[-1]:.4f}, {throughput_text(self.items / actual, self.item)}, "
            f"{seconds_text(actual)} a step ({seconds_text(self.predicted.step_seconds)} predicted), "
            f"{duration_text(left)} left"
        )

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
            predicted=self.predicted,
            first_step=self.began_at,
            steps=self.began_at + len(self.losses),
            loss=self.losses.tolist(),
            step_seconds=self.step_seconds,
            waited_for_input=self.waited,
            held_out=self.held_out,
            evaluations={str(step): found for step, found in self.evaluations.items()},
            reference_losses=self.references,
            **rate,
        )

    def show(self) -> None:
        """The end of a run, for people."""
        step = self.step_seconds
        rows = [
            ("model", f"{self.loaded.model.name}, {self.loaded.model.parameters:,} parameters"),
            ("mesh", f"{self.given.mesh} ({self.given.mesh.devices} devices of {self.where})"),
            ("layout", layout_text(self.given.layout)),
        ]
        if self.losses:
            predicted = self.predicted.step_seconds
            rows += [
                ("trained", f"steps {self.began_at + 1} to {self.began_at + len(self.losses)}"),
                (
                    "step",
                    f"{seconds_text(step)} (predicted {seconds_text(predicted)} for {self.machine.name})",
                ),
                ("rate", throughput_text(self.items / step, self.item)),
                ("input", f"waited for it {100 * self.waited:.1f}% of the time"),
                ("loss", f"{self.losses[0]:.4f} at first, {self.losses[-1]:.4f} at the end"),
            ]
        else:
            rows.append(("trained", f"nothing to do: the checkpoint is of step {self.began_at} already"))
        rows += [(f"held-out {name}", f"{value:.4f}") for name, value in self.held_out.items()]
        rows += [(name, f"{value:.4f}") for name, value in self.references.items()]
        self.terminal.show(facts(rows))
