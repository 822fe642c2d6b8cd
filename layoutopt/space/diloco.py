"""An axis that synchronises rarely (DiLoCo): each choice, or none, is a search of its own (`api.replicas`),
so a subproblem has nothing to choose.

Nothing is split over the axis except the dimension of the replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument
from layoutopt.space.kind import (
    PLAIN,
    Beyond,
    Choice,
    Chosen,
    Decision,
    LeftOut,
    PlanField,
    Target,
    Typed,
    Words,
)
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.pipeline import check_axis, check_whole
from mesh_tf_core.lower.storage import read_stage
from mesh_tf_core.tracing.diloco import DiLoCo
from mesh_tf_core.tracing.graph import Graph


def _one(value: Any) -> DiLoCo | None:
    found = DiLoCo.parse(value) if isinstance(value, str) else value
    if not isinstance(found, DiLoCo | None):
        raise UserError(f"diloco {found!r}: write the axis and the period, e.g. 'sites:period=30'")
    return found


@dataclass(frozen=True)
class Rarely(Decision):
    """The axis of the replicas, and the settings of their synchronisation."""

    diloco: DiLoCo | None = None
    label = "DiLoCo replicas"
    asks: ClassVar[Mapping[str, Any]] = {
        "diloco": argument(
            None,
            Option(
                "--diloco",
                "WAY",
                "Plan for DiLoCo: one replica at each position of a mesh axis, synchronised every `period` "
                "steps, e.g. sites:period=30. Each replica gets the model's batch. To compare settings, "
                "repeat the option, or separate values by /, e.g. sites:period=30/100,bits=32/4; the "
                "replicas of each setting then share the batch. never: no DiLoCo; free: compare never with "
                "every axis between nodes or slices (repeatable).",
                usual="all devices synchronise in every step",
                several=True,
            ),
            parse=_one,
            plan=str,
            text=lambda value: None if value is None else str(value),
            names_axes=True,
            by_name=False,
        ),
    }
    says = PlanField(
        "diloco", str, "", lambda rare: str(rare or ""), lambda said: DiLoCo.parse(said) if said else None
    )
    by_hand = Option(
        "--diloco",
        "AXIS[:period=30,...]",
        "DiLoCo: one replica at each position of this mesh axis, with its own batches, synchronised every "
        "`period` steps. Settings and defaults: period=30; rate=0.7 and momentum=0.9 of "
        "the outer optimizer; fragments=1 (parts that synchronise in turn); bits=32, 8 or 4 per number sent; "
        "delay=0 (steps between exchange and merge); alpha=0.5 (with a delay).",
        usual="all devices synchronise in every step",
    )
    word = "replicas"
    place = 8

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        """Nothing: a step in which replicas train alone is another step."""
        return {}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        if target.axes and allowed.diloco is None:
            yield LeftOut(cls.label, cls.label, "--diloco AXIS")
        elif target.axes:
            yield LeftOut(cls.label, "other DiLoCo settings", "--diloco", finer=True)

    @classmethod
    def check(cls, allowed: Space) -> None:
        if allowed.diloco is None:
            return
        axis = allowed.diloco.axis
        over = [(f"--pin {dim}", axes) for dim, axes in allowed.pins.items()]
        stages = [stage for stage in allowed.storage if "@" in stage]
        over += [(f"--storage {stage}", read_stage(stage).over or ()) for stage in stages]
        for said, axes in over:
            if axis in axes:
                raise UserError(
                    f"{said}: axis {axis!r} is the axis of the --diloco replicas and cannot split "
                    "anything else; name another axis"
                )

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        if allowed.diloco is not None:
            check_axis(allowed.diloco, mesh)
            check_whole(allowed.diloco, allowed.stages)
            yield cls(REPLICA, ((allowed.diloco.axis,),), allowed.diloco)

    def apply(self, choice: Choice, to: Chosen) -> None:
        to.options["diloco"] = self.diloco

    def read(self, layout: Layout, options: Options) -> Choice:
        return self.options[0]

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        for text in texts:
            if text in ("never", "free") or "/" in text:
                raise UserError(
                    f"--diloco {text}: only `search` compares several settings; write a single "
                    "setting, e.g. sites:period=30, or remove --diloco"
                )
        return {"diloco": DiLoCo.parse(texts[-1]) if texts else None}

    @classmethod
    def in_words(cls, said: Any) -> Words:
        if not said.diloco:
            return PLAIN
        axis = said.diloco.partition(":")[0]
        return f"train separately and synchronise rarely ({said.diloco})", f"replicas of {axis}"

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        if how := said.diloco:
            alone = f"replicas along {how.partition(':')[0]!r} train separately for some steps"
            yield Beyond("diloco", how, alone, "search without --diloco")
