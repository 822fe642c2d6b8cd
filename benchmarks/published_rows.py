"""A published run as a program of ours: model, mesh, layout and options as its authors state them.

Tables and their sources: `benchmarks/data/*.csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from costmodels import Hardware, load_hardware
from costmodels.frameworks import DEFAULT
from costmodels.pricing.hidden import Cost
from costmodels.pricing.pricer import Pricer, pricer
from mesh_tf_core.ir.blocks import loop_dims
from mesh_tf_core.ir.schedules import GPIPE

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Run:
    """One published row.

    Attributes:
      table: the file it is from.
      workload: runs of one workload compete with each other (ranking, regret); "" if it has no rivals.
      seconds: published (or derived from published throughput), of one step.
      program: builds the program.
      hardware: a preset, with what the source says of its network (`load_hardware`).
      framework: the software that priced it.
      stack: of software.
      keeps: what its layers keep though they run again; "" where all or nothing does.
      stages: of its pipeline, each a program of its own.
    """

    table: str
    name: str
    model: str
    workload: str
    seconds: float
    program: Callable[[], mtf.Program] = field(repr=False)
    hardware: str
    stack: str
    keeps: str = ""
    stages: int = 1
    framework: str = DEFAULT

    @property
    def fitted(self) -> bool:
        """Whether a constant was fitted to it, or chosen while its errors were known."""
        return not self.keeps and self.table in LOOKED_AT


LOOKED_AT = (
    "gspmd_tpuv3.csv",
    "gspmd_tpuv3_more.csv",
    "published/vtrain_a100_h1024.csv",
    "published/vtrain_a100_h2048.csv",
    "published/vtrain_a100_multi.csv",
    "oneflow_megatron_v100.csv",
)
"""Tables that the overlap of TPU v3 (gspmd) and `megatron:kernels=2022` were fitted to, or its overlap was
checked with (oneflow)."""


@dataclass
class Prices:
    """Prices of runs; what runs of one mesh on one machine share is priced once."""

    known: dict[tuple[str, str, str], Pricer] = field(default_factory=dict)

    def by(self, run: Run, program: mtf.Program) -> tuple[Pricer, Cost]:
        """What prices a run, and the price of its program."""
        key = (run.hardware, run.framework, str(program.mesh))
        if key not in self.known:
            self.known[key] = pricer(load_hardware(run.hardware, run.framework), program)
        prices = self.known[key]
        return prices, prices.cost(program)

    def of(self, run: Run, program: mtf.Program) -> tuple[Hardware, Cost]:
        """The machine of a run, and the price of its program on it."""
        prices, cost = self.by(run, program)
        return prices.hardware, cost


@dataclass(frozen=True)
class Priced:
    """A run, and the seconds that it is predicted to take."""

    run: Run
    shipped: float

    @property
    def error(self) -> float:
        return self.shipped / self.run.seconds - 1

    @staticmethod
    def of(run: Run, prices: Prices) -> Priced:
        return Priced(run, prices.of(run, run.program())[1].step_seconds)


def read(name: str) -> list[dict[str, str]]:
    """Rows of a table; lines that begin with '#' say where it is from."""
    with (DATA / name).open(encoding="utf-8") as f:
        return list(csv.DictReader(line for line in f if not line.startswith("#")))


def stored(model: mtf.Model, stage: int | str) -> dict[str, int | str]:
    """All trained variables at one stage of storage, of all axes or of some (`zero3@data`)."""
    _ = model.step_graph
    return {v.name: stage for v in model.graph.variables.values() if v.trainable and len(v.shape)}


def lowered(
    build: Callable[..., mtf.Model],
    sizes: dict[str, Any],
    mesh: str,
    layout: str,
    *,
    stage: int | str = 0,
    recompute: bool = False,
    keep: str = "",
    microbatches: int = 1,
    schedule: str = GPIPE,
    to_the_end: bool = False,
) -> mtf.Program:
    """The step of a model under a layout; `recompute` runs every layer again in backward, but for what is to
    `keep`, `to_the_end` or not (`Model.second_runs`)."""
    model = build(**sizes).second_runs(to_the_end)
    loops = loop_dims(model.graph) if recompute else ()
    again = frozenset(f"{name}:keep={keep}" if keep else name for name in loops)
    options = mtf.Options(stored(model, stage) if stage else {}, again, microbatches, schedule=schedule)
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout), options)
