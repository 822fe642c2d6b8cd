"""The JAX engine: a program on the devices that JAX has, as one compiled function (see `jax.program`).

It runs where JAX is and TensorFlow is not. What it compiles here is what `jax.compile` gives to the TPU
compiler.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from mesh_tf_core.engines.feeds import check_array, check_batch, stored
from mesh_tf_core.engines.jax import home as jax_home
from mesh_tf_core.engines.jax.program import JaxProgram, is_wide
from mesh_tf_core.engines.pieces import initial
from mesh_tf_core.engines.stepping import OneByOne, Stepping, check_beside
from mesh_tf_core.ir.program import Program, Stored, count_sent


class JaxEngine(Stepping):
    """See `engines.protocol.Engine`. Variables are sharded arrays, replaced in place by every step.

    Args:
      devices: JAX's devices by rank; by default the first ones of the process.
    """

    is_chief = True

    def __init__(self, program: Program, devices: Sequence[Any] | None = None) -> None:
        self.program = program
        self.devices = tuple(devices or jax_home.devices(program.mesh.devices))
        self.mesh = jax_home.device_mesh(program.mesh, self.devices)
        self.compile_seconds = 0.0
        self.communication_bytes: dict[str, float] = {}
        self._state: dict[str, Any] = {}
        self._owner = True
        self._compiled: Any = None
        self._bytes: dict[str, float] = {}
        self._wide = is_wide(program)

    # -- state -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        for name, variable in self.program.variables.items():
            self._state[name] = self._initial(name, variable)

    def _initial(self, name: str, variable: Stored) -> Any:
        sizes = variable.variable.shape.sizes
        made: dict[tuple[int, ...], Any] = {}  # devices that hold the same are asked for one by one

        def piece(where: tuple[slice, ...]) -> Any:
            ranges = [s.indices(n)[:2] for s, n in zip(where, sizes, strict=True)]
            begin, extent = tuple(b for b, _ in ranges), [e - b for b, e in ranges]
            if begin not in made:
                made[begin] = initial(name, variable, begin, extent)
            return made[begin]

        with jax_home.wide_numbers(self._wide):
            return jax.make_array_from_callback(tuple(sizes), self._sharding(variable), piece)

    def _sharding(self, variable: Stored) -> Any:
        return jax_home.sharding(self.mesh, variable.splits)

    def _ready(self) -> None:
        if not self._state:
            self.initialize()

    def read(self, name: str) -> Any:
        stored(self.program, name)
        self._ready()
        return np.asarray(self._state[name])

    def write(self, name: str, array: Any) -> None:
        value = check_array(stored(self.program, name).variable, array)
        self._ready()
        with jax_home.wide_numbers(self._wide):
            self._state[name] = jax.device_put(value, self._sharding(self.program.variables[name]))

    def snapshot(self) -> Mapping[str, Any]:
        self._ready()
        # The next step gives the arrays' memory away.
        kept = {name: self._state[name].copy() for name in self.program.variables}
        return OneByOne(kept, np.asarray)

    def beside(self, program: Program) -> JaxEngine:
        check_beside(self.program, program)
        self._ready()
        other = JaxEngine(program, self.devices)
        other._state, other._owner = self._state, False
        return other

    @property
    def variable_bytes(self) -> int:
        self._ready()
        return sum(int(x.addressable_shards[0].data.nbytes) for x in self._state.values())

    @property
    def peak_memory_bytes(self) -> int | None:
        stats = [d.memory_stats() for d in self.devices]
        if all(stats):
            return max(int(s["peak_bytes_in_use"]) for s in stats)
        return None if self._compiled is None else int(self._compiled.memory_analysis().peak_memory_in_bytes)

    def close(self) -> None:
        for array in self._state.values() if self._owner else ():
            array.delete()
        self._state, self._compiled = {}, None

    # -- running ---------------------------------------------------------------------------------------------

    def feed(self, batch: Mapping[str, Any]) -> Any:
        arrays = check_batch(self.program, batch)
        values = self.program.values
        with jax_home.wide_numbers(self._wide):
            return {
                name: jax.device_put(arrays[name], jax_home.sharding(self.mesh, values[id].splits))
                for name, id in self.program.feeds.items()
            }

    def run(self, fed: Any) -> dict[str, Any]:
        self._ready()
        with jax_home.wide_numbers(self._wide):
            if self._compiled is None:
                self._compile()
            state = {name: self._state[name] for name in self.program.variables}
            state, results = self._compiled(state, fed)
            self._state.update(state)
        self.communication_bytes = dict(self._bytes)
        return {name: np.asarray(array) for name, array in results.items()}

    def _compile(self) -> None:
        start = time.perf_counter()
        made = JaxProgram(self.program, self.mesh, self.mesh.devices.flat[0].platform)
        self._compiled = made.lowered().compile()
        self._bytes = dict.fromkeys(self.program.mesh.names, 0.0)
        for sent in made.sent.values():
            count_sent(self._bytes, self.program.mesh, *sent)
        self.compile_seconds += time.perf_counter() - start
