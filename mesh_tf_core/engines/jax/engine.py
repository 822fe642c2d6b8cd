"""The JAX engine: a program on the devices that JAX has, as one compiled function (see `jax.program`).

It needs JAX but not TensorFlow. It runs in one process or in the processes of a `Cluster`, each of which
calls the same methods in the same order. It compiles the same function that `jax.compile` gives to the TPU
compiler.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from operator import methodcaller
from typing import Any

import jax
import numpy as np

from mesh_tf_core.engines.feeds import check_array, stored
from mesh_tf_core.engines.jax import compat as jax_compat
from mesh_tf_core.engines.jax.cluster import Cluster
from mesh_tf_core.engines.jax.compat import placed
from mesh_tf_core.engines.jax.profile import STEP
from mesh_tf_core.engines.jax.program import JaxProgram, is_wide
from mesh_tf_core.engines.pieces import (
    Begin,
    VariablePiece,
    in_order,
    in_runs,
    initial,
    joined,
    lying,
    runs,
    writers,
)
from mesh_tf_core.engines.stepping import OneByOne, Stepping, check_beside
from mesh_tf_core.ir.program import Program, Stored, count_sent, text
from mesh_tf_core.kernels.array_kernel import np_dtype

IN_FLIGHT = 2
"""Steps that an accelerator may have before it: one runs, and the next one waits for it. Steps of CPU devices
deadlock, because their collectives wait in threads that the first step needs."""


class JaxEngine(Stepping):
    """See `engines.protocol.Engine`. Variables are sharded arrays, replaced in place by every step.

    Args:
      devices: JAX's devices by rank; by default those of the process or the cluster, in the order of
        `engines.jax.placing`.
      cluster: the processes that run the program together; by default this one alone.
      slices: mesh axis -> number of slices that it spans.

    Raises:
      ClusterError: another process lowers a different program; later, in every method that needs the others:
        one of them was lost.
    """

    def __init__(
        self,
        program: Program,
        devices: Sequence[Any] | None = None,
        cluster: Cluster | None = None,
        slices: Mapping[str, int] | None = None,
    ) -> None:
        self.program, self.cluster = program, cluster
        if devices is None:
            count = program.mesh.devices
            found = jax_compat.devices(count) if cluster is None else cluster.start(count)
            devices = placed(program.mesh, found, slices)
        self.mesh = jax_compat.device_mesh(program.mesh, devices)
        self.devices = tuple(self.mesh.devices.flat)
        self.platform = self.devices[0].platform
        self.in_flight = 1 if self.platform == "cpu" else IN_FLIGHT
        self.is_chief = cluster is None or cluster.is_writer
        self.compile_seconds = 0.0
        self.communication_bytes: dict[str, float] = {}
        self.transfer_bytes: dict[str, float] = {}
        self._state: dict[str, Any] = {}
        self._owner = True
        self._compiled: Any = None
        self._bytes: dict[str, float] = {}
        self._moved: dict[str, float] = {}
        self._wide = is_wide(program)
        self._steps = 0
        self._whole = jax.jit(
            partial(jax_compat.transferred, to_host=False), out_shardings=jax_compat.sharding(self.mesh, ())
        )
        if cluster is not None:
            cluster.same("the program", hashlib.sha256(text(program).encode()).hexdigest()[:16])

    @property
    def ranks(self) -> Sequence[int]:
        own = jax.process_index()
        return [rank for rank, device in enumerate(self.devices) if device.process_index == own]

    # -- state -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        for name, variable in self.program.variables.items():
            self._state[name] = self._filled(variable, partial(initial, name, variable))

    def _filled(self, variable: Stored, read: Callable[[Begin, Sequence[int]], Any]) -> Any:
        """A variable of the pieces that this process's devices hold."""
        sizes = variable.value.shape.sizes
        made: dict[tuple[int, ...], Any] = {}  # devices that hold the same are asked for one by one

        def piece(where: tuple[slice, ...]) -> Any:
            ranges = [s.indices(n)[:2] for s, n in zip(where, sizes, strict=True)]
            begin, extent = tuple(b for b, _ in ranges), tuple(e - b for b, e in ranges)
            if begin not in made:
                made[begin] = np.asarray(read(begin, extent)).astype(
                    np_dtype(variable.variable.dtype), copy=False
                )
            return made[begin]

        with jax_compat.wide_numbers(self._wide):
            return jax.make_array_from_callback(tuple(sizes), self._sharding(variable), piece)

    def _sharding(self, variable: Stored) -> Any:
        return jax_compat.sharding(self.mesh, variable.splits, variable.host)

    def _ready(self) -> None:
        if not self._state:
            self.initialize()

    def _placed(self, array: Any, sharding: Any) -> Any:
        """A whole array on the devices; of several processes each puts its own pieces there."""
        if self.cluster is None:
            return jax.device_put(array, sharding)
        return jax.make_array_from_callback(array.shape, sharding, lambda where: array[where])

    def _joined(self, array: Any) -> Any:
        """The global value on the host; of what lies in other processes a device holds a whole copy for the
        moment."""
        if self.cluster is None or array.is_fully_replicated:
            return np.asarray(array)
        return np.asarray(self._whole(array).addressable_data(0))

    def read(self, name: str) -> Any:
        variable = stored(self.program, name)
        self._ready()
        with self._together(f"reading variable {name!r}"), jax_compat.wide_numbers(self._wide):
            return in_order(variable, self._joined(self._state[name]))

    def write(self, name: str, array: Any) -> None:
        variable = stored(self.program, name)
        value = lying(variable, check_array(variable.variable, array))
        self._ready()
        with jax_compat.wide_numbers(self._wide):
            self._state[name] = self._placed(value, self._sharding(variable))

    def fill(self, name: str, read: Callable[[Begin, Sequence[int]], Any]) -> None:
        variable = stored(self.program, name)
        self._ready()
        self._state[name] = self._filled(variable, in_runs(variable, read))

    def snapshot(self) -> Mapping[VariablePiece, Any]:
        self._ready()
        own, mesh, kept = jax.process_index(), self.program.mesh, dict[VariablePiece, Any]()
        for name, pieces in self._writers.items():
            variable = self.program.variables[name]
            v = variable.value
            copied = np.array if v.host else methodcaller("copy")
            held = {shard.device: shard.data for shard in self._state[name].addressable_shards}
            with jax_compat.wide_numbers(self._wide):  # the next step gives the arrays' memory away
                mine = {
                    begin: copied(held[self.devices[rank]])
                    for begin, rank in pieces.items()
                    if self.devices[rank].process_index == own
                }
            if self.cluster is None:
                kept[VariablePiece.all_of(variable.variable)] = variable, mine
            else:
                shape = v.local(mesh).shape.sizes
                for begin, array in mine.items():
                    for run in runs(variable, begin, shape):
                        piece = VariablePiece(
                            name, v.dtype, variable.variable.shape.sizes, run.begin, run.sizes
                        )
                        kept[piece] = array, run.within
        if self.cluster:
            return OneByOne(kept, lambda found: np.asarray(found[0])[found[1]])
        return OneByOne(kept, lambda found: in_order(found[0], joined(found[0].value, mesh, found[1])))

    @cached_property
    def _writers(self) -> Mapping[str, Mapping[Begin, int]]:
        return writers(self.program, [device.process_index for device in self.devices])

    def beside(self, program: Program) -> JaxEngine:
        check_beside(self.program, program)
        self._ready()
        other = JaxEngine(program, self.devices, self.cluster)
        other._state, other._owner = self._state, False
        return other

    def _held(self, host: bool) -> int:
        self._ready()
        found = (x for x in self._state.values() if (x.sharding.memory_kind == jax_compat.HOST) is host)
        return sum(int(x.addressable_shards[0].data.nbytes) for x in found)

    @property
    def peak_memory_bytes(self) -> int | None:
        stats = [self.devices[rank].memory_stats() for rank in self.ranks]
        if all(stats):
            return max(int(s["peak_bytes_in_use"]) for s in stats)
        if self._compiled is None:
            return None
        # The CPU's compiler counts what lies on the host as if it were the device's.
        peak = int(self._compiled.memory_analysis().peak_memory_in_bytes)
        return peak - self.host_variable_bytes if self.platform == "cpu" else peak

    def close(self) -> None:
        for array in self._state.values() if self._owner else ():
            array.delete()
        self._state, self._compiled = {}, None

    # -- running ---------------------------------------------------------------------------------------------

    def feed(self, batch: Mapping[str, Any]) -> Any:
        arrays = self._feeds.checked(batch)
        values = self.program.values
        with jax_compat.wide_numbers(self._wide):
            return {
                name: self._placed(arrays[name], jax_compat.sharding(self.mesh, values[id].splits))
                for name, id in self.program.feeds.items()
            }

    def begin(self, fed: Any) -> Callable[[], dict[str, Any]]:
        self._ready()
        with jax_compat.wide_numbers(self._wide):
            if self._compiled is None:
                with self._together("compiling", patient=True):
                    self._compile()
                if self.cluster is not None:  # the first collective waits 30 s for the others, no longer
                    self.cluster.gather("compiling", None, patient=True)
            self._steps += 1
            step = f"step {self._steps} since the start"
            numbered = jax.profiler.StepTraceAnnotation(STEP, step_num=self._steps)
            with self._together(step), numbered:
                state = {name: self._state[name] for name in self.program.variables}
                state, results = self._compiled(state, fed)
                self._state.update(state)
                if self.in_flight == 1:
                    jax.block_until_ready(state)
        self.communication_bytes, self.transfer_bytes = dict(self._bytes), dict(self._moved)
        return partial(self._found, f"the results of {step}", results)

    def _found(self, what: str, results: Mapping[str, Any]) -> dict[str, Any]:
        with self._together(what), jax_compat.wide_numbers(self._wide):
            return {name: self._joined(array) for name, array in results.items()}

    def run(self, fed: Any) -> dict[str, Any]:
        return self.begin(fed)()

    @contextlib.contextmanager
    def _together(self, what: str, patient: bool = False) -> Iterator[None]:
        """Tells the others what this process does; turns what JAX says when they are missing into who is
        missing."""
        if self.cluster is None:
            yield
            return
        with self.cluster.doing(what, patient):
            try:
                yield
            except jax.errors.JaxRuntimeError:
                self.cluster.explain(what)
                raise

    def _compile(self) -> None:
        start = time.perf_counter()
        made = JaxProgram(self.program, self.mesh, self.platform)
        self._compiled = jax_compat.compiled(made.lowered())
        self._bytes = dict.fromkeys(self.program.mesh.names, 0.0)
        for sent in made.sent.values():
            count_sent(self._bytes, self.program.mesh, *sent)
        self._moved = {"host_load": 0, "host_store": 0}
        for instr, size, times in made.moved.values():
            self._moved[instr.name] += size * times
        self.compile_seconds += time.perf_counter() - start
