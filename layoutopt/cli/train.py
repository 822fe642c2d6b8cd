"""`layoutopt train`: real training on this machine's mesh under a searched, given or planned layout."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import UNDECIDED, ByHand, GivenOptions, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.job import ALONE, Job
from layoutopt.cli.measure import Trace, TraceOption
from layoutopt.cli.progress import Bounds
from layoutopt.cli.running import Session, machine_here, machine_of_run
from layoutopt.cli.terminal import Terminal, layout_text
from layoutopt.cli.training_run import TrainingRun
from layoutopt.plan.units import seconds_text
from layoutopt.runtime import signals

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan

AUTO = "auto"
SEARCHING = "searching the layout"


@grouped
def train(
    model: options.ModelArgument,
    layout: Annotated[
        str,
        typer.Option(
            metavar="auto|LAYOUT|PLAN.json",
            help='Layout as DIMENSION:AXIS rules, e.g. "batch:data", a PLAN.json, or auto (search for the '
            "best layout first).",
        ),
    ] = AUTO,
    mesh: options.MeshOption = None,
    decided: ByHand = UNDECIDED,
    settings: options.SetOption = None,
    steps: Annotated[int, typer.Option(min=1, help="Train up to this step.")] = 100,
    checkpoint: Annotated[
        Path | None,
        options.checkpoint_option(
            "Folder to save checkpoints in and to resume from; the layout may change in between."
        ),
    ] = None,
    resume: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="STEP",
            help="Resume from the checkpoint of this step instead of the newest; newer checkpoints are "
            "renamed.",
        ),
    ] = None,
    every: Annotated[int, typer.Option(min=1, help="Number of steps between checkpoints.")] = 100,
    checkpoint_mode: Annotated[
        str | None,
        typer.Option(
            metavar="MODE",
            help="Permissions of the checkpoint folders in octal, e.g. 0700 (only you can read them); "
            "their files get the same without execute permission.",
            show_default="from the umask",
        ),
    ] = None,
    held_out: Annotated[
        int,
        typer.Option(
            "--held-out", min=0, metavar="N", help="Number of held-out batches to evaluate on at the end."
        ),
    ] = 8,
    evaluate_every: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="K",
            help="Number of steps between evaluations during training; 0 evaluates only at the end.",
        ),
    ] = 0,
    meet: Annotated[
        str | None,
        typer.Option(
            "--meet",
            metavar="dir=DIR,replica=I/N[,period=30,...]",
            help="DiLoCo between jobs: train as replica I of N jobs that synchronise every `period` "
            "steps through a shared directory; a late or lost job does not stop the others. Other "
            "settings: patience=60, staleness=1, bits=32, fragments=1, rate=0.7, momentum=0.9.",
        ),
    ] = None,
    trace: TraceOption = None,
    hardware: options.RunsOnOption = None,
    set_hardware: options.SetHardwareOption = None,
    job: Job = ALONE,
    output: options.Output = options.OUTPUT,
) -> None:
    """Train a model on this machine, under the best layout or your own."""
    from mesh_tf_core.errors import UserError
    from mesh_tf_core.exclusions import MEETINGS, REPLICAS, refuse
    from mesh_tf_core.training.decoupled import Decoupled
    from mesh_tf_core.training.folders import read_mode

    run: TrainingRun | None = None
    meets = None if meet is None else Decoupled.parse(meet)
    alone = "--diloco" if "--diloco" in decided.texts else ""
    refuse({MEETINGS: "" if meets is None else "--meet", REPLICAS: alone})
    if resume is not None and checkpoint is None:
        raise UserError("--resume needs --checkpoint DIR; add --checkpoint, or remove --resume")
    if layout == AUTO:
        _refuse_decided(decided)
    mode = None if checkpoint_mode is None else read_mode(checkpoint_mode)
    if mode is not None and checkpoint is None:
        raise UserError(
            "--checkpoint-mode needs --checkpoint DIR; add --checkpoint, or remove --checkpoint-mode"
        )
    with contextlib.ExitStack() as stack:
        session = stack.enter_context(job.open(output))
        terminal, traced = session.terminal, Trace(session, trace)
        if checkpoint is not None and terminal.shown:
            _own(stack, terminal, checkpoint, mode)  # before any work is done for it
        if meets is not None:
            from mesh_tf_core.training.outer_step_files import only

            if trouble := stack.enter_context(only(meets)):
                terminal.say(f"warning: {trouble}")

        def stopped() -> None:
            terminal.say(run.stopped() if run is not None else "stopped before training began")

        if session.cluster is None:  # the others of a cluster are told
            stack.enter_context(signals.nothing_to_keep(stopped))
        try:
            options.read_hardware(hardware or options.THIS_MACHINE, set_hardware)  # refused first
            loaded = session.load(model, settings, mesh, layout)
            loaded.needed("data")  # before any work is done for it
            if layout == AUTO:
                machine = machine_here(session, hardware, set_hardware)
                given = _searched(session, loaded, machine, mesh)
            else:
                given = LayoutByHand(mesh, layout, decided).read(loaded, session.plan)
                machine = machine_of_run(session, given, hardware, set_hardware)
            run = TrainingRun(session, loaded, given, machine, steps, traced, checkpoint, resume, mode)
            run.train(every, held_out, evaluate_every, meets)
            run.evaluate(held_out)
        except KeyboardInterrupt:
            stopped()
            raise
    terminal.result(run.result())
    run.show()


def _own(stack: contextlib.ExitStack, terminal: Terminal, checkpoint: Path, mode: int | None) -> None:
    """Keeps other jobs out of the directory until the end of `stack`."""
    from mesh_tf_core.training.checkpoint import owned

    trouble = stack.enter_context(owned(checkpoint, mode))
    if trouble:
        terminal.say(f"warning: {trouble}")


def _refuse_decided(decided: ByHand) -> None:
    from mesh_tf_core.errors import UserError

    if decided:
        raise UserError(
            f"--layout auto searches with the defaults of `search`; remove {', '.join(decided.texts)}, or "
            "search with these options and train with --layout PLAN.json"
        )


def _searched(session: Session, loaded: Loaded, machine: Hardware, mesh: str | None) -> GivenOptions:
    """The best layout; of a cluster's processes one searches it for all. Without a mesh it is the best of all
    meshes of as many devices as there are."""
    from layoutopt.optimize.entry import search
    from layoutopt.plan.build import parse_plan
    from layoutopt.space.allow import USUAL
    from mesh_tf_core.engines import device_count

    cluster, terminal = session.cluster, session.terminal
    count = device_count(session.engine, cluster) if mesh is None else None
    given = options.read_mesh(mesh) if count is None else None
    devices = count if given is None else given.devices
    assert devices is not None

    def found() -> Plan:
        if not terminal.live:
            terminal.say(SEARCHING)
        with Bounds(terminal, SEARCHING, seconds_text) as bounds:
            return search(
                loaded.model,
                mesh=given,
                devices=count,
                hardware=machine,
                on_progress=bounds.show,
                alternatives=False,
                allow=USUAL,
            )

    if cluster is None:
        plan = found()
    else:
        session.start(devices)
        plan = parse_plan(cluster.share("the search", lambda: found().to_json()), "worker 0's plan")
    on = "" if given else f" on {plan.mesh}"
    terminal.say(f"layout: {layout_text(plan.layout)}{on} ({plan.solver.status.lower()})")
    return GivenOptions(plan.mesh, plan.layout, plan.options, plan)
