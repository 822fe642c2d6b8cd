"""What of a step runs a second time where loops are recomputed, and what backward finds there already."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence

from layoutopt.formulation.dependencies import Dependencies
from layoutopt.space.kind import Choice
from layoutopt.space.recompute import chosen
from mesh_tf_core.ir.blocks import Block, Node
from mesh_tf_core.ir.structure import Connection
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.kept import Recomputed
from mesh_tf_core.lower.nodes import moved_dims, plan_of, renamed_saves
from mesh_tf_core.lower.rematerialization import (
    keep_sets,
    rematerialization,
    running_again,
    stands_beside_backward,
)


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
            for keep in ((), *keep_sets(self.graph, dim)):
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

    def alike(
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
