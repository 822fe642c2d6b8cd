"""`layoutopt lower`: the program that every device runs."""

from __future__ import annotations

import json
import sys
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from layoutopt.cli.given import PLAIN, LayoutByHand
from layoutopt.cli.grouped import grouped
from layoutopt.cli.options import JsonOption, ModelArgument
from layoutopt.cli.terminal import Terminal

if TYPE_CHECKING:
    from mesh_tf_core import Program


@grouped
def lower(
    model: ModelArgument,
    asked: LayoutByHand = PLAIN,
    emit: Annotated[
        Literal["program", "stablehlo", "json"],
        typer.Option(
            help="Output format: program (readable text), stablehlo (for the TPU compiler), "
            "or json (the whole program; mesh_tf_core.written.program_from_json reads it)."
        ),
    ] = "program",
    as_json: JsonOption = False,
) -> None:
    """Print the SPMD program that each device runs."""
    from layoutopt.plan.build import axes_of, model_info, refined_of
    from layoutopt.plan.results import LowerResult

    terminal = Terminal(as_json)
    loaded, given = asked.load(model)
    program = loaded.model.lower(given.mesh, given.layout, given.options)
    text = _emit(program, emit)
    terminal.result(
        LowerResult(
            model=model_info(loaded.model),
            mesh=given.mesh.as_dict(),
            layout=axes_of(given.layout),
            refined=refined_of(given.layout),
            emit=emit,
            instructions=dict(Counter(instr.name for instr, _ in program.walk()).most_common()),
            communication_bytes_per_device=program.communication_bytes(),
            program=text,
        )
    )
    if not as_json:
        sys.stdout.write(text if text.endswith("\n") else text + "\n")


def _emit(program: Program, form: str) -> str:
    from mesh_tf_core.ir.program import text

    if form == "program":
        return text(program)
    if form == "json":
        from mesh_tf_core.written import program_to_json

        return json.dumps(program_to_json(program))
    from layoutopt.cli.running import hushed
    from mesh_tf_core.engines.jax.compile import stablehlo

    with hushed():
        return stablehlo(program)
