"""`layout="auto"`: the search of an installed package above the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from mesh_tf_core.engines import Cluster
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model


@runtime_checkable
class PlannedTraining(Protocol):
    """The decisions of a plan; `layoutopt.search` gives one."""

    def check(self, model: Model) -> None:
        """UserError, naming the difference, unless it was made for this model."""
        ...

    @property
    def mesh(self) -> Mesh: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def options(self) -> Options: ...

    @property
    def slices(self) -> Mapping[str, int]:
        """Mesh axis -> number of slices that it spans."""
        ...


class LayoutFinder(Protocol):
    """Finds layouts for this machine."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        """The plan of the best layout, as JSON, which one process sends to the others."""
        ...

    def read(self, plan: Mapping[str, Any]) -> PlannedTraining:
        """The plan of its JSON."""
        ...


GROUP = "mesh_tf_core.search"
"""The entry points by which packages name their search (packaging.python.org, entry points specification)."""


def installed() -> LayoutFinder:
    """The search of `layout="auto"`.

    Raises:
      UserError: no installed package has one.
    """
    found = tuple(entry_points(group=GROUP))
    if not found:
        raise UserError(
            'layout="auto" needs a search, and no installed package has one; install layoutopt, or give a '
            "layout instead"
        )
    search: LayoutFinder = found[0].load()
    return search


def planned(model: Model, mesh: Mesh, cluster: Cluster | None) -> PlannedTraining:
    """The plan of the best layout; of a cluster's processes one searches it for all."""
    search = installed()
    if cluster is None:
        found = search.best(model, mesh)
    else:
        cluster.start(mesh.devices)
        found = cluster.share("the search", lambda: search.best(model, mesh))
    return search.read(found)
