"""The value of what recomputed layers keep: the plan's step with one kept value more or less, all else
unchanged.

Each is the whole program, lowered and priced. If several words keep the same values, only the first of
`remat_policy.words_of` is tried.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from costmodels.hardware import Hardware
from costmodels.pricing.pricer import pricer
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.build import decided
from layoutopt.plan.layout_results import KeptStep
from layoutopt.space.decisions import beyond
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.recomputed import recomputed
from mesh_tf_core.lower.remat_policy import OTHERS, KeptKind, Recomputed, words_of
from mesh_tf_core.lower.rematerialization import saving_loops
from mesh_tf_core.model import Model
from mesh_tf_core.tracing.graph import Graph


def keepings(
    model: Model, mesh: Mesh, layout: Layout, options: Options, hardware: Hardware, memory: float
) -> list[KeptStep]:
    """Every change of one kind, or name, of kept value that the framework can express; fastest first.

    Args:
      memory: bytes that fit.
    """
    graph = model.step_of(mesh, layout, options).graph
    can = restriction_of(hardware.framework).of(model)
    stages = model.stages(mesh, layout)
    prices, found = pricer(hardware, mesh), list[KeptStep]()
    for asked in sorted(options.recompute):
        others = options.recompute - {asked}
        for change, again in _changes(asked, graph):
            instead = replace(options, recompute=others if again is None else others | {again})
            if beyond(can, decided(instead, layout, stages)) is not None:
                continue
            step = evaluate(model, mesh, layout, hardware, instead, prices)
            peak, said = step.memory.peak, "" if again is None else str(again)
            its: dict[str, Any] = {
                "loop": asked.dim,
                "change": change,
                "recompute": said,
                "fits": peak <= memory,
            }
            found.append(KeptStep(**its, step_seconds=step.cost.step_seconds, peak_bytes=peak))
    return sorted(found, key=lambda k: (k.step_seconds, k.peak_bytes))


def _changes(asked: Recomputed, graph: Graph) -> Iterator[tuple[str, Recomputed | None]]:
    """What may be said of some loops instead, and what then is other."""
    blocks = saving_loops(graph, asked.dim)

    def kept(policy: Recomputed) -> tuple[frozenset[int], ...]:
        remat = recomputed(graph, frozenset({policy}))
        return tuple(remat.second(block).kept for block in blocks)

    yield "nothing is recomputed", None
    seen = {kept(asked)}
    words = dict.fromkeys(word for block in blocks for word in words_of(block, graph))
    changes = [(f"without {_said(word)}", set(asked.keep) - {word}) for word in asked.keep]
    changes += [("nothing is kept", set())] if len(asked.keep) > 1 else []
    changes += [(f"with {_said(word)}", {*asked.keep, word}) for word in words if word not in asked.keep]
    for change, keep in changes:
        policy = Recomputed.of(asked.dim, keep, asked.only)
        if (values := kept(policy)) not in seen:
            seen.add(values)
            yield change, policy


def _said(word: str) -> str:
    """A word of `keep=` in a sentence: 'products', 'all other values', 'what feed_forward makes'."""
    if word == OTHERS:
        return "all other values"
    return word if KeptKind.of(word) else f"what {word} makes"
