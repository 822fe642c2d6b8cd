"""Who takes part in a job of several processes: one address per process, and which of them this one is."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mesh_tf_core.errors import UserError

EXAMPLE = '{"cluster": {"worker": ["host0:2222", "host1:2222"]}, "task": {"type": "worker", "index": 0}}'
_PORT = re.compile("[0-9]{1,5}")


@dataclass(frozen=True)
class Members:
    """The processes of a job.

    Attributes:
      addresses: HOST:PORT of every process by its index; TensorFlow listens there.
      index: which of them this process is.
      devices: devices that every process brings, if it was said.
    """

    addresses: tuple[str, ...]
    index: int
    devices: int | None = None

    def __post_init__(self) -> None:
        for address in self.addresses:
            host, colon, port = address.rpartition(":")
            if not (host and colon and _PORT.fullmatch(port) and 0 < int(port) < 1 << 16):
                raise UserError(f"cluster: address {address!r} is not HOST:PORT, as 'host0:2222'")
        for address in self.addresses:
            if self.addresses.count(address) > 1:
                raise UserError(f"cluster: two processes have the address {address}; give each its own")
        if not 0 <= self.index < len(self.addresses):
            raise UserError(
                f"cluster: this process is number {self.index}, but there are {len(self.addresses)} "
                "addresses, counted from 0"
            )
        if self.devices is not None and self.devices < 1:
            raise UserError(f"cluster: a process needs a device at least, found {self.devices}")

    def name(self, index: int) -> str:
        """How messages call a process."""
        ranks = ""
        if self.devices is not None:
            first, last = index * self.devices, (index + 1) * self.devices - 1
            ranks = f", device {first}" if first == last else f", devices {first} to {last}"
        return f"worker {index} ({self.addresses[index]}{ranks})"

    @property
    def job(self) -> str:
        """Tells this job from others whose processes may knock at the same port."""
        return hashlib.sha256(" ".join(self.addresses).encode()).hexdigest()[:16]

    @property
    def meeting_point(self) -> tuple[str, int]:
        """Where the processes watch each other: at worker 0, on the first port above its own that no worker
        of its host has."""
        host, port = endpoint(self.addresses[0])
        taken = {p for h, p in map(endpoint, self.addresses) if h == host}
        return host, next(p for p in range(port + 1, port + 2 + len(taken)) if p not in taken)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of every process."""
        return tuple(endpoint(a)[0] for a in self.addresses)

    @property
    def neighbours(self) -> tuple[int, ...]:
        """Indices of the processes on this one's host, itself among them."""
        return tuple(i for i, host in enumerate(self.hosts) if host == self.hosts[self.index])

    def devices_of(self, mesh_devices: int) -> int:
        """Devices of one process, if the mesh has `mesh_devices`.

        Raises:
          UserError: they cannot be dealt out equally, or are not what was said.
        """
        count, left = divmod(mesh_devices, len(self.addresses))
        if left or (self.devices is not None and self.devices != count):
            have = f" of {self.devices} devices" if self.devices is not None else ""
            raise UserError(
                f"the mesh has {mesh_devices} devices, the cluster {len(self.addresses)} processes{have}; "
                "give every process equally many and the mesh all of them"
            )
        return count


def endpoint(address: str) -> tuple[str, int]:
    """Host and port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def explicit(addresses: Sequence[str], index: int | None, devices: int | None) -> Members:
    """From what a caller says."""
    if index is None:
        raise UserError("cluster: which of the addresses is this process? give its index too")
    return Members(tuple(addresses), index, devices)


def from_environment(environ: Mapping[str, str] = os.environ) -> Members:
    """From TF_CONFIG, TensorFlow's own description of a cluster: `chief` (if there is one) comes first, then
    the `worker`s. Its entry `devices_per_process` (ours) is optional.

    Raises:
      UserError: it is missing or malformed, or has tasks that cannot run a program.
    """
    text = environ.get("TF_CONFIG")
    if not text:
        raise UserError(
            f"cluster: TF_CONFIG is not set; set it as {EXAMPLE}, or start local processes with "
            "`layoutopt launch`"
        )
    try:
        config = json.loads(text)
        cluster, task = config["cluster"], config["task"]
        kind, index = str(task["type"]), int(task["index"])
        jobs = {name: _addresses(found) for name, found in cluster.items()}
        devices = config.get("devices_per_process")
        if devices is not None and type(devices) is not int:
            raise TypeError(f"devices_per_process is a {type(devices).__name__}")
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"cluster: TF_CONFIG is malformed ({error!r}); write it as {EXAMPLE}") from None
    strange = sorted({*jobs, kind} - {"chief", "worker"})
    if strange or kind not in jobs:
        raise UserError(
            f"cluster: TF_CONFIG has {', '.join(sorted(jobs))} and this process is a {kind}; "
            "only chief and worker take part"
        )
    chiefs = jobs.get("chief", ())
    if not 0 <= index < len(jobs[kind]):
        raise UserError(f"cluster: TF_CONFIG says {kind} {index}, but has {len(jobs[kind])} of them")
    first = len(chiefs) if kind == "worker" else 0
    return Members((*chiefs, *jobs.get("worker", ())), first + index, devices)


def _addresses(found: Any) -> tuple[str, ...]:
    """A list, or TensorFlow's other form: a mapping from index to address."""
    if isinstance(found, Mapping):
        return tuple(str(found[i]) for i in sorted(found, key=int))
    return tuple(str(a) for a in found)
