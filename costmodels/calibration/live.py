"""`calibrate`: measure, fit, describe."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodels.calibration.fit import fit
from costmodels.calibration.probes import Probe, probes
from costmodels.calibration.profile import profile, versions
from costmodels.calibration.runner import Partial, Progress, measure, noise_of
from mesh_tf_core.engines import prepare
from mesh_tf_core.errors import UserError
from mesh_tf_core.mesh import Mesh

QUICK, THOROUGH = 45.0, 480.0
"""Seconds after which what is still to be measured gets fewer repeats."""


def calibrate(
    mesh: Mesh | str,
    on_progress: Progress | None = None,
    quick: bool = True,
    resume: str | Path | None = None,
    wanted: Sequence[Probe] | None = None,
) -> dict[str, Any]:
    """Measures this machine's mesh; returns the content of its profile (see
    `costmodels.hardware.write_profile`).

    The machine should be idle: `content["calibration"]["machine"]["noisy"]` says whether it was.

    Args:
      mesh: its devices are this process's, all at work at once as in a step.
      on_progress: called with (what is measured, measurements done, measurements in all).
      quick: about 45 s on two cores, else about ten times that: more sizes, more repeats.
      resume: a file of partial results; written while measuring, read if it exists, removed at the end.
      wanted: the probes (None: all of `costmodels.calibration.probes`).

    Raises:
      UserError: a mesh of one device, or a file to resume from that is of another mesh.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    if mesh.devices < 2:
        raise UserError(f"mesh [{mesh}] has one device; calibrate a mesh of at least two, for example data:2")
    chosen = list(probes(mesh, quick) if wanted is None else wanted)
    key = {"mesh": str(mesh), "quick": quick, "versions": versions()}
    partial = Partial(Path(resume) if resume is not None else None, key)
    prepare(mesh.devices)
    rounds, seconds, budget = (5, 0.02, QUICK) if quick else (15, 0.05, THOROUGH)
    measure(mesh, chosen, rounds, seconds, budget, partial.done, on_progress, partial.save)
    done = [partial.done[p.name] for p in chosen]
    found = fit(chosen, partial.done, {"+".join(p.axes): mesh.group_size(p.axes) for p in chosen if p.axes})
    content = profile(mesh, found, done, noise_of(done), quick)
    partial.finish()
    return content
