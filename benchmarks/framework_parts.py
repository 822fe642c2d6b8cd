"""What the prices of published runs are made of, kept outside of the checkout.

    python -m benchmarks.framework_parts [TABLE …]

prices every run once under the compiler profiles that its software may have, so that
`benchmarks.framework_fit` prices all runs under any constants in seconds.
"""

from __future__ import annotations

import hashlib
import pickle
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import layoutopt
from benchmarks.framework_rows import Row, built, rows, tables
from costmodels import load_hardware
from costmodels.pricing.items import Item
from mesh_tf_core.errors import UserError

KEPT = Path(tempfile.gettempdir()) / "layoutopt-rows"


@dataclass(frozen=True)
class Parts:
    """What the price of a row is made of.

    Attributes:
      items: part of the step, name, phase, times and item of every line.
      placement: of its mesh.
      parameters_gathered: bytes that FSDP2 copies (`copied_bytes`).
      peak, limit: bytes.
    """

    items: tuple[tuple[str, str, float, Item], ...]
    placement: Any
    peak: float
    limit: float
    seconds: float


def parts(row: Row, compiler: str) -> Parts:
    """A row priced under a compiler profile, kept on disk; UserError as of `layoutopt.cost`."""
    key = (
        row.family,
        sorted(row.sizes.items()),
        row.mesh,
        row.layout,
        row.hardware,
        sorted(row.decided.items()),
        row.ways,
        compiler,
    )
    file = KEPT / f"{hashlib.sha1(repr(key).encode()).hexdigest()}.pickle"
    if not file.exists():
        try:
            found: Any = _priced(row, compiler)
        except UserError as error:
            found = str(error)
        KEPT.mkdir(exist_ok=True)
        file.write_bytes(pickle.dumps(found))
    found = pickle.loads(file.read_bytes())
    if isinstance(found, str):
        raise UserError(found)
    assert isinstance(found, Parts)
    return found


def _priced(row: Row, compiler: str) -> Parts:
    machine = (
        replace(load_hardware(row.hardware), compiler=compiler) if compiler else load_hardware(row.hardware)
    )
    model = built(row)
    items, peak, limit, seconds, placement = [], 0.0, 0.0, 0.0, None
    for part, again in row.ways:
        if part == 0:
            continue
        found = layoutopt.cost(
            model,
            row.mesh,
            row.layout,
            machine,
            **row.decided,
            **({"recompute": list(again)} if again else {}),
        )
        of = found.evaluation
        for x in of.cost.lines:
            items.append((x.name, str(x.origin.phase), x.times * part, x.item))
        placement, limit = of.prices.placement, found.limit
        peak += part * of.predicted.peak_memory_bytes
        seconds += part * of.predicted.step_seconds
    return Parts(tuple(items), placement, peak, limit, seconds)


def main() -> None:
    for table in sys.argv[1:] or tables():
        begin, n, why = time.time(), 0, {}
        for row in rows(table):
            if row.seconds is None:
                continue
            for compiler in ("",) if row.hardware.startswith("tpu") else ("launched", "eager", "xla-gpu"):
                try:
                    parts(row, compiler)
                    n += 1
                except UserError as error:
                    why[str(error)[:100]] = why.get(str(error)[:100], 0) + 1
        print(table, n, f"{time.time() - begin:.0f} s", why, flush=True)


if __name__ == "__main__":
    from benchmarks import framework_parts  # what is kept names this module, not "__main__"

    framework_parts.main()
