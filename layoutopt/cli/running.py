"""Code that commands share that run a model: devices, batches, and the numbers of real steps."""

from __future__ import annotations

import contextlib
import itertools
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from layoutopt.cli.given import GivenOptions
from layoutopt.cli.options import THIS_MACHINE, read_hardware, read_mesh
from layoutopt.cli.plans import load_planned, machine_of_plan, named_plan
from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import plural
from layoutopt.runtime import signals

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan
    from mesh_tf_core import Model
    from mesh_tf_core.engines import Cluster
    from mesh_tf_core.training import Trainer

COMPILING = "compiling the step"
STARTING = {
    "local": "loading TensorFlow and starting {}",
    "jax": "loading JAX and starting {}",
    "lockstep": "starting {} of NumPy",
}
"""The message during the start of an engine."""


@dataclass
class Session:
    """A command that runs a model: its messages, its engine, and the processes that run it together.

    Attributes:
      cluster: the connected processes; None for a single process.
      plan: content of the plan file, if `load` read it.
    """

    terminal: Terminal
    engine: str = "auto"
    cluster: Cluster | None = None
    plan: Plan | None = None

    @property
    def kind(self) -> str:
        """The engine that `engine` means."""
        from mesh_tf_core.engines import chosen

        return chosen(self.engine, self.cluster)

    def load(
        self, source: str, settings: Sequence[str] | None, mesh: str | None, layout: str | None = None
    ) -> Loaded:
        """The model of a file. JAX's devices are set up first if the options name a mesh, because the file
        may use JAX, whose devices are fixed at its start."""
        self.plan = named_plan(layout)
        if self.kind == "jax":
            if mesh is not None:
                self.start(read_mesh(mesh).devices)
            elif self.plan is not None:
                self.start(self.plan.mesh.devices)
        with self.terminal.waiting("building the model"):
            return load_planned(source, settings, str(layout), self.plan, mesh)

    def start(self, count: int) -> None:
        """Sets up this process's devices before another library uses JAX, and connects to the other
        processes."""
        from mesh_tf_core.engines import prepare, running

        cluster, terminal, kind = self.cluster, self.terminal, self.kind
        say = terminal.say if not running(kind, cluster) else lambda _: None
        starting = STARTING[kind].format(plural(count, "device"))
        if cluster is not None:
            cluster.devices_of(count)  # refused before anything takes time
            say(f"{starting} in {cluster.processes} processes")
            _keep_compiled()
            with hushed():
                cluster.start(count)
            return
        say(starting)
        with signals.nothing_to_keep(lambda: terminal.say("stopped before the first step")), hushed():
            if kind == "jax":
                _keep_compiled()
            prepare(count, kind)

    def trainer(self, loaded: Loaded, given: GivenOptions, checkpoint_mode: int | None = None) -> Trainer:
        """The model on this machine's mesh, or the cluster's; its variables at their initial values."""
        self.start(given.mesh.devices)
        from mesh_tf_core.training import Trainer

        slices = None if given.plan is None else given.plan.slices
        with self.terminal.waiting("lowering the model and initialising its variables", said=True):
            what = (loaded.model, given.mesh, given.layout, given.options)
            return Trainer(*what, self.engine, self.cluster, slices, checkpoint_mode)

    @property
    def where(self) -> str:
        """The owner of a mesh's devices, in words."""
        count = 1 if self.cluster is None else self.cluster.processes
        return "this machine" if count == 1 else f"{count} processes"


def machine_of_run(
    session: Session, given: GivenOptions, hardware: str | None, settings: Sequence[str] | None
) -> Hardware:
    """The hardware that predicts a run: the named one; else the plan's own, if the run uses such devices;
    else that of this run's devices."""
    from layoutopt.analysis.difference import runs_on
    from mesh_tf_core.errors import UserError

    if hardware is None and given.plan is not None:
        with contextlib.suppress(UserError):  # a file that is not here
            machine = machine_of_plan(given.plan, settings)
            if runs_on(session.kind, machine):
                return machine
    return machine_here(session, hardware, settings)


def machine_here(session: Session, hardware: str | None, settings: Sequence[str] | None) -> Hardware:
    """The machine that is named; else the preset of the accelerators that JAX runs on here; else this
    machine's CPU."""
    from costmodels.hardware.load import preset_of_device
    from mesh_tf_core.engines.jax import compat

    if hardware is None and session.kind == "jax" and compat.running():
        kind, platform = compat.device_kind()
        hardware = THIS_MACHINE if platform == "cpu" else preset_of_device(kind)
        if hardware is None:
            session.terminal.say(
                f"no preset describes {kind}, so predictions are for {THIS_MACHINE}; set --hardware "
                "for another one"
            )
    return read_hardware(hardware or THIS_MACHINE, settings)


def restored(terminal: Terminal, trainer: Trainer, checkpoint: Path, step: int | None = None) -> bool:
    """Restores the newest whole checkpoint of a directory, or that of a given step, and reports the skipped
    ones."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trainer.restore(checkpoint, step)
    for warning in caught:
        terminal.say(f"warning: {warning.message}")
    return found


@contextlib.contextmanager
def warnings_said(terminal: Terminal) -> Iterator[None]:
    """Prints each fault of checkpoints once, in one line."""
    from mesh_tf_core.training.checkpoint import CheckpointWarning

    with warnings.catch_warnings():
        warnings.simplefilter("default", CheckpointWarning)
        shown = warnings.showwarning

        def say(message: Warning | str, category: type[Warning], *rest: Any) -> None:
            if issubclass(category, CheckpointWarning):
                terminal.say(f"warning: {message}")
            else:
                shown(message, category, *rest)

        warnings.showwarning = say  # type: ignore[assignment]
        yield


def _keep_compiled() -> None:
    """What JAX compiles is kept for the next command."""
    from costmodels.hardware.profiles import cache_directory
    from mesh_tf_core.engines.jax import compat

    place = cache_directory("compiled")
    if place is not None:
        compat.keep_compiled(place)


@contextlib.contextmanager
def kept(terminal: Terminal, partial: Path | None) -> Iterator[None]:
    """After an interruption, prints where the results are stored, if there are any."""
    try:
        yield
    except KeyboardInterrupt:
        if partial is not None and partial.is_file():
            terminal.say(
                f"stopped; the measurements are saved in {partial}, and the same command continues from there"
            )
        else:
            terminal.say("stopped before the first measurement")
        raise


@contextlib.contextmanager
def hushed() -> Iterator[Callable[[Callable[[str], object]], Callable[[str], None]]]:
    """Holds back the output of TensorFlow's libraries to stderr while they start; shows it if starting
    fails. Yields a function that makes a function heard meanwhile."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.stderr.flush()
    saved = os.dup(2)
    with tempfile.TemporaryFile() as kept:
        os.dup2(kept.fileno(), 2)

        def aloud(tell: Callable[[str], object]) -> Callable[[str], None]:
            def heard(text: str) -> None:
                os.dup2(saved, 2)
                tell(text)
                sys.stderr.flush()
                os.dup2(kept.fileno(), 2)

            return heard

        try:
            with signals.put_right(lambda: os.dup2(saved, 2)):
                yield aloud
        except ImportError:
            kept.seek(0)
            os.write(2, kept.read())
            raise
        finally:
            os.close(saved)


@dataclass(frozen=True)
class Timed:
    """Steps from the initial values on, the seconds of each, and the share of the cores that other processes
    used."""

    seconds: tuple[float, ...]
    losses: tuple[float, ...]
    load: float | None

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


def timed_steps(
    trainer: Trainer,
    fed: Sequence[Mapping[str, Any]],
    steps: int,
    warm_up: int,
    on_step: Callable[[int, float | None], None] = lambda done, seconds: None,
) -> Timed:
    """Times steps; the data is ready before the clock starts.

    Args:
      fed: batches, one a step, from the first one again when they are through.
      warm_up: steps before, not timed and forgotten: the first one compiles.
      on_step: called with the number of steps done and the seconds of a timed step.
    """
    from costmodels.calibration.clock import started

    seconds, losses = [], []
    for n in range(warm_up):
        trainer.step(fed[n % len(fed)])
        on_step(n + 1, None)
    trainer.engine.initialize()
    ended = started()
    for n in range(steps):
        batch = fed[n % len(fed)]
        began = time.perf_counter()
        losses.append(float(trainer.step(batch)["loss"]))
        seconds.append(time.perf_counter() - began)
        on_step(warm_up + n + 1, seconds[-1])
    # The processes of a cluster would count as others.
    return Timed(
        tuple(seconds), tuple(losses), ended(steps).foreign_share if trainer.cluster is None else None
    )


def evaluated_model(loaded: Loaded) -> Model:
    """The model in the form in which held-out data evaluates it: without dropout, not in training."""
    from layoutopt.models.loading import load_model

    still: dict[str, Any] = {"dropout": 0.0, "training": False}
    changed = {name: value for name, value in still.items() if name in loaded.hparams}
    return load_model(loaded.source, {**loaded.hparams, **changed}).model if changed else loaded.model


def batches(terminal: Terminal, loaded: Loaded) -> Iterator[dict[str, Any]]:
    """The file's data, or zeros of the right shapes: enough to time a step."""
    if loaded.function("data") is not None:
        return loaded.data()
    terminal.say(f"{loaded.source} defines no data(), so the steps run on zeros")
    from layoutopt.analysis.validate import zeros

    return itertools.repeat(zeros(loaded.model))


def items_of(model: Model, given: GivenOptions) -> tuple[int, str]:
    """The number and the kind of the items of a step: tokens if the model names them, else examples."""
    tokens = model.tokens
    count, name = (model.examples, "examples") if tokens is None else (tokens, "tokens")
    diloco = given.options.diloco
    return (count if diloco is None else count * given.mesh.size(diloco.axis)), name
