"""The terms of memory rows: bytes that are read off clusters, the points that hold them, and which points
matter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from layoutopt.formulation.lifetimes import ByteRule
from mesh_tf_core.ir.liveness import Liveness
from mesh_tf_core.ir.program import Instr, Loop, Program

PointKey = tuple[str, int]
"""The key of a counted item: ("tensor", its id), ("copy", id of the tensor that is moved), ("inside",
node)."""


class HeldBytes(NamedTuple):
    """Bytes to be read off a cluster.

    Attributes:
      run: the second run that makes it (`Subgraph.again`); "" if the first does.
      share: how much of it is held.
    """

    reading: ByteRule
    cluster: int
    what: int
    more: Hashable
    run: str
    share: float


class Counted(NamedTuple):
    """An object that the points from `first` to `last` hold."""

    first: int
    last: int
    key: PointKey
    thing: HeldBytes


class Fading(NamedTuple):
    """A value that may die before its last reader, which reads a copy that was moved for an earlier one.

    Attributes:
      since: the first point at which every cluster that reads the value has begun to.
      readers: the readers of the last one's cluster, and their points.
    """

    since: int
    readers: tuple[tuple[int, Instr], ...]


def last_reads(program: Program) -> dict[int, int]:
    """A value -> the last point that computes or reads it; inputs of a loop are read until it ends."""
    found, position = dict[int, int](), 0

    def visit(code: Sequence[Instr]) -> None:
        nonlocal position
        for instr in code:
            at, position = position, position + 1
            found.update(dict.fromkeys((*instr.outputs, *instr.inputs), at))
            if isinstance(instr, Loop):
                visit(instr.body)
                found.update(dict.fromkeys((*instr.inputs, *instr.outside), position - 1))

    visit(program.code)
    return found


def fading(program: Program, own: Liveness, runs: Mapping[int, tuple[int, int]]) -> dict[int, Fading]:
    """The values that an instruction of a cluster frees.

    Args:
      own: the memory of the program, with every name counted for itself.
      runs: node -> its cluster, and the node that represents it there.
    """
    found, position = dict[int, Fading](), 0

    def visit(code: Sequence[Instr]) -> None:
        nonlocal position
        reads: dict[int, list[tuple[int, int, Instr]]] = defaultdict(list)
        for instr in code:
            at, position = position, position + 1
            if isinstance(instr, Loop):
                visit(instr.body)
            other = isinstance(instr, Loop) or instr.origin.node not in runs
            cluster = -position if other else runs[instr.origin.node][0]
            for i in dict.fromkeys(instr.inputs):
                reads[i].append((position if other else at, cluster, instr))
            for i in () if other else {*instr.inputs}.intersection(own.span(instr).frees):
                first = {c: p for p, c, _ in reversed(reads[i])}
                readers = tuple((p, each) for p, c, each in reads[i] if c == cluster)
                found[i] = Fading(max(first.values()), readers)

    visit(program.code)
    return found


def undominated(counts: np.ndarray) -> list[int]:
    """The points that hold something which no other single point holds as well, those that hold most first.

    Args:
      counts: amount of every object at each point, of shape (points, objects).
    """
    first = np.sort(np.unique(counts, axis=0, return_index=True)[1])
    order = first[np.argsort(-counts[first].sum(axis=1), kind="stable")]
    kept, found = np.empty_like(counts[order]), list[int]()
    for row in order.tolist():
        if not (kept[: len(found)] >= counts[row]).all(axis=1).any():
            kept[len(found)] = counts[row]
            found.append(row)
    return found
