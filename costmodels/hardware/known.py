"""The errors of predictions by kind of run: `known.json`, which `benchmarks/known.py` makes of results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.hardware.model import Hardware

FILE = Path(__file__).parent / "known.json"


def known_kinds(machine: Hardware) -> Sequence[Mapping[str, Any]]:
    """The kinds of runs that were predicted for this hardware, with their errors; none of a machine that was
    calibrated or has other numbers set."""
    return [] if machine.calibrated else [k for k in _read()["kinds"] if k["hardware"] == machine.name]


def compared(machine: Hardware) -> Mapping[str, Any] | None:
    """The errors against the hardware's compiler (`layoutopt.plan.known.Compiled`); None: not compared."""
    found: Mapping[str, Any] | None = None if machine.calibrated else _read()["compiler"].get(machine.name)
    return found


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
