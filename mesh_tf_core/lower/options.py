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
    """The options of lowering besides the layout.

    Attributes:
      storage: of variables that are not stored as the layout says (see `lower.storage`).
      recompute: the loops whose bodies run again in backward, by their dimension, and what they keep
        (`remat_policy.Recomputed`): "layers", "layers:keep=products".
      microbatches: parts of the batch that a step runs one after the other, adding up their gradients.
      context: (dimension of keys, form): how attention to keys that are split is done, of those to which it
        does not gather them (`ops.context.FORMS`).
      diloco: an axis that synchronises rarely.
      offload: what lies in the hosts' memory, by kind and variable (`lower.offload`).
      schedule: when the stages of a pipeline go backward (`ir.schedules.SCHEDULES`).
      collective_matmul: dimensions: what products with one of them gather, split over its axes, and what is
        scattered of them, goes in chunks beside them (`lower.collective_matmul`).
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
        stages = arguments.instance(Mapping, "a dict of variables and how they are stored")
        parts = arguments.ArgumentKind(arguments.is_whole, "a whole number")
        arguments.check("Options", microbatches=(self.microbatches, parts), storage=(self.storage, stages))
        check_schedule(self.schedule)
        if len(dict(self.context)) < len(self.context):
            said = ", ".join(f"{name}={form}" for name, form in sorted(self.context))
            raise UserError(f"context: more than one form for the same keys: {said}; name one")
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
        """All but storage and offload, whose rows lowering reads: hashable."""
        return tuple(getattr(self, f.name) for f in fields(self) if f.name not in ("storage", "offload"))


DEFAULT = Options()
