"""Values whose pieces lie on the devices of several processes, put together on every host.

Pieces travel from host to host, not from device to device: a device need not have room for the whole.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Value
from mesh_tf_core.kernels.numpy_kernel import np_dtype

CHUNK = 1 << 25
"""8-byte words of a message at most."""
FIRST_KEY = 1 << 30
"""Keys from here on are this module's; `engines.tf.group` counts from 1."""
_keys = itertools.count(FIRST_KEY)

Begin = tuple[int, ...]
"""Index of a piece's first element, per dimension."""


class HostGather:
    """Puts values together; every process must ask for the same ones in the same order.

    Args:
      processes: how many there are, with equally many devices each; `index`: this one.
      device: a CPU device of this process.
      timeout: seconds to wait for the others.
    """

    def __init__(self, mesh: Mesh, processes: int, index: int, device: str, timeout: float) -> None:
        self.mesh, self.processes, self.index = mesh, processes, index
        self.device, self.timeout = device, timeout
        self._group, self._instances = next(_keys), dict[int, int]()

    def whole(self, v: Value, pieces: Mapping[Begin, Any]) -> Any:
        """The global array.

        Args:
          pieces: those of this process's devices.
        """
        each = self.mesh.devices // self.processes
        sizes = v.local(self.mesh).shape.sizes
        begins = [self.begin(v, rank) for rank in range(self.mesh.devices)]
        held = [dict.fromkeys(begins[p * each : (p + 1) * each]) for p in range(self.processes)]
        if not all(len(own) == len(set(begins)) for own in held):
            first = {begin: p for p in reversed(range(self.processes)) for begin in held[p]}
            owned = [[b for b in own if first[b] == p] for p, own in enumerate(held)]
            mine = [pieces[b] for b in owned[self.index]]
            pieces = self._exchanged(owned, mine, np.empty(sizes, np_dtype(v.dtype)))
        out = np.empty(v.shape.sizes, np_dtype(v.dtype))
        for begin, array in pieces.items():
            out[tuple(slice(b, b + n) for b, n in zip(begin, sizes, strict=True))] = array
        return out

    def begin(self, v: Value, rank: int) -> Begin:
        """Where a device's piece begins."""
        places = zip(v.splits, v.local(self.mesh).shape.sizes, strict=True)
        return tuple(self.mesh.group_index(rank, axes) * n for axes, n in places)

    def _exchanged(
        self, owned: Sequence[Sequence[Begin]], mine: Sequence[Any], like: Any
    ) -> dict[Begin, Any]:
        """All pieces. Every process sends as many bytes: those of the one that owns most pieces."""
        rows = max(map(len, owned))
        words = -(-rows * like.nbytes // 8)
        sent = np.zeros(words * 8, np.uint8)
        for i, array in enumerate(mine):
            content = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            sent[i * like.nbytes : (i + 1) * like.nbytes] = content
        found: dict[Begin, Any] = {}
        for begins, received in zip(owned, self._gathered(sent.view(np.int64)), strict=True):
            for i, begin in enumerate(begins):
                content = received.view(np.uint8)[i * like.nbytes : (i + 1) * like.nbytes]
                found[begin] = content.view(like.dtype).reshape(like.shape)
        return found

    def _gathered(self, words: Any) -> Any:
        """[processes, words], by parts."""
        out = np.empty((self.processes, words.size), np.int64)
        for begin in range(0, words.size, CHUNK):
            part = words[begin : begin + CHUNK]
            key = self._instances.setdefault(part.size, FIRST_KEY + len(self._instances))
            with tf.device(self.device):
                out[:, begin : begin + CHUNK] = tf.raw_ops.CollectiveGatherV2(
                    input=tf.constant(part[None]),
                    group_size=self.processes,
                    group_key=self._group,
                    instance_key=key,
                    ordering_token=[],
                    timeout_seconds=self.timeout,
                )
        return out
