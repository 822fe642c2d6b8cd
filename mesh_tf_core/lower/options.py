"""The options of lowering besides the layout."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from mesh_tf_core import arguments
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.schedules import GPIPE, check_schedule
from mesh_tf_core.lower.offload import OffloadSet
from mesh_tf_core.lower.remat_policy import Policies, policies
from mesh_tf_core.lower.storage import StageByVariable, read_stage
from mesh_tf_core.tracing.diloco import DiLoCo


@dataclass(frozen=True)
class Options:
    """Options of lowering besides the layout.

    Attributes:
      storage: name of a variable -> storage stage (`zero1` to `zero3`), for variables that are not stored as
        in the layout (see `lower.storage`).
      recompute: dimensions of the loops that the backward pass recomputes, and the values to keep
        (`remat_policy.Recomputed`), e.g. "layers" or "layers:keep=products".
      microbatches: number of parts of the batch that a step runs one after another, accumulating gradients.
      context: pairs (dimension of keys, form) that choose a form of attention to split keys
        (`ops.context.FORMS`); without a pair, keys are gathered.
      diloco: the mesh axis and settings of replicas that synchronise only every H steps; None: no replicas.
      offload: pairs (kind, name) of tensors that are kept in host memory (`lower.offload`).
      schedule: the pipeline schedule, e.g. "1f1b" (`ir.schedules.NAMES`).
      collective_matmul: dimensions whose matrix products overlap with their gathers and scatters in chunks
        (`lower.collective_matmul`).

    Example:
      >>> import mesh_tf_core as mtf
      >>> mtf.Options(storage={"w": "zero3"}, recompute={"layers"}, microbatches=4).microbatches
      4
    """

    storage: StageByVariable = field(default_factory=dict)
    recompute: Policies = frozenset()
    microbatches: int = 1
    context: frozenset[tuple[str, str]] = frozenset()
    diloco: DiLoCo | None = None
    offload: OffloadSet = frozenset()
    schedule: str = GPIPE
    collective_matmul: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        stages = arguments.instance(
            Mapping, "a dict from names of variables to storage stages, e.g. {'wi': 'zero3'}"
        )
        parts = arguments.ArgumentKind(arguments.is_whole, "a whole number")
        arguments.check("Options", microbatches=(self.microbatches, parts), storage=(self.storage, stages))
        check_schedule(self.schedule)
        if len(dict(self.context)) < len(self.context):
            said = ", ".join(f"{name}={form}" for name, form in sorted(self.context))
            raise UserError(f"context {said}: several forms are given for the same dimension; give only one")
        # From Python it may be any set, also of texts.
        object.__setattr__(self, "recompute", policies(self.recompute))

    @property
    def key(self) -> Hashable:
        """Equal for equal options, and hashable."""
        stages = frozenset((name, read_stage(s)) for name, s in self.storage.items())
        return stages, self.offload, *self.without_placement

    def renamed(self, axes: Mapping[str, str]) -> Options:
        """With other names for mesh axes."""
        storage = {name: read_stage(stage).renamed(axes).short for name, stage in self.storage.items()}
        return replace(self, storage=storage)

    @cached_property
    def without_placement(self) -> tuple[Hashable, ...]:
        """All options except storage and offload, whose rows lowering reads: hashable."""
        return *self.without_chunks, self.collective_matmul

    @cached_property
    def without_chunks(self) -> tuple[Hashable, ...]:
        """The same without `collective_matmul`."""
        left = ("storage", "offload", "collective_matmul")
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in left)


DEFAULT = Options()
