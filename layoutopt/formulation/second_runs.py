"""What of a step runs a second time where loops are recomputed, and what backward finds there already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from layoutopt.formulation.dependencies import Dependencies
from layoutopt.space.kind import Choice
from layoutopt.space.recompute import ON_HOSTS, chosen
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.structure import Connection
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.kept import Recomputed
from mesh_tf_core.lower.nodes import moved_dims, plan_of
from mesh_tf_core.lower.rematerialization import (
    keep_sets,
    rematerialization,
    running_again,
    stands_beside_backward,
)
from mesh_tf_core.lower.subgraph import made_by


class SecondRuns:
    """The second runs of one step.

    Attributes:
      remat: node -> the dimensions of the loops whose recomputation makes it run again.
      texts: node -> what these loops may keep then (`kept.Recomputed`).
      again: what they keep -> these nodes.
      kept: tensor -> under which of these texts it is kept.
    """

    def __init__(self, dependencies: Dependencies) -> None:
        self.graph, self.dependencies, self.further = dependencies.graph, dependencies, dependencies.further
        self.remat: dict[int, tuple[str, ...]] = {}
        self.texts: dict[int, tuple[str, ...]] = {}
        self.kept: dict[int, tuple[str, ...]] = {}
        self.again: dict[str, set[int]] = defaultdict(set)
        self._find()

    def _find(self) -> None:
        for block in self.graph.blocks:
            if not stands_beside_backward(block, self.graph) or block.dim is None:
                continue
            dim = block.dim.name
            for keep in ((), *keep_sets(self.graph, dim, self.dependencies.keeps)):
                text = str(Recomputed(dim, keep))
                kept = rematerialization(self.graph, frozenset({text})).kept(
                    block, self.dependencies.unread, live=True
                )
                for node in running_again(block, self.dependencies.unread, kept):
                    self.texts[node.index] = (*self.texts.get(node.index, ()), text)
                    self.again[text].add(node.index)
                    if not keep:
                        self.remat[node.index] = (*self.remat.get(node.index, ()), dim)
                for tensor in kept:
                    self.kept[tensor] = (*self.kept.get(tensor, ()), text)

    def early(self, nodes: Sequence[Node], text: str) -> frozenset[int]:
        """Of what some nodes make when they run again, what others read then: backward, where the loop would
        have saved it, and nodes that run again too."""
        again, dependencies = self.again[text], self.dependencies
        inside, unread = {node.index for node in nodes}, dependencies.unread
        found: set[int] = set()
        for node in nodes if again.intersection(inside) else ():
            for t in (t for o in made_by(node, self.graph) for t in dependencies.leads_to(o)):
                block, outer = self.graph.blocks[self.graph.tensor(t).block], self._runs_again(t, text)
                if outer is None:
                    continue
                saved = block is outer and t in block.saved and block.saved[t] not in unread
                goes_on = block is not outer and t in dependencies.leaving
                others = (r.index for r in dependencies.readers[t] if r.index not in inside)
                if saved or goes_on or t in dependencies.sliced or not again.isdisjoint(others):
                    found.add(t)
        return frozenset(found)

    def _runs_again(self, tensor: int, text: str) -> Block | None:
        """The loop in which a tensor is, of those that a text is about."""
        dim, block = Recomputed.parse(text).dim, self.graph.blocks[self.graph.tensor(tensor).block]
        while block.dim is None or block.dim.name != dim or not stands_beside_backward(block, self.graph):
            if block.parent is None:
                return None
            block = self.graph.blocks[block.parent]
        return block

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
                    found[tensor] = tuple(dict.fromkeys((p.dims, p.regrouped) for p in plans))
        return found

    def _runs_in_backward(self, node: Node) -> Block | None:
        """A node's block, if that runs again within its backward; loops inside of it do so beside theirs."""
        home = self.dependencies.block_of[node.index]
        again = self.remat.get(node.index, ())
        return home if home.dim is not None and home.dim.name in again else None

    def _in(self, node: Node, block: Block) -> bool:
        return self.dependencies.block_of[node.index] is block

    def alike(
        self, runs: Mapping[str, Subgraph], kept: Mapping[int, Sequence[str]]
    ) -> dict[str, dict[Choice, Choice]]:
        """`Cluster.alike`: under which options the same runs again and the same is kept."""
        first: dict[Hashable, Choice] = {}
        found: dict[str, dict[Choice, Choice]] = defaultdict(dict)
        for block in self.graph.blocks:
            if not stands_beside_backward(block, self.graph) or block.dim is None:
                continue
            for keep in ((), *keep_sets(self.graph, block.dim.name, self.dependencies.keeps)):
                text = str(Recomputed(block.dim.name, keep))
                own = tuple(t for t, texts in kept.items() if text in texts)
                for there in ("", ON_HOSTS):
                    name, choice = chosen(text + there)
                    what = name, runs.get(text), own, there if own else ""
                    if first.setdefault(what, choice) != choice:
                        found[name][choice] = first[what]
        return found
