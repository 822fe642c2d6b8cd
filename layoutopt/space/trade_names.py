"""What the trade calls each axis of a mesh: data, FSDP, tensor, sequence, expert or pipeline parallel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from layoutopt.space.parallelism import parallelism
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model

STORED = {"zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "FSDP"}
"""How most parameters are stored along an axis of the batch, and what that is called."""
IDLE = "idle"


def trade_names(model: Model, mesh: Mesh, layout: Layout, storage: Mapping[str, str]) -> dict[str, str]:
    """Axis -> what its devices share: 'data (FSDP)', 'tensor + expert', 'idle' where they share nothing.

    Args:
      storage: variable to its stage, as a plan file says it.
    """
    return {
        axis: " + ".join(dict.fromkeys(_forms(model, axis, layout, storage))) or IDLE
        for axis, size in mesh.axes
        if size > 1
    }


def _forms(model: Model, axis: str, layout: Layout, storage: Mapping[str, str]) -> Iterator[str]:
    known = parallelism(model)
    split = [name for name, axes in layout.items() if axis in axes]
    stored = _stored(model, axis, layout, storage)
    if any(name in known.data for name in split):
        yield f"data ({stored})" if stored else "data"
    elif stored:
        yield f"storage ({stored})"
    loops = {b.dim.name for b in model.step_graph.blocks if b.dim is not None}
    weights = [name for name in known.weights if name not in known.experts]
    tables = {name for v in model.graph.variables.values() for name in v.shape.names}
    forms: tuple[tuple[str, Sequence[str] | set[str]], ...] = (
        ("sequence", [name for name in known.sequence if name not in tables]),
        ("pipeline", loops),
        ("tensor", weights),
        ("expert", known.experts),
    )
    yield from (form for form, names in forms if any(name in names for name in split))
    named = {*known.data, *known.sequence, *loops, *known.weights}
    yield from (name for name in split if name not in named)


def _stored(model: Model, axis: str, layout: Layout, storage: Mapping[str, str]) -> str:
    """How most parameters are stored along an axis; '' if most are whole there, or split by the layout."""
    trained = {n: v for n, v in model.graph.variables.items() if v.trainable}
    found: Counter[str] = Counter()
    for name, variable in trained.items():
        stage, _, over = storage.get(name, "").partition("@")
        split = {a for dim in variable.shape.names for a in layout.axes(dim)}
        if stage in STORED and axis not in split and (not over or axis in over.split("+")):
            found[STORED[stage]] += variable.shape.size
    most = sum(v.shape.size for v in trained.values()) / 2
    return found.most_common(1)[0][0] if found.total() > most else ""
