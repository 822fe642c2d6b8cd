"""A TPU that is not there: enough of one for TPUStrategy to build graphs, and the TPU operations in a form
that XLA's CPU compiler takes, to run a replica function on eight CPU devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops
from tensorflow.python.tpu.topology import Topology
from tensorflow.python.tpu.tpu_system_metadata import TPUSystemMetadata

from mesh_tf_core.engines.tf.tpu import TpuEngine
from mesh_tf_core.engines.tf.tpu_collectives import TpuOps
from mesh_tf_core.engines.tf.tpu_home import strategy_for

HOST = 8
"""Cores of one host."""


def topology(*shape):
    """A torus of cores, shape [x, y, z, cores per chip]."""
    places = np.stack(np.meshgrid(*map(np.arange, shape), indexing="ij"), -1).reshape(-1, 4)
    tasks = max(1, len(places) // HOST)
    return Topology(mesh_shape=list(shape), device_coordinates=places.reshape(tasks, -1, 4).astype(np.int32))


class Resolver(tf.distribute.cluster_resolver.ClusterResolver):
    """What TPUStrategy asks a resolver."""

    environment, task_type, task_id = "", "worker", 0

    def __init__(self, cores):
        self.cores = cores

    def get_tpu_system_metadata(self):
        t = self.cores
        names = [
            f"/job:worker/replica:0/task:{task}/device:TPU:{i}"
            for task in range(t.num_tasks)
            for i in range(t.num_tpus_per_task)
        ]
        return TPUSystemMetadata(
            num_cores=len(names),
            num_hosts=t.num_tasks,
            num_of_cores_per_host=t.num_tpus_per_task,
            topology=t,
            devices=[tf.config.LogicalDevice(name, "TPU") for name in names],
        )

    def cluster_spec(self):
        return tf.train.ClusterSpec({"worker": [f"host{i}:1" for i in range(self.cores.num_tasks)]})

    def master(self, *args, **kwargs):
        return ""

    def num_accelerators(self, *args, **kwargs):
        return {"TPU": self.cores.num_tpus_per_task}


def strategy(mesh, *shape, devices=None):
    cores = topology(*shape)
    return strategy_for(mesh, Resolver(cores), cores, devices)


class StepGraph:
    """The graph of a step (or of several) on a TPU, built and not run.

    Attributes:
      nodes: those of the replica function and of the functions that it calls.
      shapes: variable -> shapes of its components; kinds: its (synchronization, aggregation).
    """

    def __init__(self, program, *shape, numbers=None, count=1):
        with tf.Graph().as_default() as graph:
            held = strategy(program.mesh, *shape)
            engine = TpuEngine(program, held, numbers or range(program.mesh.devices))
            fed = [
                engine._fed(id, np.zeros(((count,) if count > 1 else ()) + v.shape.sizes, v.dtype))
                for id, v in ((id, program.values[id]) for id in program.feeds.values())
            ]
            engine._call(count)(*fed)
            self.sent = {axes: n for axes, n in engine._bytes.items() if n}
            self.variable_bytes = engine.variables.bytes
            self.shapes = {n: {tuple(x.shape) for x in engine.variables.shards(n)} for n in program.variables}
            self.kinds = {(v.synchronization, v.aggregation) for v in engine.variables.held.values()}
        library = graph.as_graph_def().library.function
        self.functions = {f.signature.name: f for f in library}
        self.nodes = [node for f in library for node in f.node_def]

    def replica(self):
        """Nodes that every replica runs: those of the step that are marked so, and the loops' bodies."""
        steps = [f for name, f in self.functions.items() if name.startswith("__inference_call")]
        marked = [n for f in steps for n in f.node_def if "_tpu_replicate" in n.attr]
        rest = [n for f in self.functions.values() if f not in steps for n in f.node_def]
        return marked + rest

    def collectives(self):
        """(operation, groups or pairs) of every collective, sorted."""
        found = []
        for f in self.functions.values():
            constants = {n.name: n for n in f.node_def if n.op == "Const"}
            for node in f.node_def:
                at = {"CollectivePermute": 1, "CrossReplicaSum": 1, "AllToAll": 1}.get(node.op)
                at = 1 if node.op in ("XlaAllReduce", "XlaReduceScatter") else at
                if at is not None:
                    groups = constants[node.input[at].partition(":")[0]].attr["value"].tensor
                    found.append((node.op, tf.make_ndarray(groups).tolist()))
        return sorted(found)


class XlaOps(TpuOps):
    """The same operations as XLA's CPU compiler takes them; only ever compiled, never run by TensorFlow."""

    def all_reduce(self, x: Any, groups: Any, combine: str) -> Any:
        name = {"sum": "Add", "max": "Max", "min": "Min"}[combine]
        return gen_xla_ops.xla_all_reduce(x, groups, name, "CrossReplica")

    def reduce_scatter(self, x: Any, groups: Any, axis: int) -> Any:
        return gen_xla_ops.xla_reduce_scatter(x, groups, axis, "Add")

    def all_to_all(self, x: Any, groups: Any, split: int, concat: int) -> Any:
        n, shape = len(groups[0]), list(x.shape)
        shape[split] //= n
        shape[concat] *= n
        attributes = (
            f"split_dimension = {split} : i64, concat_dimension = {concat} : i64, split_count = {n} : i64, "
            f"replica_groups = dense<{groups}> : tensor<{len(groups)}x{n}xi64>"
        )
        return self._embedded("all_to_all", attributes, x, shape)

    def permute(self, x: Any, pairs: Any) -> Any:
        attributes = f"source_target_pairs = dense<{pairs}> : tensor<{len(pairs)}x2xi64>"
        return self._embedded("collective_permute", attributes, x, list(x.shape))

    def _embedded(self, name: str, attributes: str, x: Any, shape: list[int]) -> Any:
        dtype = {"float32": "f32", "bfloat16": "bf16", "int32": "i32", "uint32": "ui32"}[x.dtype.name]
        given, made = ("x".join([*map(str, sizes), dtype]) for sizes in (x.shape, shape))
        text = (
            f"module {{ func.func @main(%a: tensor<{given}>) -> tensor<{made}> {{ %0 = "
            f'"stablehlo.{name}"(%a) {{{attributes}}} : (tensor<{given}>) -> tensor<{made}> '
            f"return %0 : tensor<{made}> }} }}"
        )
        (out,) = gen_xla_ops.xla_call_module(
            [x],
            version=9,
            module=_serialized(text),
            Sout=[shape],
            Tout=[x.dtype],
            platforms=["CPU"],
        )
        return out


def _serialized(text: str) -> bytes:
    from jax._src.interpreters import mlir
    from jaxlib.mlir import ir
    from jaxlib.mlir.dialects import stablehlo

    with mlir.make_ir_context():
        artifact: bytes = stablehlo.serialize_portable_artifact(
            ir.Module.parse(text), stablehlo.get_current_version()
        )
        return artifact
