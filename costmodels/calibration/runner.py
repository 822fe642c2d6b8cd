"""Runs probes on a live mesh, of one process or several: one after the other, each until its steps find their
memory as the last one left it, as steps of a training do; within a budget of time, resumable.

The processes that measure: this process alone, or those of a cluster, which all run the same steps in the
same order.

Values that depend on time differ between processes, so worker 0 sends its own (`Team.broadcast`). A sample
combines all processes (`costmodels.calibration.clock.combined`): every process starts it when all are ready,
and receives the samples of the others.

The machine of a calibration, and the conditions that its numbers depend on.
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

from costmodels.calibration.clock import (
    ClockNoise,
    TimingSample,
    combined,
    noise,
    repeats_spread,
    sample,
    steps_for,
    typical,
)
from costmodels.calibration.probes import LAUNCH, Probe
from mesh_tf_core.cores import cores, cpus
from mesh_tf_core.engines import Cluster, Engine, chosen, open_engine, prepare
from mesh_tf_core.errors import UserError
from mesh_tf_core.files import write_file
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.reading import read_json, read_text, reading


def machine() -> dict[str, Any]:
    """Describes this machine."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "memory_bytes": memory_bytes(),
    }


def together(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several machines as one: the first one's description, the cores and memory of all."""
    sums = {name: sum(m[name] for m in machines) for name in ("cores", "memory_bytes")}
    return {**machines[0], **sums, **({"machines": len(machines)} if len(machines) > 1 else {})}


def versions(engine: str = "local") -> dict[str, str]:
    """The versions of the software that an engine's measurements depend on."""
    packages = ({"jax": "jaxlib", "lockstep": "numpy"}.get(engine, "tensorflow"), "numpy", "layoutopt")
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def version_of(package: str) -> str:
    """The installed version, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def accelerator_memory_bytes() -> int:
    """Memory that JAX takes of this machine's smallest accelerator."""
    import jax

    return min(int(d.memory_stats()["bytes_limit"]) for d in jax.local_devices())


def _processor() -> str:
    try:
        lines = read_text("/proc/cpuinfo").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()


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


OnProbe = Callable[[str, int, int], None]
"""on_progress(what, done, total)."""
ProbeRecord = dict[str, Any]
"""A probe's name, target, axes, bytes, repeats, and `seconds` of a whole step with all devices at work."""

WARMING = 20
"""Samples that are thrown away at the beginning."""


def measure(
    team: Team,
    wanted: Sequence[Probe],
    rounds: int,
    seconds: float,
    budget: float,
    done: dict[str, ProbeRecord],
    on_progress: OnProbe | None = None,
    save: Callable[[], None] | None = None,
) -> None:
    """Adds the measurements of `wanted` to `done`, by name; the same ones in every process of the team.

    Args:
      rounds: samples of every probe.
      seconds: of one sample.
      budget: seconds after which the remaining measurements get three rounds, except overheads that others
        subtract or add.
      done: must be equal in all processes.
    """
    left = [p for p in wanted if p.name not in done]
    if left:
        _samples(team, left[0], WARMING, seconds)  # the first steps of a process are slower
    start = time.monotonic()
    for batch in (left[i : i + 12] for i in range(0, len(left), 12)):
        share = (time.monotonic() - start) / budget
        late = team.broadcast("the time", share > (len(done) + 1) / max(1, len(wanted)))
        try:
            for probe in batch:
                few = late and probe.target not in ("stores", LAUNCH)
                samples = _samples(team, probe, min(3, rounds) if few else rounds, seconds)
                done[probe.name] = {
                    "name": probe.name,
                    "target": probe.target,
                    "axes": "+".join(probe.axes),
                    "bytes": probe.bytes,
                    "repeats": probe.repeats,
                    "seconds": typical(samples),
                    "wall_seconds": median(s.wall / s.steps for s in samples),
                    "foreign": median(s.foreign_share for s in samples),
                    "spread": repeats_spread(samples),
                    "samples": len(samples),
                }
        finally:  # also what was measured before an interruption
            if save is not None:
                save()
        if on_progress is not None:
            on_progress(batch[-1].target, len(done), len(wanted))


def _samples(team: Team, probe: Probe, rounds: int, seconds: float) -> list[TimingSample]:
    engine = team.open(probe.program(team.mesh))

    def step() -> object:
        return engine.step({})

    try:
        engine.initialize()
        step()
        step()
        (steps,) = team.broadcast("the number of steps", [steps_for(step, seconds)])
        return [team.sample(step, steps) for _ in range(rounds)]
    finally:
        engine.close()


def noise_of(done: Sequence[ProbeRecord]) -> ClockNoise:
    """The machine's noise, from all measurements."""
    if not done:
        return noise([])
    return ClockNoise(median(m["foreign"] for m in done), median(m["spread"] for m in done))


class Partial:
    """Measurements so far in a file, so that a stopped calibration can resume.

    Args:
      key: the conditions of the measurements; a file with another key is refused.
    """

    def __init__(self, path: Path | None, key: dict[str, Any]) -> None:
        self.path, self.key = path, key
        self.done: dict[str, ProbeRecord] = {}
        if path is not None and path.is_file():
            self._load(path)

    def _load(self, path: Path) -> None:
        what, again = f"the partial results in {str(path)!r}", "delete the file to start again"
        with reading(what, again):
            content = read_json(path)
        try:
            key, done = dict(content["key"]), {m["name"]: m for m in content["measurements"]}
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{what} are not those of a calibration; {again}") from None
        if key != self.key:
            raise UserError(
                f"the partial results in {str(path)!r} are of {_words(key)}, not of {_words(self.key)}; "
                "delete the file or give another file"
            )
        self.done = done

    def save(self) -> None:
        if self.path is None:
            return
        content = {"key": self.key, "measurements": list(self.done.values())}
        write_file(self.path, json.dumps(content), "partial results")

    def finish(self) -> None:
        """Removes the file: the profile holds everything now."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)


def _words(key: dict[str, Any]) -> str:
    return ", ".join(" ".join(f"{k} {v}".split()) for k, v in key.items())
