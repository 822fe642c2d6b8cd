"""How variables are stored: as the layout says, or split further (see `mesh_tf_core.lower.storage`).

Variables of the same dimensions are one class, and one decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from layoutopt.space.kind import Allowed, Choice, Chosen, Decision, Touched
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import STAGES, stage_number
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Storage(Decision):
    """The stage of one class of variables, by the names of these: (), ("zero1",), ("zero2",), ("zero3",)."""

    variables: tuple[str, ...] = ()
    prefix = "storage of "

    @classmethod
    def check(cls, allowed: Allowed) -> None:
        if not allowed.storage:
            raise UserError(f"storage names no stage; allow one or more of {', '.join(STAGES)}")
        for stage in allowed.storage:
            stage_number(stage)

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Allowed) -> Iterator[Self]:
        stages = tuple(() if stage == STAGES[0] else (stage,) for stage in allowed.storage)
        for name, variables in stored_classes(graph).items():
            yield cls(name.removeprefix(cls.prefix), stages, tuple(v.name for v in variables))

    @property
    def leanest(self) -> Choice:
        return max(self.options, key=stage_of)

    def apply(self, choice: Choice, to: Chosen) -> None:
        if choice:
            stages = to.options.setdefault("storage", {})
            stages.update(dict.fromkeys(self.variables, stage_of(choice)))

    def read(self, layout: Layout, options: Options) -> Choice:
        stages = {options.storage.get(v, 0) for v in self.variables}
        return (STAGES[stages.pop()],) if len(stages) == 1 and stages != {0} else ()

    @classmethod
    def changing(cls, touched: Touched) -> list[str]:
        return [storage_class(v) for v in touched.variables]

    @classmethod
    def written(cls, options: Options) -> dict[str, Any]:
        return {"storage": {name: STAGES[stage] for name, stage in sorted(options.storage.items()) if stage}}

    @classmethod
    def parsed(cls, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"storage": {name: stage_number(stage) for name, stage in said["storage"].items()}}


def stage_of(choice: Choice) -> int:
    """The stage that an option is."""
    return stage_number(choice[0]) if choice else 0


def storage_class(variable: Variable) -> str:
    """Name of the decision about a variable's storage."""
    return Storage.prefix + " ".join(variable.shape.names)


def stored_classes(graph: Graph) -> dict[str, list[Variable]]:
    """Name of the decision -> its trained variables; scalars have none."""
    out: dict[str, list[Variable]] = {}
    for v in graph.variables.values():
        if v.trainable and len(v.shape):
            out.setdefault(storage_class(v), []).append(v)
    return out
