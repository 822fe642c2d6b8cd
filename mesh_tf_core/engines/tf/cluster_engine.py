"""The engine of a job of several processes: each runs the program on its own devices, whose collectives reach
those of the others. The mesh's devices are dealt out in the order of their ranks."""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tf_core.cluster import Cluster
from mesh_tf_core.engines.stepping import check_beside
from mesh_tf_core.engines.tf.cluster import start
from mesh_tf_core.engines.tf.cluster_gather import HostGather
from mesh_tf_core.engines.tf.group import label
from mesh_tf_core.engines.tf.group_trace import GroupTrace
from mesh_tf_core.engines.tf.local import TfLocalEngine
from mesh_tf_core.engines.tf.variables import Variables
from mesh_tf_core.ir.program import Collective, Program, text

LOST = (
    tf.errors.AbortedError,
    tf.errors.CancelledError,
    tf.errors.DeadlineExceededError,
    tf.errors.FailedPreconditionError,
    tf.errors.InternalError,
    tf.errors.UnavailableError,
)
"""What TensorFlow raises when a collective fails because of other processes."""


class TfClusterEngine(TfLocalEngine):
    """See `engines.protocol.Engine`. Every process must call the same methods in the same order.

    Args:
      shared: another engine's variables, to be used here too.

    Raises:
      ClusterError: another process lowers another program; later, from every method that needs the others,
        one of them was lost, with what this process waited for.
    """

    def __init__(self, program: Program, cluster: Cluster, shared: Variables | None = None) -> None:
        names = start(cluster, program.mesh.devices)
        members = cluster.members
        super().__init__(program, names, "group", shared, members.index * len(names))
        self.cluster, self.is_chief = cluster, cluster.is_writer
        self._gather = HostGather(
            program.mesh, len(members.addresses), members.index, _host(names[0]), cluster.timeout
        )
        self._labels = {label(i): i for i, _ in program.walk() if isinstance(i, Collective)}
        self._steps = 0
        cluster.same("the program", hashlib.sha256(text(program).encode()).hexdigest()[:16])

    # -- what needs the others -------------------------------------------------------------------------------

    def run(self, fed: Any) -> dict[str, Any]:
        self._steps += 1
        with self._together(f"step {self._steps} since the start"):
            return super().run(fed)

    def read(self, name: str) -> Any:
        self._ready()
        with self._together(f"reading variable {name!r}"):
            pieces = {begin: x.numpy() for begin, x in self.variables.pieces(name).items()}
            return self._gather.whole(self.variables.values[name], pieces)

    def snapshot(self) -> Mapping[str, Any]:
        """Gathered at once, since later the other processes do something else; empty where nothing is
        written."""
        found = {}
        for name in self.program.variables:
            array = self.read(name)
            if self.is_chief:
                found[name] = array
        return found

    def beside(self, program: Program) -> TfClusterEngine:
        check_beside(self.program, program)
        self._ready()
        return TfClusterEngine(program, self.cluster, self.variables)

    @contextlib.contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """Turns what TensorFlow says when others are missing into who is missing."""
        self.cluster.check()
        with self.cluster.doing(what):
            try:
                yield
            except tf.errors.OpError as error:
                if not isinstance(error, LOST) or "ollective" not in str(error):
                    raise
                late = isinstance(error, tf.errors.DeadlineExceededError)
                raise self.cluster.explain(f"{self._waited(error)} of {what}", late) from error

    def _waited(self, error: Any) -> str:
        """The collective that an error names, and its mesh axes."""
        for node in re.findall(r"\{\{node ([^}]+)\}\}", str(error)):
            name = re.sub(r"_\d+$", "", node.rpartition("/")[2])
            for key in (node.rpartition("/")[2], name):
                if key in self._labels:
                    instr = self._labels[key]
                    axes = " and ".join(repr(axis) for axis in instr.axes)
                    return f"{instr.name} over mesh {'axes' if len(instr.axes) > 1 else 'axis'} {axes}"
        return "a collective"

    # -- results, and how the step is traced -----------------------------------------------------------------

    def _results(self, found: Sequence[Any]) -> dict[str, Any]:
        pieces, out = iter(found), {}
        for name, id in self.program.results.items():
            v = self.program.values[id]
            here = {self._gather.begin(v, self.first + at): next(pieces) for at in self._holders(v)}
            out[name] = self._gather.whole(v, here)
        return out

    def _trace(self) -> GroupTrace:
        returned = [self._holders(self.program.values[id]) for id in self.program.results.values()]
        trace = GroupTrace(self.program, self.devices, self.variables, self._count, returned, self.first)
        trace.timeout = self.cluster.timeout
        return trace


def _host(device: str) -> str:
    """The CPU of a device's process."""
    return f"{device.partition('/device:')[0]}/device:CPU:0"
