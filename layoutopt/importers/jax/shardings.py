"""Shardings of a JAX function's arrays, as a plan has them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import KEY, Leaf, Noted
from layoutopt.importers.arrays.placing import ArrayAxes, ArrayPlacing, ImportedFunction, Spec
from layoutopt.importers.jax.internals import dtype_of, jax_module
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT
from mesh_tf_core.model import Model


def leaves_of(tree: Any) -> tuple[list[Leaf], Any]:
    """The arrays of a pytree with their paths, and the tree of their types for tracing."""
    jax = jax_module()
    leaves, types = [], []
    for name, leaf, noted in flat(tree):
        if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
            leaf = _array(leaf, name)
        types.append(jax.ShapeDtypeStruct(tuple(leaf.shape), leaf.dtype))
        abstract = isinstance(leaf, jax.ShapeDtypeStruct | jax.core.Tracer)
        dtype = dtype_of(leaf.dtype)
        value = None if abstract or dtype == KEY else leaf
        leaves.append(Leaf(name, tuple(map(int, leaf.shape)), dtype, value, noted))
    return leaves, jax.tree_util.tree_unflatten(structure(tree), types)


def _array(leaf: Any, name: str) -> Any:
    """A Python number, or a sequence, as an array of JAX's default precision."""
    try:
        found = np.asarray(leaf)
        if found.dtype.kind in "OSU":
            raise TypeError
    except (TypeError, ValueError):
        raise UserError(
            f"from_jax: {name or 'an argument'} is a {type(leaf).__name__}, not an array; give arrays or "
            "jax.ShapeDtypeStruct, and bind arguments that are not arrays with functools.partial"
        ) from None
    if found.dtype.itemsize == 8 and not jax_module().config.jax_enable_x64:
        narrow = {"f": np.float32, "i": np.int32, "u": np.uint32}
        found = found.astype(narrow.get(found.dtype.kind, found.dtype))
    return found


def flat(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any, Noted | None]]:
    """The leaves of a pytree in order: path, leaf, and the metadata of the box around it."""
    flatten = jax_module().tree_util.tree_flatten_with_path
    found: list[tuple[str, Any, Noted | None]] = []
    for keys, item in flatten(tree, is_leaf=lambda x: _is_box(x) or bool(is_leaf and is_leaf(x)))[0]:
        if _is_box(item):
            # The first key is what the box calls its array.
            inner = flatten(item, is_leaf=is_leaf)[0]
            found += [(path_of((*keys, *rest[1:])), leaf, _noted(item)) for rest, leaf in inner]
        else:
            found.append((path_of(keys), item, None))
    return found


def _is_box(x: Any) -> bool:
    """A box of Linen, or a variable of NNX."""
    kind = type(x)
    linen = hasattr(kind, "unbox") and hasattr(x, "names")
    return linen or callable(getattr(kind, "get_metadata", None))


_NNX_KEYS = ("out_sharding", "sharding_names", "sharding")
"""What NNX calls names of axes; the newest first."""


def _noted(box: Any) -> Noted | None:
    if hasattr(type(box), "unbox"):
        names, logical = box.names, hasattr(box, "rules")
    else:
        metadata = box.get_metadata()
        names = next((metadata[k] for k in _NNX_KEYS if metadata.get(k)), None)
        logical = bool(metadata.get("sharding_rules"))
    return noted_names(names, logical)


def noted_names(names: Any, logical: bool) -> Noted | None:
    """Names of axes as Flax writes them, a tuple or a PartitionSpec; None for others.

    Several names for one axis are axes of a mesh, never a dimension.
    """
    if not isinstance(names, tuple | list | jax_module().sharding.PartitionSpec) or not len(names):
        return None
    return Noted(tuple(n if isinstance(n, str) else None for n in names), logical)


def path_of(keys: Sequence[Any]) -> str:
    """The keys of a pytree as a path."""
    parts = [
        str(next((getattr(key, a) for a in ("key", "idx", "name") if hasattr(key, a)), key)) for key in keys
    ]
    return "/".join(re.sub(r"[^\w.\-/]+", "_", p).strip("_") or "_" for p in parts)


def leaves(tree: Any) -> list[Any]:
    """The leaves of a pytree."""
    found: list[Any] = jax_module().tree_util.tree_leaves(tree)
    return found


def structure(tree: Any) -> Any:
    """The structure of a pytree, to be compared."""
    return jax_module().tree_util.tree_structure(tree)


def new_state(auxiliary: Any, state: Any) -> Any:
    """The part of a loss's auxiliary values that is built like its state, its new value; None: none."""
    if state is None or auxiliary is None:
        return None
    wanted = structure(state)
    parts = [auxiliary, *(auxiliary if isinstance(auxiliary, tuple | list) else ())]
    parts += auxiliary.values() if isinstance(auxiliary, Mapping) else ()
    return next((part for part in parts if structure(part) == wanted), None)


def said_of(names: Any, known: Sequence[Leaf]) -> tuple[dict[str, Any], dict[str, Noted]]:
    """Parses `names` of the user: names of axes of arrays, new names of dimensions, and pytrees of
    PartitionSpecs (Flax's `get_partition_spec`) as logical axes by path.

    Raises:
      UserError: it is neither, or has a path that no array has.
    """
    if names is None:
        return {}, {}
    spec = jax_module().sharding.PartitionSpec
    own: dict[str, Any] = {}
    trees: Any = names
    if isinstance(names, Mapping):
        plain = [k for k, v in names.items() if isinstance(v, str | tuple | list | None)]
        own = {k: names[k] for k in plain if not isinstance(names[k], spec)}
        trees = {k: v for k, v in names.items() if k not in own}
    paths = {leaf.path for leaf in known}
    noted = {}
    for path, leaf, _ in flat(trees, is_leaf=lambda x: isinstance(x, spec)):
        if not isinstance(leaf, spec):
            raise UserError(
                f"from_jax: names has the value {leaf!r} at {path!r}; give a tuple of names for the axes "
                "of an array, a new name for a dimension, or a pytree of PartitionSpec built like params"
            )
        if path not in paths:
            hint = known_names(path, paths)
            raise UserError(f"from_jax: names has an entry for {path!r}, but no array has this path; {hint}")
        found = noted_names(leaf, logical=True)
        if found is not None:
            noted[path] = found
    return own, noted


def partition_spec(spec: Spec) -> Any:
    """The PartitionSpec; axes that it cannot express are left to XLA's propagation."""
    P = jax_module().sharding.PartitionSpec
    return P(*(P.UNCONSTRAINED if a is None else None if not a else a[0] if len(a) == 1 else a for a in spec))


class Shardings:
    """The shardings of parameters, inputs, gradients and an optimizer's state.

    Args:
      devices: a JAX mesh with the plan's axes; by default a new one of JAX's devices.

    Attributes:
      mesh: the plan's mesh as a `jax.sharding.Mesh`.
      where: the table of where values live.
    """

    def __init__(
        self,
        model: Model,
        origin: ImportedFunction,
        mesh: Mesh,
        layout: Layout,
        options: Options,
        devices: Any = None,
    ) -> None:
        self.model, self.origin, self.options = model, origin, options
        self.where = placement(model.step_of(mesh, layout, options).graph, mesh, layout, options)
        self.placing = ArrayPlacing(mesh, layout, origin, model.lower(mesh, layout, options))
        self.mesh = jax_mesh(mesh) if devices is None else devices

    def shardings(self, params: Any) -> Any:
        """`NamedSharding`s of parameters as the plan stores them between steps: a pytree like `params`.

        Raises:
          UserError: arrays that the model does not have, or that JAX's shardings cannot place so.
        """
        return self._tree(params, self.origin.parameters, self.placing.stored, "parameter")

    def batch_shardings(self, batch: Any) -> Any:
        """`NamedSharding`s of the loss's batch: a pytree like it."""
        return self._tree(batch, self.origin.batch, self.placing.argument, "input")

    def stored_shardings(self, state: Any) -> Any:
        """`NamedSharding`s of values that the loss stores and does not train (`state`) between steps: a
        pytree of the same structure."""
        return self._tree(state, self.origin.state, self.placing.stored, "state")

    def state_shardings(self, state: Any, params: Any) -> Any:
        """`NamedSharding`s of an optimizer's state: arrays with a parameter's path and shape are placed as
        the plan stores optimizer state (ZeRO); all others are replicated.

        Args:
          state: optimizer.init(params), or its types.
        """
        known = {leaf.path: leaf for leaf in leaves_of(params)[0]}
        return self._built(state, [self._slot(leaf, known) for leaf in leaves_of(state)[0]])

    def gradient_shardings(self, params: Any) -> Any:
        """The shardings of gradients: those of optimizer state if the storage splits gradients, else those of
        parameters."""
        return self._tree(params, self.origin.parameters, self._gradient, "parameter")

    def updated_shardings(self, params: Any) -> Any:
        """The shardings of parameters while they are updated: as the optimizer's state, so that a device adds
        to its share and the sum is gathered."""
        stored = partial(self.placing.stored, slot=True)
        return self._tree(params, self.origin.parameters, stored, "parameter")

    def _gradient(self, of: ArrayAxes) -> Spec:
        trained = of.variable in self.where.variables
        split = trained and self.where.row(GRADIENT, of.variable, BACKWARD).layout is not None
        return self.placing.stored(of, slot=split)

    def _slot(self, leaf: Leaf, params: Mapping[str, Leaf]) -> Spec:
        parts = leaf.path.split("/")
        for first in range(len(parts) + 1):
            path = "/".join(parts[first:])
            if path in params and path in self.origin.parameters and params[path].shape == leaf.shape:
                return self.placing.stored(self.origin.parameters[path], slot=True)
        return ((),) * len(leaf.shape)

    def _tree(
        self, tree: Any, known: Mapping[str, ArrayAxes], spec: Callable[[ArrayAxes], Spec], what: str
    ) -> Any:
        found, _ = leaves_of(tree)
        for leaf in found:
            if leaf.path not in known:
                raise UserError(
                    f"plan.jax: the model has no {what} {leaf.path!r}; {known_names(leaf.path, known)}"
                )
            if len(leaf.shape) != len(known[leaf.path].shape):
                raise UserError(
                    f"plan.jax: {leaf.path!r} has shape {leaf.shape}, but shape {known[leaf.path].shape} "
                    "in the plan's model; search again with this array"
                )
        return self._built(tree, [spec(known[leaf.path]) for leaf in found])

    def _built(self, tree: Any, specs: Iterable[Spec]) -> Any:
        jax = jax_module()
        made = [jax.sharding.NamedSharding(self.mesh, partition_spec(spec)) for spec in specs]
        return jax.tree_util.tree_unflatten(structure(tree), made)


def jax_mesh(mesh: Mesh, slices: Mapping[str, int] | None = None) -> Any:
    """A mesh of JAX with the axes of `mesh`, over JAX's own devices.

    Args:
      slices: mesh axis -> number of slices that it spans.

    Raises:
      UserError: JAX finds too few devices.
    """
    jax = jax_module()
    from mesh_tf_core.engines.jax.compat import device_mesh, placed

    found = jax.devices()
    if len(found) < mesh.devices:
        raise UserError(
            f"plan.jax: the plan's mesh {mesh} has {mesh.devices} devices, but JAX finds {len(found)}; "
            f"run on {mesh.devices} devices, or simulate them on CPU with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.devices}"
        )
    return device_mesh(mesh, placed(mesh, found[: mesh.devices], slices))
