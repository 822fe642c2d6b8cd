"""The choice of an engine, its devices, and its opening. Only opening one loads TensorFlow (or JAX)."""

from collections.abc import Mapping

from mesh_tf_core.engines.jax import compat as jax_compat
from mesh_tf_core.engines.jax.cluster import Cluster
from mesh_tf_core.engines.protocol import Engine
from mesh_tf_core.engines.tf import devices as tf_devices
from mesh_tf_core.engines.tf.devices import installed, require
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.program import Program

KINDS = ("auto", "local", "jax", "lockstep")


def chosen(kind: str, cluster: Cluster | None = None) -> str:
    """The engine that a kind means: `auto` is `jax` where JAX finds an accelerator, in several processes, and
    where it is installed without TensorFlow; else `local`.

    Raises:
      UserError: an unknown kind, one that runs in one process alone, or one whose library is not installed.
    """
    if kind not in KINDS:
        raise UserError(f"unknown engine {kind!r}; {known_names(kind, KINDS)}")
    if cluster is not None:
        if kind not in ("auto", "jax"):
            raise UserError(
                f"engine '{kind}' runs in one process only; use the engine 'jax' for several processes"
            )
        kind = "jax"
    if kind == "auto":
        kind = "jax" if jax_compat.accelerated() or jax_compat.installed() > installed() else "local"
    if kind == "jax":
        jax_compat.require()
    elif kind == "local":
        require()
    return kind


def running(kind: str, cluster: Cluster | None = None) -> bool:
    """True if this process has the devices of an engine that keeps those that it starts with."""
    return cluster.joined if cluster is not None else kind == "jax" and jax_compat.running()


def device_count(kind: str, cluster: Cluster | None = None) -> int | None:
    """The number of devices for an engine: those of a job's processes, or the accelerators of this process;
    None if the user decides."""
    if cluster is not None:
        return cluster.device_count()
    return jax_compat.device_count() if chosen(kind) == "jax" and jax_compat.accelerated() else None


def prepare(devices: int, kind: str = "auto") -> tuple[str, ...]:
    """Makes this process's devices for an engine, before its library is used for anything else; their names
    by rank.

    Raises:
      UserError: an unknown kind, or the library already runs with fewer devices.
    """
    kind = chosen(kind)
    if kind == "lockstep":
        return tuple(f"CPU:{rank}" for rank in range(devices))
    if kind == "jax":
        return tuple(map(str, jax_compat.devices(devices)))
    return tf_devices.prepare(devices)


def open_engine(
    program: Program,
    kind: str = "auto",
    cluster: Cluster | None = None,
    slices: Mapping[str, int] | None = None,
) -> Engine:
    """An engine for the program.

    Args:
      kind: `local` runs on virtual CPU devices of this process with TensorFlow. `jax` runs on JAX's devices:
        TPUs, GPUs, or as many virtual CPU devices as the mesh needs (without TensorFlow). `lockstep` runs
        device by device in NumPy (slow; the reference of tests). `auto`: see `chosen`.
      cluster: the processes over which the program runs, by JAX; by default this one alone.
      slices: mesh axis -> number of slices that it spans (see `engines.jax.placing`).

    Raises:
      UserError: an unknown kind, or not enough devices.
    """
    kind = chosen(kind, cluster)
    if kind == "lockstep":
        from mesh_tf_core.engines.lockstep import LockstepEngine

        return LockstepEngine(program)
    if kind == "jax":
        from mesh_tf_core.engines.jax.engine import JaxEngine

        return JaxEngine(program, cluster=cluster, slices=slices)
    names = tf_devices.prepare(program.mesh.devices)
    from mesh_tf_core.engines.tf.local import TfLocalEngine

    return TfLocalEngine(program, names)
