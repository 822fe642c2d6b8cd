"""A published run as a program of ours: model, mesh, layout and options as its authors state them.

A row that cannot be expressed is there too and says why it is not judged: it is shown, not counted. Tables
and their sources: `benchmarks/data/*.csv`.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import mesh_tf_core as mtf
from costmodels import Hardware, load_hardware
from costmodels.frameworks import DEFAULT
from costmodels.liveness import memory
from costmodels.pricing.compilers import compiler_of
from costmodels.pricing.lines import Cost
from costmodels.pricing.pricer import Pricer, pricer
from mesh_tf_core.ir.instructions import GRADIENT, PARAMETER
from mesh_tf_core.ir.program import AllGather, ReduceScatter

DATA = Path(__file__).parent / "data"

PIPELINED = "pipeline stages"
CUSTOM = "every second layer is recomputed"
SLICES = "several slices: variables are split over one and repeated on the others"


@dataclass(frozen=True)
class Run:
    """One published row.

    Attributes:
      table: the file it is from.
      model: what is left out together when constants are fitted.
      workload: runs of one workload compete with each other (ranking, regret); "" if it has no rivals.
      seconds: published (or derived from published throughput), of one step.
      program: builds the program.
      hardware: a preset, with what the source says of its network (`load_hardware`).
      framework: the software that priced it.
      stack: of software; constants are fitted per stack.
      unjudged: why it does not count; "" where it does.
      assumed: its recomputation or its attention is not stated by the source.
      keeps: what its layers keep though they run again; "" where all or nothing does.
      compiled: kernels are made of several operations; else each operation is one.
      buffers: it is PyTorch's FSDP2 (`copied_bytes`).
      gib: peak memory of a device as published; None: not published.
    """

    table: str
    name: str
    model: str
    workload: str
    seconds: float
    program: Callable[[], mtf.Program] = field(repr=False)
    hardware: str
    stack: str
    unjudged: str = ""
    assumed: bool = False
    keeps: str = ""
    compiled: bool = True
    buffers: bool = False
    gib: float | None = None
    framework: str = DEFAULT

    @property
    def machine(self) -> Hardware:
        """What it ran on, as it ran on it."""
        return as_run(self.hardware, self.compiled, self.framework)


@cache
def as_run(hardware: str, compiled: bool, framework: str = DEFAULT) -> Hardware:
    """A machine under a framework; without a compiler every operation is a kernel of its own."""
    found = load_hardware(hardware, framework)
    return found if compiled else replace(found, compiler="eager")


@dataclass
class Prices:
    """Prices of runs; what runs of one mesh on one machine share is priced once."""

    known: dict[tuple[str, bool, str, str], Pricer] = field(default_factory=dict)

    def by(self, run: Run, program: mtf.Program) -> tuple[Pricer, Cost]:
        """What prices a run, and the price of its program."""
        key = (run.hardware, run.compiled, run.framework, str(program.mesh))
        if key not in self.known:
            self.known[key] = pricer(run.machine, program)
        prices = self.known[key]
        return prices, prices.cost(program)

    def of(self, run: Run, program: mtf.Program) -> tuple[Hardware, Cost]:
        """The machine of a run, and the price of its program on it."""
        prices, cost = self.by(run, program)
        return prices.hardware, cost


def copied_bytes(program: mtf.Program) -> float:
    """Bytes of a device's memory that PyTorch's FSDP2 reads and writes in a step besides what the program
    says: between kernels it copies gathered parameters out of one buffer for a block, and gradients,
    converted, into one (pytorch/pytorch torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py,
    `foreach_all_gather_copy_out`, `foreach_reduce_scatter_copy_in`, both on the stream of the kernels)."""
    found = 0.0
    for instr, times in program.walk():
        if isinstance(instr, AllGather) and instr.rule == PARAMETER:
            found += times * 2 * sum(_local(program, i) for i in instr.outputs)
        elif isinstance(instr, ReduceScatter) and instr.rule == GRADIENT:
            found += times * 1.5 * sum(_local(program, i) for i in instr.inputs)
    return found


def _local(program: mtf.Program, value: int) -> int:
    return program.values[value].local_bytes(program.mesh)


def peak(hardware: Hardware, program: mtf.Program) -> int:
    """Bytes that a device holds at the fullest point of a step."""
    return memory(program, compiler_of(hardware).memory).peak


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
) -> mtf.Program:
    """The step of a model under a layout; `recompute` runs every layer again in backward, but for what is to
    `keep`."""
    model = build(**sizes)
    loops = {b.dim.name for b in model.graph.blocks if b.dim is not None} if recompute else ()
    again = frozenset(f"{name}:keep={keep}" if keep else name for name in loops)
    options = mtf.Options(stored(model, stage) if stage else {}, again, microbatches)
    return model.lower(mtf.Mesh(mesh), mtf.Layout(layout), options)
