"""The table of where a plan's values live (`mesh_tf_core.lower.placement`), equal rows together."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from layoutopt.optimize.evaluation import Evaluation
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.lower.placement import KEEP, PHASES, Row
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.lower.storage import BETWEEN, SAVED, VARIABLE


@dataclass(frozen=True)
class PlacedValues:
    """Values of one class that have the same placement in one phase.

    Attributes:
      values: the class: variable, state, gradient or saved.
      names: of the variables, or of the dimensions of the loops.
      further: the axes over which storage splits them in addition to the layout's.
      host: they lie in the memory of the devices' hosts.
      dtype: None: their own.
      again: how they are had when they are read once more.
      keep: the kept values among those that are recomputed.
      bytes: that a device, or its host, holds of them between steps.
    """

    values: str
    phase: str
    names: tuple[str, ...]
    further: Axes = ()
    host: bool = False
    dtype: str | None = None
    again: str = KEEP
    keep: tuple[str, ...] = ()
    bytes: int | None = None

    @property
    def plain(self) -> bool:
        """True if they stay on the devices with the layout's splits."""
        return not self.further and not self.host and self.dtype is None and self.again == KEEP


def placed(evaluation: Evaluation) -> tuple[PlacedValues, ...]:
    """The table, class by class and phase by phase."""
    where, loops = evaluation.placement, recomputable(evaluation.model.step_graph)
    found: dict[tuple[str, str, Axes, Row], list[str]] = {}
    for what, name, phase, row in where.rows(loops):
        split = what != SAVED and row.layout is not None and row.layout != where.read_in(name)
        further = where.further(name)[0] if split else ()
        found.setdefault((what, phase, further, row._replace(layout=None)), []).append(name)
    return tuple(
        PlacedValues(
            what,
            phase,
            tuple(names),
            further,
            *row[1:],
            bytes=_held(evaluation, what, names) if phase == BETWEEN else None,
        )
        for (what, phase, further, row), names in sorted(found.items(), key=lambda each: _order(*each[0][:2]))
    )


def _order(what: str, phase: str) -> tuple[int, int]:
    return [*PHASES].index(what), PHASES[what].index(phase)


def _held(evaluation: Evaluation, what: str, names: Collection[str]) -> int:
    """Bytes of some variables, or of what the optimizer keeps of them."""
    stored = evaluation.program.variables.values()
    owners = ((v.variable.name if what == VARIABLE else v.variable.slot_of, v.value) for v in stored)
    return sum(value.local_bytes(evaluation.program.mesh) for name, value in owners if name in {*names})
