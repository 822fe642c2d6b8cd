"""The TPU engine: the program as the replica function of TensorFlow's TPUStrategy (see `tf.tpu_program`).

Written against TensorFlow's documented interface. Without a TPU its graph can be built and its replica
function compiled, which the tests do; no step of it has been run on one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tf_core.engines.feeds import check_batch
from mesh_tf_core.engines.stepping import check_beside
from mesh_tf_core.engines.tf.local import TfLocalEngine
from mesh_tf_core.engines.tf.tpu_collectives import TpuExchange, TpuOps, refuse_wide
from mesh_tf_core.engines.tf.tpu_home import connect, strategy_for, xla_numbers
from mesh_tf_core.engines.tf.tpu_program import TpuProgram
from mesh_tf_core.engines.tf.variables import Variables
from mesh_tf_core.ir.program import Program, Value


def open_tpu(program: Program, devices: Sequence[str] | None = None) -> TpuEngine:
    """An engine on the TPU of this process.

    Args:
      devices: TensorFlow's names of its cores by rank; by default the mesh's axes lie along the torus.

    Raises:
      UserError: no TPU, another number of cores, or numbers that no TPU operation reduces.
    """
    refuse_wide(program)
    strategy = strategy_for(program.mesh, *connect(), devices)
    return TpuEngine(program, strategy, xla_numbers(strategy))


class TpuEngine(TfLocalEngine):
    """See `engines.protocol.Engine`.

    Args:
      strategy: a TPUStrategy whose replica r has rank r.
      numbers: XLA's number of every replica.
      shared: another engine's variables, to be used here too.
    """

    steps_per_call = 16
    """Chosen, not measured: so many batches fit beside any model, and a call is shared by so many steps."""

    def __init__(
        self, program: Program, strategy: Any, numbers: Sequence[int], shared: TpuVariables | None = None
    ) -> None:
        names = strategy.extended.worker_devices
        super().__init__(program, names, "tpu")
        self.strategy, self.numbers = strategy, tuple(numbers)
        self.variables: TpuVariables = TpuVariables(program, names, strategy, shared)
        self._several: dict[int, Callable[..., Sequence[Any]]] = {}

    def beside(self, program: Program) -> TpuEngine:
        refuse_wide(program)
        check_beside(self.program, program)
        self._ready()
        return TpuEngine(program, self.strategy, self.numbers, self.variables)

    @property
    def peak_memory_bytes(self) -> int | None:
        try:
            return super().peak_memory_bytes
        except (ValueError, tf.errors.OpError):  # a core of another host, or one that does not count
            return None

    def close(self) -> None:
        super().close()
        self._several.clear()

    # -- running ---------------------------------------------------------------------------------------------

    def steps(self, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """One step per batch, all in one call of the TPU: batches go in, and results come back, once."""
        if len(batches) < 2:
            return super().steps(batches)
        self._ready()
        checked = [check_batch(self.program, batch) for batch in batches]
        fed = [self._fed(id, np.stack([b[name] for b in checked])) for name, id in self.program.feeds.items()]
        count, start = len(batches), time.perf_counter()
        is_new = count not in self._several
        if is_new:
            self._several[count] = self._call(count)
        found = [x.numpy() for x in self._several[count](*fed)]
        if is_new:
            self.compile_seconds += time.perf_counter() - start
        self.communication_bytes = dict(self._bytes)
        return [self._results([x[i] for x in found]) for i in range(count)]

    def feed(self, batch: Mapping[str, Any]) -> Any:
        arrays = check_batch(self.program, batch)
        return [self._fed(id, arrays[name]) for name, id in self.program.feeds.items()]

    def _fed(self, id: int, array: Any) -> Any:
        """A piece of `array`, whose last dimensions are the value's, for every replica, on its host."""
        made: dict[tuple[Any, ...], Any] = {}

        def piece(context: Any) -> Any:
            rank = context.replica_id_in_sync_group
            where = self._where(self.program.values[id], rank)
            core = tf.DeviceSpec.from_string(self.devices[rank])
            host = core.replace(device_type="CPU", device_index=0).to_string()
            key = (host, *(s.start for s in where))
            if key not in made:
                with tf.device(host):
                    made[key] = tf.constant(array[(..., *where)])
            return made[key]

        return self.strategy.experimental_distribute_values_from_function(piece)

    def _traced(self) -> Callable[..., Sequence[Any]]:
        return self._call(1)

    def _call(self, count: int) -> Callable[..., Sequence[Any]]:
        """`count` steps as a function of what is fed, which returns the pieces that make up the results."""
        exchange = TpuExchange(self.program, self.numbers, TpuOps())
        program = TpuProgram(self.program, exchange, self._count)

        def replica(*fed: Any) -> list[Any]:
            self._bytes = dict.fromkeys(self.program.mesh.names, 0.0)
            rank = tf.distribute.get_replica_context().replica_id_in_sync_group
            pieces = {name: self.variables.value(name) for name in self.program.variables}
            batch = dict(zip(self.program.feeds, fed, strict=True))
            new, results = (
                program.step(rank, pieces, batch) if count == 1 else program.steps(rank, pieces, batch, count)
            )
            for name, value in new.items():
                self.variables.assign(name, value)
            return results

        held = [self._holders(self.program.values[id]) for id in self.program.results.values()]

        @tf.function(autograph=False)
        def call(*fed: Any) -> list[Any]:
            made = self.strategy.run(replica, args=fed)
            all_pieces = [self.strategy.experimental_local_results(x) for x in made]
            return [pieces[at] for pieces, ranks in zip(all_pieces, held, strict=True) for at in ranks]

        return call


class TpuVariables(Variables):
    """A variable per name with a component per replica, which is that device's shard: read in its replica,
    never aggregated."""

    def __init__(
        self, program: Program, devices: Sequence[str], strategy: Any, shared: TpuVariables | None = None
    ) -> None:
        super().__init__(program, devices, 0, shared)
        self.strategy = strategy
        self.held: dict[str, Any] = shared.held if shared else {}
        for name, v in self.values.items() if shared is None else ():
            self.held[name] = self._made(name, v)

    def _made(self, name: str, v: Value) -> Any:
        with self.strategy.scope():
            return tf.Variable(
                tf.zeros(self.sizes[name], v.dtype),
                trainable=False,
                name=name,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.NONE,
            )

    def shards(self, name: str) -> Sequence[Any]:
        """The components by rank."""
        found: Sequence[Any] = self.strategy.experimental_local_results(self.held[name])
        return found

    def value(self, name: str) -> Any:
        """The shard's value, in a replica."""
        return self.held[name].read_value()

    def assign(self, name: str, value: Any) -> Any:
        """Replaces the shard, in a replica."""
        return self.held[name].assign(value)

    def _fill(self, name: str, piece: Any) -> None:
        made: dict[tuple[int, ...], Any] = {}
        for rank, shard in enumerate(self.shards(name)):
            begin = self.begin(name, rank)
            if begin not in made:
                made[begin] = piece(begin).reshape(self.sizes[name])
            shard.assign(made[begin])

    def pieces(self, name: str) -> dict[tuple[int, ...], Any]:
        found: dict[tuple[int, ...], Any] = {}
        for rank, shard in enumerate(self.shards(name)):
            begin = self.begin(name, rank)
            if begin not in found:
                found[begin] = shard.read_value()
        return found

    @property
    def bytes(self) -> int:
        return sum(x.dtype.size * x.shape.num_elements() for x in (self.shards(n)[0] for n in self.held))

    def delete(self) -> None:
        if self._owner:
            self.held.clear()
        self.initialized = False
