"""The local engine: a program on all devices of this process, in one TensorFlow graph.

Every part of the program between two collectives is traced once, as a function of a device's rank and pieces, and called
for every device; collectives join the pieces of all devices in the graph around the calls. So tracing takes the same
time for any number of devices. Written values are stored after every device has computed all of them: a step happens
wholly or not at all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tf_core.engines.feeds import check_batch
from mesh_tf_core.engines.parts import Exchange, Part, Repeat, Segment, cut
from mesh_tf_core.engines.replica import Replica
from mesh_tf_core.engines.stacks import Stack, whole
from mesh_tf_core.engines.tf_exchange import LocalExchange
from mesh_tf_core.engines.tf_variables import Variables
from mesh_tf_core.kernels.numpy_kernel import np_dtype
from mesh_tf_core.kernels.tf_kernel import TfKernel
from mesh_tf_core.program import Collective, Program, Value, WriteVariable, wire_bytes

Env = dict[int, Any]


class TfLocalEngine:
    """See `engines.protocol.Engine`.

    Args:
      devices: device names by rank (`tf_devices.prepare` makes them).
    """

    def __init__(self, program: Program, devices: Sequence[str]) -> None:
        self.program, self.devices = program, tuple(devices)
        self.variables = Variables(program, self.devices)
        self.compile_seconds = 0.0
        self.communication_bytes: dict[str, float] = {}
        self._bytes: dict[str, float] = {a: 0.0 for a in program.mesh.names}
        self._step: Callable[..., Sequence[Any]] | None = None
        self._ran = False

    # -- state ---------------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        self.variables.initialize()

    def read(self, name: str) -> Any:
        self._ready()
        return self.variables.read(name)

    def write(self, name: str, array: Any) -> None:
        self._ready()
        self.variables.write(name, array)

    def _ready(self) -> None:
        if not self.variables.initialized:
            self.initialize()

    @property
    def variable_bytes(self) -> int:
        self._ready()
        return self.variables.bytes

    def close(self) -> None:
        self.variables.delete()
        self._step = None

    # -- running -------------------------------------------------------------------------------------------------

    def steps(self, batches: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self.step(b) for b in batches]

    def step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        self._ready()
        arrays = check_batch(self.program, batch)
        if self._step is None:
            self._step = self._traced()
        pieces = [tf.constant(x) for x in self._pieces(arrays)]
        start = time.perf_counter()
        found = [t.numpy() for t in self._step(*pieces)]
        if not self._ran:
            self.compile_seconds += time.perf_counter() - start
            self._ran = True
        self.communication_bytes = dict(self._bytes)
        return self._results(found)

    def _pieces(self, arrays: Mapping[str, Any]) -> list[Any]:
        out = []
        for name, id in self.program.feeds.items():
            for rank in range(len(self.devices)):
                out.append(arrays[name][self._where(self.program.values[id], rank)])
        return out

    def _where(self, v: Value, rank: int) -> tuple[slice, ...]:
        """A device's part of a global array."""
        mesh, sizes = self.program.mesh, v.local(self.program.mesh).shape.sizes
        begins = [mesh.group_index(rank, axes) * n for axes, n in zip(v.splits, sizes, strict=True)]
        return tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))

    def _results(self, found: Sequence[Any]) -> dict[str, Any]:
        pieces, out = iter(found), {}
        for name, id in self.program.results.items():
            v = self.program.values[id]
            array = np.empty(v.shape.sizes, np_dtype(v.dtype))
            for rank in self._holders(v):
                array[self._where(v, rank)] = next(pieces)
            out[name] = array
        return out

    def _holders(self, v: Value) -> Sequence[int]:
        """Ranks whose pieces make up the whole value."""
        return range(len(self.devices)) if any(v.splits) else (0,)

    # -- tracing -------------------------------------------------------------------------------------------------

    def _traced(self) -> Callable[..., Sequence[Any]]:
        start = time.perf_counter()
        values = [self.program.values[id] for id in self.program.feeds.values()]
        specs = [
            tf.TensorSpec(v.local(self.program.mesh).shape.sizes, v.dtype) for v in values for _ in self.devices
        ]
        step = tf.compat.v1.wrap_function(lambda *pieces: _Trace(self, pieces).run(), specs)
        self.compile_seconds += time.perf_counter() - start
        return step

    def count(self, instr: Collective, payload: int) -> None:
        """Adds what one collective sends, from the bytes of the pieces that it is given."""
        key = "+".join(instr.axes)
        sent = wire_bytes(instr.name, payload, self.program.mesh.group_size(instr.axes))
        self._bytes[key] = self._bytes.get(key, 0.0) + sent


class _Trace:
    """Builds the step's graph. `env` holds, per value id, one tensor per device."""

    def __init__(self, engine: TfLocalEngine, pieces: Sequence[Any]) -> None:
        self.engine, self.program, self.devices = engine, engine.program, engine.devices
        self.exchange = LocalExchange(self.program, self.devices)
        self.functions: dict[int, Any] = {}
        self.kept: list[Any] = []
        n = len(self.devices)
        self.feeds = {name: list(pieces[i * n : (i + 1) * n]) for i, name in enumerate(self.program.feeds)}
        self.ranks = []
        for rank, device in enumerate(self.devices):
            with tf.device(device):
                self.ranks.append(tf.constant(rank))

    def run(self) -> list[Any]:
        program = self.program
        writes = {i.variable: i.inputs[0] for i in program.code if isinstance(i, WriteVariable)}
        env: Env = {}
        self.parts(cut(program.code, program.results.values()), env)
        results = [
            whole(env[id], self.devices)[rank]
            for id in program.results.values()
            for rank in self.engine._holders(program.values[id])
        ]
        written = {name: whole(env[id], self.devices) for name, id in writes.items()}
        return self.committed(results, written)

    def parts(self, parts: Sequence[Part], env: Env) -> None:
        for part in parts:
            if isinstance(part, Segment):
                self.segment(part, env)
            elif isinstance(part, Exchange):
                self.exchanged(part.instr, env)
            else:
                self.loop(part, env)

    # -- local work ----------------------------------------------------------------------------------------------

    def segment(self, part: Segment, env: Env) -> None:
        if not part.outputs:
            return
        inputs = [whole(env[i], self.devices) for i in part.inputs]
        names = [i.feed for i in part.code if hasattr(i, "feed")]
        inputs += [self.feeds[name] for name in names]
        if id(part) not in self.functions:
            self.functions[id(part)] = self.function(part, names, [x[0] for x in inputs])
            self.kept.append(part)
        function = self.functions[id(part)]
        made = []
        for rank, device in enumerate(self.devices):
            with tf.device(device):
                made.append(function(self.ranks[rank], *(x[rank] for x in inputs)))
        for k, o in enumerate(part.outputs):
            env[o] = [m[k] for m in made]

    def function(self, part: Segment, feeds: Sequence[str], examples: Sequence[Any]) -> Any:
        """The part as a function of rank and pieces."""
        variables, n = self.engine.variables, len(part.inputs)

        def body(rank: Any, *args: Any) -> list[Any]:
            env = dict(zip(part.inputs, args[:n], strict=True))
            fed = dict(zip(feeds, args[n:], strict=True))
            Replica(self.program, TfKernel(), rank, variables.value, fed.__getitem__).run(part.code, env)
            return [tf.convert_to_tensor(env[o]) for o in part.outputs]

        specs = [tf.TensorSpec([], tf.int32), *(tf.TensorSpec(x.shape, x.dtype) for x in examples)]
        return tf.compat.v1.wrap_function(body, specs)

    # -- communication -------------------------------------------------------------------------------------------

    def exchanged(self, instr: Collective, env: Env) -> None:
        payload = 0
        for i, o in zip(instr.inputs, instr.outputs, strict=True):
            pieces = env[i]
            payload += _bytes(pieces)
            if isinstance(pieces, Stack) and instr.name == "all_reduce":
                env[o] = pieces.map(lambda part, i=i: self.exchange.run(instr, i, part))
            else:
                env[o] = self.exchange.run(instr, i, whole(pieces, self.devices))
        self.engine.count(instr, payload)

    # -- loops ---------------------------------------------------------------------------------------------------

    def loop(self, part: Repeat, env: Env) -> None:
        loop = part.loop
        order = range(loop.dim.size)
        state = [env[start] for start, _, _, _ in loop.carried]
        sources = [(_stack(env[outer], loop.dim.size, self.devices), inner) for outer, inner in loop.sliced]
        stacks: dict[int, dict[int, Any]] = {o: {} for _, o in loop.stacked}
        sums: Env = {}
        for step in reversed(order) if loop.reverse else order:
            inner = dict(env)
            inner[loop.index] = self.constants(step)
            inner.update(zip((i for _, i, _, _ in loop.carried), state, strict=True))
            inner.update((i, source.parts[step]) for source, i in sources)
            self.parts(part.body, inner)
            state = [inner[out] for _, _, out, _ in loop.carried]
            for i, o in loop.stacked:
                stacks[o][step] = whole(inner[i], self.devices)
            for i, o in loop.summed:
                value = whole(inner[i], self.devices)
                sums[o] = self.added(sums[o], value) if o in sums else value
        env.update(zip((final for _, _, _, final in loop.carried), state, strict=True))
        env.update((o, Stack([parts[s] for s in order])) for o, parts in stacks.items())
        env.update(sums)

    def constants(self, value: int) -> list[Any]:
        out = []
        for device in self.devices:
            with tf.device(device):
                out.append(tf.constant(value))
        return out

    def added(self, xs: Sequence[Any], ys: Sequence[Any]) -> list[Any]:
        out = []
        for x, y, device in zip(xs, ys, self.devices, strict=True):
            with tf.device(device):
                out.append(tf.add(x, y))
        return out

    # -- the end of a step ---------------------------------------------------------------------------------------

    def committed(self, results: Sequence[Any], written: Mapping[str, Sequence[Any]]) -> list[Any]:
        """Stores the written values once all of them exist everywhere; returns the results after that.

        The values pass an IdentityN, because waiting for a function call waits for its side effects only.
        """
        if not written:
            return list(results)
        ready = []
        for rank, device in enumerate(self.devices):
            with tf.device(device):
                ready.append(tf.identity_n([x[rank] for x in written.values()]))
        with tf.device(self.devices[0]), tf.control_dependencies([r[0] for r in ready] + list(results)):
            barrier = tf.no_op()
        store = self.store(list(written), [tf.TensorSpec(x.shape, x.dtype) for x in ready[0]])
        done = []
        for rank, device in enumerate(self.devices):
            with tf.device(device), tf.control_dependencies([barrier]):
                done.append(store(*ready[rank]))
        with tf.device(self.devices[0]), tf.control_dependencies(done):
            return [tf.identity(r) for r in results]

    def store(self, names: Sequence[str], specs: Sequence[Any]) -> Any:
        variables = self.engine.variables

        def body(*values: Any) -> Any:
            stores = [variables.assign(name, value) for name, value in zip(names, values, strict=True)]
            with tf.control_dependencies(stores):
                return tf.constant(0)

        return tf.function(body, autograph=False, input_signature=list(specs)).get_concrete_function()


def _bytes(pieces: Any) -> int:
    """Bytes of one device's piece."""
    if isinstance(pieces, Stack):
        return sum(_bytes(part) for part in pieces.parts)
    return pieces[0].dtype.size * pieces[0].shape.num_elements()


def _stack(pieces: Any, n: int, devices: Sequence[str]) -> Stack:
    """A stacked value by its parts, which share its memory."""
    if isinstance(pieces, Stack):
        return pieces
    cut = []
    for x, device in zip(pieces, devices, strict=True):
        with tf.device(device):
            cut.append(tf.unstack(x, n))
    return Stack([[c[i] for c in cut] for i in range(n)])
