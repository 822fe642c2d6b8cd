"""The locations of the weights of Hugging Face checkpoints, for `Trainer.load`.

`weights.json` names the array of each variable and the order of its axes: `layer` of Llama's layers, `after`
and `layer of mixtral` where a family has others, `outside` around the layers; `others` have tables of their
own, for each of their `stacks` of layers. The `joined` families have arrays that join or order variables
otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from layoutopt.importers.huggingface.decoder import LanguageModel, LayerKind, runs
from mesh_tf_core.ir.initializers import Variable
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
