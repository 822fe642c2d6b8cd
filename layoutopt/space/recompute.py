"""Activation checkpointing: whether loops over a dimension are recomputed in backward instead of saving what
their bodies compute, and what of it they keep (`mesh_tf_core.lower.kept`)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from layoutopt.space.kind import Allowed, Choice, Chosen, Decision, Feature, Touched
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.kept import Recomputed
from mesh_tf_core.lower.rematerialization import keep_sets, recomputable
from mesh_tf_core.tracing.graph import Graph

ON: Choice = ("on",)
SELECTIVE = "selective"
"""Every set of kinds that may be kept (`keep_sets`)."""


@dataclass(frozen=True)
class Recompute(Decision):
    """The loops over one dimension: () saves, ("on",) recomputes, ("on", "products") but for what is kept."""

    prefix = "recompute "
    features = (
        Feature("recompute", "recompute", bool, lambda _, options: bool(options.recompute)),
        Feature(
            "selective",
            "recompute",
            lambda again: again == SELECTIVE,
            lambda _, options: any(Recomputed.parse(text).keep for text in options.recompute),
        ),
    )

    @classmethod
    def check(cls, allowed: Allowed) -> None:
        if not allowed.recompute:
            raise UserError("recompute is empty; allow False, True or both")
        for one in allowed.recompute:
            if not isinstance(one, bool) and one != SELECTIVE:
                raise UserError(f"recompute {one!r}: allow False, True or {SELECTIVE!r}")

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Allowed) -> Iterator[Self]:
        plain = [() for again in allowed.recompute if again is False]
        whole = [ON for again in allowed.recompute if again is True]
        for dim in recomputable(graph):
            kept = keep_sets(graph, dim) if SELECTIVE in allowed.recompute else ()
            yield cls(dim, (*plain, *((*ON, *keep) for keep in kept), *whole) or (ON,))

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            text = str(Recomputed(self.subject, choice[1:]))
            to.options["recompute"] = to.options.get("recompute", frozenset()) | {text}

    def read(self, layout: Layout, options: Options) -> Choice:
        return next((c for text in options.recompute for d, c in [chosen(text)] if d == self.name), ())

    @classmethod
    def changing(cls, touched: Touched) -> list[str]:
        return [recompute_name(dim) for dim in (*touched.recomputed, *touched.saved)]

    @classmethod
    def written(cls, options: Options) -> dict[str, Any]:
        return {"recompute": sorted(options.recompute)}

    @classmethod
    def parsed(cls, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"recompute": frozenset(said["recompute"])}


def chosen(text: str) -> tuple[str, Choice]:
    """The decision about some loops, and the option that `kept.Recomputed` says in words."""
    asked = Recomputed.parse(text)
    return recompute_name(asked.dim), (*ON, *asked.keep)


def recompute_name(dim: str) -> str:
    """Name of the decision about the loops over a dimension."""
    return Recompute.prefix + dim
