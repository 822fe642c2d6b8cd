"""`layoutopt verify`: a program through the real TPU compiler, without a TPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from layoutopt.cli.given import UNDECIDED, ByHand, Given
from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import (
    JsonOption,
    LayoutOption,
    MeshOption,
    QuietOption,
    SetOption,
    check_out,
    examples,
    path_option,
    read_hardware,
)
from layoutopt.cli.plans import ModelOption, open_plan, say_damage
from layoutopt.cli.results import given_json, layout_text
from layoutopt.cli.terminal import Terminal, facts, table
from layoutopt.plan.units import bytes_text, duration_text, seconds_text, times_text

if TYPE_CHECKING:
    from layoutopt.analysis.verify import Verified
    from layoutopt.evaluator import Evaluation
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.results import Compared, VerifyResult

EXAMPLES = examples(
    'layoutopt verify examples/transformer_lm.py --topology v5e:2x4 --mesh "data:2;model:4" '
    '--layout "batch:data;heads:model;d_ff:model;vocab:model"',
    "layoutopt verify plan.json --topology v5p:4x4x4 --json",
)


@grouped
def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="MODEL_OR_PLAN",
            help="FILE.py, FILE.py:FUNCTION, PACKAGE.MODULE:FUNCTION, a Hugging Face CONFIG.json, or a file "
            "made by `search --out`.",
            show_default=False,
        ),
    ],
    topology: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Chips, as the compiler names them: v4:2x2x1, v5e:2x4, v5p:4x4x4, v6e:4x4, tpu7x:2x2x1.",
            show_default=False,
        ),
    ],
    mesh: MeshOption = None,
    layout: LayoutOption = None,
    decided: ByHand = UNDECIDED,
    settings: SetOption = None,
    model: ModelOption = None,
    text: Annotated[
        Path | None,
        path_option("FILE", "Write the compiled program (HLO) there."),
    ] = None,
    as_json: JsonOption = False,
    quiet: QuietOption = False,
) -> None:
    """Compile with the real TPU compiler: collectives, peak memory and compute time against ours."""
    from layoutopt.analysis.verify import generation
    from layoutopt.analysis.verify import verify as compiled
    from layoutopt.cli.running import hushed
    from mesh_tf_core.errors import InfeasibleError, UserError
    from mesh_tf_core.files import write_file

    terminal = Terminal(as_json, quiet)
    check_out(text, "--text")
    machine = read_hardware(generation(topology).hardware)
    loaded, given = _asked(source, model, settings, mesh, layout, decided)
    if given.options.diloco is not None:
        raise UserError(
            f"{given.options.diloco} makes two programs, a step and a meeting, and `verify` compiles one; "
            "leave --diloco out, with the mesh of one replica"
        )
    evaluation = given.priced(loaded, machine)
    terminal.say(f"compiling for {topology}; large models take minutes")
    with hushed():
        found = compiled(evaluation, topology, machine, _own_step(loaded, given))
    program = found.compiled.text if found.compiled is not None else None
    out = text if program is not None else None
    with terminal.saved(out, lambda path: write_file(path, program or "", "--text"), "the program"):
        terminal.result(_result(loaded, given, evaluation, found))
        if not as_json:
            _show(terminal, loaded, given, evaluation, found)
    if found.refusal is not None:
        raise InfeasibleError(_verdict(found))


def _asked(
    source: str,
    model: str | None,
    settings: list[str] | None,
    mesh: str | None,
    layout: str | None,
    decided: ByHand,
) -> tuple[Loaded, Given]:
    """The model and what is decided about it: a plan gives everything, a model file nothing."""
    from layoutopt.importers.huggingface import is_configuration
    from layoutopt.models.loading import load_model
    from mesh_tf_core import UserError

    if not source.endswith(".json") or is_configuration(source):
        if model is not None:
            raise UserError(
                f"--model names the model of a plan, but {source!r} is not a PLAN.json; leave it out"
            )
        loaded = load_model(source, settings or ())
        return loaded, decided.read(loaded, mesh, layout)
    if settings or mesh or layout or decided:
        raise UserError(
            f"{source} says the hyperparameters, the mesh, the layout and how variables are stored; "
            "leave these options out, or give the MODEL"
        )
    planned = open_plan(Path(source), model, on_damage=say_damage)
    plan = planned.plan
    return planned.loaded, Given(plan.mesh, plan.layout, plan.options, plan)


def _own_step(loaded: Loaded, given: Given) -> Callable[[Any], Any] | None:
    """What traces the step of a model that is another library's program; None for our own."""
    own = getattr(loaded.model, "step_on", None)
    return own and (lambda devices: own(given.mesh, given.layout, given.options, devices))


def _result(loaded: Loaded, given: Given, evaluation: Evaluation, found: Verified) -> VerifyResult:
    from layoutopt.analysis.verify import counted
    from layoutopt.plan.results import Collectives, Compared, Moved, VerifyResult

    def listed(collectives: Any) -> list[Collectives]:
        return [Collectives(kind=k, group_size=n, count=c) for k, n, c in counted(collectives)]

    made, refusal = found.compiled, found.refusal
    return VerifyResult(
        topology=found.topology,
        compiled=made is not None,
        out_of_memory=refusal is not None and refusal.out_of_memory,
        reason=refusal.reason if refusal else None,
        **given_json(loaded.model, given),
        collectives=listed(made.collectives) if made else [],
        predicted_collectives=listed(found.predicted),
        moved=[
            Moved(
                family=m.family,
                group_size=m.group_size,
                count=Compared(compiler=m.compiler_count, predicted=m.predicted_count),
                bytes=Compared(compiler=m.compiler_bytes, predicted=m.predicted_bytes),
            )
            for m in found.moved
        ],
        same_collectives=found.same_collectives if made else None,
        peak_memory_bytes=Compared(
            compiler=made.peak_bytes if made else refusal.used if refusal else None,
            predicted=evaluation.memory.peak,
        ),
        allocated_bytes=made.allocated_bytes if made else None,
        host_memory_bytes=Compared(
            compiler=made.host_bytes if made else None, predicted=evaluation.program.host_bytes
        ),
        host_load_bytes=_moved_by_host(found, evaluation, "host_load"),
        host_store_bytes=_moved_by_host(found, evaluation, "host_store"),
        compute_seconds=Compared(
            compiler=made.compute_seconds if made else None, predicted=found.compute_seconds
        ),
        unknown_loops=made.unknown_loops if made else None,
        compile_seconds=made.compile_seconds if made else None,
    )


def _moved_by_host(found: Verified, evaluation: Evaluation, way: str) -> Compared:
    from layoutopt.plan.results import Compared

    made = found.compiled
    return Compared(
        compiler=made.transfers.get(way, 0) if made else None,
        predicted=evaluation.program.transfer_bytes()[way],
    )


def _verdict(found: Verified) -> str:
    assert found.refusal is not None
    what = "does not fit on a device" if found.refusal.out_of_memory else "was refused"
    return f"the program {what}, says the compiler for {found.topology}: {found.refusal.reason}"


def _show(terminal: Terminal, loaded: Loaded, given: Given, evaluation: Evaluation, found: Verified) -> None:
    peak, own = evaluation.memory.peak, _own_step(loaded, given) is not None
    rows = [
        ("model", f"{loaded.model.name}, {loaded.model.parameters:,} parameters"),
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
    rows += [
        (
            "compiled",
            f"{'the JAX step itself' if own else 'yes'}, in {duration_text(made.compile_seconds)}",
        ),
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
        ("collectives", "as the program says" if found.same_collectives else "not all as the program says"),
    ]
    if made.host_bytes:
        moved = evaluation.program.transfer_bytes()
        words = (
            f"{bytes_text(made.transfers.get(way, 0))} {how} in a step, predicted {bytes_text(moved[way])}"
            for way, how in (("host_load", "loaded"), ("host_store", "stored"))
        )
        held = f"{bytes_text(made.host_bytes)}, predicted {bytes_text(evaluation.program.host_bytes)}"
        rows.append(("host", "; ".join((held, *words))))
    if made.libraries:
        attention = seconds_text(evaluation.cost.compute_seconds - found.compute_seconds)
        rows.append(("note", f"kernels of attention ({attention} predicted) are a library's, not compared"))
    if made.unknown_loops:
        rows.append(("note", f"{made.unknown_loops} loops of unknown length count once"))
    terminal.show(facts(rows))
    if found.moved:
        terminal.show("", _moved_table(found))


def _moved_table(found: Verified) -> Any:
    return table(
        "Collectives of a step: how many, and bytes that a device puts in",
        ("kind", "group", "predicted", "bytes", "compiled", "bytes", ""),
        [
            (
                "all-reduce, reduce-scatter" if m.family == "sum" else m.family.replace("_", "-"),
                str(m.group_size),
                f"{m.predicted_count:,}",
                bytes_text(m.predicted_bytes),
                f"{m.compiler_count:,}",
                bytes_text(m.compiler_bytes),
                "same" if m.same else f"{m.ratio:.3g} times",
            )
            for m in found.moved
        ],
        numbers=(1, 2, 3, 4, 5),
    )
