"""Converts a user's batch to the inputs of a program."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from mesh_tf_core.arguments import BATCH, check
from mesh_tf_core.engines.feeds import widened
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.program import Program
from mesh_tf_core.model import Model


def fitted(batch: Mapping[str, Any], model: Model, program: Program, rows: Any) -> dict[str, Any]:
    """The inputs of the model in the shapes of the program: with microbatches, in parts; with replicas, one
    part for each.

    Args:
      rows: those that this process's devices read, int64 [n]; a batch may hold these alone. None: all.

    Raises:
      UserError: an input is missing, or its shape differs from the model's.
    """
    check("training", batch=(batch, BATCH))
    replicas = program.layout.axes(REPLICA)
    of = (program.mesh.group_size(replicas),) if replicas else ()
    found = {}
    for name, tensor in model.graph.inputs.items():
        if name not in batch:
            raise UserError(
                f"the batch has no array for the model's input {name!r}; the inputs are "
                f"{', '.join(model.graph.inputs)}"
            )
        array, wanted = batch[name], (*of, *tensor.shape.sizes)
        shape = tuple(getattr(array, "shape", ()))
        if rows is not None and wanted and len(rows) < wanted[0] and shape[:1] == (len(rows),):
            array = widened(np.asarray(array), rows, wanted[0])
            shape = array.shape
        if shape != wanted:
            raise UserError(
                f"the batch's array {name!r} has shape {shape}, but the model was built for "
                f"[{tensor.shape}]" + (f" and {of[0]} replicas, which need shape {wanted}" if of else "")
            )
        found[name] = array
    feeds = {name: program.values[id].shape.sizes for name, id in program.feeds.items()}
    return {name: np.reshape(found[name], sizes) for name, sizes in feeds.items()}


def plain(found: Mapping[str, Any]) -> dict[str, Any]:
    """Results, scalars as numbers."""
    return {name: value.item() if getattr(value, "ndim", 1) == 0 else value for name, value in found.items()}
