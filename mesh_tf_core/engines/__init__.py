"""Engines: the homes in which a program runs. Only opening one loads TensorFlow (or JAX)."""

from __future__ import annotations

from mesh_tf_core.cluster import Cluster
from mesh_tf_core.engines.jax import home as jax_home
from mesh_tf_core.engines.protocol import Engine
from mesh_tf_core.engines.tf import devices as tf_devices
from mesh_tf_core.engines.tf.cluster import start as start_cluster
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.program import Program

KINDS = ("auto", "local", "jax", "lockstep", "tpu")

__all__ = ["KINDS", "Engine", "chosen", "open_engine", "prepare", "start_cluster"]


def chosen(kind: str) -> str:
    """The engine that a kind means: `auto` is `jax` where JAX finds an accelerator, else `local`.

    Raises:
      UserError: an unknown kind.
    """
    if kind not in KINDS:
        raise UserError(f"engine {kind!r}: {known_names(kind, KINDS)}")
    if kind != "auto":
        return kind
    return "jax" if jax_home.accelerated() else "local"


def prepare(devices: int, kind: str = "auto") -> tuple[str, ...]:
    """Makes this process's devices for an engine, before its library is used for anything else; their names
    by rank.

    Raises:
      UserError: an unknown kind, or the library already runs with fewer devices.
    """
    kind = chosen(kind)
    if kind == "lockstep":
        return tuple(f"NumPy:{rank}" for rank in range(devices))
    if kind == "jax":
        return tuple(map(str, jax_home.devices(devices)))
    return tf_devices.prepare(devices)


def open_engine(
    program: Program,
    kind: str = "auto",
    devices: tuple[str, ...] | None = None,
    cluster: Cluster | None = None,
) -> Engine:
    """An engine for the program.

    Args:
      kind: `local` runs on this process's devices (its GPUs if there are enough of them, else virtual CPU
        devices), `lockstep` device by device in NumPy (slow; the oracle of tests), `jax` on what JAX finds:
        TPUs, GPUs, or as many virtual CPU devices as the mesh needs (no TensorFlow), `tpu` on a TPU through
        TensorFlow's TPUStrategy, `auto`: see `chosen`.
      devices: TensorFlow's names of the devices by rank; by default the first ones, and on a TPU as the
        mesh's axes lie best on the torus.
      cluster: the processes over which the program runs, by TensorFlow; by default this one alone.

    Raises:
      UserError: an unknown kind, not enough devices, or no TPU.
    """
    if cluster is not None:
        if kind not in ("auto", "local"):
            raise UserError(f"engine {kind!r} runs in one process; leave it out with a cluster")
        from mesh_tf_core.engines.tf.cluster_engine import TfClusterEngine

        return TfClusterEngine(program, cluster)
    kind = chosen(kind)
    if kind == "lockstep":
        from mesh_tf_core.engines.lockstep import LockstepEngine

        return LockstepEngine(program)
    if kind == "jax":
        jax_home.require()
        from mesh_tf_core.engines.jax.engine import JaxEngine

        return JaxEngine(program)
    if kind == "tpu":
        from mesh_tf_core.engines.tf.tpu import open_tpu

        return open_tpu(program, devices)
    names = devices or tf_devices.prepare(program.mesh.devices)
    if len(names) != program.mesh.devices:
        raise UserError(
            f"mesh [{program.mesh}] needs {program.mesh.devices} devices, found {len(names)} names"
        )
    from mesh_tf_core.engines.tf.local import TfLocalEngine

    return TfLocalEngine(program, names)
