"""Advice on the next command, among those that can work on this machine."""

from __future__ import annotations

import importlib.util
import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from costmodels.hardware import Hardware
    from layoutopt.models.loading import Loaded
    from layoutopt.plan.build import Plan

MOST_DEVICES = 64
"""The largest mesh that one process of this machine runs in reasonable time."""
RUN_BY = ("tensorflow", "jax")
"""Packages; one of them must be installed to run steps on a CPU."""


def after_search(plan: Plan, out: Path, loaded: Loaded, settings: Sequence[str], machine: Hardware) -> str:
    """Advice on a plan that was written to `out`: commands that work here."""
    file = shlex.quote(str(out))
    if why := elsewhere(plan, machine):
        named = _model(plan)
        too = (
            "report takes the plan too, and export takes the plan with the same --model"
            if named
            else "report and export take the plan too"
        )
        return f"next: layoutopt explain {file}{named}; {too} ({why})"
    sets = "".join(f" --set {shlex.quote(each)}" for each in settings)
    what, more = ("train", " --steps 100") if loaded.function("data") else ("measure", "")
    return f"next: layoutopt {what} {loaded.source}{sets} --layout {file}{more}"


def elsewhere(plan: Plan, machine: Hardware) -> str:
    """Why a plan does not run on this machine; '' where it does."""
    devices = plan.mesh.devices
    if machine.kind != "cpu":
        return f"the plan is for {machine.name}"
    if devices > MOST_DEVICES:
        return f"this machine is too small to run {devices} devices"
    if _memory() and devices * plan.predicted.peak_memory_bytes > _memory():
        return "the plan needs more memory than this machine has"
    if not any(importlib.util.find_spec(name) for name in RUN_BY):
        return "to run the plan here: pip install 'layoutopt[tensorflow]'"
    return ""


def _memory() -> int:
    """Bytes of this machine's memory; 0 where the system does not say."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _model(plan: Plan) -> str:
    """What names the model where its plan alone may not."""
    from layoutopt.models.recorded import trusted
    from mesh_tf_core.errors import UserError

    try:
        trusted(plan.data.details.source, plan.data.details.source_sha256)
    except UserError:
        return f" --model {shlex.quote(plan.data.details.source)}"
    return ""
