"""`layoutopt candidates`: the layouts that are worth measuring."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.allowed import Allowed, MaxAxesOption, OnMesh
from layoutopt.cli.grouped import grouped
from layoutopt.cli.learn import write_candidates
from layoutopt.cli.terminal import facts
from layoutopt.cli.ways import is_choice
from layoutopt.plan.units import layout_text, mesh_option, percent
from reports.views.view import RULES, SECONDS, WHOLE, Column, View

if TYPE_CHECKING:
    from layoutopt.api.comparing import LayoutCandidates


@grouped
def candidates(
    model: options.ModelArgument,
    number: Annotated[int, typer.Option("-n", "--number", metavar="N", help="Most layouts to list.")] = 4,
    mesh: options.MeshOption = None,
    devices: options.DevicesOption = None,
    max_axes: MaxAxesOption = 2,
    settings: options.SetOption = None,
    machine_on: options.OnHardware = options.ON,
    memory: options.MemoryOption = None,
    allowed: Allowed = OnMesh(),  # noqa: B008
    time_limit: options.TimeLimitOption = None,
    out: Annotated[
        Path | None,
        options.path_option(
            "RUNS.csv", "Write them as a table for `learn`, with step_seconds to be filled in."
        ),
    ] = None,
    output: options.Output = options.OUTPUT,
) -> None:
    """List the layouts worth measuring, and which of them predictions cannot tell apart."""
    clock = options.time_limited(time_limit)
    from layoutopt.api.comparing import candidates as find
    from layoutopt.models.loading import load_model
    from mesh_tf_core.errors import UserError

    terminal = output.terminal
    options.check_out(out, read=[model])
    if is_choice(allowed.given("--diloco")):
        raise UserError("candidates compares no --diloco settings; give one, or compare them with `search`")
    machine = machine_on.read()  # refused before anything takes time
    limit = None if memory is None else options.read_memory(memory, machine)
    on = None if mesh is None else options.read_mesh(mesh)
    many = devices if on is None else on.devices
    loaded = options.in_time(clock, model, lambda: load_model(model, settings or (), many))
    with terminal.waiting(f"searching {loaded.model.name}"):
        found = find(
            loaded.model,
            number,
            mesh=on,
            devices=devices,
            max_axes=max_axes,
            hardware=machine_on.read(loaded.model),
            framework=machine_on.framework,
            memory=limit,
            time_limit=clock,
            **allowed.space().keywords,
        )
    with terminal.saved(
        out, lambda path: write_candidates(path, found, model, settings or ()), "the layouts"
    ):
        terminal.result(found.data)
        if not output.as_json:
            rows = [("hardware", found.data.hardware), ("framework", found.data.framework)]
            terminal.show(facts(rows), "", _table(found), *(f"\nnote: {note}" for note in found.notes))


def _table(found: LayoutCandidates) -> View:
    columns = (
        Column("group", "group", WHOLE),
        Column("name", "layout", lead=True),
        Column("mesh", "mesh"),
        Column("splits", "splits", RULES),
        Column("decided", "storage and recompute"),
        Column("step", "step", SECONDS),
        Column("error", "error"),
    )
    rows = [
        (
            *(each.group, each.name, mesh_option(each.mesh)),
            *(layout_text(each.layout), each.in_short(), each.predicted.step_seconds),
            "unknown" if each.error is None else f"±{percent(each.error)}",
        )
        for each in found.chosen
        if each.predicted is not None
    ]
    return View("Layouts worth measuring", columns, rows)
