"""The TPU of this process: found and started once, and the mesh laid on its torus.

One process drives all hosts of a slice (TensorFlow's single client): the other hosts run TensorFlow's TPU
worker, not this program.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import socket
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.mesh import Mesh

Place = tuple[int, ...]
"""Coordinates of a core on the torus, the last one within its chip."""


WAIT = 30.0
"""Seconds that a TPU's host may take to answer."""


@lru_cache(maxsize=1)
def connect() -> tuple[Any, Any]:
    """The resolver and the topology of the TPU, which is started: what older engines kept there is lost, so
    this happens once.

    Raises:
      UserError: there is none, or it does not start.
    """
    import tensorflow as tf

    failures = (tf.errors.OpError, RuntimeError, OSError)
    try:
        resolver = _resolver()
        _reach(resolver.master())
        tf.config.experimental_connect_to_cluster(resolver)
        return resolver, tf.tpu.experimental.initialize_tpu_system(resolver)
    except failures as error:
        said = " ".join(str(error).split())[:300]
        raise UserError(
            f"engine 'tpu': the TPU of TPU_NAME or of this machine does not start ({said}); see that it is "
            "there, that no other process holds it and that this one has not used TensorFlow before"
        ) from None


def _resolver() -> Any:
    """Of the TPU that TPU_NAME names, else of this machine's."""
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TPUClusterResolver
    with contextlib.suppress(ValueError):  # no name is set
        return resolver()
    if any(tf.config.list_physical_devices(kind) for kind in ("TPU", "TPU_SYSTEM")):
        return resolver(tpu="local")
    raise UserError(
        "engine 'tpu': no TPU: TensorFlow sees none on this machine, and TPU_NAME names none; run on a TPU "
        "VM with the package tensorflow-tpu, or compile without one: layoutopt verify"
    )


def _reach(master: str) -> None:
    """OSError unless somebody listens there: TensorFlow would wait without end."""
    if master:
        host, _, port = master.removeprefix("grpc://").rpartition(":")
        socket.create_connection((host, int(port)), WAIT).close()


def strategy_for(mesh: Mesh, resolver: Any, topology: Any, devices: Sequence[str] | None = None) -> Any:
    """A TPUStrategy whose replica r is the mesh's device of rank r.

    Args:
      devices: TensorFlow's names of the cores by rank; by default as `places` lays them.

    Raises:
      UserError: the TPU has another number of cores, or not these.
    """
    import tensorflow as tf

    cores = {
        topology.tpu_device_name_at_coordinates(place, job=None): place
        for place in map(tuple, np.reshape(topology.device_coordinates, (-1, topology.mesh_rank)).tolist())
    }
    if devices is not None:
        order = [_core(name, cores) for name in devices]
    elif len(cores) == math.prod(topology.mesh_shape) == mesh.devices:
        order = list(places(mesh, tuple(int(n) for n in topology.mesh_shape)))
    else:
        order = list(cores.values())
    if len(set(order)) != mesh.devices or len(cores) != mesh.devices:
        shape = "x".join(str(n) for n in topology.mesh_shape)
        raise UserError(
            f"mesh [{mesh}] needs {mesh.devices} TPU cores, found {len(cores)} (torus {shape})"
            + (f" and {len(set(order))} different names" if devices is not None else "")
            + "; make them equal"
        )
    assignment = tf.tpu.experimental.DeviceAssignment(topology, np.array(order, np.int32)[:, None])
    return tf.distribute.TPUStrategy(resolver, experimental_device_assignment=assignment)


def _core(name: str, cores: dict[str, Place]) -> Place:
    """A core by a name that may say its job, too."""
    known = name[max(0, name.find("/task:")) :]
    if known not in cores:
        raise UserError(f"there is no TPU core {name!r}; {known_names(known, cores)}")
    return cores[known]


def places(mesh: Mesh, torus: Place) -> Iterator[Place]:
    """Where every rank lies, in the order of ranks.

    If the mesh's axes, in their order, are products of whole axes of the torus, in any order, devices that
    differ in one mesh axis differ in those alone: groups of different axes use different links. Otherwise all
    ranks lie along one snake. Either way neighbours along the last mesh axis are neighbours on the torus.
    """
    sizes = [n for n in mesh.shape if n > 1]
    for order in itertools.permutations(range(len(torus))):
        parts = _parts(sizes, [torus[axis] for axis in order])
        if parts is not None:
            break
    else:
        order, parts = tuple(range(len(torus))), [len(torus)]
    ends = list(itertools.accumulate(parts))
    axes = [order[end - n : end] for n, end in zip(parts, ends, strict=True)]
    rest = [axis for axis in order if not any(axis in own for own in axes)]
    for parts_of in itertools.product(*(list(_snake([torus[a] for a in own])) for own in axes)):
        place = dict.fromkeys(rest, 0)
        for own, at in zip(axes, parts_of, strict=True):
            place.update(zip(own, at, strict=True))
        yield tuple(place[axis] for axis in range(len(torus)))


def _parts(sizes: Sequence[int], torus: Sequence[int]) -> list[int] | None:
    """How many axes of the torus each size takes, in order; None if some product is not met."""
    out, at = [], 0
    for size in sizes:
        begin, product = at, 1
        while at < len(torus) and product < size:
            product *= torus[at]
            at += 1
        if product != size:
            return None
        out.append(at - begin)
    return out


def _snake(sizes: Sequence[int]) -> Iterator[Place]:
    """All places of a grid, each a neighbour of the one before."""
    if not sizes:
        yield ()
        return
    for i, rest in enumerate(itertools.repeat(sizes[1:], sizes[0])):
        line = list(_snake(rest))
        yield from ((i, *place) for place in (reversed(line) if i % 2 else line))


def xla_numbers(strategy: Any) -> tuple[int, ...]:
    """XLA's number of every replica, asked of the chips.

    Groups are given in XLA's numbers, and TensorFlow does not promise that they are its own: see `all_gather`
    in tensorflow/python/distribute/tpu_strategy.py.
    """
    return tuple(int(number) for number in asked_numbers(strategy))


def asked_numbers(strategy: Any) -> Sequence[Any]:
    """The same as tensors."""
    import tensorflow as tf
    from tensorflow.compiler.tf2xla.ops import gen_xla_ops

    @tf.function(autograph=False)
    def ask() -> Any:
        return strategy.experimental_local_results(strategy.run(lambda: gen_xla_ops.xla_replica_id()))

    found: Sequence[Any] = ask()
    return found
