"""The terms of memory rows: bytes that are read off clusters, the points that hold them, and which points
matter."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple

import numpy as np

from layoutopt.formulation.lifetimes import ByteRule
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
