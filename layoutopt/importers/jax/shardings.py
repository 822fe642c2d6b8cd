"""Shardings of a JAX function's arrays, as a plan has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from layoutopt.importers.arrays.contract import Leaf
from layoutopt.importers.arrays.placing import ArrayAxes, ArrayPlacing, ImportedFunction, Spec
from layoutopt.importers.jax.internals import jax_module
from layoutopt.importers.jax.leaves import leaves_of
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.lower.storage import BACKWARD, GRADIENT
from mesh_tf_core.model import Model


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
        found, _ = leaves_of(state)
        jax = jax_module()
        tree = jax.tree_util.tree_structure(state)
        return jax.tree_util.tree_unflatten(tree, [self._named(self._slot(leaf, known)) for leaf in found])

    def gradient_shardings(self, params: Any) -> Any:
        """The shardings of gradients: those of optimizer state if the storage splits gradients, else those of
        parameters."""
        return self._tree(params, self.origin.parameters, self._gradient, "parameter")

    def updated_shardings(self, params: Any) -> Any:
        """The shardings of parameters while they are updated: as the optimizer's state, so that a device adds
        to its share and the sum is gathered."""
        return self._tree(
            params, self.origin.parameters, lambda a: self.placing.stored(a, slot=True), "parameter"
        )

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
        jax = jax_module()
        made = [self._named(spec(known[leaf.path])) for leaf in found]
        return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), made)

    def _named(self, spec: Spec) -> Any:
        return jax_module().sharding.NamedSharding(self.mesh, partition_spec(spec))


def jax_mesh(mesh: Mesh, slices: Mapping[str, int] | None = None) -> Any:
    """A mesh of JAX with the axes of `mesh`, over JAX's own devices.

    Args:
      slices: mesh axis -> number of slices that it spans.

    Raises:
      UserError: JAX finds too few devices.
    """
    jax = jax_module()
    from mesh_tf_core.engines.jax.compat import device_mesh
    from mesh_tf_core.engines.jax.placing import placed

    found = jax.devices()
    if len(found) < mesh.devices:
        raise UserError(
            f"plan.jax: the plan's mesh {mesh} has {mesh.devices} devices, but JAX finds {len(found)}; "
            f"run on {mesh.devices} devices, or simulate them on CPU with "
            f"XLA_FLAGS=--xla_force_host_platform_device_count={mesh.devices}"
        )
    return device_mesh(mesh, placed(mesh, found[: mesh.devices], slices))
