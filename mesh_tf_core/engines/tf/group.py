"""Collectives by TensorFlow's group operations, from inside a function that is traced once for all devices.

They run between processes and between the GPUs of a machine (as rings; `communication_hint="nccl"` would
choose NCCL, which was not tried); between virtual CPU devices of one process `exchange` is far faster. A
group is told by a key that a device looks up by its rank. Its members stand in device order, which is not the
order of the program's pieces if the axes are not in the mesh's order: pieces are then reordered locally.

Every run of a collective has an instance key of its own, from one counter of the process: a key that returns
with another shape aborts TensorFlow. All carry a time limit, and are ordered by a token, without which
devices of one function wait for each other.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Permute,
    Program,
    ReduceScatter,
)

TIMEOUT = 120.0
"""Seconds that a device waits for the others of its group."""
STRIDE = 1 << 12
"""Instance keys kept for one trace of a block: more collectives than a block has."""

_group_keys = itertools.count(1)
_blocks = itertools.count(1)


def keys_for(runs: int) -> int:
    """The first instance key of `runs` blocks, each with STRIDE keys; nobody else in this process gets
    them."""
    first = next(_blocks)
    for _ in range(runs - 1):
        next(_blocks)
    return first * STRIDE


def label(instr: Collective) -> str:
    """How TensorFlow's errors call a collective."""
    return re.sub(r"[^A-Za-z0-9_.]", "_", f"{instr.name}_{'_'.join(instr.axes)}")


class Groups:
    """The group keys of a mesh, per set of axes: one table [devices] each."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._tables: dict[frozenset[str], list[int]] = {}

    def table(self, axes: Axes) -> list[int]:
        """Group key by rank."""
        same = frozenset(axes)
        if same not in self._tables:
            table = [0] * self.mesh.devices
            for group in self.mesh.groups(axes):
                key = next(_group_keys)
                for rank in group:
                    table[rank] = key
            self._tables[same] = table
        return self._tables[same]

    def order(self, axes: Axes) -> list[int]:
        """For every position in a group, the position of that member in device order."""
        group = self.mesh.groups(axes)[0]
        return [sorted(group).index(rank) for rank in group]


class GroupExchange:
    """Collectives of one device, in a traced function.

    Args:
      rank: number of the device, an int32 scalar.
      first_key: int32 scalar, the first instance key that this block may use.
      token: name of a resource that orders this device's collectives.
      timeout: seconds that it waits for the others of a group.
    """

    def __init__(
        self, program: Program, groups: Groups, rank: Any, first_key: Any, token: str, timeout: float
    ) -> None:
        self.program, self.mesh, self.groups = program, program.mesh, groups
        self.rank, self.first_key, self.token, self.timeout = rank, first_key, token, timeout
        self._used = itertools.count()

    def run(self, instr: Collective, pieces: Sequence[Any]) -> list[Any]:
        """This device's piece of every value after the collective."""
        if self.mesh.group_size(instr.axes) == 1 and not isinstance(instr, Permute):
            return list(pieces)
        if isinstance(instr, AllReduce):
            return self._reduced(instr, pieces)
        (x,), shape = pieces, self.program.values[instr.inputs[0]].shape
        if isinstance(instr, ReduceScatter):
            return [tf.reduce_sum(self._sent(instr, self._rows(x, instr, shape.index(instr.dim))), 0)]
        if isinstance(instr, AllGather):
            return [self._gathered(instr, x, shape.index(instr.dim))]
        if isinstance(instr, AllToAll):
            rows = self._sent(instr, self._rows(x, instr, shape.index(instr.split)))
            return [_joined(self._ordered(rows, instr.axes), shape.index(instr.concat))]
        assert isinstance(instr, Permute)
        return [self._shifted(instr, x)]

    # -- one message -----------------------------------------------------------------------------------------

    def _group(self, instr: Collective) -> dict[str, Any]:
        used = next(self._used)
        assert used < STRIDE
        return {
            "group_size": self.mesh.group_size(instr.axes),
            "group_key": tf.constant(self.groups.table(instr.axes))[self.rank],
            "instance_key": self.first_key + used,
            "ordering_token": [tf.raw_ops.VarHandleOp(dtype=tf.int32, shape=[], shared_name=self.token)],
            "timeout_seconds": self.timeout,
            "name": label(instr),
        }

    def _reduced(self, instr: AllReduce, pieces: Sequence[Any]) -> list[Any]:
        """One message for all values: flattened, joined, reduced, cut."""
        sizes = [math.prod(x.shape) for x in pieces]
        flat = pieces[0] if len(pieces) == 1 else tf.concat([tf.reshape(x, [-1]) for x in pieces], 0)
        merge = {"sum": "Add", "max": "Max", "min": "Min"}[instr.combine]
        raw, dtype = _plain(flat)
        found = tf.raw_ops.CollectiveReduceV2(input=raw, merge_op=merge, final_op="Id", **self._group(instr))
        found = _restored(found, dtype)
        if len(pieces) == 1:
            return [tf.ensure_shape(found, pieces[0].shape)]
        parts = tf.split(found, sizes)
        return [tf.reshape(part, x.shape) for part, x in zip(parts, pieces, strict=True)]

    def _gathered(self, instr: AllGather, x: Any, axis: int) -> Any:
        n = self.mesh.group_size(instr.axes)
        raw, dtype = _plain(tf.expand_dims(x, 0))
        rows = _restored(tf.raw_ops.CollectiveGatherV2(input=raw, **self._group(instr)), dtype)
        return _joined(self._ordered(tf.ensure_shape(rows, [n, *x.shape]), instr.axes), axis)

    def _sent(self, instr: Collective, rows: Any) -> Any:
        """Row i goes to the i-th member in device order; row i of the result came from it."""
        raw, dtype = _plain(rows)
        found = tf.raw_ops.CollectiveAllToAllV2(input=raw, **self._group(instr))
        return tf.ensure_shape(_restored(found, dtype), rows.shape)

    # -- order -----------------------------------------------------------------------------------------------

    def _rows(self, x: Any, instr: Collective, axis: int) -> Any:
        """Equal parts of `axis` as rows, each in its receiver's place."""
        order = self.groups.order(instr.axes)
        parts = tf.split(x, len(order), axis)
        return tf.stack([parts[order.index(i)] for i in range(len(order))])

    def _ordered(self, rows: Any, axes: Axes) -> Any:
        """Rows in device order, brought into the order of the pieces."""
        order = self.groups.order(axes)
        return rows if order == sorted(order) else tf.gather(rows, order)

    def _shifted(self, instr: Permute, x: Any) -> Any:
        """A padded all-to-all: one row holds the piece."""
        n, order = self.mesh.group_size(instr.axes), self.groups.order(instr.axes)
        targets, sources = [-1] * n, [-1] * n
        for i, to in instr.links(n):
            targets[i], sources[to] = order[to], order[i]
        places = [self.mesh.group_index(rank, instr.axes) for rank in range(self.mesh.devices)]
        place = tf.constant(places)[self.rank]
        target, source = tf.constant(targets)[place], tf.constant(sources)[place]
        zeros = tf.zeros_like(x)
        mine = tf.reshape(tf.equal(tf.range(n), target), [n, *([1] * x.shape.rank)])
        found = self._sent(instr, tf.where(mine, x[None], zeros[None]))[tf.maximum(source, 0)]
        return tf.where(source >= 0, found, zeros)


def _joined(rows: Any, axis: int) -> Any:
    """Rows [n, ...] joined along `axis` of what they hold."""
    n, *shape = rows.shape
    moved = tf.transpose(rows, [*range(1, axis + 1), 0, *range(axis + 1, len(shape) + 1)]) if axis else rows
    shape[axis] *= n
    return tf.reshape(moved, shape)


def _plain(x: Any) -> tuple[Any, Any]:
    """x in a dtype that TensorFlow's collectives carry, and its own dtype."""
    if x.dtype == tf.uint32:
        return tf.bitcast(x, tf.int32), x.dtype
    return (tf.cast(x, tf.int32), x.dtype) if x.dtype in (tf.bool, tf.int8) else (x, x.dtype)


def _restored(x: Any, dtype: Any) -> Any:
    if x.dtype == dtype:
        return x
    return tf.bitcast(x, dtype) if dtype == tf.uint32 else tf.cast(x, dtype)
