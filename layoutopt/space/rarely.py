"""An axis that synchronises rarely (DiLoCo): given, not chosen, so no decision of a search is about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from layoutopt.space.kind import Allowed, Choice, Chosen, Decision
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.replicas import DiLoCo


@dataclass(frozen=True)
class Rarely(Decision):
    """What files say of it."""

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Allowed) -> Iterator[Self]:
        return iter(())

    def apply(self, choice: Choice, to: Chosen) -> None:
        to.options["diloco"] = DiLoCo.parse(choice[0]) if choice else None

    def read(self, layout: Layout, options: Options) -> Choice:
        return (str(options.diloco),) if options.diloco else ()

    @classmethod
    def written(cls, options: Options) -> dict[str, Any]:
        return {"diloco": str(options.diloco or "")}

    @classmethod
    def parsed(cls, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"diloco": DiLoCo.parse(said["diloco"]) if said["diloco"] else None}
