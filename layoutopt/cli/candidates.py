"""`layoutopt candidates`: the layouts that are worth measuring.

Ways to synchronise on the command line: `search --diloco` with several, and `explain` of the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli import options
from layoutopt.cli.given import Allowed, MaxAxesOption, OnMesh
from layoutopt.cli.grouped import grouped
from layoutopt.cli.learn import write_candidates
from layoutopt.cli.terminal import Terminal, facts
from layoutopt.plan.units import layout_text, mesh_option, percent, signed_percent
from reports.views.view import BYTES, FLAG, RULES, SECONDS, SHARE, WHOLE, Cell, Column, Kind, View

if TYPE_CHECKING:
    from layoutopt.api.comparing import LayoutCandidates
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan
    from mesh_tf_core.model import Model

AcceptLossOption = Annotated[
    float | None,
    typer.Option(
        "--accept-loss",
        metavar="SHARE",
        help="Exclude DiLoCo settings that raise the loss by more than this fraction, e.g. 0.02, "
        "according to a published scaling law (with several --diloco).",
    ),
]


class ReplicaModel:
    """The model of one of n replicas, built again from a file, as `choose_replicas` requires.

    Attributes:
      loaded: by n.
    """

    def __init__(self, source: str, settings: Sequence[str], whole: Loaded) -> None:
        self.source, self.settings, self.loaded = source, settings, {1: whole}

    def __call__(self, count: int) -> Model:
        from layoutopt.models.loading import load_model
        from mesh_tf_core.errors import UserError

        if count not in self.loaded:
            batch = self.loaded[1].hparams.get("batch")
            if not isinstance(batch, int) or batch % count:
                told = (
                    f"--diloco: {count} replicas share the hyperparameter 'batch' of {self.source}, but "
                    f"{batch} is not divisible by {count}; set a divisible batch (--set batch=N)"
                    if isinstance(batch, int)
                    else f"--diloco: replicas share the hyperparameter 'batch', but {self.source} has none; "
                    "add 'batch' to the model's function"
                )
                raise UserError(f"{told}, or give a single --diloco setting")
            self.loaded[count] = load_model(self.source, [*self.settings, f"batch={batch // count}"])
        return self.loaded[count].model

    def of(self, plan: Plan) -> Loaded:
        """The model of one replica for a number of replicas."""
        rare = plan.options.diloco
        return self.loaded[1 if rare is None else plan.mesh.size(rare.axis)]


def is_choice(ways: Sequence[str]) -> bool:
    """True if several ways are to be compared; a single way is searched directly."""
    return len(ways) > 1 or any(way in ("never", "free") or "/" in way for way in ways)


def show_ways(terminal: Terminal, plan: Plan) -> None:
    """All ways, the fastest first."""
    from layoutopt.plan.schema import ProofStatus

    found = plan.data.details.ways
    if found is None:
        return
    columns = (
        Column("replicas", "replicas"),
        Column("step_seconds", "step", replace(SECONDS, number=False)),
        Column("mfu", "MFU", SHARE),
        Column("rare_bytes", "over the axis", BYTES, rank=2),
        Column("peak_memory_bytes", "memory", BYTES),
        Column("loss", "predicted loss", Kind(signed_percent)),
        Column("proven", "proven", FLAG, rank=1),
    )
    rows = [
        (
            way.name,
            Cell(way.reason) if way.step_seconds is None else way.step_seconds,
            *(way.mfu, way.rare_bytes, way.peak_memory_bytes),
            Cell("not known") if way.loss is None and way.diloco else way.loss,
            way.status == ProofStatus.OPTIMAL if way.status else None,
        )
        for way in found.compared
    ]
    terminal.show("", View("Settings of synchronisation on the same examples", columns, rows, strong=0))
    law = (
        "Loss by the scaling law of Charles et al. 2025 (arXiv:2503.09799), at H = 30 and 20 tokens per "
        "parameter."
    )
    terminal.show(law)


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
