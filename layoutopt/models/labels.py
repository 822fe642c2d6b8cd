"""Labels: inputs of a model that name elements of a dimension, checked before they are used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.tracing.graph import Graph

Labels = Mapping[str, tuple[Dim, bool]]
"""Input -> the dimension that its numbers count, and whether negative ones may be among them."""


def labels_of(graph: Graph) -> dict[str, tuple[Dim, bool]]:
    """The inputs that are labels as they are.

    A model that compares its labels with something may mask the negative ones, as those of padding.
    """
    names = {tensor.id: name for name, tensor in graph.inputs.items()}
    found: dict[str, Dim] = {}
    compared: set[str] = set()
    for node, _ in graph.walk():
        types = [graph.tensor(i).type for i in node.inputs]
        if (label := node.op.labels(*types)) is not None and node.inputs[label[0]] in names:
            found[names[node.inputs[label[0]]]] = label[1]
        if any(graph.tensor(o).dtype == "bool" for o in node.outputs):
            compared |= {names[i] for i in node.inputs if i in names}
    return {name: (dim, name in compared) for name, dim in found.items()}


def check_labels(labels: Labels, batch: Mapping[str, Any]) -> None:
    """UserError, naming the input, the label and the dimension, for a label that there is not."""
    for name, (dim, masked) in labels.items():
        values = np.asarray(batch[name])
        if not values.size:
            continue
        low, high = int(values.min()), int(values.max())
        if high >= dim.size or (low < 0 and not masked):
            wrong = high if high >= dim.size else low
            raise UserError(
                f"batch input {name!r} has the label {wrong}, but {dim.name!r} has {dim.size:,} elements, "
                f"0 to {dim.size - 1:,}"
            )
