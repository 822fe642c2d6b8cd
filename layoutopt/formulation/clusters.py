"""Clusters: the smallest groups of operations whose costs add up to the cost of the whole program.

Lowering treats most operations alone. The exceptions couple operations, and a cluster contains the operations
that they couple:
  - a sum that may wait behind linear operations (pass `pending sums`), also out of a loop;
  - a gather that several operations of a block share;
  - the update of one variable, all of it;
  - the casts and gathers of one variable that is stored split, in every block that reads it.
A cluster is lowered alone, with everything around it given; equal clusters (unrolled layers) are predicted
once, with a multiplicity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Set
from dataclasses import replace

from costmodels.kept import kept_values
from layoutopt.formulation.cuts import PendingSum
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.makers import (
    Accesses,
    OpCluster,
    numbers_of,
    pairs_of,
    rules_of,
    stages_of,
    subgraph_of,
)
from layoutopt.formulation.second_runs import SecondRun, SecondRuns
from layoutopt.space.context import Context
from layoutopt.space.decisions import changing
from layoutopt.space.kind import Affects
from mesh_tf_core.ir.blocks import Assign, Block, Feed, Node, Read, Scan
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.nodes import delivered, plan_of, product_dims
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.subgraph import Twin, made_by


def clusters(dependencies: Dependencies) -> list[OpCluster]:
    """The clusters of a graph, with equal ones merged."""
    builder = _Builder(dependencies)
    groups: dict[int, list[Node]] = defaultdict(list)
    for node in dependencies.live:
        if isinstance(node.op, Feed | Read) or (node.op.converts and dependencies.variable_of(node)):
            continue
        groups[dependencies.root(node.index)].append(node)
    merged: dict[Hashable, list[list[Node]]] = defaultdict(list)
    for nodes in groups.values():
        merged[builder.signature(nodes)].append(nodes)
    found = [
        replace(builder.cluster(alike[0], len(alike)), members=tuple(map(numbers_of, alike)))
        for alike in merged.values()
    ]
    return found + Accesses(dependencies, builder.runs).clusters()


class _Builder:
    def __init__(self, dependencies: Dependencies) -> None:
        self.graph, self.dependencies, self.further = dependencies.graph, dependencies, dependencies.further
        self.runs, self.delivered = SecondRuns(dependencies), delivered(dependencies.graph)
        self.products = product_dims(dependencies.graph)
        self.values = kept_values(dependencies.graph.outline())

    def signature(self, nodes: list[Node]) -> Hashable:
        """Equal for clusters with the same operations on the same types, connected and repeated alike."""
        inside = {node.index for node in nodes}
        position, parts = dict[int, int](), list[Hashable]()
        runs = dict.fromkeys(run for node in nodes for run in self.runs.runs.get(node.index, ()))
        read_then = {run: self.runs.early(nodes, run) for run in runs}
        for node in nodes:
            types = []
            for i in (*node.inputs, *node.outputs):
                position.setdefault(i, len(position))
                types.append((position[i], self.graph.tensor(i).type))
            leaves = tuple(self._leaves(o) for o in node.outputs)
            leading = [t for o in node.outputs for t in self.dependencies.leads_to(o)]
            early = tuple(self.dependencies.early(t, inside) for t in leading)
            what = (
                node.op.variable.slot_of is None if isinstance(node.op, Assign) else isinstance(node.op, Scan)
            )
            switches = self._switches(node)
            kernel = self._kernel(node, inside)
            times = self.dependencies.times(node)
            own = self.runs.runs.get(node.index, ())
            anyway = tuple(
                tuple((node.inputs.index(t.tensor), self._readers(t)) for t in self.runs.beside([node], run))
                for run in own
            )
            totalled = tuple(o in self.dependencies.totalled for o in node.outputs)
            cut = self.dependencies.cut
            by_cut = any(o in self.dependencies.additions[n] for n in cut for o in node.outputs)
            apart = node.index if node.index in cut or by_cut else -1
            # Prices know the phase: whether a result stays, what a collective may overlap, when casts run.
            again = tuple((run, *(t in read_then[run] for t in leading)) for run in own)
            kept = tuple(self.runs.kept.get(o) for o in node.outputs)
            idle = tuple(texts for texts, found in self.runs.idle.items() if node.index in found)
            memory = tuple(self._memory(o) for o in node.outputs)
            how = (switches, node.phase, kernel, anyway, totalled, apart, again, kept, idle, memory)
            parts.append((_bare(node), tuple(types), times, leaves, early, what, *how))
        if any(isinstance(n.op, Scan) for n in nodes):
            parts.append(nodes[0].index)
        return tuple(parts)

    def _memory(self, tensor: int) -> Hashable:
        """What rules of memory ask about a tensor's value, which readers in other clusters decide, too."""
        value = self.values.of.get(tensor, -1)
        more = self.values.masks.get(value), self.values.apart.get(value)
        return *more, value in self.values.remade, value in self.values.inside

    def _readers(self, each: Twin) -> Hashable:
        """What backward does with what a second run moves."""
        return tuple(
            (
                _bare(node),
                tuple((i == each.twin, self.graph.tensor(i).type) for i in (*node.inputs, *node.outputs)),
            )
            for node in each.readers
        )

    def _leaves(self, tensor: int) -> tuple[tuple[bool, bool, bool], ...]:
        """What loops make of a tensor: a sum is written in iterations that run, a stack in all of them, and
        it is first set to zero if the loop runs from the last iteration to the first."""
        block = self.graph.blocks[self.graph.tensor(tensor).block]
        stacks, sums = ({o for i, o in pairs if i == tensor} for pairs in (block.stacked, block.summed))
        return tuple((o in stacks, o in sums, block.reverse) for o in self.dependencies.outer[tensor])

    def _kernel(self, node: Node, inside: Set[int]) -> Hashable:
        """What of fusion matters to a price: with which of the nodes, and what of it others read."""
        position = {i: n for n, i in enumerate(sorted(inside))}
        found: list[Hashable] = []
        for way in self.dependencies.fusions:
            group = way.group.get(node.index)
            others = sorted(i for i in inside if i != node.index and way.group.get(i) == group is not None)
            read = tuple((o in way.leaving, o in way.again) for o in node.outputs)
            found.append((tuple(position[i] for i in others), read))
        return tuple(found)

    def _switches(self, node: Node) -> tuple[str, ...]:
        """Decisions, splits apart, that change how a node is lowered."""
        updated = self._updated(node)
        made = [
            t for o in made_by(node, self.graph) for t in self.dependencies.leads_to(o) if t in self.delivered
        ]
        variables = [self.graph.variables[self.delivered[t]] for t in made]
        own = [] if updated is None else [updated]
        makers = (self.graph.producer.get(i) for i in node.inputs if node.phase == Phase.UPDATE)
        reads = (maker.op.variable for maker in makers if maker is not None and isinstance(maker.op, Read))
        variables += [v for v in reads if v.own_storage and v not in own]
        products = sorted(self.products.get(node.index, frozenset()) & self.dependencies.products)
        keys = node.op.crosses[:1]
        every, granularity = [*own, *variables], self.dependencies.granularity
        return changing(
            Affects(self._recomputed(node), every, keys, own, products=products, granularity=granularity)
        )

    def _recomputed(self, node: Node) -> tuple[str, ...]:
        """Names of the loops whose recomputation makes a node run again, or changes what it saves."""
        saved = (name for block in self._savers(node) for name in self.runs.around(block))
        return tuple(dict.fromkeys((*self.runs.switches.get(node.index, ()), *saved)))

    def _savers(self, node: Node) -> list[Block]:
        """The loops that save, for backward, what a node computes, or what its own body does."""
        block, body = self.dependencies.block_of[node.index], node.body
        found = [body] if body is not None and body.saved else []
        return found + [block] * any(o in block.saved for o in node.outputs)

    def _updated(self, node: Node) -> Variable | None:
        """The variable that a node of the update belongs to, or that a node gives its new value."""
        updates = self.graph.variables.get(node.scope) if node.phase == Phase.UPDATE else None
        found = node.op.variable if updates is None and isinstance(node.op, Assign) else updates
        return found if found is not None and found.own_storage else None

    def cluster(self, nodes: list[Node], multiplicity: int) -> OpCluster:
        inside = {node.index for node in nodes}
        leading = (t for n in nodes for o in made_by(n, self.graph) for t in self.dependencies.leads_to(o))
        early = frozenset(t for t in leading if self.dependencies.early(t, inside))
        first = nodes[0]
        name = f"{first.scope or 'model'}/{first.op.name}" + (
            f" ({first.phase})" if first.phase != Phase.FORWARD else ""
        )
        subgraph = replace(subgraph_of(self.dependencies, nodes), early=early)
        again = self._second_runs(nodes, subgraph)
        idle = ((texts, found & inside) for texts, found in self.runs.idle.items())
        first_runs = {texts: subgraph.without(found) for texts, found in idle if found}
        kept = {o: self.runs.kept[o] for node in nodes for o in node.outputs if o in self.runs.kept}
        names = list(dict.fromkeys(name for node in nodes for name in self._recomputed(node)))
        return OpCluster(
            name,
            subgraph,
            again,
            *self._dims(nodes, subgraph),
            self.dependencies.totalled.intersection(o for node in nodes for o in node.outputs),
            *self._cut(inside),
            multiplicity,
            bool(kept) or any(isinstance(n.op, Scan) or self._savers(n) for n in nodes),
            alike={}
            if any(n.body is not None for n in nodes)
            else self.runs.alike(again, kept, names, first_runs),
            crossed={
                s: n.op.crosses for n in nodes for s in Context.changing(Affects(keys=n.op.crosses[:1]))
            },
            nests=tuple(nest for nest in self.runs.nests if not nest.isdisjoint(names)),
            first=first_runs,
        )

    def _second_runs(self, nodes: list[Node], subgraph: Subgraph) -> dict[Policies, tuple[Subgraph, ...]]:
        """`OpCluster.again`."""
        numbers: dict[SecondRun, list[int]] = defaultdict(list)
        for node in nodes:
            for run in self.runs.runs.get(node.index, ()):
                numbers[run].append(node.index)
        different, found = dict[Subgraph, Subgraph](), dict[Policies, tuple[Subgraph, ...]]()
        for run, own in numbers.items():
            second = Subgraph(
                frozenset(own),
                subgraph.blocks,
                again=run.name,
                early=self.runs.early(nodes, run),
                beside=self.runs.beside([node for node in nodes if node.index in self.runs.again[run]], run),
                unread=self.dependencies.unread,
            )
            # What is worked out of a subgraph is remembered in it.
            found[run.recompute] = (*found.get(run.recompute, ()), different.setdefault(second, second))
        return found

    def _cut(
        self, inside: Set[int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, str]]:
        """`given`, `left` and `follows` of the cluster of some nodes."""
        given, left, follows = dict[str, tuple[int, ...]](), dict[str, tuple[int, ...]](), dict[str, str]()
        for node in sorted(self.dependencies.cut):
            name, operands = PendingSum.prefix + str(node), self.dependencies.additions[node]
            makers = {t: self.graph.producer[t].index for t in operands}
            here = tuple(t for t in operands if makers[t] in inside)
            if node not in inside:
                if here:
                    left[name] = here
            elif len(here) < len(operands):
                given[name] = tuple(t for t in operands if t not in here)
                others = [PendingSum.prefix + str(makers[t]) for t in here]
                follows.update((name, other) for other in others if other in given)
        return given, left, follows

    def _dims(
        self, nodes: list[Node], subgraph: Subgraph
    ) -> tuple[tuple[str, ...], tuple[str, ...], tuple[tuple[str, ...], ...]]:
        types, switches = dict[TensorType, None](), dict[str, None]()
        for node in nodes:
            switches.update(dict.fromkeys(self._switches(node)))
            for i in (*node.inputs, *made_by(node, self.graph)):
                types[self.graph.tensor(i).type] = None
            updated = self._updated(node)
            if updated is not None:
                types[updated.type] = None
            for o in made_by(node, self.graph):
                # Where a gradient is delivered depends on all dimensions of its variable.
                for t in self.dependencies.leads_to(o):
                    if t in self.delivered:
                        types[self.graph.variables[self.delivered[t]].type] = None
        shapes = dict.fromkeys(t.shape.names for t in types)
        dims = tuple(
            dict.fromkeys((*(n for names in shapes for n in names), *stages_of(self.graph, nodes, subgraph)))
        )
        for node in nodes:
            shapes.update(dict.fromkeys(self._worked(node)))
        return (
            (*dims, *rules_of(dims, self.further)),
            tuple(switches),
            (*shapes, *pairs_of(dims, self.further)),
        )

    def _worked(self, node: Node) -> Iterator[tuple[str, ...]]:
        """The dimensions whose pieces an operation works through, where no tensor has them all."""
        roles = plan_of(node, self.graph).roles
        if roles is None:
            return
        worked = {*roles.parallel, *roles.reduced}
        if not any(worked <= {*self.graph.tensor(i).shape.names} for i in (*node.inputs, *node.outputs)):
            yield tuple(sorted(worked))


def _bare(node: Node) -> Hashable:
    """The operation without the name of a variable in it."""
    return "assign" if isinstance(node.op, Assign) else node.op
