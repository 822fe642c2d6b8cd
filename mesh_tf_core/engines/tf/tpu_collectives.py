"""Collectives of one replica of a TPU program, by the operations that TensorFlow's TPU compiler has.

Sums are `CrossReplicaSum`; maxima, minima and reduce-scatters `XlaAllReduce` and `XlaReduceScatter`, which
TensorFlow's DTensor emits for TPUs too. There is no all-gather: a piece per member is sent by `AllToAll`, as
`tf.distribute.ReplicaContext.all_gather` does under TPUStrategy; the links carry what an all-gather carries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Permute,
    Program,
    ReduceScatter,
)

REDUCED = ("float16", "bfloat16", "float32", "int32", "uint32")
"""What the operations that add or compare carry; bool and int8 travel as int32."""
_AS_INT32 = ("bool", "int8")

Groups = list[list[int]]


def refuse_wide(program: Program) -> None:
    """UserError if the program reduces numbers that no TPU operation carries."""
    for instr, _ in program.walk():
        if isinstance(instr, AllReduce | ReduceScatter):
            for id in instr.inputs:
                dtype = program.values[id].dtype
                if dtype not in (*REDUCED, *_AS_INT32):
                    raise UserError(
                        f"engine 'tpu': {instr.text()} of {dtype} has no TPU operation; build the model in "
                        f"one of {', '.join(REDUCED)}"
                    )


class TpuOps:
    """The operations themselves. `groups` lists replicas by XLA's numbers, every group in piece order."""

    def all_reduce(self, x: Any, groups: Groups, combine: str) -> Any:
        _only_for_tpu()
        if combine == "sum":
            return tf.raw_ops.CrossReplicaSum(input=x, group_assignment=groups)
        name = {"max": "Max", "min": "Min"}[combine]
        return gen_xla_ops.xla_all_reduce(x, groups, name, "CrossReplica")

    def reduce_scatter(self, x: Any, groups: Groups, axis: int) -> Any:
        _only_for_tpu()
        return gen_xla_ops.xla_reduce_scatter(x, groups, axis, "Add")

    def all_to_all(self, x: Any, groups: Groups, split: int, concat: int) -> Any:
        _only_for_tpu()
        return tf.raw_ops.AllToAll(
            input=x,
            group_assignment=groups,
            split_dimension=split,
            concat_dimension=concat,
            split_count=len(groups[0]),
        )

    def permute(self, x: Any, pairs: Groups) -> Any:
        _only_for_tpu()
        return tf.raw_ops.CollectivePermute(input=x, source_target_pairs=pairs)


def _only_for_tpu() -> None:
    """On a CPU XlaAllReduce returns its input, unreduced and without a word: it is never traced for one."""
    if not isinstance(tf.distribute.get_strategy(), tf.distribute.TPUStrategy):
        raise RuntimeError("TPU collectives are traced under tf.distribute.TPUStrategy only")


class TpuExchange:
    """Runs collectives on this replica's pieces.

    Args:
      numbers: XLA's number of the replica of every rank (see `tf_tpu_home.xla_numbers`).
    """

    def __init__(self, program: Program, numbers: Sequence[int], ops: TpuOps) -> None:
        self.program, self.mesh, self.ops = program, program.mesh, ops
        self.numbers = tuple(numbers)

    def run(self, instr: Collective, pieces: Sequence[Any]) -> list[Any]:
        """This replica's piece of every value after the collective. Every value is an operation of its own:
        XLA joins neighbours without copying them into one buffer first."""
        if self.mesh.group_size(instr.axes) == 1 and not isinstance(instr, Permute):
            return list(pieces)
        return [self._one(instr, id, x) for id, x in zip(instr.inputs, pieces, strict=True)]

    def _one(self, instr: Collective, id: int, x: Any) -> Any:
        adds = isinstance(instr, AllReduce | ReduceScatter)
        if x.dtype == tf.bool or (adds and x.dtype == tf.int8):
            return tf.cast(self._one(instr, id, tf.cast(x, tf.int32)), x.dtype)
        shape, groups = self.program.values[id].shape, self.groups(instr.axes)
        if isinstance(instr, AllReduce):
            return self.ops.all_reduce(x, groups, instr.combine)
        if isinstance(instr, ReduceScatter):
            return self.ops.reduce_scatter(x, groups, shape.index(instr.dim))
        if isinstance(instr, AllGather):
            copies = tf.concat([x] * len(groups[0]), 0)
            return self.ops.all_to_all(copies, groups, 0, shape.index(instr.dim))
        if isinstance(instr, AllToAll):
            return self.ops.all_to_all(x, groups, shape.index(instr.split), shape.index(instr.concat))
        assert isinstance(instr, Permute)
        links = instr.links(len(groups[0]))
        pairs = [[group[i], group[to]] for group in groups for i, to in links]
        return self.ops.permute(x, pairs) if pairs else tf.zeros_like(x)

    def groups(self, axes: Axes) -> Groups:
        """The groups over `axes` by XLA's numbers."""
        return [[self.numbers[rank] for rank in group] for group in self.mesh.groups(axes)]
