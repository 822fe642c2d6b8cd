"""The errors of predictions by kind of run: `known.json`, which `benchmarks/known.py` makes of results."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from costmodels.frameworks import DEFAULT
from costmodels.hardware.load import load_hardware
from costmodels.hardware.model import Hardware

FILE = Path(__file__).parent / "known.json"


def known_kinds(machine: Hardware) -> Sequence[Mapping[str, Any]]:
    """The kinds of runs that were predicted by this machine's numbers, under its framework or an equal one,
    with their errors; none of a machine that was calibrated or has other numbers set."""
    every, here = [] if machine.calibrated else _read()["kinds"], _numbers_of(machine)
    own = (k for k in every if k["hardware"] == machine.name)
    return [k for k in own if _numbers_of(load_hardware(k["hardware"], k["framework"])) == here]


def _numbers_of(machine: Hardware) -> Hardware:
    """What is held beside the program, how far recomputation goes and which kernel attention takes changes
    little of errors: rates of these kernels are not fitted to the runs (`Known.of` names those compared)."""
    chip = replace(machine.chip, attention_efficiency=None, attention_block=None)
    return replace(machine, chip=chip, framework=DEFAULT, holds=())


def compared(machine: Hardware) -> Mapping[str, Any] | None:
    """The errors against the hardware's compiler (`layoutopt.plan.known.Compiled`); None: not compared."""
    found: Mapping[str, Any] | None = None if machine.calibrated else _read()["compiler"].get(machine.name)
    return found


@cache
def _read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found
