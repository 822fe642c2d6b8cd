"""Clusters of the access to variables: the casts and gathers of one variable, in all blocks that read it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace

from layoutopt.formulation.cluster import Cluster, numbers_of, pairs_of, rules_of, stages_of, subgraph_of
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.second_runs import SecondRun, SecondRuns
from layoutopt.space.decisions import changing
from layoutopt.space.kind import Affects
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.structure import Read
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.nodes import assigned
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.lower.subgraph import Access


class Accesses:
    """The accesses of one step."""

    def __init__(self, dependencies: Dependencies, runs: SecondRuns) -> None:
        self.graph, self.dependencies, self.runs = dependencies.graph, dependencies, runs

    def clusters(self) -> list[Cluster]:
        """For every variable with its own storage: its casts, and the gather in every block that reads it."""
        merged: dict[Hashable, list[Cluster]] = defaultdict(list)
        for variable in self.graph.variables.values():
            if variable.own_storage:
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
        loops = self._loops(again)
        granularity, it = self.dependencies.granularity, [variable]
        switches = changing(Affects(loops, it, read=it, granularity=granularity))
        subgraph = subgraph_of(self.dependencies, nodes, frozenset(accesses))
        own = variable.shape.names
        dims = tuple(dict.fromkeys((*own, *stages_of(self.graph, (), subgraph))))
        key = (
            variable.type,
            variable.stacked,
            switches,
            variable.name in assigned(self.graph),
            tuple(sorted((self.dependencies.block_of[n.index].id, n.op.describe()) for n in casts)),
            _places(accesses),
            tuple(
                (texts, tuple((k.again, len(k.nodes), _places(k.natural)) for k in found))
                for texts, found in again.items()
            ),
        )
        name, members = f"{variable.name} (access)", (numbers_of(nodes),)
        alike = self.runs.alike(again, {}, loops)
        nests = tuple(nest for nest in self.runs.nests if not nest.isdisjoint(loops))
        shapes = own, *pairs_of(own, self.dependencies.further)
        every = *dims, *rules_of(dims, self.dependencies.further)
        return key, Cluster(
            name, subgraph, again, every, switches, shapes, members=members, alike=alike, nests=nests
        )

    def _loops(self, again: Mapping[Policies, Sequence[Subgraph]]) -> tuple[str, ...]:
        """Names of the loops that have a say in what is done again."""
        names = dict.fromkeys(name for nest in self.runs.nests for name in sorted(nest))

        def matters(name: str) -> bool:
            others = {said: {each for each in said if each.dim != name} for said in again}
            return any(
                tuple(again.get(frozenset(rest), ())) != again[texts] for texts, rest in others.items()
            )

        return tuple(filter(matters, names))

    def _access_again(self, casts: list[Node], accesses: set[Access]) -> dict[Policies, tuple[Subgraph, ...]]:
        """What recomputation adds: casts and gathers that the backward body does not have anyway.

        What a body inside of the recomputed one does, it does once more in any case.
        """
        extra: dict[SecondRun, tuple[set[int], set[Access]]] = {}
        for backward in self.graph.blocks:
            if backward.forward is None:
                continue
            for run in self.runs.of(backward.forward):
                nodes, gathers = extra.setdefault(run, (set(), set()))
                self._extra(run, backward.forward, backward, casts, accesses, nodes, gathers)
        reads = [n for n in self.dependencies.live if isinstance(n.op, Read)]
        found: dict[Policies, tuple[Subgraph, ...]] = {}
        different: dict[Subgraph, Subgraph] = {}
        for run, (nodes, gathers) in extra.items():
            if nodes or gathers:
                subgraph = subgraph_of(
                    self.dependencies, [*reads, *(n for n in casts if n.index in nodes)], frozenset(gathers)
                )
                second = replace(subgraph, again=run.name)
                found[run.recompute] = (*found.get(run.recompute, ()), different.setdefault(second, second))
        return found

    def _extra(
        self,
        run: SecondRun,
        forward: Block,
        backward: Block,
        casts: list[Node],
        accesses: set[Access],
        nodes: set[int],
        gathers: set[Access],
    ) -> None:
        """Adds to `nodes` and `gathers` what one loop's second run has more."""
        remat = self.runs.again[run]
        for cast in casts:
            here = self.dependencies.block_of[cast.index]
            twin = self.runs.twin(cast.outputs[0], backward)
            known = here is forward and any(twin in c.outputs for c in casts)
            if cast.index in remat and self._within(here, forward) and not known:
                nodes.add(cast.index)
        for block, _, tensor in accesses:
            read = any(
                r.index in remat and self.dependencies.block_of[r.index].id == block and r not in casts
                for r in self.dependencies.readers[tensor]
            )
            twin = self.runs.twin(tensor, backward)
            known = block == forward.id and (backward.id, Phase.BACKWARD, twin) in accesses
            if read and self._within(self.graph.blocks[block], forward) and not known:
                gathers.add((block, Phase.RECOMPUTE, tensor))

    def _within(self, block: Block, other: Block) -> bool:
        """Whether a block is another one, or inside of it."""
        while block is not other and block.parent is not None:
            block = self.graph.blocks[block.parent]
        return block is other


def _places(accesses: Iterable[Access]) -> tuple[tuple[int, str], ...]:
    return tuple(sorted((block, way) for block, way, _ in accesses))
