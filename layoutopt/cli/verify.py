"""`layoutopt verify`: a program through the real TPU compiler, without a TPU."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import PLAIN, GivenOptions, LayoutByHand, read_source
from layoutopt.cli.grouped import grouped
from layoutopt.cli.plans import ModelOption, SourceArgument
from layoutopt.cli.terminal import Terminal, facts, layout_text
from layoutopt.plan.units import bytes_text, duration_text, seconds_text, times_text
from reports.views.view import BYTES, WHOLE, Cell, Column, Kind, View

if TYPE_CHECKING:
    from layoutopt.analysis.verify import Verified
    from layoutopt.models.loading import Loaded
    from layoutopt.optimize.evaluation.evaluation import Evaluation


@grouped
def verify(
    source: SourceArgument,
    topology: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="TPU topology, as the TPU compiler names it, e.g. v4:2x2x1, v5e:2x4, v5p:4x4x4, v6e:4x4, "
            "tpu7x:2x2x1.",
        ),
    ],
    asked: LayoutByHand = PLAIN,
    model: ModelOption = None,
    text: Annotated[
        Path | None, options.path_option("FILE", "Write the compiled program (HLO) to this file.")
    ] = None,
    time_limit: options.TimeLimitOption = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """Compile with the TPU compiler and compare collectives, memory and compute time with the prediction."""
    from layoutopt.analysis.verify import generation
    from layoutopt.api.pricing import cost
    from layoutopt.api.running import verify as compiled
    from layoutopt.cli.running import hushed
    from mesh_tf_core.errors import InfeasibleError, LimitError
    from mesh_tf_core.files import write_file

    terminal, clock = output.terminal, options.time_limited(time_limit)
    options.check_out(text, "--text", [source, model])
    machine = options.read_hardware(generation(topology).hardware)
    loaded, given = options.in_time(clock, source, lambda: read_source(source, model, asked))
    terminal.say("predicting the step")
    priced = options.in_time(
        clock,
        source,
        lambda: cost(loaded.model, given.mesh, given.layout, machine, options=given.options),
        "predicting the step",
    )
    evaluation = priced.evaluation
    terminal.say(f"compiling for {topology}, which takes minutes for large models")
    with hushed() as aloud:
        found = compiled(priced, topology, clock, aloud(terminal.say))
    program = found.compiled.text if found.compiled is not None else None
    out = text if program is not None else None
    with terminal.saved(out, lambda path: write_file(path, program or "", "--text"), "the program"):
        terminal.result(found.data)
        if not output.as_json:
            _show(terminal, loaded, given, evaluation, found)
    if found.refusal is not None and found.refusal.late:
        raise LimitError(f"--topology {topology}: {found.refusal.reason}")
    if found.refusal is not None:
        raise InfeasibleError(_verdict(found))


def _verdict(found: Verified) -> str:
    assert found.refusal is not None
    what = "does not fit on a device" if found.refusal.out_of_memory else "was refused"
    return f"the program {what}, according to the compiler for {found.topology}: {found.refusal.reason}"


def _show(
    terminal: Terminal, loaded: Loaded, given: GivenOptions, evaluation: Evaluation, found: Verified
) -> None:
    from layoutopt.plan.build import model_info
    from reports.views import facts as told

    peak, own = evaluation.memory.peak, getattr(loaded.model, "step_on", None) is not None
    rows = [
        *told.model(model_info(loaded.model)),
        ("mesh", f"{given.mesh} on {found.topology}"),
        ("layout", layout_text(given.layout)),
    ]
    made = found.compiled
    if made is None:
        assert found.refusal is not None
        used = f"; the compiler needs {bytes_text(found.refusal.used)}" if found.refusal.used else ""
        rows += [("compiled", "no"), ("memory", f"{bytes_text(peak)} predicted{used}")]
        terminal.show(facts(rows))
        return
    read = made.read
    rows += [
        ("compiled", f"{'the JAX step itself' if own else 'yes'}, in {duration_text(made.seconds)}"),
        (
            "memory",
            f"peak {bytes_text(made.peak_bytes)}, predicted {bytes_text(peak)} "
            f"({times_text(peak, made.peak_bytes)}); {bytes_text(made.allocated_bytes)} reserved",
        ),
        (
            "compute",
            f"{seconds_text(made.compute_seconds)} by the compiler's estimate, predicted "
            f"{seconds_text(found.compute_seconds)} "
            f"({times_text(found.compute_seconds, made.compute_seconds)})",
        ),
        ("collectives", "all as predicted" if found.same_collectives else "not all as predicted"),
    ]
    if made.host_bytes:
        moved = evaluation.program.transfer_bytes()
        words = (
            f"{bytes_text(read.transfers.get(way, 0))} {how} in a step, predicted {bytes_text(moved[way])}"
            for way, how in (("host_load", "loaded"), ("host_store", "stored"))
        )
        held = f"{bytes_text(made.host_bytes)}, predicted {bytes_text(evaluation.program.host_bytes)}"
        rows.append(("host", "; ".join((held, *words))))
    if read.libraries:
        alone = seconds_text(evaluation.cost.compute_seconds - found.compute_seconds)
        rows.append(("note", f"a library's kernels ({alone} predicted: attention, experts) are not compared"))
    if any(value.shape.sparse is not None for value in evaluation.program.values):
        room = "a TPU device has room for all rows of experts, the prediction for its own"
        rows.append(("note", f"{room}: 0.32 to 0.72 of the compiler's memory where both are known"))
    if read.unknown_loops:
        rows.append(("note", f"loops of unknown length, counted as one iteration each: {read.unknown_loops}"))
    terminal.show(facts(rows))
    if found.moved:
        terminal.show("", _moved_table(found))


def _moved_table(found: Verified) -> View:
    columns = (
        Column("family", "kind"),
        Column("group_size", "group", WHOLE),
        Column("predicted_count", "predicted", WHOLE),
        Column("predicted_bytes", "bytes", BYTES),
        Column("compiler_count", "compiled", WHOLE),
        Column("compiler_bytes", "bytes", BYTES),
        Column("ratio", "ratio", Kind(lambda ratio: f"{ratio:.3g}×", number=False)),
    )
    rows = [
        (
            "all-reduce, reduce-scatter" if m.family == "sum" else m.family.replace("_", "-"),
            *(m.group_size, m.count.predicted, m.bytes.predicted, m.count.compiler, m.bytes.compiler),
            Cell("same", value=1.0) if m.same else m.bytes.ratio,
        )
        for m in found.moved
    ]
    return View("Collectives of a step: number, and bytes of inputs per device", columns, rows)
