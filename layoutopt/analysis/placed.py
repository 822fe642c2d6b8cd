"""The table of where a plan's values live (`mesh_tf_core.lower.placement`), equal rows together."""

from __future__ import annotations

from collections.abc import Collection

from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.plan.layout_results import Placed
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.lower.placement import KEEP, PHASES, Row
from mesh_tf_core.lower.rematerialization import recomputable
from mesh_tf_core.lower.storage import BETWEEN, SAVED, VARIABLE


def placed(evaluation: Evaluation) -> tuple[Placed, ...]:
    """The table, class by class and phase by phase."""
    where, loops = evaluation.placement, recomputable(evaluation.model.step_graph)
    found: dict[tuple[str, str, Axes, Row], list[str]] = {}
    for what, name, phase, row in where.rows(loops):
        split = what != SAVED and row.layout is not None and row.layout != where.read_in(name)
        further = where.further(name)[0] if split else ()
        found.setdefault((what, phase, further, row._replace(layout=None)), []).append(name)
    order = [(what, phase) for what, phases in PHASES.items() for phase in phases]
    return tuple(
        Placed(
            values=what,
            phase=phase,
            names=tuple(names),
            further=further,
            **{name: value for name, value in row._asdict().items() if name != "layout"},
            bytes=_held(evaluation, what, names) if phase == BETWEEN else None,
        )
        for (what, phase, further, row), names in sorted(found.items(), key=lambda e: order.index(e[0][:2]))
    )


def plain(values: Placed) -> bool:
    """True if they stay on the devices with the layout's splits."""
    return not values.further and not values.host and values.dtype is None and values.again == KEEP


def _held(evaluation: Evaluation, what: str, names: Collection[str]) -> int:
    """Bytes of some variables, or of what the optimizer keeps of them."""
    stored = evaluation.program.variables.values()
    owners = ((v.variable.name if what == VARIABLE else v.variable.slot_of, v.value) for v in stored)
    return sum(value.local_bytes(evaluation.program.mesh) for name, value in owners if name in {*names})
