"""Usual names for the use of each mesh axis: data, FSDP, tensor, sequence, context, expert or pipeline."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator

from layoutopt.plan.decided import Decided
from layoutopt.space.parallelism import looped, parallelism
from layoutopt.space.undivided import storage_of
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower.storage import STAGES
from mesh_tf_core.model import Model

STORED = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "FSDP"}
"""The storage of most parameters along an axis of the batch, and its usual name."""
IDLE, RARE = "idle", "data (DiLoCo)"


def trade_names(model: Model, mesh: Mesh, layout: Layout, decided: Decided) -> dict[str, str]:
    """Axis -> the parallelism of its devices: 'data (FSDP)', 'tensor + expert', 'idle' if they share no work.

    Args:
      decided: the decisions of a plan file besides the layout.
    """
    return {
        axis: " + ".join(dict.fromkeys(_forms(model, mesh, axis, layout, decided))) or IDLE
        if axis != decided.diloco.partition(":")[0]
        else RARE
        for axis, size in mesh.axes
        if size > 1
    }


def _forms(model: Model, mesh: Mesh, axis: str, layout: Layout, decided: Decided) -> Iterator[str]:
    known = parallelism(model)
    split = [name for name, axes in layout.items() if axis in axes]
    further = [name for name, axes in layout.elsewhere if axis in axes]
    stored = _stored(model, mesh, axis, layout, decided)
    if any(name in known.data for name in split):
        yield f"data ({stored})" if stored else "data"
    elif stored:
        yield f"storage ({stored})"
    loops = looped(model.step_graph)
    weights = [name for name in known.weights if name not in known.experts]
    tables = {name for v in model.graph.variables.values() for name in v.shape.names}
    sequence = [name for name in known.sequence if name not in tables]
    forms: tuple[tuple[str, Collection[str]], ...] = (
        ("context", decided.context.keys()),
        ("sequence", sequence),
        ("pipeline", loops),
        ("tensor", weights),
        ("expert", known.experts),
    )
    found = [form for form, names in forms if any(name in names for name in split)]
    if "sequence" not in found and any(name in sequence for name in further):
        found.insert(0, "sequence")
    yield from (form for form in found if form != "sequence" or "context" not in found)
    named = {*known.data, *known.sequence, *loops, *known.weights}
    yield from (name for name in split if name not in named)


def _stored(model: Model, mesh: Mesh, axis: str, layout: Layout, decided: Decided) -> str:
    """How most variables are stored along an axis; '' if most are whole there, or split by the layout."""
    sizes = {n: v.shape.size for n, v in model.graph.variables.items() if v.own_storage}
    storage = storage_of(model.step_graph, mesh, layout, decided.storage)
    found: Counter[str] = Counter()
    for name, stage in storage.stages.items():
        if axis in storage.further(name)[0]:
            found[STORED.get(STAGES[stage.number], STAGES[stage.number])] += sizes[name]
    most = sum(sizes.values()) / 2
    return found.most_common(1)[0][0] if found.total() > most else ""
