"""Cost tables: every cluster, lowered alone under every legal combination of its decisions, and predicted.

    T_c(a) = seconds of cluster c when the decisions are a       (computed by lowering, never by formula)
    S_c(a) = the small gradient messages in it, which travel with those of other clusters:
             (axes, dtype) -> bytes; and the axes of what it adds to the norm of all gradients

The time of a step is sum_c multiplicity_c T_c + sum over message groups of their shared latency + the one sum
of the norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cache, partial

import numpy as np

from costmodels.pricing.pricer import Pricer
from layoutopt.formulation.lowering_cache import LoweredCluster, Naming, Namings, lowering_cache
from layoutopt.formulation.makers import OpCluster, rules_of
from layoutopt.solver.form import Ints
from layoutopt.space.decisions import Decisions
from layoutopt.space.kind import Choice
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.messages import BucketKey, together
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.pipeline import alone
from mesh_tf_core.lower.placement import placement
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.storage import Stage, narrow_reads, paddable
from mesh_tf_core.lower.subgraph import NO_CUT, Cut
from mesh_tf_core.tracing.graph import Graph

Assignment = tuple[Choice, ...]
NOTHING: Policies = frozenset()
NONE: Mapping[str, str] = {}


@dataclass(frozen=True)
class Entry:
    """The price of one assignment.

    Attributes:
      small: the bytes of each small message, by group; none for contributions to a norm, axis by axis.
      lowered: the lowered programs: the cluster, then its second runs; `mesh` is their mesh.
    """

    seconds: float
    small: Mapping[BucketKey, tuple[int, ...]] = field(default_factory=dict)
    lowered: tuple[LoweredCluster, ...] = ()
    mesh: Mesh | None = None


@dataclass(frozen=True)
class Table:
    """All legal assignments of the decisions that matter to a cluster; `names` are those with a choice."""

    cluster: OpCluster
    names: tuple[str, ...]
    entries: Mapping[Assignment, Entry]

    def within(self, decided: Decisions) -> Table:
        """The table over fewer options."""
        options = [set(decided.options[n]) for n in self.names]
        free = [i for i, found in enumerate(options) if len(found) > 1]
        entries = {
            tuple(a[i] for i in free): e
            for a, e in self.entries.items()
            if all(choice in found for choice, found in zip(a, options, strict=True))
        }
        return Table(self.cluster, tuple(self.names[i] for i in free), entries)


def assignments(
    names: Sequence[str],
    shapes: Sequence[Sequence[str]],
    options: Mapping[str, Sequence[Choice]],
    follows: Mapping[str, str] = NONE,
    most: float = math.inf,
) -> list[Assignment]:
    """Assignments of `names` under which no shape uses a mesh axis twice, and in which names that follow
    another have its choice or the plain one; if the first names have more than `most`, the assignments of
    these."""
    position = {n: i for i, n in enumerate(names)}
    within = [[position[n] for n in shape if n in position] for shape in shapes]
    earlier = [
        sorted({j for shape in within if i in shape for j in shape if j < i}) for i in range(len(names))
    ]
    bits: dict[str, int] = {}
    found: list[tuple[Assignment, tuple[int, ...]]] = [((), ())]
    for name, others in zip(names, earlier, strict=True):
        more = [(c, sum(bits.setdefault(a, 1 << len(bits)) for a in c)) for c in options[name]]
        longer = []
        leader = position.get(follows.get(name, ""))
        for chosen, used in found:
            taken = 0
            for j in others:
                taken |= used[j]
            longer += [
                ((*chosen, choice), (*used, its))
                for choice, its in more
                if not its & taken and (leader is None or choice in ((), chosen[leader]))
            ]
        found = longer
        if len(found) > most:
            break
    return [chosen for chosen, _ in found]


def legal(cluster: OpCluster, decided: Decisions) -> Table:
    """All legal assignments, without their prices."""
    free = set(decided.free)
    names = tuple(n for n in cluster.decisions if n in free)
    pinned = tuple(n for n in cluster.dims if n in decided.fixed)
    found = assignments((*pinned, *names), cluster.shapes, decided.options, cluster.follows)
    # A form that is the only one allowed is not a decision, and needs its splits all the same.
    given = {s for s in cluster.crossed if s not in free and any(decided.options.get(s, ()))}
    if given or cluster.crossed.keys() & free:
        found = [*_crossing(cluster, (*pinned, *names), found, given)]
    return Table(cluster, names, dict.fromkeys((a[len(pinned) :] for a in found), Entry(0.0)))


def _crossing(
    cluster: OpCluster, names: Sequence[str], found: Iterable[Assignment], given: Set[str]
) -> Iterator[Assignment]:
    """The assignments that lowering may not refuse for what keys are split over. What splits one of the
    dimensions further elsewhere splits no other of them: where one rule does, they are not split alike.

    Args:
      given: switches that are no decision, and name a form.
    """
    needs = [
        (-1 if switch in given else names.index(switch), dims)
        for switch, dims in cluster.crossed.items()
        if (switch in names or switch in given) and len({*rules_of(dims, {*dims})} & {*cluster.dims}) < 2
    ]

    def crosses(splits: Mapping[str, Choice], dims: Sequence[str]) -> bool:
        first, *others = (splits.get(n, ()) for n in dims)
        return first != () and others == [first] * len(others)

    for each in found:
        splits = dict(zip(names, each, strict=True))
        if all((i >= 0 and not each[i]) or crosses(splits, dims) for i, dims in needs):
            yield each


def is_large(cluster: OpCluster, decided: Decisions, most: int) -> bool:
    """True if a cluster has more than `most` legal assignments; they are counted no further."""
    names = [n for n in cluster.decisions if n in decided.options]  # not every kind is allowed
    return len(assignments(names, cluster.shapes, decided.options, cluster.follows, most)) > most


def _options(cluster: OpCluster, decided: Decisions, switches: Sequence[Choice], mesh: Mesh) -> Options:
    """The options of lowering that choices of a cluster's switches mean."""
    chosen = dict(zip(cluster.switches, switches, strict=True))
    found = decided.read({n: choice for n, choice in chosen.items() if n in decided.options})[1]
    return alone(found, mesh)


def _merged(chosen: Sequence[Choice], alike: Sequence[tuple[int, Mapping[Choice, Choice]]]) -> Assignment:
    """An assignment with what is another one's equal in its place."""
    if not alike:
        return tuple(chosen)
    found = list(chosen)
    for i, same in alike:
        found[i] = same.get(found[i], found[i])
    return tuple(found)


class Tabler:
    """Builds the tables of one graph on one mesh; no entry twice.

    Args:
      narrow, padded: see `storage.narrow_reads` and `padding.paddable`; None: of this graph.
      divided: name -> sizes of dimensions that their splits are known to divide; None: all sizes here.
      apart: axes of replicas, which the graph does not name.
    """

    def __init__(
        self,
        graph: Graph,
        mesh: Mesh,
        pricer: Pricer,
        narrow: Mapping[str, str] | None = None,
        padded: Mapping[str, frozenset[str]] | None = None,
        divided: Mapping[str, Set[int]] | None = None,
        apart: Axes = (),
    ) -> None:
        self.graph, self.mesh, self.pricer, self.apart = graph, mesh, pricer, apart
        self.narrow = narrow_reads(graph) if narrow is None else narrow
        self.padded = paddable(graph) if padded is None else padded
        self.cache, self.namings = lowering_cache(graph, pricer), Namings(pricer)
        self.sizes = graph.dims()
        self.divided = self.sizes if divided is None else divided
        self._entries: dict[OpCluster, dict[Assignment, Entry | None]] = {}
        self._oracles: dict[Hashable, Oracle] = {}

    def table(
        self, cluster: OpCluster, decided: Decisions, only: Callable[[Table], Table] | None = None
    ) -> Table:
        """Lowers and prices a cluster under all its assignments; those that lowering refuses are left out.

        Args:
          only: leaves some of the assignments, before anything is lowered (None: all).
        """
        bare, price = legal(cluster, decided), self._prices(cluster, decided)
        bare = bare if only is None else only(bare)
        every = [decided.fixed.get(n, ()) for n in cluster.decisions]
        place = [cluster.decisions.index(n) for n in bare.names]
        entries: dict[Assignment, Entry] = {}
        for assignment in bare.entries:
            for i, choice in zip(place, assignment, strict=True):
                every[i] = choice
            if (entry := price(every)) is not None:
                entries[assignment] = entry
        return Table(cluster, bare.names, entries)

    def entry(self, cluster: OpCluster, decided: Decisions, chosen: Mapping[str, Choice]) -> Entry | None:
        """The price of a cluster under one choice of everything; None if that is not legal."""
        return self._prices(cluster, decided)([chosen.get(n, ()) for n in cluster.decisions])

    def _prices(self, cluster: OpCluster, decided: Decisions) -> Callable[[Sequence[Choice]], Entry | None]:
        """The price of a cluster by choices of all its decisions; what these share is made once."""
        # The first decisions name mesh axes.
        known, count = self._entries.setdefault(cluster, {}), len(cluster.dims) + len(cluster.sums)
        alike = [(i, cluster.alike[n]) for i, n in enumerate(cluster.decisions) if n in cluster.alike]
        placed = cache(partial(self._placed, cluster))
        switched = cache(partial(_options, cluster, decided, mesh=self.mesh))

        def price(every: Sequence[Choice]) -> Entry | None:
            key = _merged(every, alike)
            if key not in known:
                known[key] = self._entry(cluster, *placed(key[:count]), switched(key[count:]))
            return known[key]

        return price

    def computed(self, cluster: OpCluster, entry: Entry, chosen: Mapping[str, Choice]) -> float:
        """Seconds of an entry, under its choices, without messages."""
        prices = self.prices_of(cluster, chosen)
        return sum(prices.computed(part.cost or ()) for part in entry.lowered)

    def prices_of(self, cluster: OpCluster, chosen: Mapping[str, Choice]) -> Pricer:
        """The prices of a cluster's lowered programs, which name axes as its choices do."""
        return self.namings.of([chosen.get(n, ()) for n in (*cluster.dims, *cluster.sums)]).pricer

    def _placed(self, cluster: OpCluster, splits: Sequence[Axes]) -> tuple[Naming, Layout, Cut]:
        """Splits of a cluster's dimensions, and its pending sums, with the axes numbered."""
        naming = self.namings.of(splits)
        number, named = naming.number, zip(cluster.dims, splits, strict=False)
        layout = Layout({n: tuple([number[a] for a in axes]) for n, axes in named if axes})
        if not cluster.sums:
            return naming, layout, NO_CUT
        waits = dict(zip(cluster.sums, splits[len(cluster.dims) :], strict=True))
        given, left = (
            {
                t: tuple(number[a] for a in waits[n])
                for n, tensors in found.items()
                for t in tensors
                if waits[n]
            }
            for found in (cluster.given, cluster.left)
        )
        return naming, layout, Cut(given, left)

    def _entry(
        self, cluster: OpCluster, naming: Naming, layout: Layout, cut: Cut, options: Options
    ) -> Entry | None:
        """The price of a cluster; None if that is not legal."""
        # What splits dimensions further elsewhere divides them there.
        if any(
            size % naming.mesh.group_size((*layout.axes(name), *axes))
            for name, axes in layout.elsewhere
            for size in self.sizes[name]
        ):
            return None
        options = self._numbered(options, naming)
        oracle = self._oracle(naming, layout, options)
        first = options if cluster.saves or not options.recompute else replace(options, recompute=NOTHING)
        runs = cluster.first_run(options.recompute)
        lowered = self.cache.lowered(runs, first, oracle, cluster.totalled, cut)
        if lowered.cost is None:
            return None
        seconds = naming.pricer.total(lowered.cost)
        small: dict[BucketKey, tuple[int, ...]] = {}
        # Messages that are summed one by one are priced so already.
        for key, sums in (
            {} if self.pricer.itemiser.compiler.apart else together(lowered.waiting, naming.mesh)
        ).items():
            payloads = tuple(w.value.local_bytes(naming.mesh) for w in sums)
            seconds -= sum(naming.pricer.message_seconds(key.axes, payload) for payload in payloads)
            small[key._replace(axes=tuple(naming.real[a] for a in key.axes))] = payloads
        for axes, dtype in lowered.totalled:
            seconds -= naming.pricer.message_seconds(axes, itemsize(dtype), late=True)
            small.update({BucketKey((naming.real[a],), dtype, late=True): () for a in axes})
        parts = [lowered]
        for each in cluster.second_runs(options.recompute):
            second = self.cache.lowered(each, options, oracle, cluster.totalled)
            assert second.cost is not None
            seconds += naming.pricer.total(second.cost)
            parts.append(second)
        return Entry(max(seconds, 0.0), small, tuple(parts), naming.mesh)

    def _oracle(self, naming: Naming, layout: Layout, options: Options) -> Oracle:
        """That of a table of placements; clusters share it, so that no row is worked out twice."""
        stages = frozenset(options.storage.items())
        key = naming.order, layout, stages, options.offload, options.recompute
        oracle = self._oracles.get(key)
        if oracle is None:
            where = placement(self.graph, naming.mesh, layout, options, self.narrow, self.padded)
            apart = tuple(naming.number[axis] for axis in self.apart)
            oracle = self._oracles[key] = Oracle(where, self.divided, naming.real, apart)
        return oracle

    def _numbered(self, options: Options, naming: Naming) -> Options:
        """The options of a cluster's lowering, with the axes numbered."""
        known = self.graph.variables
        if all(v in known and not isinstance(s, Stage) for v, s in options.storage.items()):
            return options
        # One decision may be of variables that meet in another fragment, too: this graph has not those.
        storage = {v: s for v, s in options.storage.items() if v in known}
        return replace(options, storage=storage).renamed(naming.number)


class Index:
    """Numbers of decisions and of their options."""

    def __init__(self, names: Sequence[str], decided: Decisions) -> None:
        self.number = {n: i for i, n in enumerate(names)}
        self.place = {n: {c: j for j, c in enumerate(decided.options[n])} for n in names}

    def rows(self, names: Sequence[str], assignments: Iterable[Sequence[Choice]]) -> list[list[int]]:
        places = [self.place[n] for n in names]
        return [[place[c] for place, c in zip(places, a, strict=True)] for a in assignments]

    def scope(self, names: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.number[n] for n in names)

    def listed(self, table: Table) -> Ints:
        """The assignments of a table, of shape (assignments, decisions)."""
        rows = np.array(self.rows(table.names, table.entries), np.int64)
        return rows.reshape(len(table.entries), len(table.names))
