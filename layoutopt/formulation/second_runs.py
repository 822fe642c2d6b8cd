"""The parts of a step that run a second time where loops are recomputed, and the values that backward finds
kept.

Each of several nested loops may be recomputed: the second runs, and the values kept for them, follow from the
policies of all of them together.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from layoutopt.formulation.dependencies import Dependencies
from layoutopt.space.kind import Choice
from layoutopt.space.recompute import choice_of
from mesh_tf_core.ir.blocks import Block, Node, loop_name
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.lower.nodes import moved_dims
from mesh_tf_core.lower.recomputed import keep_sets, recomputed
from mesh_tf_core.lower.remat_policy import Policies, Recomputed
from mesh_tf_core.lower.rematerialization import Rematerialization, beside, has_backward, recomputable
from mesh_tf_core.lower.subgraph import Twin, made_by

NOTHING: Mapping[Policies, Subgraph] = {}


class SecondRun(NamedTuple):
    """A second run: of loops with a name, or in the backward of loops inside them."""

    recompute: Policies
    name: str


class SecondRuns:
    """The second runs of one step.

    Attributes:
      nests: names of loops, those together that are one inside of the other.
      again: run -> its nodes.
      runs: node -> the runs that it is in.
      switches: node -> the names of the loops whose recomputation changes its second run, or its kept values.
      idle: policy -> the nodes that then do nothing in the first run.
      kept: tensor -> the policies under which loops, or loops that they pass it to, keep it.
    """

    def __init__(self, dependencies: Dependencies) -> None:
        self.graph, self.dependencies, self.further = dependencies.graph, dependencies, dependencies.further
        own = (b for b in self.graph.blocks if has_backward(b, self.graph))
        self.loops = {b.id: name for b in own if (name := loop_name(b, self.graph))}
        self.nests = self._nested()
        self.runs, self.switches = dict[int, tuple[SecondRun, ...]](), dict[int, tuple[str, ...]]()
        self.kept, self.again = dict[int, tuple[Policies, ...]](), dict[SecondRun, set[int]]()
        self.idle: dict[Policies, set[int]] = {}
        self._loops = [node for node in dependencies.live if node.body is not None and node.body.saved]
        self._makers = {t: node.index for t, node in self.graph.producer.items()}
        for node in (node for node, _ in self.graph.walk() if node.body is not None):
            self._makers.update(dict.fromkeys(node.body.carry_in if node.body else (), node.index))
        self.said = {nest: self._said(nest) for nest in self.nests}
        for nest, every in self.said.items():
            for recompute in every:
                self._find(nest, recompute)
            for recompute in every if len(nest) > 1 else ():
                self._compare(recompute)

    def around(self, block: Block) -> Iterator[str]:
        """Names of a loop and those around it that may run again, the innermost first."""
        return (self.loops[b.id] for b in self.graph.around(block) if b.id in self.loops)

    def _nested(self) -> tuple[frozenset[str], ...]:
        found: list[frozenset[str]] = [frozenset({name}) for name in recomputable(self.graph)]
        for block in self.graph.blocks:
            names = frozenset(self.around(block))
            touched = [nest for nest in found if nest & names]
            if len(touched) > 1:
                found = [*(nest for nest in found if not nest & names), frozenset().union(*touched)]
        return tuple(found)

    def _said(self, nest: frozenset[str]) -> list[Policies]:
        """All that may be said of a nest, but that none of its loops runs again."""
        every = []
        for name in sorted(nest):
            sets = ((), *keep_sets(self.graph, name, self.dependencies.keeps))
            every.append([None, *(Recomputed(name, keep) for keep in sets)])
        return [frozenset(filter(None, each)) for each in itertools.product(*every)][1:]

    def _find(self, nest: frozenset[str], recompute: Policies) -> None:
        remat = recomputed(self.graph, recompute, self.dependencies.unread)
        said = sorted(each.dim for each in recompute)
        for name, nodes in remat.running().items():
            run = SecondRun(recompute, name)
            self.again[run] = {node.index for node in nodes}
            for node in nodes:
                self.runs[node.index] = (*self.runs.get(node.index, ()), run)
                if name in nest:
                    self._switch(node.index, [name])
        self.idle[recompute] = set()
        for node in self._loops:
            self.idle[recompute] |= remat.idle(node, self._read_of(node))
        for tensor in self._handed(remat):
            self.kept[tensor] = (*self.kept.get(tensor, ()), recompute)
            if tensor in self._makers:
                self._switch(self._makers[tensor], said)

    def _compare(self, recompute: Policies) -> None:
        """Notes what runs otherwise in other loops of a nest for what is said of one of them."""
        names = {run.name for run in self.again if run.recompute == recompute}
        for each in recompute:
            rest, own = recompute - {each}, each.dim
            names |= {run.name for run in self.again if run.recompute == rest}
            for name in names - {own}:
                here, there = (self.again.get(SecondRun(said, name), set()) for said in (recompute, rest))
                for node in here ^ there:
                    self._switch(node, [own])

    def of(self, block: Block) -> list[SecondRun]:
        """The second runs of a loop's body."""
        return [run for run in self.again if self._is_of(block, run.name)]

    def _read_of(self, scan: Node) -> set[int]:
        """What others read of what a loop gives, but for what it saves."""
        body, found = scan.body, self.dependencies
        assert body is not None
        gives = (*scan.outputs, *(o for _, o in body.results))
        elsewhere = found.leaving | found.sliced | found.returned
        return {o for o in gives if found.readers[o] or found.outer[o] or o in elsewhere}

    def _switch(self, node: int, names: Sequence[str]) -> None:
        self.switches[node] = tuple(dict.fromkeys((*self.switches.get(node, ()), *names)))

    def _handed(self, remat: Rematerialization) -> set[int]:
        """The tensors that loops keep, or hand out for second runs inside of them."""
        found = set[int]()
        for block in self.graph.blocks:
            if remat.again(block):
                found |= remat.second(block).kept
            elif has_backward(block, self.graph):
                found |= remat.handed(block)
        return found

    def early(self, nodes: Sequence[Node], run: SecondRun) -> frozenset[int]:
        """The tensors, made by some nodes in their second run, that other nodes read then: backward, where
        the loop would have saved them, and nodes that are recomputed too, now or in second runs inside."""
        again, dependencies = self.again[run], self.dependencies
        inside, unread = {node.index for node in nodes}, dependencies.unread
        found: set[int] = set()
        for node in nodes if again.intersection(inside) else ():
            for t in (t for o in made_by(node, self.graph) for t in dependencies.leads_to(o)):
                block, outer = self.graph.blocks[self.graph.tensor(t).block], self._runs_again(t, run)
                if outer is None:
                    continue
                saved = block is outer and t in block.saved and block.saved[t] not in unread
                goes_on = block is not outer and t in dependencies.leaving
                others = (r.index for r in dependencies.readers[t] if r.index not in inside)
                if saved or goes_on or t in dependencies.sliced or not again.isdisjoint(others):
                    found.add(t)
        return frozenset(found)

    def _runs_again(self, tensor: int, run: SecondRun) -> Block | None:
        around = self.graph.around(self.graph.blocks[self.graph.tensor(tensor).block])
        return next((block for block in around if self._is_of(block, run.name)), None)

    def _is_of(self, block: Block, name: str) -> bool:
        """Whether a loop's body is what second runs of some name are about."""
        return self.loops.get(block.id) == name or beside(block) == name

    def beside(self, nodes: Iterable[Node], run: SecondRun) -> tuple[Twin, ...]:
        """`Subgraph.beside`: for values that some nodes may move, and that are recomputed within their
        block's backward."""
        found: dict[int, Twin] = {}
        for node in nodes:
            home = self.dependencies.block_of[node.index]
            for block in self.graph.blocks if self._is_of(home, run.name) else ():
                for tensor in self._moved(node, node.inputs) if block.forward is home else ():
                    twin = self.twin(tensor, block)
                    if tensor not in found and not self._made_twice(tensor, twin, run.recompute):
                        within = self.dependencies.block_of
                        here = (r for r in self.dependencies.readers[twin] if within[r.index] is block)
                        if readers := tuple(r for r in here if self._moved(r, [twin])):
                            found[tensor] = Twin(tensor, twin, readers)
        return tuple(found.values())

    def _moved(self, node: Node, tensors: Iterable[int]) -> list[int]:
        return [t for t in tensors if moved_dims(node, t, self.graph, self.further)]

    def _made_twice(self, tensor: int, twin: int, recompute: Policies) -> bool:
        """Whether backward makes for itself what stands for a tensor, as it does of another name of a value
        and of what takes no work (`tracing.residuals`), beside what the second run has of it. What both
        convert alike is converted once."""
        maker, own = (self.graph.producer.get(t) for t in (twin, tensor))
        if twin == tensor or maker is None or own is None:
            return False
        if maker.op.converts and own.op == maker.op:
            return self._made_twice(own.inputs[0], maker.inputs[0], recompute)
        again = any(own.index in nodes for run, nodes in self.again.items() if run.recompute == recompute)
        return again or recompute in self.kept.get(tensor, ())

    def twin(self, tensor: int, backward: Block) -> int:
        """The tensor that represents one of forward in a backward body, or in those around it."""
        around = self.graph.around(backward)
        return next((b.captured[tensor] for b in around if tensor in b.captured), tensor)

    def alike(
        self,
        again: Mapping[Policies, Sequence[Subgraph]],
        kept: Mapping[int, Sequence[Policies]],
        names: Sequence[str],
        first_runs: Mapping[Policies, Subgraph] = NOTHING,
    ) -> dict[str, dict[Choice, Choice]]:
        """`OpCluster.alike`: the options with the same second runs and the same kept values, whatever the
        policies of other loops.

        Args:
          names: the loops that matter to the cluster.
        """
        found: dict[str, dict[Choice, Choice]] = defaultdict(dict)
        for name, every in ((name, self.said[nest]) for nest in self.nests for name in nest if name in names):
            first: dict[Hashable, Choice] = {}
            own = dict.fromkeys(each for recompute in every for each in recompute if each.dim == name)
            others = dict.fromkeys(frozenset(t for t in recompute if t not in own) for recompute in every)
            for asked in own:
                said = [rest | {asked} for rest in others]
                stays = tuple(tuple(t for t, under in kept.items() if each in under) for each in said)
                for there in (False, True):
                    decision, choice = choice_of(asked, there)
                    what = tuple((*again.get(each, ()), first_runs.get(each)) for each in said), stays
                    key = what, there and any(stays)
                    if first.setdefault(key, choice) != choice:
                        found[decision][choice] = first[key]
        return found
