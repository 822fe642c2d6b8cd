"""The mesh, the layout and the options of a training: as given, of a plan, or, for `layout="auto"`, of the
search of an installed package above the runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from mesh_tf_core.arguments import check, instance
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

    @property
    def mesh(self) -> Mesh: ...

    @property
    def layout(self) -> Layout: ...

    @property
    def options(self) -> Options: ...

    @property
    def slices(self) -> Mapping[str, int]:
        """Mesh axis -> number of slices that it spans."""


class LayoutFinder(Protocol):
    """Finds layouts for this machine."""

    def best(self, model: Model, mesh: Mesh) -> Mapping[str, Any]:
        """The plan of the best layout, as JSON, which one process sends to the others."""

    def read(self, plan: Mapping[str, Any]) -> PlannedTraining:
        """The plan of its JSON."""


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
            "layout='auto' needs an installed package with a search, and there is none; install "
            "layoutopt, or give a layout"
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


DEFAULT = Options()
PLACE = instance((Mesh, str, PlannedTraining), "a mesh, e.g. 'data:2;model:4', or a plan")
LAYOUT = instance((Layout, str), "a layout, e.g. 'batch:data;heads:model', or 'auto'")
OPTIONS = instance(Options, "mtf.Options")


@dataclass(frozen=True)
class DecidedTraining:
    """Where and how a training runs; `plan`: the plan that says so, if one does."""

    mesh: Mesh
    layout: Layout
    options: Options
    plan: PlannedTraining | None = None

    @classmethod
    def of(cls, plan: PlannedTraining) -> DecidedTraining:
        """The decisions of a plan."""
        return cls(plan.mesh, plan.layout, plan.options, plan)


def decided(
    model: Model,
    mesh: Mesh | str | PlannedTraining,
    layout: Layout | str,
    options: Options,
    cluster: Cluster | None,
) -> DecidedTraining:
    """The decisions behind the arguments of a `Trainer`, which describes them.

    Raises:
      UserError: an argument is of another type, or a plan is of another model or has company.
    """
    for given in (mesh, layout):
        if isinstance(given, str) and given.endswith(".json"):
            raise UserError(
                f"Trainer: {given!r} is the name of a file; load the plan first: Trainer(model, "
                f"layoutopt.load_plan({given!r}))"
            )
    check("Trainer", mesh=(mesh, PLACE), layout=(layout, LAYOUT), options=(options, OPTIONS))
    if not isinstance(mesh, Mesh | str):
        mesh.check(model)
        if layout or options != DEFAULT:
            raise UserError(
                "Trainer: a plan already sets the layout and the options; remove the arguments layout and "
                "options"
            )
        return DecidedTraining.of(mesh)
    mesh = Mesh(mesh) if isinstance(mesh, str) else mesh
    if layout == "auto":
        return DecidedTraining.of(planned(model, mesh, cluster))
    return DecidedTraining(mesh, Layout(layout) if isinstance(layout, str) else layout, options)
