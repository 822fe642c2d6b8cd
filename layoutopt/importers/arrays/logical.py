"""Logical axes: names of dimensions that Flax, and libraries on it, attach to parameters.

The function itself decides which axes are one dimension. A logical name gives the dimension a name, and makes
axes of one size and one name one dimension unless a relation contradicts. Flax also writes mesh axes into the
same places (`with_partitioning(init, ("data", "model"))`). They are recognised because they name axes of
different sizes, and are not used as names.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from layoutopt.importers.arrays.axis_relations import Axis
from layoutopt.importers.arrays.classes import FactorNode
from layoutopt.importers.arrays.contract import Leaf, Unimportable, Var

_MESH_SHARE = 1 / 3
"""Share of the noted axes whose names stand for several sizes, from which on names are those of a mesh: of
MaxText's own logical axes at most a fifth do (`norm`, of models with normalized keys)."""


@dataclass(frozen=True)
class LogicalAxis:
    """An axis of an array that has a logical name."""

    axis: Axis
    name: str
    path: str


def logical_axes(arrays: Sequence[tuple[Var, Leaf]], notes: list[str]) -> list[LogicalAxis]:
    """The logical names of arrays; names that are left out are reported in `notes`.

    Raises:
      Unimportable: more names than axes.
    """
    sure: list[LogicalAxis] = []
    perhaps: list[LogicalAxis] = []
    for v, leaf in arrays:
        if leaf.noted is None:
            continue
        names = leaf.noted.names
        if len(names) > len(v.shape):
            raise Unimportable(
                f"{leaf.path!r} has the logical axes {_text(names)}, but its shape {v.shape} "
                f"has {len(v.shape)} axes; give one name per axis"
            )
        if len(names) < len(v.shape):
            notes.append(
                f"{leaf.path} has the logical axes {_text(names)}, but its shape {v.shape} has "
                f"{len(v.shape)} axes, so the names are ignored; name the axis of stacked layers with "
                "nn.PARTITION_NAME"
            )
            continue
        found = [LogicalAxis((v, a), name, leaf.path) for a, name in enumerate(names) if name]
        (sure if leaf.noted.logical else perhaps).extend(found)
    sizes: dict[str, set[int]] = defaultdict(set)
    for x in perhaps:
        sizes[x.name].add(_size(x))
    several = [x for x in perhaps if len(sizes[x.name]) > 1]
    if len(several) >= _MESH_SHARE * len(perhaps) > 0:
        name = several[0].name
        notes.append(
            f"the axis names of {several[0].path} and other arrays are read as mesh axes, not as dimensions, "
            f"because {name!r} occurs with the sizes {', '.join(map(str, sorted(sizes[name])))}; name "
            "dimensions with names=, and check these shardings with `layoutopt lint`"
        )
        perhaps = []
    return sure + perhaps


def _size(x: LogicalAxis) -> int:
    v, a = x.axis
    return v.shape[a]


def _text(names: Sequence[str | None]) -> str:
    return f"({', '.join(map(str, names))})"


def same_dimensions(axes: Sequence[LogicalAxis], apart: Collection[str]) -> list[list[Axis]]:
    """Axes with one logical name and one size, except those of arrays in `apart`, which the user names."""
    found: dict[tuple[str, int], list[Axis]] = defaultdict(list)
    for x in axes:
        if x.path not in apart:
            found[x.name, _size(x)].append(x.axis)
    return [listed for listed in found.values() if len(listed) > 1]


def called(
    axes: Sequence[tuple[FactorNode, LogicalAxis]],
) -> tuple[dict[FactorNode, tuple[str, str]], list[str]]:
    """Class -> its logical name and an array that has it, from (class, axis) of all, most frequent first; and
    notes of classes that have several names."""
    votes: dict[FactorNode, Counter[str]] = defaultdict(Counter)
    where: dict[FactorNode, str] = {}
    for node, x in axes:
        votes[node][x.name] += 1
        where.setdefault(node, x.path)
    found, notes = {}, []
    for node, names in sorted(votes.items(), key=lambda item: -item[1].total()):
        first, *others = (name for name, _ in names.most_common())
        found[node] = first, where[node]
        if others:
            listed = ", ".join(repr(n) for n in (first, *others))
            notes.append(f"the logical axes {listed} are the same dimension, which is named {first!r}")
    return found, notes
