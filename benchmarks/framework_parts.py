"""What the prices of published runs are made of, kept outside of the checkout.

A run is lowered once under its framework; its items are then priced under any constants in moments, by
`benchmarks.unseen` as they ship and by `benchmarks.framework_fit` to find them.
"""

from __future__ import annotations

import hashlib
import pickle
import tempfile
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import layoutopt
from benchmarks.framework_rows import Row
from costmodels import Hardware, load_hardware
from costmodels.liveness import memory
from costmodels.network.topology import MeshPlacement
from costmodels.pricing.items import Item
from costmodels.stage_ends import StageEnd
from mesh_tf_core.errors import UserError

KEPT = Path(tempfile.gettempdir()) / "layoutopt-rows"
ROOT = Path(__file__).parents[1]
PRICED_BY = "mesh_tf_core", "costmodels", "layoutopt", "examples"
"""Packages whose code decides which items a run has; their data files stand in the hardware (`_key`)."""


@dataclass(frozen=True)
class Parts:
    """What the price of a row is made of.

    Attributes:
      items: times in a step, and the item.
      peak, limit: bytes.
    """

    items: tuple[tuple[float, Item], ...]
    placement: MeshPlacement
    peak: float
    limit: float


def bare(machine: Hardware) -> Hardware:
    """A machine without the numbers that fits choose; they decide no item."""
    whole = replace(machine.chip.memory_efficiency, value=1.0, given="", source="", date="")
    chip = replace(machine.chip, sustained=None, launch_interval=None, memory_efficiency=whole)
    return replace(machine, chip=chip)


@cache
def _code() -> str:
    found = hashlib.sha1()
    for package in PRICED_BY:
        for file in sorted((ROOT / package).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()


def _key(row: Row, machine: Hardware) -> str:
    asked = row.family, sorted(row.sizes.items()), row.mesh, row.layout, sorted(row.decided.items()), row.ways
    last = "last rank" in row.published.get("memory_kind", "")
    text = repr((_code(), *asked, last, replace(bare(machine), overlap={})))
    return hashlib.sha1(text.encode()).hexdigest()


def parts(row: Row) -> Parts:
    """The items of a row; UserError as of `layoutopt.cost`."""
    machine = load_hardware(row.hardware, row.framework)
    file = KEPT / f"{_key(row, machine)}.pickle"
    if not file.exists():
        try:
            found: Any = _lowered(row)
        except UserError as error:
            found = str(error)
        KEPT.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps(found))
    found = pickle.loads(file.read_bytes())
    if isinstance(found, str):
        raise UserError(found)
    assert isinstance(found, Parts)
    return found


def _lowered(row: Row) -> Parts:
    items, peak, limit = list[tuple[float, Item]](), 0.0, 0.0
    for part, again in row.ways:
        said = {"recompute": list(again)} if again else {}
        found = layoutopt.cost(
            row.model_built(),
            row.mesh,
            row.layout,
            row.hardware,
            framework=row.framework,
            **row.decided,
            **said,
        )
        of = found.evaluation
        items += [(line.times * part, line.item) for line in of.cost.lines]
        held = of.predicted.peak_memory_bytes
        if row.stages and "last rank" in row.published.get("memory_kind", ""):
            held = memory(of.program, of.prices.itemiser.compiler.rules, at=(StageEnd.LAST,)).peak
        peak, limit = peak + part * held, found.limit
    return Parts(tuple(items), of.prices.placement, peak, limit)
