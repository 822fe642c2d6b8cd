"""The local engine: a program on all devices of this process, in one TensorFlow graph (see `tf.trace`).

Written values are stored after every device has computed all of them: a step happens wholly or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from mesh_tf_core.engines.feeds import check_array, stored
from mesh_tf_core.engines.meter import Meter
from mesh_tf_core.engines.pieces import VariablePiece, joined
from mesh_tf_core.engines.stepping import Stepping, check_beside
from mesh_tf_core.engines.tf.trace import StepTrace
from mesh_tf_core.engines.tf.variables import Variables
from mesh_tf_core.ir.program import Program, Transfer, Value, count_sent


class TfLocalEngine(Stepping):
    """See `engines.protocol.Engine`.

    Args:
      devices: names of virtual CPU devices by rank (`engines.prepare` makes them).
      shared: another engine's variables, to be used here too.
    """

    is_chief = True

    def __init__(self, program: Program, devices: Sequence[str], shared: Variables | None = None) -> None:
        self.program, self.devices = program, tuple(devices)
        self.variables = Variables(program, self.devices, shared)
        self.compile_seconds = 0.0
        self.communication_bytes: dict[str, float] = {}
        self.transfer_bytes: dict[str, float] = {}
        self._bytes: dict[str, float] = dict.fromkeys(program.mesh.names, 0.0)
        self._step: Callable[..., Sequence[Any]] | None = None
        self._sizes: Mapping[int, int] = {}
        self._ran = False

    # -- state -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        self.variables.initialize()

    def read(self, name: str) -> Any:
        stored(self.program, name)
        self._ready()
        return self.variables.read(name)

    def write(self, name: str, array: Any) -> None:
        whole = check_array(stored(self.program, name).variable, array)
        self._ready()
        self.variables.write(name, whole)

    def snapshot(self) -> Mapping[VariablePiece, Any]:
        self._ready()
        return self.variables.snapshot()

    def beside(self, program: Program) -> TfLocalEngine:
        check_beside(self.program, program)
        self._ready()
        return TfLocalEngine(program, self.devices, self.variables)

    def _ready(self) -> None:
        if not self.variables.initialized:
            self.initialize()

    def _held(self, host: bool) -> int:
        self._ready()
        return self.variables.bytes(host)

    @property
    def peak_memory_bytes(self) -> int | None:
        """By the sizes of the tensors that were traced, in the order of the trace."""
        if self._step is None:
            return None
        meter = Meter(self.program, self.variable_bytes)
        meter.follow(self.program.code, lambda id: self._sizes.get(id, 0))
        return meter.peak

    def close(self) -> None:
        self.variables.delete()
        self._step = None

    # -- running ---------------------------------------------------------------------------------------------

    def feed(self, batch: Mapping[str, Any]) -> Any:
        arrays = self._feeds.checked(batch)
        return [tf.constant(arrays[name]) for name in self.program.feeds]

    def run(self, fed: Any) -> dict[str, Any]:
        self._ready()
        if self._step is None:
            self._step = self._traced()
        start = time.perf_counter()
        found = [t.numpy() for t in self._step(*fed)]
        if not self._ran:
            self.compile_seconds += time.perf_counter() - start
            self._ran = True
        self.communication_bytes = dict(self._bytes)
        self.transfer_bytes = {"host_load": 0, "host_store": 0}
        for instr, times in self.program.expected():
            if isinstance(instr, Transfer):
                self.transfer_bytes[instr.name] += times * sum(map(self._sizes.__getitem__, instr.outputs))
        return self._results(found)

    def _results(self, found: Sequence[Any]) -> dict[str, Any]:
        pieces, out, mesh = iter(found), {}, self.program.mesh
        for name, id in self.program.results.items():
            v = self.program.values[id]
            held = {v.begin(mesh, at): next(pieces) for at in self._holders(v)}
            out[name] = joined(v, mesh, held)
        return out

    def _holders(self, v: Value) -> Sequence[int]:
        """Which of the devices' pieces make up the whole value."""
        return range(len(self.devices)) if any(v.splits) else (0,)

    # -- tracing ---------------------------------------------------------------------------------------------

    def _traced(self) -> Callable[..., Sequence[Any]]:
        start = time.perf_counter()
        returned = [self._holders(self.program.values[id]) for id in self.program.results.values()]
        count = partial(count_sent, self._bytes, self.program.mesh)
        trace = StepTrace(self.program, self.devices, self.variables, count, returned)
        step, self._sizes = trace.step(), trace.sizes
        self.compile_seconds += time.perf_counter() - start
        return step
