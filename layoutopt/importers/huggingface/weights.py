"""The locations of the weights of Hugging Face checkpoints, for `Trainer.load`, and the parameters of the
modules of transformers, as a plan places them.

`weights.json` names the array of each variable and the order of its axes: `layer` of Llama's layers, `after`
and `layer of mixtral` where a family has others, `outside` around the layers; `others` have tables of their
own, for each of their `stacks` of layers. The `joined` families have arrays that join or order variables
otherwise.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from layoutopt.importers.huggingface.decoder import LanguageModel, LayerKind, runs
from layoutopt.plan.exported import ExportedTensor
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.model import Model
from mesh_tf_core.training.weights import Source

NAMES = json.loads((Path(__file__).parent / "weights.json").read_text(encoding="utf-8"))
_AFTER = NAMES["after"]
_PLACED = {"both": _AFTER, "after": {n: w for n, w in _AFTER.items() if "_after_" in n}}
"""Of families that normalise blocks on both sides, or after them."""


def checkpoint_names(
    made: LanguageModel | Model, family: str, length: int, variables: Mapping[str, Variable]
) -> Iterator[tuple[str, Source]]:
    """The source of every trained variable, as far as arrays have one variable each."""
    usual = {"outside": NAMES["outside"], "stacks": [["layers", "model.layers", "layer"]]}
    row = NAMES["others"].get(family, {} if family in NAMES["joined"] else usual)
    for own, (name, order) in row.get("outside", {}).items():
        if own in variables:
            yield own, Source(name, tuple(order))
    for ours, top, table, *needed in row.get("stacks", ()):
        inside, loops = NAMES[table], [(ours, ["{}"])]
        if table == "layer" and isinstance(made, LanguageModel):
            inside = {**inside, **_PLACED.get(made.place, {}), **NAMES.get(f"layer of {family}", {})}
            loops = list(_loops(made.seen(length)))
        for scope, at in loops if {*needed} <= variables.keys() else ():
            for own, (theirs, order) in inside.items():
                if (variable := variables.get(f"{scope}/{own}")) is None:
                    continue
                experts = range(variable.shape.sizes[1] if "{}" in theirs else 1)
                every = tuple(f"{top}.{i}.{theirs.format(e)}" for i in at for e in experts)
                yield variable.name, Source(every[0] if at == ["{}"] else every, tuple(order))


def _loops(layers: tuple[LayerKind, ...]) -> Iterator[tuple[str, list[str]]]:
    """The scope of each loop over layers, or of one of the layers in it, and the numbers of its layers."""
    first = 0
    for number, (period, count) in enumerate(runs(layers)):
        top, end = f"layers_{number}" if number else "layers", first + count * len(period)
        for place in range(len(period)):
            scope = f"{top}/layer_{place}" if len(period) > 1 else top
            yield scope, [str(i) for i in range(first + place, end, len(period))]
        first = end


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
