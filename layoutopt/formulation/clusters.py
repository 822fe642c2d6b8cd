"""Clusters: the smallest groups of operations whose prices add up to the price of the whole program.

Lowering treats most operations alone. The exceptions couple operations, and a cluster holds together what
they couple:
  - a sum that may wait behind linear operations (pass `pending sums`), also out of a loop;
  - a gather that several operations of a block share;
  - the update of one variable, all of it;
  - the casts and gathers of one variable that is stored split, in every block that reads it.
A cluster is lowered by itself, with everything around it given; equal clusters (unrolled layers) are priced
once, with a multiplicity.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace

from layoutopt.formulation.cluster import Cluster
from layoutopt.formulation.cuts import PendingSum
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.space.decisions import changing
from layoutopt.space.elsewhere import written
from layoutopt.space.kind import Choice, Touched
from layoutopt.space.recompute import chosen
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.structure import Assign, Connection, Feed, Read, Scan
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.kept import Recomputed
from mesh_tf_core.lower.nodes import moved_dims, plan_of, renamed_saves
from mesh_tf_core.lower.rematerialization import (
    keep_sets,
    rematerialization,
    running_again,
    stands_beside_backward,
)
from mesh_tf_core.lower.subgraph import Access, made_by_loop


def clusters(dependencies: Dependencies) -> list[Cluster]:
    """The clusters of a graph, equal ones merged."""
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
        replace(builder.cluster(alike[0], len(alike)), members=tuple(map(_numbers, alike)))
        for alike in merged.values()
    ]
    return found + builder.accesses()


def _numbers(nodes: Iterable[Node]) -> tuple[int, ...]:
    return tuple(node.index for node in nodes)


class _Builder:
    def __init__(self, dependencies: Dependencies) -> None:
        self.graph, self.dependencies, self.further = dependencies.graph, dependencies, dependencies.further
        made = dependencies.stacks
        self.unread = frozenset(o for b in self.graph.blocks for o in b.saved.values() if o not in made)
        self.remat: dict[int, tuple[str, ...]] = {}
        self.texts: dict[int, tuple[str, ...]] = {}
        self.kept: dict[int, tuple[str, ...]] = {}
        self.again: dict[str, set[int]] = defaultdict(set)
        self._remat()

    def _remat(self) -> None:
        """Fills `remat`, of a node the dimensions of the loops whose recomputation makes it run again;
        `texts`, what these loops may keep then; `again`, by what they keep, these nodes; and `kept`, of a
        tensor under which it is."""
        for block in self.graph.blocks:
            if not stands_beside_backward(block, self.graph) or block.dim is None:
                continue
            dim = block.dim.name
            for keep in ((), *keep_sets(self.graph, dim)):
                text = str(Recomputed(dim, keep))
                kept = rematerialization(self.graph, frozenset({text})).kept(block, self.unread, live=True)
                for node in running_again(block, self.unread, kept):
                    self.texts[node.index] = (*self.texts.get(node.index, ()), text)
                    self.again[text].add(node.index)
                    if not keep:
                        self.remat[node.index] = (*self.remat.get(node.index, ()), dim)
                for tensor in kept:
                    self.kept[tensor] = (*self.kept.get(tensor, ()), text)

    # -- operations ------------------------------------------------------------------------------------------

    def signature(self, nodes: list[Node]) -> Hashable:
        """Equal for clusters with the same operations on the same types, connected and repeated alike."""
        inside = {node.index for node in nodes}
        position: dict[int, int] = {}
        parts: list[Hashable] = []
        for node in nodes:
            types = []
            for i in (*node.inputs, *node.outputs):
                position.setdefault(i, len(position))
                types.append((position[i], self.graph.tensor(i).type))
            leaves = tuple(self._leaves(o) for o in node.outputs)
            early = tuple(
                self.dependencies.early(t, inside)
                for o in node.outputs
                for t in self.dependencies.leads_to(o)
            )
            what = (
                node.op.variable.slot_of is None if isinstance(node.op, Assign) else isinstance(node.op, Scan)
            )
            switches = self._switches(node)
            kernel = self._kernel(node, inside)
            times = self.dependencies.times(node)
            anyway = (
                tuple(i in self.moved_anyway(node) for i in node.inputs),
                tuple(self.moved_by(node).values()),
            )
            totalled = tuple(o in self.dependencies.totalled for o in node.outputs)
            apart = node.index if node.index in self.dependencies.cut or self._read_by_cut(node) else -1
            # Prices know the phase: whether a result stays, what a collective may overlap, when casts run.
            again = self.texts.get(node.index), tuple(self.kept.get(o) for o in node.outputs)
            how = (switches, node.phase, kernel, anyway, totalled, apart, again)
            parts.append((_bare(node), tuple(types), times, leaves, early, what, *how))
        if any(isinstance(n.op, Scan) for n in nodes):
            parts.append(nodes[0].index)
        return tuple(parts)

    def _leaves(self, tensor: int) -> tuple[tuple[bool, bool, bool], ...]:
        """What loops make of a tensor: a sum is written in iterations that run, a stack in all of them, and
        it is first set to zero if the loop runs from the last iteration to the first."""
        block = self.graph.blocks[self.graph.tensor(tensor).block]
        stacks, sums = ({o for i, o in pairs if i == tensor} for pairs in (block.stacked, block.summed))
        return tuple((o in stacks, o in sums, block.reverse) for o in self.dependencies.outer[tensor])

    def _read_by_cut(self, node: Node) -> bool:
        """Whether an addition that is cut reads what a node makes."""
        return any(o in self.dependencies.additions[n] for n in self.dependencies.cut for o in node.outputs)

    def _kernel(self, node: Node, inside: Set[int]) -> Hashable:
        """What of fusion matters to a price: with which of the nodes, and what of it others read."""
        fusion = self.dependencies.fusion
        group = fusion.group.get(node.index)
        others = sorted(i for i in inside if i != node.index and fusion.group.get(i) == group is not None)
        position = {i: n for n, i in enumerate(sorted(inside))}
        read = tuple((o in fusion.leaving, o in fusion.again) for o in node.outputs)
        return tuple(position[i] for i in others), read

    def moved_anyway(self, node: Node) -> set[int]:
        """Operands that a node moves which may run again, and that backward moves alike: once for both."""
        found: set[int] = set()
        home = self._runs_in_backward(node)
        if home is None:
            return found
        for block in (b for b in self.graph.blocks if b.forward is home):
            for tensor in node.inputs:
                twin = block.captured.get(tensor, tensor)
                here = (r for r in self.dependencies.readers[twin] if self._in(r, block))
                wanted = moved_dims(node, tensor, self.graph)
                if wanted and any(moved_dims(r, twin, self.graph) == wanted for r in here):
                    found.add(tensor)
        return found

    def moved_by(self, node: Node) -> dict[int, tuple[tuple[frozenset[str], frozenset[str]], ...]]:
        """Operands that a node moves where a rule for elsewhere holds, and of what reads them in backward its
        dimensions, and those that it regroups: the same rules say whether it moves them alike."""
        found: dict[int, tuple[tuple[frozenset[str], frozenset[str]], ...]] = {}
        home = self._runs_in_backward(node)
        if home is None or not self.further:
            return found
        for block in self.graph.blocks:
            for tensor in node.inputs if block.forward is home else ():
                if moved_dims(node, tensor, self.graph, self.further):
                    twin = block.captured.get(tensor, tensor)
                    plans = [
                        plan_of(r, self.graph)
                        for r in self.dependencies.readers[twin]
                        if self._in(r, block) and not isinstance(r.op, Connection)
                    ]
                    renamed = renamed_saves(home, self.further).values()
                    plans += [plan_of(n, self.graph) for n in renamed if n.inputs == (tensor,)]
                    found[tensor] = tuple(dict.fromkeys((p.dims, p.regrouped) for p in plans))
        return found

    def _runs_in_backward(self, node: Node) -> Block | None:
        """A node's block, if that runs again within its backward; loops inside of it do so beside theirs."""
        home = self.dependencies.block_of[node.index]
        again = self.remat.get(node.index, ())
        return home if home.dim is not None and home.dim.name in again else None

    def _in(self, node: Node, block: Block) -> bool:
        return self.dependencies.block_of[node.index] is block

    def _switches(self, node: Node) -> tuple[str, ...]:
        """Decisions, splits apart, that change how a node is lowered."""
        saved = [block.dim.name for block in self._savers(node) if block.dim is not None]
        updated = self._updated(node)
        made = [
            t for o in self._own(node) for t in self.dependencies.leads_to(o) if t in self.graph.gradient_of
        ]
        variables = [self.graph.variables[self.graph.gradient_of[t]] for t in made]
        own = [] if updated is None else [updated]
        again = self.remat.get(node.index, ())
        return changing(Touched(again, saved, [*own, *variables], node.op.crosses[:1], own))

    def _own(self, node: Node) -> tuple[int, ...]:
        """What a node computes itself: what else a loop gives, its body's nodes make."""
        return node.outputs if node.body is None else made_by_loop(node, self.graph)

    def _savers(self, node: Node) -> list[Block]:
        """The loops that save, for backward, what a node computes, or what its own body does."""
        block, body = self.dependencies.block_of[node.index], node.body
        found = [body] if body is not None and body.saved else []
        return found + [block] * any(o in block.saved for o in node.outputs)

    def _updated(self, node: Node) -> Variable | None:
        """The variable that a node of the update belongs to."""
        found = self.graph.variables.get(node.scope) if node.phase == "update" else None
        return found if found is not None and found.trainable and len(found.shape) else None

    def cluster(self, nodes: list[Node], multiplicity: int) -> Cluster:
        inside = {node.index for node in nodes}
        early: dict[str, Tensor] = {}
        for node in nodes:
            for o in self._own(node):
                for t in self.dependencies.leads_to(o):
                    if self.dependencies.early(t, inside):
                        early[f"%{t}"] = self.graph.tensor(t)
        first = nodes[0]
        name = f"{first.scope or 'model'}/{first.op.name}" + (
            f" ({first.phase})" if first.phase != "forward" else ""
        )
        subgraph = self._subgraph(nodes)
        again: dict[str, list[int]] = defaultdict(list)
        moved = frozenset(t for node in nodes for t in self.moved_anyway(node))
        by = {t: how for node in nodes for t, how in self.moved_by(node).items()}
        for node in nodes:
            for text in self.texts.get(node.index, ()):
                again[text].append(node.index)
        parts = {numbers: frozenset(numbers) for numbers in map(tuple, again.values())}
        second = {
            numbers: Subgraph(
                found,
                subgraph.blocks,
                again=True,
                moved=moved,
                moved_by=tuple(by.items()),
                unread=self.unread,
            )
            for numbers, found in parts.items()
        }
        runs = {text: second[tuple(numbers)] for text, numbers in again.items()}
        kept = {o: self.kept[o] for node in nodes for o in node.outputs if o in self.kept}
        return Cluster(
            name,
            subgraph,
            runs,
            *self._dims(nodes, subgraph),
            early,
            self.dependencies.totalled.intersection(o for node in nodes for o in node.outputs),
            *self._cut(inside),
            multiplicity,
            bool(kept) or any(isinstance(n.op, Scan) or self._savers(n) for n in nodes),
            alike={} if any(n.body is not None for n in nodes) else self._alike(runs, kept),
        )

    def _alike(
        self, runs: Mapping[str, Subgraph], kept: Mapping[int, Sequence[str]]
    ) -> dict[str, dict[Choice, Choice]]:
        """`Cluster.alike`: under which options the same runs again and the same is kept."""
        first: dict[Hashable, Choice] = {}
        found: dict[str, dict[Choice, Choice]] = defaultdict(dict)
        for block in self.graph.blocks:
            if not stands_beside_backward(block, self.graph) or block.dim is None:
                continue
            for keep in ((), *keep_sets(self.graph, block.dim.name)):
                text = str(Recomputed(block.dim.name, keep))
                name, choice = chosen(text)
                what = name, runs.get(text), tuple(t for t, texts in kept.items() if text in texts)
                if first.setdefault(what, choice) != choice:
                    found[name][choice] = first[what]
        return found

    def _cut(
        self, inside: Set[int]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]], dict[str, str]]:
        """`given`, `left` and `follows` of the cluster of some nodes."""
        given: dict[str, tuple[int, ...]] = {}
        left: dict[str, tuple[int, ...]] = {}
        follows: dict[str, str] = {}
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
        types: dict[TensorType, None] = {}
        switches: dict[str, None] = {}
        for node in nodes:
            switches.update(dict.fromkeys(self._switches(node)))
            for i in (*node.inputs, *self._own(node)):
                types[self.graph.tensor(i).type] = None
            updated = self._updated(node)
            if updated is not None:
                types[updated.type] = None
            for o in self._own(node):
                # Where a gradient is delivered depends on all dimensions of its variable.
                for t in self.dependencies.leads_to(o):
                    if t in self.graph.gradient_of:
                        types[self.graph.variables[self.graph.gradient_of[t]].type] = None
        shapes = dict.fromkeys(t.shape.names for t in types)
        dims = tuple(dict.fromkeys((*(n for names in shapes for n in names), *self._stages(nodes, subgraph))))
        for node in nodes:
            shapes.update(dict.fromkeys(self._worked(node)))
        return (*dims, *self._rules(dims)), tuple(switches), (*shapes, *self._pairs(dims))

    def _stages(self, nodes: Iterable[Node], subgraph: Subgraph) -> list[str]:
        """The dimensions of layers whose stages have some of a subgraph, or are nodes of it."""
        blocks = [self.graph.blocks[b] for b in sorted(subgraph.blocks)]
        blocks += [n.body for n in nodes if n.body is not None]
        return [b.dim.name for b in blocks if b.spread and b.dim is not None]

    def _rules(self, dims: Iterable[str]) -> tuple[str, ...]:
        """The decisions about what splits some dimensions further elsewhere."""
        return tuple(written(n) for n in dims if n in self.further)

    def _pairs(self, dims: Iterable[str]) -> tuple[tuple[str, str], ...]:
        """A dimension and what splits it further, over other axes."""
        return tuple((n, written(n)) for n in dims if n in self.further)

    def _worked(self, node: Node) -> Iterator[tuple[str, ...]]:
        """The dimensions whose pieces an operation works through, where no tensor has them all."""
        roles = plan_of(node, self.graph).roles
        if roles is None:
            return
        worked = {*roles.parallel, *roles.reduced}
        if not any(worked <= {*self.graph.tensor(i).shape.names} for i in (*node.inputs, *node.outputs)):
            yield tuple(sorted(worked))

    def _subgraph(self, nodes: list[Node], accesses: frozenset[Access] = frozenset()) -> Subgraph:
        blocks: set[int] = set()
        for start in (*(self.dependencies.block_of[n.index].id for n in nodes), *(b for b, *_ in accesses)):
            block = self.graph.blocks[start]
            while block.parent is not None:
                blocks.add(block.id)
                block = self.graph.blocks[block.parent]
        return Subgraph(frozenset(n.index for n in nodes), frozenset(blocks), accesses, unread=self.unread)

    # -- access to variables ---------------------------------------------------------------------------------

    def accesses(self) -> list[Cluster]:
        """For every trained variable: its casts, and the gather in every block that reads it."""
        merged: dict[Hashable, list[Cluster]] = defaultdict(list)
        for variable in self.graph.variables.values():
            if variable.trainable and len(variable.shape):
                found = self._access(variable)
                if found is not None:
                    key, cluster = found
                    merged[key].append(cluster)
        return [
            replace(found[0], multiplicity=len(found), members=tuple(m for f in found for m in f.members))
            for found in merged.values()
        ]

    def _access(self, variable: Variable) -> tuple[Hashable, Cluster] | None:
        reads = self.dependencies.reads[variable.name]
        casts = [
            n
            for n in self.dependencies.live
            if n.op.converts and self.dependencies.variable_of(n) == variable.name
        ]
        accesses = self.dependencies.accesses(variable.name)
        if not accesses and not casts:
            return None
        nodes = [*reads, *casts]
        again = self._access_again(casts, accesses)
        dims_again = tuple(dict.fromkeys(Recomputed.parse(text).dim for text in again))
        switches = changing(Touched(recomputed=dims_again, variables=[variable]))
        subgraph = self._subgraph(nodes, frozenset(accesses))
        own = variable.shape.names
        dims = tuple(dict.fromkeys((*own, *self._stages((), subgraph))))
        key = (
            variable.type,
            variable.stacked,
            tuple(sorted((self.dependencies.block_of[n.index].id, n.op.describe()) for n in casts)),
            _places(accesses),
            tuple((text, len(k.nodes), _places(k.natural)) for text, k in again.items()),
        )
        name, members = f"{variable.name} (access)", (_numbers(nodes),)
        alike = self._alike(again, {})
        shapes = own, *self._pairs(own)
        every = *dims, *self._rules(dims)
        return key, Cluster(name, subgraph, again, every, switches, shapes, {}, members=members, alike=alike)

    def _access_again(self, casts: list[Node], accesses: set[Access]) -> dict[str, Subgraph]:
        """What recomputation adds: casts and gathers that the backward body does not have anyway.

        What a body inside of the recomputed one does, it does once more in any case.
        """
        extra: dict[str, tuple[set[int], set[Access]]] = {}
        for backward in self.graph.blocks:
            forward = backward.forward
            if forward is None or forward.dim is None or not stands_beside_backward(forward, self.graph):
                continue
            for keep in ((), *keep_sets(self.graph, forward.dim.name)):
                text = str(Recomputed(forward.dim.name, keep))
                nodes, gathers = extra.setdefault(text, (set(), set()))
                self._extra(text, forward, backward, casts, accesses, nodes, gathers)
        reads = [n for n in self.dependencies.live if isinstance(n.op, Read)]
        found = {}
        for text, (nodes, gathers) in extra.items():
            if nodes or gathers:
                subgraph = self._subgraph(
                    [*reads, *(n for n in casts if n.index in nodes)], frozenset(gathers)
                )
                found[text] = replace(subgraph, again=True)
        return found

    def _extra(
        self,
        text: str,
        forward: Block,
        backward: Block,
        casts: list[Node],
        accesses: set[Access],
        nodes: set[int],
        gathers: set[Access],
    ) -> None:
        """Adds to `nodes` and `gathers` what one loop's second run has more."""
        remat = self.again[text]
        for cast in casts:
            here = self.dependencies.block_of[cast.index]
            twin = backward.captured.get(cast.outputs[0], -1)
            known = here is forward and any(twin in c.outputs for c in casts)
            if cast.index in remat and self._within(here, forward) and not known:
                nodes.add(cast.index)
        for block, way, tensor in accesses:
            read = any(
                r.index in remat and self.dependencies.block_of[r.index].id == block and r not in casts
                for r in self.dependencies.readers[tensor]
            )
            twin = backward.captured.get(tensor, tensor)
            known = block == forward.id and (backward.id, "backward", twin) in accesses
            if read and self._within(self.graph.blocks[block], forward) and not known:
                gathers.add((block, way, tensor))

    def _within(self, block: Block, other: Block) -> bool:
        """Whether a block is another one, or inside of it."""
        while block is not other and block.parent is not None:
            block = self.graph.blocks[block.parent]
        return block is other


def _places(accesses: Iterable[Access]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((block, way) for block, way, _ in accesses))


def _bare(node: Node) -> Hashable:
    """The operation without the name of a variable in it."""
    return "assign" if isinstance(node.op, Assign) else node.op
