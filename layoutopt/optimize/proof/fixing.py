"""Removes options before all tables are complete: those that no layout faster than a known one has.

A problem with only some of its tables costs no more than the whole. Elimination gives, for every option, the
cost of the best layout with it under these tables (`problem.marginals`). The least cost of clusters without a
table is added: a device computes its share of them, if pieces cost no less than their share of the whole
(`Pricer.pieces_cost_more`). If the sum exceeds the time of a known layout that fits, the option is removed,
and later tables are made over the remaining ones. Where the bound of the whole problem is more, no further
table is needed. Tables that raise the bound most, by their entries, come first. Their cost is estimated by
that of their cluster without splits, then under the best choices by the tables so far, which avoid what is
known to be slow.

The best choices by the tables so far are evaluated now and then: they are often a better known layout.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from costmodels.pricing.pricer import LaunchPricer
from layoutopt.formulation.extract import Draft
from layoutopt.formulation.makers import OpCluster
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import EXACT, SLACK, BoundSource, OptionCosts
from layoutopt.optimize.problems.subproblem import SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.runtime.clock import UNLIMITED, Clock
from layoutopt.solver import eliminate
from layoutopt.solver.elimination import marginals, rows_below
from layoutopt.solver.form import Floats
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice
from layoutopt.space.recompute import Recompute
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split
from layoutopt.space.storage import Storage
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import AT, Layout
from mesh_tf_core.lower import Options

FIRST, MORE = 40, 0.3
"""Entries before options are looked at: at first, and as a part of those that there are."""
LITTLE = 0.01
"""Least part of a cluster's seconds that count for the order of tables."""
KNOWN = 1e-3
"""Least part of all seconds with which it is worth knowing what a cluster computes at least."""
PROPOSED = 0.5
"""Share of the estimated seconds in complete tables from which their best choices are evaluated."""

Propose = Callable[[Layout, Options], float]
"""Evaluates a layout; the seconds of the fastest known one that fits."""
Heard = Callable[[float, float], None]
"""heard(seconds that no layout takes less than, part of the tables that are made)."""
PartMade = Callable[[float], None]
"""told(share of the tables that are complete)."""


class Weight(NamedTuple):
    """The price of a cluster of all layers while nothing is split.

    Attributes:
      seconds: all of it; 0: that is not legal.
      computed: the least compute on all devices together under any layout; 0: unknown.
    """

    seconds: float
    computed: float


ClusterWeights = dict[int, Weight]
"""By the ids of clusters, of any mesh with as many devices."""


def fix_options(
    draft: Draft,
    upper: float,
    propose: Propose,
    clock: Clock = UNLIMITED,
    weights: ClusterWeights | None = None,
    heard: Heard | None = None,
) -> float:
    """Makes tables until none is left, or the bound reaches `upper`, or the time is over.

    Args:
      upper: seconds of a known layout; only faster ones matter.
      weights: costs of clusters without splits, as far as known; it is filled.
      heard: called with every bound.

    Returns:
      seconds: no layout takes less, or none takes less than `upper` if that is less.
    """
    weight = fill({} if weights is None else weights, draft)
    total, told = sum(weight[id(c)].seconds for c in draft.left), 0.0
    known, bound, made, last = upper, 0.0, 0, 0
    queue: list[OpCluster] = []
    seconds = {id(c): weight[id(c)].seconds for c in draft.left}

    def worth(cluster: OpCluster) -> float:
        own = seconds.get(id(cluster), known)
        least = weight[id(cluster)].computed / _ways(cluster, draft)  # the bound has it without a table
        return max(own - least, LITTLE * own) / _width(cluster, draft.decided)

    while draft.left and not clock.over:
        queue = queue or sorted(draft.left, key=worth, reverse=True)[::-1]  # the best last
        best = queue.pop()
        told += weight[id(best)].seconds
        made += len(draft.make(best).entries)
        if draft.left and made - last < max(FIRST, MORE * last):
            continue
        problem = draft.times()
        found = eliminate(problem)
        rest = (1 - SLACK) * sum(weight[id(c)].computed / _ways(c, draft) for c in draft.left)
        bound = max(bound, found.bound + rest)
        if heard is not None and not draft.unsplit:
            heard(bound, len(draft.tables) / (len(draft.tables) + len(draft.left)))
        if bound >= upper * (1 - EXACT):
            break
        if found.exact:
            # What is not told yet takes about its part of the time too.
            hopeful = told >= PROPOSED * total and found.bound * total <= known * told
            if (choices := found.best()) is not None:
                seconds = _under(draft, choices)
                with suppress(LayoutError):  # a cluster without a table yet may forbid it
                    known = min(known, propose(*draft.read(choices))) if hopeful else known
            # Should the evaluator be below the tables, these keep what is best by them.
            most = max(known, bound) * (1 + SLACK)
            left = _below(most - rest, marginals(found, problem.sizes), draft.decided)
            draft.restrict(left, rows_below(found, most - rest))
            queue = []
        made = last = sum(len(t.entries) for t in draft.tables)
    return bound


def faster(
    evaluator: Evaluator,
    subproblem: Subproblem,
    upper: float,
    propose: Propose,
    clock: Clock = UNLIMITED,
    weights: ClusterWeights | None = None,
    told: PartMade | None = None,
) -> SubproblemSearch | None:
    """The problem of layouts that may be faster than `upper` seconds; None if there are none, or no time for
    all tables. Proves bounds of the subproblem, none if dimensions had to stay whole.

    Args:
      propose, clock, weights: those of `fix_options`.
      told: called with every bound.
    """
    mesh, bounds = subproblem.mesh, subproblem.bounds
    draft = Draft(evaluator.model, mesh, subproblem.decided, evaluator.prices(mesh))

    def prove(seconds: float) -> None:
        if not draft.unsplit:  # what is left out is proven to take `upper` alone
            bounds.prove(min(seconds, upper), BoundSource.TABLES)

    def heard(bound: float, part: float) -> None:
        prove(bound)
        if told is not None:
            told(part)

    bound = fix_options(draft, upper, propose, clock, weights, heard)
    prove(bound)
    if draft.left or bound >= upper * (1 - EXACT):
        return None
    search = SubproblemSearch(evaluator, draft.extraction())
    bound = max(bound, search.eliminated.bound)  # with what messages share
    prove(bound)
    return search if bound < upper * (1 - EXACT) else None


def option_costs(search: SubproblemSearch, asked: Decisions, known: float) -> OptionCosts | None:
    """The costs of the options of a problem; None if they are unknown.

    Args:
      search: the remaining problem (`faster`).
      asked: all its options.
      known: seconds of a layout; removed options, and those that only occur in removed rows, take longer.
    """
    found, extraction = search.eliminated, search.extraction
    if not found.exact or extraction.unsplit:
        return None
    more = math.nextafter(known * (1 + SLACK), math.inf)
    costs = dict(zip(extraction.names, marginals(found, extraction.problem.sizes), strict=False))
    every = {name: dict.fromkeys(options, more) for name, options in asked.options.items()}
    for name, options in extraction.decided.options.items():
        least = costs.get(name, [found.bound] * len(options))
        every.setdefault(name, {}).update(zip(options, [min(more, float(c)) for c in least], strict=True))
    return every


def removed(draft: Draft, asked: Decisions, known: float) -> OptionCosts:
    """The splits and storage that `fix_options` removed, with seconds that no layout with them takes less
    than."""
    more, left = math.nextafter(known * (1 + SLACK), math.inf), draft.decided.options
    names = (n for kind in (Split, Elsewhere, Storage) for n in asked.of(kind) if n in left)
    return {n: dict.fromkeys([o for o in asked.options[n] if o not in left[n]], more) for n in names}


def fill(weights: ClusterWeights, draft: Draft) -> ClusterWeights:
    """The weights of clusters by their id, including those of a draft; what clusters with few of its seconds
    compute stays unknown, as its entries would take most of the time."""
    new = [c for c in draft.left if id(c) not in weights]
    for cluster in new:
        entry = draft.entry(cluster, _plain(draft, cluster))
        weights[id(cluster)] = Weight(0.0 if entry is None else cluster.multiplicity * entry.seconds, 0.0)
    least = KNOWN * sum(weights[id(c)].seconds for c in draft.left)
    for cluster in new if draft.pricer.pieces_cost_more else ():
        if (seconds := weights[id(cluster)].seconds) > least:
            weights[id(cluster)] = Weight(seconds, _computed(draft, cluster))
    return weights


def _under(draft: Draft, choices: Sequence[int]) -> dict[int, float]:
    """By their ids, the seconds of clusters without a table under choices of `Draft.times` that are legal."""
    options, free = draft.decided.options, draft.decided.free
    chosen = draft.decided.fixed | {n: options[n][c] for n, c in zip(free, choices, strict=True)}
    every = [(c, draft.entry(c, chosen)) for c in draft.left]
    return {id(c): c.multiplicity * e.seconds for c, e in every if e is not None}


def _plain(draft: Draft, cluster: OpCluster) -> dict[str, Choice]:
    """The choices under which nothing of a cluster is split."""
    plain = {n: options[0] for n in cluster.decisions if (options := draft.decided.options.get(n))}
    return plain | {n: () for n in cluster.dims if n not in draft.decided.stages}


def _computed(draft: Draft, cluster: OpCluster) -> float:
    """`Weight.computed` of a cluster that is legal without splits."""
    decided, tabler, plain = draft.decided, draft.tabler_of(cluster), _plain(draft, cluster)
    # How variables are stored, and what loops save, changes what is computed.
    switches = [n for n in cluster.switches if cluster.saves or n not in decided.of(Recompute)]
    every = itertools.product(*(decided.options.get(n, ((),)) for n in switches))
    chosen = [plain | dict(zip(switches, choices, strict=True)) for choices in every]
    entries = ((each, draft.entry(cluster, each)) for each in chosen)
    computed = [tabler.computed(cluster, entry, each) for each, entry in entries if entry is not None]
    return cluster.multiplicity * min(computed)


def _ways(cluster: OpCluster, draft: Draft) -> int:
    """Among how many devices the work of a cluster can be divided at most; a host launches it for each."""
    decided, mesh = draft.decided, draft.mesh
    if isinstance(draft.pricer, LaunchPricer):
        return 1
    if not decided.named.keys().isdisjoint(cluster.switches) or any(AT in n for n in cluster.dims):
        return mesh.devices  # storage, and what splits dimensions further, has axes of its own
    splits = (max(map(mesh.group_size, decided.options.get(n, ((),)))) for n in cluster.dims)
    return min(math.prod(splits), mesh.devices)


def _width(cluster: OpCluster, decided: Decisions) -> int:
    """How many entries the table of a cluster has at most; few of them have more than the plain option of
    what is `crossed`."""
    counted = (n for n in cluster.decisions if n in decided.options and n not in cluster.crossed)
    return math.prod(len(decided.options[n]) for n in counted)


def _below(most: float, costs: Sequence[Floats], decided: Decisions) -> Decisions:
    """The decisions without the options that cost more."""
    options = dict(decided.options)
    for name, found in zip(decided.free, costs, strict=True):
        options[name] = tuple(o for o, cost in zip(options[name], found, strict=True) if cost <= most)
    return decided.within(options)
