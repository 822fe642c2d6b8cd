"""Variables as one shard per device, found by name from inside traced functions.

A shard is a resource of its device under a shared name, so a function traced once reads "its" shard on
whatever device it runs: no handle is passed, and the graph does not grow with the number of devices.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tf_core.engines.pieces import (
    Begin,
    VariablePiece,
    in_order,
    initial,
    joined,
    lying,
    per_device,
    region,
)
from mesh_tf_core.engines.stepping import OneByOne
from mesh_tf_core.ir.program import Program, Value

_engines = itertools.count()


class Variables:
    """The shards of a program's variables on `devices`, by rank.

    Args:
      shared: another program's variables with the same shards.
    """

    def __init__(self, program: Program, devices: Sequence[str], shared: Variables | None = None) -> None:
        self.program, self.devices = program, tuple(devices)
        self.prefix: str = shared.prefix if shared else f"layoutopt_{next(_engines)}"
        self._owner = shared is None
        self.values: dict[str, Value] = {name: s.value for name, s in program.variables.items()}
        self.sizes = {name: v.local(program.mesh).shape.sizes for name, v in self.values.items()}
        self.initialized = shared is not None

    def handle(self, name: str) -> Any:
        """The shard on the current device, in a traced function or eagerly."""
        v = self.values[name]
        return tf.raw_ops.VarHandleOp(
            dtype=tf.as_dtype(v.dtype), shape=list(self.sizes[name]), shared_name=f"{self.prefix}/{name}"
        )

    def value(self, name: str) -> Any:
        """The shard's value on the current device; shares its memory."""
        return tf.raw_ops.ReadVariableOp(
            resource=self.handle(name), dtype=tf.as_dtype(self.values[name].dtype)
        )

    def assign(self, name: str, value: Any) -> Any:
        """Makes `value`'s memory the shard's."""
        return tf.raw_ops.AssignVariableOp(resource=self.handle(name), value=value)

    def begin(self, name: str, rank: int) -> tuple[int, ...]:
        """Index of a device's first element, per dimension."""
        return self.values[name].begin(self.program.mesh, rank)

    def initialize(self) -> None:
        for name, stored in self.program.variables.items():
            self._fill(name, partial(initial, name, stored, extent=self.sizes[name]))
        self.initialized = True

    def write(self, name: str, array: Any) -> None:
        """Cuts a global array of the variable's dtype into the shards."""
        sizes, array = self.sizes[name], lying(self.program.variables[name], array)
        # A contiguous array has a dimension at least; a number gets back its none.
        self._fill(name, lambda begin: np.ascontiguousarray(array[region(begin, sizes)]).reshape(sizes))

    def _fill(self, name: str, piece: Callable[[Begin], Any]) -> None:
        ranks = range(len(self.devices))
        made = per_device(self.values[name], self.program.mesh, ranks, piece)
        for array, device in zip(made, self.devices, strict=True):
            with tf.device(device):
                self.assign(name, tf.constant(array))

    def read(self, name: str) -> Any:
        """The global array."""
        whole = joined(self.values[name], self.program.mesh, self.pieces(name))
        return in_order(self.program.variables[name], whole)

    def snapshot(self) -> OneByOne:
        """All values as they are now. No copy: a step stores new tensors, and the old ones stay alive while
        they are referenced here."""
        kept = {
            VariablePiece.all_of(stored.variable): (stored, self.pieces(name))
            for name, stored in self.program.variables.items()
        }
        mesh = self.program.mesh
        return OneByOne(kept, lambda found: in_order(found[0], joined(found[0].value, mesh, found[1])))

    def pieces(self, name: str) -> dict[tuple[int, ...], Any]:
        """Index of the first element -> tensor, of all different pieces."""
        found: dict[tuple[int, ...], Any] = {}
        for rank, device in enumerate(self.devices):
            begin = self.begin(name, rank)
            if begin not in found:
                with tf.device(device):
                    found[begin] = self.value(name)
        return found

    def bytes(self, host: bool) -> int:
        """Bytes of one device's shards, as they lie there, or on its host."""
        total = 0
        with tf.device(self.devices[0]):
            for name in (name for name, v in self.values.items() if v.host is host):
                value = self.value(name)
                total += value.dtype.size * value.shape.num_elements()
        return total

    def delete(self) -> None:
        """Gives the shards' memory back."""
        for device in self.devices if self.initialized and self._owner else ():
            with tf.device(device):
                for name in self.values:
                    tf.raw_ops.DestroyResourceOp(resource=self.handle(name), ignore_lookup_error=True)
        self.initialized = False
