"""The TPU engine's replica function, compiled by XLA and run with eight replicas on JAX's CPU devices, gives
what the lockstep oracle gives.

    JAX_PLATFORMS=cpu python -m tests.engines.tpu_cases

TensorFlow only traces; the artifact that its compiler bridge makes is run by jaxlib. Prints one JSON object:
case -> what was wrong ("" if nothing was).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np

from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.jax.home import devices
from mesh_tf_core.ir.program import Program, Value
from tests.engines.control import PROGRAMS, batches
from tests.engines.jax_cases import equal
from tests.engines.programs import every_collective, language_model, numbers, tokens

SCATTERED = (3, 1, 7, 0, 6, 2, 5, 4)
"""XLA's numbers of the replicas, as a TPU might give them."""


class Replicas:
    """A program as the TPU engine traces it, on eight CPU devices.

    Args:
      count: steps per call.
      numbers: XLA's number of every rank.
    """

    def __init__(self, program: Program, count: int = 1, numbers: Any = range(8)) -> None:
        import jax
        import tensorflow as tf

        from mesh_tf_core.engines.tf.tpu_collectives import TpuExchange
        from mesh_tf_core.engines.tf.tpu_program import TpuProgram
        from tests.engines.tpu_fake import XlaOps

        self.program, self.count, self.numbers = program, count, list(numbers)[: program.mesh.devices]
        self.devices = jax.devices()[: program.mesh.devices]
        self.oracle = open_engine(program, "lockstep")
        self.oracle.initialize()
        self.state = {name: self._cut(name, self.oracle.read(name)) for name in program.variables}
        made = TpuProgram(program, TpuExchange(program, self.numbers, XlaOps()), lambda *_: None)
        self.written = made.written

        def replica(rank: Any, *args: Any) -> list[Any]:
            pieces = [x[0] for x in args]
            n = len(program.variables)
            variables = dict(zip(program.variables, pieces[:n], strict=True))
            batch = dict(zip(program.feeds, pieces[n:], strict=True))
            how = (rank[0], variables, batch)
            new, results = made.step(*how) if count == 1 else made.steps(*how, count)
            return [*(new[name] for name in made.written), *results]

        specs = [tf.TensorSpec([1], tf.int32)]
        specs += [tf.TensorSpec([1, *pieces[0].shape], pieces[0].dtype) for pieces in self.state.values()]
        for id in program.feeds.values():
            type = program.local(id)
            lead = [1] if count == 1 else [1, count]
            specs.append(tf.TensorSpec([*lead, *type.shape.sizes], type.dtype))
        traced = tf.function(replica, autograph=False, jit_compile=True)
        self.compiled = self._compiled(
            traced.experimental_get_compiler_ir(*specs)(stage="stablehlo_serialized")
        )

    def _compiled(self, artifact: bytes) -> Any:
        from jax._src import compiler
        from jax._src.interpreters import mlir
        from jax._src.lib import xla_client
        from jaxlib.mlir.dialects import stablehlo

        n = len(self.devices)
        options = compiler.get_compile_options(
            num_replicas=n, num_partitions=1, device_assignment=np.arange(n).reshape(n, 1)
        )
        with mlir.make_ir_context() as context:
            module = stablehlo.deserialize_portable_artifact(context, artifact)
            held = xla_client.DeviceList(tuple(self.devices))
            return compiler.backend_compile_and_load(self.devices[0].client, module, held, options, [])

    def _stored(self, name: str) -> Value:
        stored = self.program.variables[name]
        return Value(-1, stored.variable.shape, stored.variable.dtype, stored.splits)

    def _where(self, v: Value, rank: int) -> tuple[slice, ...]:
        mesh, sizes = self.program.mesh, v.local(self.program.mesh).shape.sizes
        begins = [mesh.group_index(rank, axes) * n for axes, n in zip(v.splits, sizes, strict=True)]
        return tuple(slice(b, b + n) for b, n in zip(begins, sizes, strict=True))

    def _cut(self, name: str, array: Any) -> list[Any]:
        v = self._stored(name)
        return [array[self._where(v, rank)] for rank in range(len(self.devices))]

    def run(self, fed: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Steps on batches, in one call; results by step, every device's agreement checked."""
        p, ranks = self.program, range(len(self.devices))
        args = [[np.int32(rank) for rank in ranks], *self.state.values()]
        for name, id in p.feeds.items():
            whole = np.stack([b[name].astype(p.values[id].dtype) for b in fed])
            cut = [whole[(slice(None), *self._where(p.values[id], rank))] for rank in ranks]
            args.append([x[0] for x in cut] if self.count == 1 else cut)
        out = self.compiled.execute_sharded([self._given(arg) for arg in args])
        made = [[None] * len(ranks) for _ in range(len(self.written) + len(p.results))]
        for pieces, found in zip(made, out.disassemble_into_single_device_arrays(), strict=True):
            for rank in ranks:
                pieces[rank] = np.asarray(found[self.numbers[rank]])
        self.state.update(zip(self.written, made, strict=False))
        results: list[dict[str, Any]] = [{} for _ in fed]
        for (name, id), pieces in zip(p.results.items(), made[len(self.written) :], strict=True):
            for step, result in enumerate(results):
                own = pieces if self.count == 1 else [x[step] for x in pieces]
                result[name] = self._joined(p.values[id], own)
        return results

    def _given(self, pieces: list[Any]) -> Any:
        """One array per device, under the number that XLA gives its rank."""
        import jax
        from jax.sharding import Mesh, NamedSharding, PartitionSpec

        placed = [None] * len(pieces)
        for rank, x in enumerate(pieces):
            number = self.numbers[rank]
            placed[number] = jax.device_put(np.asarray(x)[None], self.devices[number])
        sharding = NamedSharding(Mesh(np.array(self.devices), ("r",)), PartitionSpec("r"))
        return jax.make_array_from_single_device_arrays((len(pieces), *np.shape(pieces[0])), sharding, placed)

    def _joined(self, v: Value, pieces: list[Any]) -> Any:
        out = np.empty(v.shape.sizes, pieces[0].dtype)
        for rank, x in enumerate(pieces):
            out[self._where(v, rank)] = x
        for rank, x in enumerate(pieces):
            np.testing.assert_array_equal(out[self._where(v, rank)], x, err_msg=f"device {rank} disagrees")
        return out

    def read(self, name: str) -> Any:
        return self._joined(self._stored(name), self.state[name])


def collectives(axes: tuple[str, ...], numbering: Any) -> None:
    program = every_collective("a:2;b:4", axes, "float32")
    batch = numbers(program)
    equal(Replicas(program, numbers=numbering).run([batch])[0], _oracle(program, [batch])[0], 1e-5)


def control(name: str) -> None:
    """Branches and loops that stop early."""
    program = PROGRAMS[name]("float32")
    made = Replicas(program)
    for batch in batches(program):
        equal(made.run([batch])[0], _oracle(program, [batch])[0], 1e-4)


def training(mesh: str, layout: str, hparams: dict[str, Any], count: int) -> None:
    """Steps of the language model, and all variables afterwards."""
    program = language_model(mesh, layout, **hparams)
    made, fed = Replicas(program, count), [tokens(program, seed) for seed in range(4)]
    found = [result for at in range(0, 4, count) for result in made.run(fed[at : at + count])]
    for ours, theirs in zip(found, made.oracle.steps(fed), strict=True):
        equal(ours, theirs, 1e-4)
    for name in program.variables:
        np.testing.assert_allclose(made.read(name), made.oracle.read(name), 2e-3, 2e-4, err_msg=name)


def planted() -> None:
    """Groups of other numbers than the replicas have are wrong, and the comparison says so."""
    program = every_collective("a:2;b:4", ("b",), "float32")
    made, batch = Replicas(program, numbers=SCATTERED), numbers(program)
    made.numbers = list(range(8))
    try:
        equal(made.run([batch])[0], _oracle(program, [batch])[0], 1e-5)
    except AssertionError:
        return
    raise AssertionError("wrong groups were not noticed")


def _oracle(program: Program, fed: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return open_engine(program, "lockstep").steps(fed)


CASES: dict[str, Callable[[], None]] = {
    "collectives a": lambda: collectives(("a",), range(8)),
    "collectives b": lambda: collectives(("b",), range(8)),
    "collectives b+a, other numbers": lambda: collectives(("b", "a"), SCATTERED),
    **{f"control {name}": lambda n=name: control(n) for name in PROGRAMS},
    "training 2x4": lambda: training("a:2;b:4", "batch:a;heads:b;d_ff:b;vocab:b", {"dropout": 0.2}, 1),
    "training 8, four steps at once": lambda: training("a:8", "batch:a", {"optimizer": "adam"}, 4),
    "planted": planted,
}


def main() -> None:
    devices(8)
    said = {}
    for name, case in CASES.items():
        try:
            case()
            said[name] = ""
        except Exception as error:  # every case reports; the test says which failed
            said[name] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


if __name__ == "__main__":
    main()
