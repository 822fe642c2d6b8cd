"""Engines: the homes in which a program runs. Only opening one loads TensorFlow (or JAX)."""

from __future__ import annotations

from mesh_tf_core.cluster import Cluster
from mesh_tf_core.engines.protocol import Engine
from mesh_tf_core.engines.tf.cluster import start as start_cluster
from mesh_tf_core.engines.tf.devices import prepare
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.program import Program

KINDS = ("auto", "local", "lockstep", "jax", "tpu")

__all__ = ["KINDS", "Engine", "open_engine", "prepare", "start_cluster"]


def open_engine(
    program: Program,
    kind: str = "auto",
    devices: tuple[str, ...] | None = None,
    cluster: Cluster | None = None,
) -> Engine:
    """An engine for the program.

    Args:
      kind: `local` runs on this process's devices (its GPUs if there are enough of them, else virtual CPU
        devices), `lockstep` device by device in NumPy (slow; the oracle of tests), `jax` on the devices
        that JAX has (the extra `tpu`; no TensorFlow), `tpu` on a TPU through TensorFlow's TPUStrategy, `auto`
        the fastest of TensorFlow's on CPU and GPU.
      devices: TensorFlow's names of the devices by rank; by default the first ones, and on a TPU as the
        mesh's axes lie best on the torus.
      cluster: the processes over which the program runs, by TensorFlow; by default this one alone.

    Raises:
      UserError: an unknown kind, not enough devices, or no TPU.
    """
    if kind not in KINDS:
        raise UserError(f"engine {kind!r}: {known_names(kind, KINDS)}")
    if cluster is not None:
        if kind not in ("auto", "local"):
            raise UserError(f"engine {kind!r} runs in one process; leave it out with a cluster")
        from mesh_tf_core.engines.tf.cluster_engine import TfClusterEngine

        return TfClusterEngine(program, cluster)
    if kind == "lockstep":
        from mesh_tf_core.engines.lockstep import LockstepEngine

        return LockstepEngine(program)
    if kind == "jax":
        from mesh_tf_core.engines.jax.home import require

        require()
        from mesh_tf_core.engines.jax.engine import JaxEngine

        return JaxEngine(program)
    if kind == "tpu":
        from mesh_tf_core.engines.tf.tpu import open_tpu

        return open_tpu(program, devices)
    names = devices or prepare(program.mesh.devices)
    if len(names) != program.mesh.devices:
        raise UserError(
            f"mesh [{program.mesh}] needs {program.mesh.devices} devices, found {len(names)} names"
        )
    from mesh_tf_core.engines.tf.local import TfLocalEngine

    return TfLocalEngine(program, names)
