"""TensorFlow's runtime over the processes of a cluster: one server per process, between which its group
collectives run.

What is used is what `tf.distribute.MultiWorkerMirroredStrategy` sets up, without its coordination service: a
worker that is missing there makes the others wait for ever, and `Cluster` watches the processes already.
"""

from __future__ import annotations

from dataclasses import replace

from mesh_tf_core.cluster import Cluster
from mesh_tf_core.engines.tf.devices import make_virtual
from mesh_tf_core.errors import UserError

JOB = "worker"


def start(cluster: Cluster, mesh_devices: int) -> tuple[str, ...]:
    """Names of this process's devices, in the order of their ranks; the first call meets the other processes.

    Raises:
      UserError: the mesh cannot be dealt out, too few devices, TensorFlow already runs, a port is in use.
      ClusterError: a process did not come, or cannot be reached.
    """
    count = cluster.members.devices_of(mesh_devices)
    # Importing it may take seconds in which no thread runs: before the others listen for signs of life.
    import tensorflow as tf

    if not cluster.joined:
        cluster.members = replace(cluster.members, devices=count)
        cluster.join()
        kind = _own_gpus(cluster, count) or "CPU"
        if kind == "CPU":
            make_virtual(count, len(cluster.members.neighbours))
        _serve(cluster)
        cluster.on_failure(_abort)
        cluster.reach()
    found = tf.config.list_logical_devices("GPU") or tf.config.list_logical_devices("CPU")
    if len(found) < count:
        raise UserError(f"this process needs {count} devices, TensorFlow found {len(found)}")
    return tuple(d.name for d in found[:count])


def _own_gpus(cluster: Cluster, count: int) -> str | None:
    """Takes this process's part of the machine's GPUs; None if there are none.

    A scheduler may show every process its own GPUs only, or all processes all of them.
    """
    import tensorflow as tf

    gpus, here = tf.config.list_physical_devices("GPU"), cluster.members.neighbours
    if not gpus:
        return None
    if len(gpus) != count:
        place = here.index(cluster.members.index)
        if len(gpus) < count * len(here):
            raise UserError(
                f"{len(here)} processes with {count} devices each are on this machine, which has "
                f"{len(gpus)} GPUs; start fewer, or hide the GPUs (CUDA_VISIBLE_DEVICES=-1)"
            )
        gpus = gpus[place * count : (place + 1) * count]
    tf.config.set_visible_devices(gpus, "GPU")
    return "GPU"


def _serve(cluster: Cluster) -> None:
    """Starts this process's server."""
    import tensorflow as tf
    from tensorflow.core.protobuf import tensorflow_server_pb2
    from tensorflow.python.eager import context

    own, members = context.context(), cluster.members
    spec = tf.train.ClusterSpec({JOB: list(members.addresses)})
    try:
        own.configure_collective_ops(
            collective_leader=f"/job:{JOB}/replica:0/task:0",
            scoped_allocator_enabled_ops=(),
            device_filters=(f"/job:{JOB}/task:{members.index}",),
        )
    except RuntimeError:
        raise UserError(
            "the cluster must be there before TensorFlow runs anything in this process; make the Cluster and "
            "the Trainer first"
        ) from None
    server = tensorflow_server_pb2.ServerDef(
        cluster=spec.as_cluster_def(),
        job_name=JOB,
        task_index=members.index,
        protocol="grpc",
        default_session_config=own.config,
    )
    own.enable_collective_ops(server)
    try:
        own.ensure_initialized()
    except tf.errors.OpError as error:
        raise UserError(
            f"{members.name(members.index)} cannot listen on its port: {' '.join(error.message.split())}"
        ) from None


def _abort(text: str) -> None:
    """Wakes whatever waits in a collective of this process."""
    from tensorflow.python.eager import context

    unavailable = 14
    context.context().abort_collective_ops(unavailable, text)
