"""Ways to synchronise on the command line: `search --diloco` with several, and `explain` of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from layoutopt.cli.terminal import Terminal
from layoutopt.plan.units import signed_percent
from reports.views.view import BYTES, FLAG, SECONDS, SHARE, Cell, Column, Kind, View

if TYPE_CHECKING:
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
