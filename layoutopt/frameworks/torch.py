"""PyTorch with FSDP2, tensor-parallel plans of DTensor, and its pipelines, in eager execution.

`fully_shard` stores all parameters alike: whole (DDP), gathered once in a step (`set_reshard_after_backward`)
or in each pass, over the data ranks or those of a node (HSDP). Gradients are reduced with every microbatch
(ZeRO-2, ZeRO-3), or once (`set_requires_gradient_sync`; ZeRO-1, zero3-once).
Checkpoints (`checkpoint_wrapper`) are of whole layers, all of them or some.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from layoutopt.space.degrees import Degrees
from layoutopt.space.kind import ALL, STORED, Choice, Decision
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.recompute import KEEP, SOME
from layoutopt.space.restriction import ANY, Coupling, DecisionRelation, DimRoles, Only, Restriction
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.stages import StageSplit
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.schedules import INTERLEAVED, ONE_F_ONE_B, kind_name
from mesh_tf_core.lower.storage import ONCE


def started(kind: str, stages: int, number: int) -> bool:
    """True if torch.distributed.pipelining starts a kind of schedule with a number of microbatches."""
    least = {ONE_F_ONE_B: stages, "dualpipev": 2 * stages}.get(kind, 0)
    uneven = kind == INTERLEAVED and number % max(1, number // stages)  # rounds are of equal length
    return not (uneven or number < least)


@dataclass(frozen=True)
class StartedSchedules(DecisionRelation):
    """The numbers of microbatches that schedules of a framework start with.

    Attributes:
      starts: of a kind of schedule, and numbers of stages and microbatches.
    """

    starts: Callable[[str, int, int], bool] = started

    def couplings(self, every: Mapping[str, Decision], roles: DimRoles, mesh: Mesh) -> Iterator[Coupling]:
        stages = math.prod(mesh.group_size(d.options[0]) for d in every.values() if isinstance(d, StageSplit))
        chosen = (name for d in every.values() if isinstance(d, ScheduleDecision) for name in d.options[0])
        kind = kind_name(next(chosen, ""))

        def passes(decision: Decision, choice: Choice) -> bool:
            return not isinstance(decision, Microbatches) or self.starts(kind, stages, int(choice[0]))

        yield from Only(passes).couplings(every, roles, mesh)


EAGER = Restriction(
    "torch",
    says={
        "storage": (*STORED, ONCE),
        "elsewhere": ANY,
        "recompute": (False, True),
        "context": ("gather", "ring", "zigzag"),
        "microbatches": ANY,
        "pipeline": ANY,
        "schedule": ("gpipe", "1f1b", "circular", "interleaved", "zb-v", "dualpipev"),
    },
    relations=(Degrees(hybrid=("zero2", "zero3")), StartedSchedules()),
    granularity={"storage": ALL, "recompute": ALL},
)
APPLIED = replace(
    EAGER,
    says={
        **(EAGER.says or {}),
        "context": (),
        "recompute": (False, True, SOME, f"{KEEP}products", f"{KEEP}products+attention"),
        # zb-v and dualpipev lose gradients of modules under `fully_shard` (torch 2.13, on four processes).
        "schedule": ("gpipe", "1f1b", "circular", "interleaved"),
    },
    relations=(
        Degrees(
            hybrid=("zero2", "zero3"),
            sequence=False,
            experts_on_data=True,
            whole_experts=True,
            experts_where_stored=True,
        ),
        StartedSchedules(),
    ),
    reasons={
        "context": "torch's context_parallel is experimental, and has no attention on CPUs to check it with",
        "offload": "CPUOffloadPolicy updates on the CPU, for which the cost model has no times",
    },
)
SAYS = replace(
    EAGER, says={**(EAGER.says or {}), "recompute": (False, True, SOME)}, applied={"torch": APPLIED}
)
