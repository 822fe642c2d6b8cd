"""The errors of predictions for each preset: `known.json`, which `benchmarks/known.py` makes of results."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.hardware.model import Hardware

FILE = Path(__file__).parent / "known.json"


def known_errors(machine: Hardware) -> dict[str, Any]:
    """The errors of predictions for this hardware (`layoutopt.plan.known.Known`); empty if none is known, as
    of a machine that was calibrated or has other numbers set."""
    return {} if machine.calibrated else _read().get(machine.name, {})


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found["hardware"]
