"""`layoutopt measure`: real steps on this machine's mesh, timed, their bytes counted by the engine."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import PLAIN, GivenOptions, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.job import ALONE, Job
from layoutopt.cli.progress import StepProgress
from layoutopt.cli.running import COMPILING, Session, Timed, batches, items_of, machine_of_run, timed_steps
from layoutopt.cli.terminal import Terminal, facts, layout_text
from layoutopt.cli.tracing import Trace, TraceOption
from layoutopt.plan.units import bytes_text, seconds_text, throughput_text

if TYPE_CHECKING:
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.evaluation import Evaluation
    from mesh_tf_core.training import Trainer


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
