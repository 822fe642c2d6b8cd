"""The parameters of the PyTorch modules that a configuration's class has, as a plan places them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from layoutopt.importers.huggingface.weights import NAMES
from layoutopt.plan.exported import ExportedTensor
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.training.weights import Source

Dims = Sequence[Dim]
_NUMBER = re.compile(r"(?<=\.)(\d+|\{\})(?=\.)")
_TIED, _MOVED = NAMES["tied"], NAMES["moved"]
"""Table of tokens -> the head that has the same weights, where the model stores no other; part of a name in
checkpoints -> in the modules of transformers 5."""
_STREAM = "d_model"


def module_tensors(
    names: Mapping[str, Source], variables: Mapping[str, Variable], layout: Layout
) -> Iterator[ExportedTensor]:
    """Every matrix and vector, with `*` for the number of its layer."""
    for name, source in names.items():
        if (found := _tensor(variables[name], source, layout)) is not None:
            yield found
            if found.name in _TIED and "output/projection" not in names:
                yield replace(found, name=_TIED[found.name], table=False)


def _tensor(variable: Variable, source: Source, layout: Layout) -> ExportedTensor | None:
    first = source.name if isinstance(source.name, str) else source.name[0]
    path = _NUMBER.sub("*", first)
    for theirs, own in _MOVED.items():
        path = path.replace(theirs, own)
    dims = variable.shape.dims[variable.stacked :]
    if ".experts." in path:
        return _experts(path, dims, layout)
    order = source.transpose or tuple(range(len(dims)))
    if not 0 < len(order) < 3:
        return None  # kernels of images and numbers, which no plan splits
    if len(order) == 1:
        groups = [dims]
    else:
        cut = 1 if dims[0].name == _STREAM else len(dims) - 1
        into = [dims[:cut], dims[cut:]]
        groups = [into[order.index(axis)] for axis in range(2)]
    return _exported(path, groups, layout, "embedding/" in variable.name and path.endswith("weight"))


def _experts(path: str, dims: Dims, layout: Layout) -> ExportedTensor:
    """The experts' arrays: transformers joins the two matrices that read the tokens."""
    count, first, second = dims
    reads = first.name == _STREAM
    groups = [(count,), (second,), (first,)]
    return _exported(
        f"{path.partition('.experts.')[0]}.experts.{'gate_up' if reads else 'down'}_proj", groups, layout
    )


def _exported(path: str, groups: Sequence[Dims], layout: Layout, table: bool = False) -> ExportedTensor:
    """A tensor whose axes are the products of dimensions."""
    return ExportedTensor(
        path,
        tuple(" ".join(d.name for d in own) for own in groups),
        tuple(tuple(a for d in own for a in layout.axes(d.name)) for own in groups),
        tuple(math.prod(d.size for d in own) for own in groups),
        True,
        table,
    )
