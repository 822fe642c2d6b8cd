"""Lazy cuts: a memory row made for a layout that does not fit. It forbids this layout, and with it all that
is too large for the same reason.

The evaluator's peak is at some instruction. The row of that point (`memory_constraints`) counts less
there: some values are larger under this layout, moved copies are held, kernels are cut. Let D be the
decisions about the clusters that make or read one of these values, and about the cluster that runs at the
peak. A cluster's program depends only on its own decisions (that is why costs of clusters add up). Under
every layout that agrees on D the same instruction therefore runs, with the same excess e over the row's
count:

    row(x) + e [x agrees on D] <= peak(x)     written as     row(x) + e (sum_{i in D} [x_i agrees] - |D| + 1)

which is less where x does not agree. The row therefore never forbids a layout that fits
(tests/layoutopt/test_lazy_cuts.py). Where the point is not found in the program with nothing split, D is
everything, and the row is about this one layout.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from costmodels.liveness import Holding
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.extract import Extraction
from layoutopt.formulation.held_bytes import PointKey
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.solver import ResourceRow, RowTerm, Sparse
from layoutopt.space.recompute import Recompute, again_in
from mesh_tf_core.ir.program import Collective, Instr, Program, Slice

SAME = 0.5
"""Bytes: whole numbers that are closer are equal."""


def lazy_cut(found: Extraction, choices: Sequence[int], judged: Evaluation, met: int = 0) -> ResourceRow:
    """The row for choices with a known program; its use under them is that program's peak.

    Args:
      met: bytes of the replicas' synchronisation state, which the program of one step does not contain.
    """
    names = found.names
    entries: tuple[RowTerm, ...] = ()
    most = float(judged.memory.peak + met)
    excess, decided = most, frozenset(names)
    again = again_in(found.read(choices)[1])
    peak = judged.memory.points[judged.memory.at]
    known = found.memory.point(again, peak.origin.node, peak.origin.phase, choices)
    if known is not None:
        row, counted = known
        held, makers = _held(judged)
        more = most - row.use(choices)
        wrong = _wrong(held, counted, found.memory.dependencies)
        explained = sum(held[k] - counted.get(k, 0.0) for k in wrong)
        if more > 0 and abs(explained - more) <= SAME:
            nodes = {peak.origin.node, *(n for k in wrong for n in makers.get(k, ()))}
            nodes.update(number for k in wrong for number in _related(found.memory.dependencies, k))
            entries, excess = row.entries, more
            decided = _decisions(found, nodes)
    agreeing = [i for i, name in enumerate(names) if name in decided]
    # Where nothing decides, the excess is always held.
    gates = [] if agreeing else [RowTerm((), Sparse(np.zeros((1, 0), np.int64), np.array([excess])))]
    for i in agreeing:
        table = np.zeros(len(found.decided.options[names[i]]))
        table[choices[i]] = excess
        gates.append(RowTerm((i,), table - (excess * (len(agreeing) - 1) if i == agreeing[0] else 0.0)))
    return ResourceRow(f"judged {tuple(choices[: len(names)])}", np.inf, (*entries, *gates))


def _wrong(
    held: Mapping[PointKey, float], counted: Mapping[PointKey, float], dependencies: Dependencies
) -> list[PointKey]:
    """What the evaluator and a row count differently. To the evaluator a sum that is still pending is no
    tensor yet, but to a row, in which nothing is split, it is: these are compared as one."""
    made = {n.index: n.outputs[0] for n in dependencies.live if len(n.outputs) == 1}
    apart = {k: held.get(k, 0.0) - counted.get(k, 0.0) for k in {**held, **counted}}
    joined: dict[PointKey, float] = defaultdict(float)
    alike = {k: ("tensor", made[k[1]]) if k[0] == "inside" and k[1] in made else k for k in apart}
    for k, difference in apart.items():
        joined[alike[k]] += difference
    return [k for k, difference in apart.items() if abs(difference) > SAME and abs(joined[alike[k]]) > SAME]


def _held(judged: Evaluation) -> tuple[Counter[PointKey], dict[PointKey, set[int]]]:
    """What the evaluator counts at the peak besides the variables, and the nodes that make it."""
    program = judged.program
    maker = {o: instr for instr, _ in program.walk() for o in instr.outputs}
    held: Counter[PointKey] = Counter()
    nodes: dict[PointKey, set[int]] = {}
    for holding in judged.memory.holdings:
        if holding.value >= 0:
            key = _key(program, holding, maker)
            held[key] += holding.bytes
            if holding.origin is not None:
                nodes.setdefault(key, set()).add(holding.origin.node)
    return held, nodes


def _key(program: Program, holding: Holding, maker: dict[int, Instr]) -> PointKey:
    """The tensor that a value is, or is a moved copy of; else the node that makes it."""
    value = program.values[holding.value]
    if value.tensor >= 0:
        return "tensor", value.tensor
    while isinstance(made := maker.get(value.id), Collective | Slice):
        value = program.values[made.inputs[0]]
        if value.tensor >= 0:
            return "copy", value.tensor
    return "inside", holding.origin.node if holding.origin is not None else -1


def _related(dependencies: Dependencies, key: PointKey) -> Iterable[int]:
    """The nodes that make or read a tensor, by whatever name, in whatever loop."""
    kind, start = key
    if kind == "inside":
        return [start]
    seen, todo, nodes = {start}, [start], set[int]()
    while todo:
        tensor = todo.pop()
        made = dependencies.graph.producer.get(tensor)
        near = [*dependencies.ties(tensor)]
        for node in (
            *([made] if made is not None and made.body is None else []),
            *dependencies.readers[tensor],
        ):
            nodes.add(node.index)
            if node.op.free:
                near += [*node.inputs[:1], *node.outputs]
        todo += [t for t in near if t not in seen]
        seen.update(near)
    return nodes


def _decisions(found: Extraction, numbers: Iterable[int]) -> frozenset[str]:
    """What is decided about the clusters of some nodes, and which loops run again."""
    clusters = (table.cluster for table in found.tables)
    nodes = frozenset(numbers)
    about = (c.decisions for c in clusters if any(not nodes.isdisjoint(members) for members in c.members))
    return frozenset({*found.decided.of(Recompute), *(name for names in about for name in names)})
