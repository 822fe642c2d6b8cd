"""When the stages of a pipeline go backward: after all microbatches (`gpipe`), or each microbatch as soon as
it has gone through all stages (`1f1b`); and whether microbatches go round several times (`circular:2`).

Another schedule is another graph, so that each is a subproblem of its own, where nothing is left to choose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Self

from layoutopt.space.kind import Allowed, Choice, Chosen, Decision, Feature
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.ops.ticks import CIRCULAR, GPIPE, ONE_F_ONE_B, check_schedule, rounds_of
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Schedule(Decision):
    """The schedule of a subproblem with stages."""

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
            lambda schedule: rounds_of(schedule) > 1,
            lambda _, options: rounds_of(options.schedule) > 1,
        ),
    )

    @classmethod
    def check(cls, allowed: Allowed) -> None:
        for schedule in allowed.schedule or ("",):
            check_schedule(schedule, f"--schedule {schedule}")
        others = [schedule for schedule in allowed.schedule if schedule != GPIPE]
        if others and allowed.elsewhere:
            raise UserError(
                f"--schedule {','.join(others)}: tables of this do not add up where dimensions are split "
                f"further elsewhere; leave it or --elsewhere {','.join(allowed.elsewhere)} out"
            )

    @classmethod
    def about(cls, graph: Graph, mesh: Mesh, allowed: Allowed) -> Iterator[Self]:
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
