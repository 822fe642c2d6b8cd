"""Activation checkpointing: whether loops over a dimension are recomputed in backward instead of saving what
their bodies compute."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from layoutopt.space.kind import Allowed, Choice, Chosen, Decision, Touched
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.tracing.graph import Graph

ON: Choice = ("on",)


@dataclass(frozen=True)
class Recompute(Decision):
    """The loops over one dimension: () saves, ("on",) recomputes."""

    prefix = "recompute "

    @classmethod
    def check(cls, allowed: Allowed) -> None:
        if not allowed.recompute:
            raise UserError("recompute is empty; allow False, True or both")

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Allowed) -> Iterator[Self]:
        options = tuple(ON if again else () for again in allowed.recompute)
        for dim in recomputable(graph):
            yield cls(dim, options)

    @property
    def leanest(self) -> Choice:
        return max(self.options)

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            to.options["recompute"] = to.options.get("recompute", frozenset()) | {self.subject}

    def read(self, layout: Layout, options: Options) -> Choice:
        return ON if self.subject in options.recompute else ()

    @classmethod
    def changing(cls, touched: Touched) -> list[str]:
        return [recompute_name(dim) for dim in (*touched.recomputed, *touched.saved)]

    @classmethod
    def written(cls, options: Options) -> dict[str, Any]:
        return {"recompute": sorted(options.recompute)}

    @classmethod
    def parsed(cls, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"recompute": frozenset(said["recompute"])}


def recompute_name(dim: str) -> str:
    """Name of the decision about the loops over a dimension."""
    return Recompute.prefix + dim
