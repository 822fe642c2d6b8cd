"""The locations of the weights of Hugging Face checkpoints, for `Trainer.load`.

`weights.json` names the array of each variable and the order of its axes: `layer` of Llama's layers, `after`
and `mixtral` where a family has others, `outside` around the layers; `others` have tables of their own, for
each of their `stacks` of layers. The `joined` families have arrays that join, name or order variables
otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

from layoutopt.importers.huggingface.decoder import LanguageModel, LayerKind, runs
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.training.weights import Source

NAMES = json.loads((Path(__file__).parent / "weights.json").read_text(encoding="utf-8"))
_AFTER = NAMES["after"]
_PLACED = {"both": _AFTER, "after": {n: w for n, w in _AFTER.items() if "_after_" in n}}
"""Of families that normalise blocks on both sides, or after them."""


def decoder_names(
    decoder: LanguageModel, family: str, length: int, variables: Mapping[str, Variable]
) -> Iterator[tuple[str, Source]]:
    """The source of every trained variable of a language model, as far as arrays have one variable each."""
    if family in NAMES["joined"]:
        return
    other = NAMES["mixtral"] if family == "mixtral" else {}
    yield from _outside(NAMES["outside"], variables)
    inside = {**NAMES["layer"], **_PLACED.get(decoder.place, {}), **other}
    first = 0
    for number, (period, count) in enumerate(runs(decoder.seen(length))):
        yield from _stack(inside, period, count, number, first, variables)
        first += count * len(period)


def _outside(
    names: Mapping[str, tuple[str, list[int]]], variables: Mapping[str, Variable]
) -> Iterator[tuple[str, Source]]:
    yield from ((own, Source(name, tuple(order))) for own, (name, order) in names.items() if own in variables)


def _stack(
    inside: Mapping[str, tuple[str, list[int]]],
    period: tuple[LayerKind, ...],
    count: int,
    number: int,
    first: int,
    variables: Mapping[str, Variable],
) -> Iterator[tuple[str, Source]]:
    top = f"layers_{number}" if number else "layers"
    for place in range(len(period)):
        scope = f"{top}/layer_{place}" if len(period) > 1 else top
        at = range(first + place, first + place + count * len(period), len(period))
        for own, (theirs, order) in inside.items():
            variable = variables.get(f"{scope}/{own}")
            if variable is None:
                continue
            experts = range(variable.shape.sizes[1] if "{}" in theirs else 1)
            every = tuple(f"model.layers.{i}.{theirs.format(e)}" for i in at for e in experts)
            yield variable.name, Source(every, tuple(order))


def other_names(family: str, variables: Mapping[str, Variable]) -> Iterator[tuple[str, Source]]:
    """The source of every trained variable of a family with `stacks`."""
    row = NAMES["others"].get(family, {"outside": {}, "stacks": []})
    yield from _outside(row["outside"], variables)
    for ours, top, table, *needed in row["stacks"]:
        for own, (theirs, order) in NAMES[table].items():
            if {name := f"{ours}/{own}", *needed} <= variables.keys():
                yield name, Source(f"{top}.{{}}.{theirs}", tuple(order))
