"""The schedules of pipelines (`mesh_tf_core.ir.schedules`).

Another schedule is another graph, so each is a separate subproblem, in which nothing is left to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument
from layoutopt.space.kind import (
    Beyond,
    Choice,
    Chosen,
    Decision,
    Feature,
    LeftOut,
    PlanField,
    Target,
    Typed,
    not_allowed,
)
from layoutopt.space.stages import StageSplit
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import GPIPE, KINDS, NAMES, ONE_WAY, check_schedule, kind_name
from mesh_tf_core.lower import Options
from mesh_tf_core.tracing.graph import Graph


def _feature(name: str) -> Feature:
    """One kind of schedule, with however many rounds."""
    return Feature(
        name,
        "schedule",
        lambda schedule: kind_name(schedule) == name,
        lambda _, options: kind_name(options.schedule) == name,
    )


@dataclass(frozen=True)
class ScheduleDecision(Decision):
    """The schedule of a subproblem with stages."""

    label = "schedules of pipelines"
    asks: ClassVar[Mapping[str, Any]] = {
        "schedule": argument(
            (GPIPE,),
            Option(
                "--schedule",
                "NAMES",
                f"Pipeline schedules to consider: {', '.join(NAMES)} (comma-separated).",
                usual=GPIPE,
            ),
            by_name=False,
            within=lambda value, said: tuple(each for each in value if kind_name(each) in said),
        ),
    }
    needs = "pipeline"
    says = PlanField(
        "schedule", str, "", lambda name: name if name != GPIPE else "", lambda said: said or GPIPE
    )
    by_hand = Option(
        "--schedule",
        "NAME",
        "Pipeline schedule: gpipe (all forward passes, then all backward passes), 1f1b (each "
        "backward pass as early as possible), circular:2 (gpipe with two virtual stages per stage, "
        "half the bubble), interleaved:2 (1f1b with two virtual stages per stage, half the bubble), "
        "or zb-h1 (1f1b with separate weight gradients, two thirds of the bubble). zb-v, dualpipev and "
        "dualpipe have less idle time only where each stage has a program of its own.",
        usual=GPIPE,
    )
    features = tuple(_feature(name) for name in KINDS if name != GPIPE)

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        return {"schedule": NAMES if StageSplit.everything(target)["pipeline"] else ()}

    @classmethod
    def widest(cls, target: Target) -> dict[str, Any]:
        """Those that have less idle time without a program for each stage too."""
        every = cls.everything(target)["schedule"]
        return {"schedule": every if target.stage_programs else tuple(n for n in every if n in ONE_WAY)}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        if allowed.pipeline:  # else no pipeline was looked at
            yield from not_allowed(cls, target, allowed)
            rounds = "--schedule " + ",".join(f"{name}:R" for name, kind in KINDS.items() if kind.rounds)
            yield LeftOut(cls.label, f"{cls.label}: more rounds", rounds, finer=True)

    @classmethod
    def check(cls, allowed: Space) -> None:
        for schedule in allowed.schedule or ("",):
            check_schedule(schedule, f"--schedule {schedule}")

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Space) -> Iterator[Self]:
        if allowed.stages:
            (schedule,) = allowed.schedule
            yield cls("schedule", ((schedule,) if schedule != GPIPE else (),))

    @classmethod
    def beyond(cls, said: Any) -> Iterator[Beyond]:
        if said.pipeline:
            order = said.schedule or GPIPE
            yield Beyond("schedule", kind_name(order), f"stages run in {order}", "use another --schedule")

    def apply(self, choice: Choice, to: Chosen) -> None:
        to.options["schedule"] = choice[0] if choice else GPIPE

    def read(self, layout: Layout, options: Options) -> Choice:
        return (options.schedule,) if options.schedule != GPIPE else ()

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        return {"schedule": texts[-1] if texts else GPIPE}
