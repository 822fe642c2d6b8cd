"""`calibrate`: measure, fit, describe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from costmodels.calibration.fit import fit
from costmodels.calibration.machine import versions
from costmodels.calibration.probes import Probe, groups, probes
from costmodels.calibration.profile import profile
from costmodels.calibration.runner import OnProbe, Partial, measure, noise_of
from costmodels.calibration.team import assemble
from mesh_tf_core.engines import Cluster
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.mesh import Mesh

QUICK, THOROUGH = 45.0, 480.0
"""Seconds after which the remaining measurements get fewer repeats."""


def calibrate(
    mesh: Mesh | str,
    on_progress: OnProbe | None = None,
    quick: bool = True,
    resume: str | Path | None = None,
    wanted: Sequence[Probe] | None = None,
    cluster: Cluster | None = None,
    engine: str = "auto",
) -> dict[str, Any]:
    """Measures this machine's mesh, or a cluster's; returns the content of its profile (see
    `costmodels.hardware.write_profile`).

    The machine should be idle: `content["calibration"]["machine"]["noisy"]` records whether it was.

    Args:
      mesh: its devices are this process's (or those of the cluster's processes, in the order of their ranks),
        all at work at once as in a step.
      on_progress: called with (current measurement, measurements done, number of measurements).
      quick: about 45 s on two cores, else about ten times that: more sizes, more repeats.
      resume: a file of partial results; written while measuring, read if it exists, removed at the end; of
        a cluster's processes, worker 0 does so.
      wanted: the probes (None: all of `costmodels.calibration.probes`).
      cluster: the processes; each calls this function with the same arguments and gets the same content.
      engine: the engine of the programs (see `mesh_tf_core.engines.open_engine`).

    Raises:
      UserError: a mesh of one device, or one that the processes cannot divide; a file to resume from that is
        of another mesh.
      ClusterError: another process was lost.
    """
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    if mesh.devices < 2:
        raise UserError(
            f"mesh [{mesh}] has one device; calibrate on a mesh of at least two devices, e.g. data:2"
        )
    team = assemble(mesh, cluster, engine)
    if cluster is not None:
        cluster.same("what is measured", f"mesh {mesh}, {'quick' if quick else 'thorough'}")
    each = team.devices_per_process
    chosen = list(probes(mesh, quick, each) if wanted is None else wanted)
    key = {"mesh": str(mesh), "processes": team.processes, "quick": quick, "versions": versions(team.engine)}
    partial = Partial(Path(resume) if resume is not None and team.is_writer else None, key)
    partial.done = team.broadcast("the partial results", partial.done)
    rounds, seconds, budget = (5, 0.02, QUICK) if quick else (15, 0.05, THOROUGH)
    measure(team, chosen, rounds, seconds, budget, partial.done, on_progress, partial.save)
    done = [partial.done[p.name] for p in chosen]
    found = fit(chosen, partial.done, groups(mesh, each))
    content = profile(team, found, done, noise_of(done), quick)
    partial.finish()
    return content
