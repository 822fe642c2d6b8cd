"""`layoutopt measure`: real steps on this machine's mesh, timed, their bytes counted by the engine.

`--trace DIR`: records steps while they run, beside the predicted step.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import PLAIN, GivenOptions, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.job import ALONE, Job
from layoutopt.cli.options import path_option
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.running import COMPILING, Session, Timed, batches, items_of, machine_of_run, timed_steps
from layoutopt.cli.terminal import Terminal, facts, layout_text
from layoutopt.plan.units import bytes_text, seconds_text, throughput_text

if TYPE_CHECKING:
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.evaluation.evaluation import Evaluation
    from mesh_tf_core.training import Trainer

TRACED = 3
"""Steps that are recorded."""
WARM = 2
"""Steps before them: the first one compiles, the second fills caches."""
NAME = "steps.json.gz"

HELP = f"Folder for a trace of {TRACED} steps and of the predicted step, e.g. for the Perfetto viewer."
TraceOption = Annotated[Path | None, path_option("DIR", HELP, "--trace")]


class Trace:
    """The steps of one run that are recorded; nothing where no directory is named.

    Args:
      directory: value of `--trace`; each of several processes has its own folder in it.

    Raises:
      UserError: the engine records nothing, or the directory cannot be made.
    """

    def __init__(self, session: Session, directory: Path | None) -> None:
        self._terminal, self._place = session.terminal, directory
        self._open = contextlib.ExitStack()
        self._begun = False
        if directory is None:
            return
        from mesh_tf_core.errors import UserError
        from mesh_tf_core.files import unwritable

        if (kind := session.kind) != "jax":
            raise UserError(
                f"--trace records only what JAX runs, but the engine is '{kind}'; add --engine jax"
            )
        own = directory if session.cluster is None else directory / f"worker-{session.cluster.index}"
        self._place = own
        try:
            for folder in {directory: None, own: None}:
                folder.mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(directory, error, "--trace") from None

    def at(self, done: int, of: int, found: Evaluation) -> None:
        """Begins or ends the recording, if it is time.

        Args:
          done: steps since the run began; `of`: total number of steps.
        """
        first = min(WARM, of - 1)
        if self._place is not None and not self._begun and first <= done < of:
            self.begin()
        elif self._begun and done >= first + TRACED:
            self.end(found)

    def record(self, run: Callable[[int], object], found: Evaluation) -> None:
        """Records steps that `run` does, by their numbers, if a directory is named."""
        if self._place is not None:
            self.begin()
            for number in range(TRACED):
                run(number)
            self.end(found)

    def begin(self) -> None:
        """From here on steps are recorded."""
        from mesh_tf_core.engines.jax.profile import recording

        assert self._place is not None
        self._begun = True
        self._open.enter_context(recording(self._place))

    def end(self, found: Evaluation) -> None:
        """Writes the recorded steps, if there are any, with the predicted step beside the first."""
        from layoutopt.analysis.perfetto import measured, predicted, written
        from mesh_tf_core.engines.jax.profile import recorded
        from mesh_tf_core.files import write_file

        if not self._begun or self._place is None:
            return
        place, self._place, self._begun = self._place, None, False
        self._open.close()
        steps, begin = measured(recorded(place))
        write_file(place / NAME, written([*predicted(found, begin), *steps], packed=True), "--trace")
        self._terminal.say(f"wrote the trace to {place / NAME}; open it at https://ui.perfetto.dev")


BATCHES = 100
"""At most so many are held; further steps are fed with the same ones."""


@grouped
def measure(
    model: options.ModelArgument,
    asked: LayoutByHand = PLAIN,
    steps: Annotated[int, typer.Option(min=1, help="Number of steps to time.")] = 10,
    warm_up: Annotated[int, typer.Option(min=1, help="Number of warm-up steps, which are not timed.")] = 2,
    trace: TraceOption = None,
    hardware: options.RunsOnOption = None,
    set_hardware: options.SetHardwareOption = None,
    job: Job = ALONE,
    output: options.Output = options.OUTPUT,
) -> None:
    """Time a layout's step on this machine and count the bytes that devices send."""
    from layoutopt.analysis.difference import difference_notes
    from layoutopt.plan.build import axes_of, refined_of
    from layoutopt.plan.results import MeasureResult

    options.read_hardware(hardware or options.THIS_MACHINE, set_hardware)  # refused before it takes time
    with job.open(output) as session:
        terminal, traced = session.terminal, Trace(session, trace)
        loaded = session.load(model, asked.settings, asked.mesh, asked.layout)
        given = asked.read(loaded, session.plan)
        machine = machine_of_run(session, given, hardware, set_hardware)
        predicted = given.priced(loaded, machine)
        trainer = session.trainer(loaded, given)
        timed = _timed(terminal, loaded, trainer, warm_up, steps, lambda run: traced.record(run, predicted))
        ran, times = trainer.engine, [(predicted.predicted.step_seconds, timed.median)]
        notes = difference_notes(times, given.mesh, session.kind, machine, timed.load)
        terminal.result(
            MeasureResult(
                mesh=given.mesh.as_dict(),
                layout=axes_of(given.layout),
                refined=refined_of(given.layout),
                step_seconds=timed.median,
                step_seconds_all=list(timed.seconds),
                compile_seconds=ran.compile_seconds,
                loss=list(timed.losses),
                communication_bytes_per_device=ran.communication_bytes,
                peak_memory_bytes=ran.peak_memory_bytes,
                notes=notes,
            )
        )
        if not output.as_json:
            _show(session, loaded, given, predicted, timed, trainer, machine.name)
            terminal.show(*(f"\nnote: {note}" for note in notes))


def _timed(
    terminal: Terminal,
    loaded: Loaded,
    trainer: Trainer,
    warm_up: int,
    steps: int,
    record: Callable[[Callable[[int], object]], object],
) -> Timed:
    """Times steps from the initial values on; the data is ready before the clock starts. Those that are
    recorded come after them, for that slows them down."""
    fed = list(itertools.islice(trainer.stream(batches(terminal, loaded)), min(steps, BATCHES)))
    with StepProgress(terminal, "measuring", warm_up + steps) as bar:
        bar.update(0, COMPILING)
        if not terminal.live:
            terminal.say(COMPILING)
        found = timed_steps(
            trainer,
            fed,
            steps,
            warm_up,
            lambda done, took: bar.update(done, f"{seconds_text(took)} a step" if took else "warming up"),
        )
    record(lambda n: trainer.step(fed[n % len(fed)]))
    return found


def _show(
    session: Session,
    loaded: Loaded,
    given: GivenOptions,
    predicted: Evaluation,
    timed: Timed,
    trainer: Trainer,
    hardware: str,
) -> None:
    from layoutopt.plan.build import model_info
    from reports.views import facts as told

    seconds, step, engine = timed.seconds, timed.median, trainer.engine
    items, name = items_of(loaded.model, given)
    said = predicted.predicted.step_seconds
    sent = predicted.program.communication_bytes()
    alike = {a: round(b) for a, b in sent.items()} == {
        a: round(b) for a, b in engine.communication_bytes.items()
    }
    equal = "as predicted" if alike else f"predicted: {_sent(sent)}"
    session.terminal.show(
        facts(
            [
                *told.model(model_info(loaded.model)),
                ("mesh", f"{trainer.mesh} ({trainer.mesh.devices} devices of {session.where})"),
                ("layout", layout_text(predicted.layout)),
                (
                    "step",
                    f"{seconds_text(step)} measured, the median of {len(seconds)} "
                    f"({seconds_text(min(seconds))} to {seconds_text(max(seconds))})",
                ),
                (
                    "predicted",
                    f"{seconds_text(said)} for {hardware} ({said / step:.2f} of the measured time)",
                ),
                ("rate", throughput_text(items / step, name)),
                ("compiling", seconds_text(engine.compile_seconds)),
                ("traffic", f"per device: {_sent(engine.communication_bytes)} ({equal})"),
                ("memory", _memory(engine.peak_memory_bytes, predicted.memory.peak)),
                (
                    "loss",
                    f"{timed.losses[0]:.4f} at the first timed step, {timed.losses[-1]:.4f} at the last",
                ),
            ]
        )
    )


def _memory(counted: int | None, predicted: int) -> str:
    if counted is None:
        return f"not measured by this engine (predicted: {bytes_text(predicted)})"
    equal = "as predicted" if counted == predicted else f"predicted: {bytes_text(predicted)}"
    return f"{bytes_text(counted)} peak per device ({equal})"


def _sent(sent: dict[str, float]) -> str:
    return ", ".join(f"{axes} {bytes_text(n)}" for axes, n in sent.items() if n) or "nothing"
