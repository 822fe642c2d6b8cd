"""Checks of what a user feeds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.program import Program
from mesh_tf_core.kernels.numpy_kernel import np_dtype


def check_batch(program: Program, batch: Mapping[str, Any]) -> dict[str, Any]:
    """The program's inputs as arrays of its dtypes, taken from a batch that may hold more.

    Raises:
      UserError: an input is missing, or its shape or kind of number is not what the model was built for.
    """
    out = {}
    for name, id in program.feeds.items():
        v = program.values[id]
        if name not in batch:
            raise UserError(f"the batch has no {name!r}, which the model reads; {known_names(name, batch)}")
        array = np.asarray(batch[name])
        if array.shape != v.shape.sizes:
            raise UserError(
                f"input {name!r}: the model was built for shape [{v.shape}], found {list(array.shape)}; "
                "feed arrays of that size or build the model for yours"
            )
        wanted = np_dtype(v.dtype)
        if array.dtype.kind in "fc" and wanted.kind in "iub":
            raise UserError(
                f"input {name!r}: the model reads {v.dtype}, found {array.dtype}; convert it first"
            )
        out[name] = array.astype(wanted, copy=False)
    return out
