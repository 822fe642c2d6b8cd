"""A user's own shardings: pytrees of PartitionSpec or NamedSharding, read as JAX reads them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from layoutopt.importers.arrays.placing import ArrayAxes
from layoutopt.importers.arrays.written import ReadArray, WrittenLayout, implied, read_array
from layoutopt.importers.jax.internals import jax_module
from layoutopt.importers.jax.model import JaxModel
from layoutopt.importers.jax.shardings import flat, partition_spec
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options

INPUT, PARAMETER = "input", "parameter"


def written(model: JaxModel, mesh: Mesh, parameters: Any, batch: Any, options: Options) -> WrittenLayout:
    """The layout and the storage of pytrees of PartitionSpec or NamedSharding.

    Args:
      options: what else is decided; they store the arrays whose shardings do not.

    Raises:
      UserError: an array or an axis that is not there, and what JAX refuses: an axis twice in one
        PartitionSpec, more entries than the array has axes, a size that the devices do not divide.
    """
    assert model.origin is not None
    fed = _read(batch, model.origin.batch, mesh, INPUT)
    own = _read(parameters, model.origin.parameters, mesh, PARAMETER)
    return implied(model, mesh, (*fed, *own), options, lambda spec: str(partition_spec(tuple(spec))))


def _read(tree: Any, known: Mapping[str, ArrayAxes], mesh: Mesh, what: str) -> Iterator[ReadArray]:
    """Every array of a pytree of shardings."""
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
        entries = _entries(known[path], found, mesh, f"shardings(): {what} {path!r}")
        yield read_array(known[path], entries, mesh, fed=what == INPUT)


def _entries(array: ArrayAxes, spec: Any, mesh: Mesh, what: str) -> tuple[Axes, ...]:
    """The mesh axes of each axis of an array; UserError where JAX refuses the sharding."""
    none = (None, type(spec).UNCONSTRAINED)
    entries = [() if e in none else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    shape = array.shape
    if len(entries) > len(shape):
        raise UserError(
            f"{what} has {spec} with {len(entries)} entries, but its shape {shape} has {len(shape)} axes; "
            "give at most one entry per axis"
        )
    named = [axis for axes in entries for axis in axes]
    for axis in named:
        if axis not in mesh.names:
            raise UserError(
                f"{what} has {spec}, but mesh {mesh} has no axis {axis!r}; {known_names(axis, mesh.names)}"
            )
    twice = [axis for axis, times in Counter(named).items() if times > 1]
    if twice:
        raise UserError(
            f"{what} has {spec}, which names mesh axis {twice[0]!r} twice, and JAX refuses that "
            "(DuplicateSpecError); name each mesh axis at most once in a PartitionSpec"
        )
    for a, (size, axes) in enumerate(zip(shape, entries, strict=False)):
        ways = mesh.group_size(axes)
        if size % ways:
            raise UserError(
                f"{what} has {spec}, but axis {a} of its shape {shape} has size {size}, which the {ways} "
                f"devices of {'+'.join(axes)} do not divide, and JAX refuses that (IndivisibleError); pad "
                f"the axis to {size + -size % ways}, or split another axis"
            )
    split = [tuple(a for a in axes if mesh.size(a) > 1) for axes in entries[: len(shape)]]
    return (*split, *((),) * (len(shape) - len(split)))
