"""Hunts: models under random layouts and options, on any engine, must learn what they learn on one device."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import mesh_tf_core as mtf
from mesh_tf_core.lower.rematerialization import recomputable
from tests.examples.helper import Result, check_same, train

Legal = Callable[[mtf.Layout], bool]
Grown = Callable[[random.Random, mtf.Graph, Legal], mtf.Layout]
"""(random numbers, the graph of a step, whether a layout can be lowered) -> a layout."""
MESH = "x:2;y:2"


def options(model: mtf.Model, way: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `mtf.Options`.

    Args:
      way: the same, but that a stage of storage is for all trained variables, "recompute" for all loops and
        a form of attention for all keys.
    """
    found, graph = dict(way), model.training_step().graph
    if "storage" in found:
        trained = [v.name for v in model.graph.variables.values() if v.trainable and len(v.shape)]
        found["storage"] = dict.fromkeys(trained, found["storage"])
    if "recompute" in found:
        found["recompute"] = frozenset(recomputable(graph))
    if "context" in found:
        found["context"] = frozenset({("memory_length", found["context"])})
    return found


@dataclass(frozen=True)
class Hunt:
    """Attributes:
    models: name -> an example and its hyperparameters.
    ways: see `options`; seeds take them in turn.
    grown: makes a layout, on `MESH`.
    """

    models: Mapping[str, tuple[Any, dict[str, Any]]]
    ways: Sequence[Mapping[str, Any]]
    grown: Grown

    def check(self, name: str, seed: int, engine: str = "lockstep", steps: int = 2) -> mtf.Layout:
        """Trains under a random layout; the layout. AssertionError if that learns something else."""
        example, hparams = self.models[name]
        model = example.model(**hparams)
        given = options(model, self.ways[(seed + len(name)) % len(self.ways)])

        def legal(layout: mtf.Layout) -> bool:
            try:
                model.lower(mtf.Mesh(MESH), layout, mtf.Options(**given))
            except mtf.UserError:
                return False
            return True

        graph = model.training_step(given.get("microbatches", 1)).graph
        layout = self.grown(random.Random(seed), graph, legal)
        assert legal(layout), f"{layout} is refused"
        found = train(example, hparams, MESH, str(layout), steps, engine=engine, **given)
        check_same(found, alone(example, tuple(sorted(hparams.items())), steps))
        return layout


@cache
def alone(example: Any, hparams: tuple[tuple[str, Any], ...], steps: int) -> Result:
    """What a model learns on one device."""
    return train(example, dict(hparams), steps=steps)
