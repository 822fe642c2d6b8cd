"""The options of lowering besides the layout.

Values in the memory of the devices' hosts instead of the devices'.

    optimizer    the optimizer's state of a variable: the update loads it over the host link, works on it as
                 ever, and stores it there again (Ren et al. 2021, "ZeRO-Offload", but for the place of the
                 arithmetic, which stays on the device; MaxText's `optimizer_memory_host_offload`)
    activations  what loops over a dimension save for their backward: all that it reads, or where they run
                 again what that keeps (their state, and what `remat_policy` says): stored as an iteration
                 begins or ends, loaded as its backward does
    weights      a variable: forward loads it where it reads it, in a loop over layers one layer at a time,
                 backward once more, and the update, which stores it (Rajbhandari et al. 2021,
                 "ZeRO-Infinity", section 5.1.1)

It has the same splits as on the devices; each device's shard lies on its own host. In a program these are the
instructions `host_load` and `host_store`; no operation computes on values `on host`.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

from mesh_tf_core import arguments
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.schedules import GPIPE, check_schedule
from mesh_tf_core.lower.remat_policy import Policies, Recomputed, policies
from mesh_tf_core.lower.storage import StageByVariable, read_stage
from mesh_tf_core.tracing.diloco import DiLoCo

OPTIMIZER, ACTIVATIONS, WEIGHTS = "optimizer", "activations", "weights"
KINDS = (OPTIMIZER, ACTIVATIONS, WEIGHTS)
OffloadSet = frozenset[tuple[str, str]]
"""(kind, name of the variable or the state's variable, or dimension of the loops)."""


def place_of(variable: Variable) -> tuple[str, str]:
    """The entry of `OffloadSet` that puts a variable or an optimizer's slot on the hosts."""
    if variable.slot_of is not None:
        return OPTIMIZER, variable.slot_of
    return WEIGHTS, variable.name


def check_offload(offload: OffloadSet, variables: Mapping[str, Variable]) -> None:
    """UserError unless there are values of each kind and variable; `check_saved` checks loops.

    Args:
      variables: of a training step.
    """
    for kind, name in sorted(offload):
        if kind not in KINDS:
            raise UserError(f"offload: unknown kind {kind!r}; {known_names(kind, KINDS)}")
        if kind == ACTIVATIONS:
            continue
        if name not in variables:
            raise UserError(
                f"offload {kind}: the model has no variable {name!r}; {known_names(name, variables)}"
            )
        if kind == WEIGHTS:
            if (owner := variables[name].slot_of) is not None:
                raise UserError(
                    f"offload {kind}: {name!r} is optimizer state; name its variable: {OPTIMIZER}={owner}"
                )
            continue
        if not any(v.slot_of == name for v in variables.values()):
            raise UserError(
                f"offload {kind}: the optimizer has no state for {name!r}; remove this variable, or use "
                "an optimizer with state, e.g. Adam"
            )


def offload_of(
    words: Iterable[str], variables: Mapping[str, Variable], recompute: Iterable[str | Recomputed] = ()
) -> OffloadSet:
    """Parses `KIND` or `KIND=NAME`; a kind alone means all variables that have dimensions (optimizer: all
    trained ones), or all recomputed loops."""
    stored = [v for v in variables.values() if v.own_storage]
    again = sorted(each.dim for each in policies(recompute))
    found: set[tuple[str, str]] = set()
    for word in words:
        kind, _, name = (part.strip() for part in word.partition("="))
        own = [v.name for v in stored if v.trainable or kind == WEIGHTS]
        every = again if kind == ACTIVATIONS else own
        if kind == ACTIVATIONS and not (name or every):
            raise UserError(
                "offload activations: only loops that are recomputed are offloaded, and there are none; "
                "recompute a loop, e.g. layers, or name a loop whose saved values all go to the host, "
                "e.g. activations=layers"
            )
        found.update((kind, each) for each in ([name] if name else every))
    return frozenset(found)


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
