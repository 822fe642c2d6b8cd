"""The processes that measure: this process alone, or those of a cluster, which all run the same steps in the
same order.

Values that depend on time differ between processes, so worker 0 sends its own (`Team.broadcast`). A sample
combines all processes (`costmodels.calibration.clock.combined`): every process starts it when all are ready,
and receives the samples of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from costmodels.calibration.clock import TimingSample, combined, sample
from costmodels.calibration.machine import machine, together
from mesh_tf_core.cores import cpus
from mesh_tf_core.engines import Cluster, Engine, chosen, open_engine, prepare
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program


@dataclass(frozen=True)
class Team:
    """The processes of one calibration; see the module.

    Attributes:
      mesh: the processes divide its devices in the order of their ranks.
      devices: names of this process's.
      machine: the machines, described as one.
      cluster: the processes; None for this one alone.
      hosts: the machine of each process.
      cores: of each machine, those that the processes may use.
      engine: the engine of the steps (see `mesh_tf_core.engines.open_engine`).
    """

    mesh: Mesh
    devices: tuple[str, ...]
    machine: Mapping[str, Any]
    cluster: Cluster | None = None
    hosts: tuple[str, ...] = ("",)
    cores: Mapping[str, int] = field(default_factory=dict)
    engine: str = "local"

    @property
    def processes(self) -> int:
        return len(self.hosts)

    @property
    def kind(self) -> str:
        """The kind of its devices, as hardware files name it; all but CPUs and TPUs count as GPUs."""
        name = self.devices[0].upper()
        return next((kind for kind in ("cpu", "tpu") if kind.upper() in name), "gpu")

    @property
    def accelerated(self) -> bool:
        return self.kind != "cpu"

    @property
    def is_writer(self) -> bool:
        """True if this process stores the measurements."""
        return self.cluster is None or self.cluster.is_writer

    @property
    def devices_per_process(self) -> int | None:
        """None if devices exchange data through the memory of one process, without messages."""
        return len(self.devices) if self.cluster is not None or self.accelerated else None

    def open(self, program: Program) -> Engine:
        return open_engine(program, self.engine, cluster=self.cluster)

    def broadcast(self, what: str, value: Any) -> Any:
        """Sends worker 0's value (JSON data) to all."""
        return value if self.cluster is None else self.cluster.gather(what, value)[0]

    def sample(self, run: Callable[[], object], steps: int) -> TimingSample:
        """Runs `steps` steps in every process, once all have called this method."""
        found = sample(run, steps)
        if self.accelerated:
            found = replace(found, foreign=0.0)  # whoever uses the cores takes nothing from an accelerator
        if self.cluster is None:
            return found
        times = self.cluster.gather("a sample", [found.wall, found.own, found.foreign])
        samples = [
            TimingSample(wall, own, foreign, self.cores[host], steps)
            for (wall, own, foreign), host in zip(times, self.hosts, strict=True)
        ]
        return combined(samples, self.hosts)


def assemble(mesh: Mesh, cluster: Cluster | None = None, engine: str = "auto") -> Team:
    """Starts this process's devices, and connects to the others.

    Raises:
      UserError: the processes cannot divide the mesh, or a library already runs with fewer devices.
      ClusterError: a process did not connect.
    """
    engine = chosen(engine, cluster)
    if cluster is None:
        return Team(mesh, prepare(mesh.devices, engine), machine(), engine=engine)
    each = mesh.devices // cluster.processes
    devices = tuple(map(str, cluster.start(mesh.devices)[cluster.index * each :][:each]))
    found = cluster.gather("the machines", [machine(), sorted(cpus())])
    hosts = cluster.hosts
    homes: dict[str, tuple[dict[str, Any], set[int]]] = {}
    for host, (own, usable) in zip(hosts, found, strict=True):
        homes.setdefault(host, (own, set()))[1].update(usable)
    cores = {host: len(usable) for host, (_, usable) in homes.items()}
    machines = [{**own, "cores": cores[host]} for host, (own, _) in homes.items()]
    return Team(mesh, devices, together(machines), cluster, hosts, cores, engine)
