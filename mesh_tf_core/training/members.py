"""Arrays of another library in the variables of two builds of its model.

Which layers become one loop, and are stacked, depends on the program, as on whether they drop out alike. The
arrays of the layers have the same names in every build, so one build finds them in the variables of another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.dims import Shape
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.shape import rename, slice_dim
from mesh_tf_core.ops.stacking import squeeze, stack

VariablePlace = tuple[Variable, int | None]
"""A variable, and the place along its first dimension; None: all of it."""


def places(variables: Iterable[Variable]) -> dict[str, VariablePlace]:
    """Variable, or array of a stack -> where it is."""
    found: dict[str, VariablePlace] = {}
    for v in variables:
        found |= {v.name: (v, None)} | {name: (v, i) for i, name in enumerate(v.members)}
    return found


def read_elsewhere(
    variable: Variable, held: Mapping[str, VariablePlace], read: Callable[[Variable], Tensor]
) -> Tensor | None:
    """The value of a variable, from what is held under other names or dimensions; None if it is not held.

    Args:
      read: reads a variable that is held.
    """
    names = (variable.name,) if variable.name in held else variable.members
    stacked, own = names == variable.members, variable.shape
    first, row = own.names[0] if stacked and names else "", Shape(own.dims[int(stacked) :])
    found = [held[name] for name in names if name in held]
    shapes = [Shape([d for d in v.shape if d.name != REPLICA][int(p is not None) :]) for v, p in found]
    if not found or len(found) < len(names) or any(shape.sizes != row.sizes for shape in shapes):
        return None
    if not stacked and found[0][1] is None and shapes[0] == row:
        return None
    rows = []
    for v, place in found:
        x = read(v)
        if place is not None:
            layers = x.shape.names[0]
            x = squeeze(slice_dim(x, layers, place, 1), layers)
        rows.append(rename(x, **dict(zip(x.shape.names, row.names, strict=True))))
    return stack(rows, first) if stacked else rows[0]
