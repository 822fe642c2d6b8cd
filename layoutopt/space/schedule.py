"""When the stages of a pipeline go backward: after all microbatches (`gpipe`), or each microbatch as soon as
it has gone through all stages (`1f1b`); and whether microbatches go round several times (`circular:2` and
`interleaved:2`).

Another schedule is another graph, so that each is a subproblem of its own, where nothing is left to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from layoutopt.space.argument import Option, Space, argument, names
from layoutopt.space.kind import Choice, Chosen, Decision, Feature, LeftOut, Target, Typed, not_allowed
from layoutopt.space.stages import Stages
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import (
    CIRCULAR,
    GPIPE,
    INTERLEAVED,
    ONE_F_ONE_B,
    SCHEDULES,
    alternates,
    check_schedule,
    rounds_of,
)
from mesh_tf_core.lower import Options
from mesh_tf_core.tracing.graph import Graph


def _goes_round(schedule: str, at_once: bool) -> bool:
    """Whether microbatches go round several times, and backward `at_once`."""
    return rounds_of(schedule) > 1 and alternates(schedule) is at_once


@dataclass(frozen=True, kw_only=True)
class Scheduled(Space):
    """Schedules of pipelines (`mesh_tf_core.ir.schedules.SCHEDULES`); of a subproblem with stages, its only
    one."""

    schedule: tuple[str, ...] = argument(
        (GPIPE,),
        parse=lambda value: names(value, "schedule"),
        plan=tuple[str, ...],
        by_name=False,
        options=(
            Option(
                "--schedule",
                "NAMES",
                "When stages may go backward: gpipe, after all microbatches; 1f1b, each at once; "
                "circular:2 and interleaved:2, as gpipe and 1f1b, with microbatches that go round twice, or "
                "more often; of these.",
                usual=GPIPE,
            ),
        ),
    )


@dataclass(frozen=True)
class Schedule(Decision):
    """The schedule of a subproblem with stages."""

    label = "schedules of pipelines"
    asks = Scheduled
    says: ClassVar[Mapping[str, tuple[Any, Any]]] = {"schedule": (str, "")}
    by_hand = Option(
        "--schedule",
        "NAME",
        "When the stages of a pipeline go backward: gpipe, after all microbatches; 1f1b, each microbatch at "
        "once, so that as many are in flight as there are stages; circular:2 and interleaved:2, as these, "
        "with microbatches that go round twice, so that stages wait half as long.",
        usual=GPIPE,
    )
    features = (
        Feature(
            ONE_F_ONE_B,
            "schedule",
            lambda schedule: schedule == ONE_F_ONE_B,
            lambda _, options: options.schedule == ONE_F_ONE_B,
        ),
        Feature(
            CIRCULAR,
            "schedule",
            lambda schedule: _goes_round(schedule, False),
            lambda _, options: _goes_round(options.schedule, False),
        ),
        Feature(
            INTERLEAVED,
            "schedule",
            lambda schedule: _goes_round(schedule, True),
            lambda _, options: _goes_round(options.schedule, True),
        ),
    )

    @classmethod
    def everything(cls, target: Target) -> dict[str, Any]:
        return {"schedule": SCHEDULES if Stages.everything(target)["pipeline"] else ()}

    @classmethod
    def left_out(cls, target: Target, allowed: Space) -> Iterator[LeftOut]:
        if allowed.pipeline:  # else no pipeline was looked at
            yield from not_allowed(cls, target, allowed)
            rounds = f"--schedule {CIRCULAR}:R,{INTERLEAVED}:R"
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

    def apply(self, choice: Choice, to: Chosen) -> None:
        to.options["schedule"] = choice[0] if choice else GPIPE

    def read(self, layout: Layout, options: Options) -> Choice:
        return (options.schedule,) if options.schedule != GPIPE else ()

    @classmethod
    def written(cls, options: Options) -> dict[str, Any]:
        return {"schedule": options.schedule if options.schedule != GPIPE else ""}

    @classmethod
    def parsed(cls, said: Mapping[str, Any]) -> dict[str, Any]:
        return {"schedule": said["schedule"] or GPIPE}

    @classmethod
    def typed(cls, texts: Sequence[str], about: Typed) -> dict[str, Any]:
        return {"schedule": texts[-1] if texts else GPIPE}
