"""The layout of a user's own shardings: PartitionSpecs of parameters and inputs, as dimensions."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from layoutopt.importers.jax.internals import jax_module
from layoutopt.importers.jax.leaves import flat
from layoutopt.importers.jax.origin import ArrayAxes, ImportedFunction
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options

STORED = 3
"""The stage of a parameter that is split over axes of the batch: it is gathered where it is used."""


@dataclass(frozen=True)
class WrittenLayout:
    """The layout that shardings imply.

    Attributes:
      doubts: arrays that place a dimension otherwise than others, in words.
    """

    layout: Layout
    options: Options
    doubts: list[str] = field(default_factory=list)


def written(origin: ImportedFunction, mesh: Mesh, parameters: Any, batch: Any) -> WrittenLayout:
    """The layout and the storage of pytrees of PartitionSpec or NamedSharding.

    A parameter's axes that split the batch too store it split; all others split its dimensions. A dimension
    that arrays place differently gets the placement of most elements.

    Raises:
      UserError: an array or an axis that is not there, an axis of an array that cannot be split so.
    """
    fed = list(_splits(batch, origin.batch, mesh, "input"))
    own = list(_splits(parameters, origin.parameters, mesh, "parameter"))
    rows = {a for _, _, axes in fed for a in axes}
    storage = {array.variable: STORED for array, _, axes in own if rows.intersection(axes)}
    read = [(array, dim, tuple(a for a in axes if a not in rows)) for array, dim, axes in own]
    votes: dict[str, Counter[Axes]] = defaultdict(Counter)
    where: dict[tuple[str, Axes], str] = {}
    for array, dim, axes in (*fed, *read):
        votes[dim][axes] += math.prod(array.shape)
        where.setdefault((dim, axes), repr(array.path))
    rules, doubts = {}, []
    for dim, found in votes.items():
        split = [axes for axes, _ in found.most_common() if axes]
        if not split:
            continue
        rules[dim] = split[0]
        for other in found:
            if other != split[0]:
                doubts.append(
                    f"{dim!r} is {_over(split[0])} in {where[dim, split[0]]}, but {_over(other)} in "
                    f"{where[dim, other]}; an operation that reads both arrays reshards one of them"
                )
    return WrittenLayout(Layout(rules), Options(storage=storage), doubts)


def _over(axes: Axes) -> str:
    return f"split over {'+'.join(axes)}" if axes else "whole"


def _splits(
    tree: Any, known: Mapping[str, ArrayAxes], mesh: Mesh, what: str
) -> Iterator[tuple[ArrayAxes, str, Axes]]:
    """Every dimension of every array with the axes that its sharding gives it."""
    jax = jax_module()
    spec, sharding = jax.sharding.PartitionSpec, jax.sharding.NamedSharding
    for path, leaf, _ in flat(tree, is_leaf=lambda x: isinstance(x, spec | sharding)):
        if path not in known:
            raise UserError(f"shardings(): the model has no {what} {path!r}; {known_names(path, known)}")
        found = leaf.spec if isinstance(leaf, sharding) else leaf
        if not isinstance(found, spec):
            raise UserError(
                f"shardings(): {what} {path!r} has the sharding {leaf!r}; give a PartitionSpec or a "
                "NamedSharding"
            )
        array = known[path]
        for a, names in enumerate(array.axes):
            entry = found[a] if a < len(found) else None
            axes: Axes = () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
            for axis in axes:
                mesh.size(axis)
            yield from _factors(array, a, names, axes, mesh)


def _factors(
    array: ArrayAxes, a: int, names: tuple[str, ...], axes: Axes, mesh: Mesh
) -> Iterator[tuple[ArrayAxes, str, Axes]]:
    """The axes of one axis of an array, from its outermost factor inwards."""
    rest = list(axes)
    for name, size in zip(names, array.sizes[a], strict=True):
        taken: Axes = ()
        while rest and size % mesh.group_size((*taken, rest[0])) == 0:
            taken += (rest.pop(0),)
        yield array, name, taken
        if mesh.group_size(taken) < size:
            break
    if rest:
        text = " x ".join(f"{n}:{size}" for n, size in zip(names, array.sizes[a], strict=True))
        raise UserError(
            f"shardings(): axis {a} of {array.path!r} ({text}) cannot be split over {'+'.join(axes)}, "
            "because the pieces would not be whole parts of its dimensions; choose mesh axes whose size "
            "divides the outermost dimension"
        )
