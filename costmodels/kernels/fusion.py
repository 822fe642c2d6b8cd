"""The operations that a compiler may run as one kernel: a fact of the graph alone, of no layout and no
machine.

The rules are those of XLA, kept simple (openxla/xla, xla/service/instruction_fusion.cc, and what its TPU
compiler makes of training steps):
  (1) what works element by element fuses with what makes its operands and with what reads its result:
      maps, broadcasts, casts, random masks; so do reductions, softmax and normalisations;
  (2) a matrix product or convolution begins a kernel, and what follows on its result may join it; operands
      come from memory;
  (3) a kernel holds at most one product, and of two parts that join one has all dimensions of the other;
  (4) gathers, writes of a part in place, sorts, windows, loops, reads and writes of variables, casts of a
      variable, and scalars (but for those of an update) connect nothing; nor is there a kernel across two
      blocks, two phases, a library's kernel and others, or the updates of two variables; a reduction that
      makes a variable's gradient is a kernel of its own;
  (5) no kernel waits for another one that waits for it;
  (6) a cast to a wider float that another phase reads, too (logits, for the loss and for its gradient), is
      made wherever it is read: what is written and kept is the narrow one.
Where a library has a kernel for each of its calls, as PyTorch has for layer_norm or gelu, only
  (7) operations of one call (`Node.call`) share a kernel, and others are a kernel each; rule (6) does not
      hold.
A layout splits these groups further, at collectives, and so does a reduction whose result is used in the same
group (`costmodels.kernels.fused`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache

from mesh_tf_core.ir.blocks import Connection, Node, Outline, reads
from mesh_tf_core.ir.dtypes import is_float, itemsize
from mesh_tf_core.ir.op import Op, TensorType
from mesh_tf_core.ir.program import Instr, Local, Program
from mesh_tf_core.layers.recurrent import KERNEL
from mesh_tf_core.lower.nodes import converts_variable, repeated, stored_tensors, updated
from mesh_tf_core.lower.rematerialization import running_again


class Fuses(StrEnum):
    """The operations that share kernels: none, those of one call of a library, or whatever a compiler may
    join."""

    NONE = ""
    CALLS = "calls"
    ALL = "all"


@dataclass(frozen=True)
class Fusion:
    """The operations of a graph that a compiler may run as one kernel.

    Attributes:
      group: node -> its group; nodes that fuse with nothing are alone in theirs or not listed.
      leaving: tensors that are read outside of their group, or leave their block.
      again: the same for a loop's body that runs again in backward.
      remade: tensors that are casts by rule (6) -> the dtype that they are read in.
      aliases: renames by whose names groups read a value that they also read under another name -> these
        groups. A kernel reads it once.
      regrouped: names of dimensions that are one dimension in other tensors.
    """

    group: Mapping[int, int] = field(default_factory=dict)
    leaving: frozenset[int] = frozenset()
    again: frozenset[int] = frozenset()
    remade: Mapping[int, str] = field(default_factory=dict)
    aliases: Mapping[int, frozenset[int]] = field(default_factory=dict)
    regrouped: frozenset[frozenset[str]] = frozenset()


FREE, PRODUCT, MAP, REDUCE, ALONE = "free", "product", "map", "reduce", "alone"


@lru_cache(maxsize=1 << 16)
def role(op: Op, inputs: tuple[TensorType, ...]) -> str:
    """The role of an operation in fusion on operands of these types: FREE, PRODUCT, MAP, REDUCE or ALONE."""
    if op.free:
        return FREE
    dims = op.work(*inputs).product
    if op.kind == "matmul" and (dims is None or min(dims[1:]) > 1) and len(inputs) > 1:
        return PRODUCT
    if op.lowers() or op.kind == "gather" or op.in_place:
        return ALONE
    if op.expands() and op.kind == "reduce":
        return REDUCE
    roles = op.roles(*inputs)
    if roles.whole:
        return ALONE
    return REDUCE if roles.reduced else MAP


def fusion(graph: Outline, fuses: Fuses = Fuses.ALL) -> Fusion:
    """The groups of a graph."""
    return graph.remembered((Fusion, fuses), lambda: _Groups(graph, fuses).found())


def fusion_of(program: Program, fuses: Fuses = Fuses.ALL) -> Fusion:
    """The groups of a lowered program's graph; none for a program that was written by hand."""
    return fusion(program.outline, fuses)


def casts_variable(instr: Instr, program: Program) -> bool:
    """True if an instruction casts a variable, or a part of one, before the update."""
    casts = isinstance(instr, Local) and instr.op.converts and not instr.op.free
    return casts and program.values[instr.outputs[0]].tensor in stored_tensors(program.outline)


class _Groups:
    """Attributes: `group` is a forest of joined nodes; by its roots: `names` of dimensions, `before` (nodes
    outside that it reads from), the `first` and `last` member, the makers of its product's `operands`."""

    def __init__(self, graph: Outline, fuses: Fuses) -> None:
        self.graph, self.calls = graph, fuses is Fuses.CALLS
        self.nodes = [n for n, _ in graph.walk()]
        self.blocks = [graph.blocks[0], *(n.body for n in self.nodes if n.body is not None)]
        self.same: dict[int, int] = {}
        self.repeated = repeated(graph)
        self.group, self.fuses, self.names = dict[int, int](), set[int](), dict[int, frozenset[str]]()
        self.before, self.first, self.last = dict[int, set[int]](), dict[int, int](), dict[int, int]()
        self.operands: dict[int, frozenset[int]] = {}
        self.stored = stored_tensors(graph)
        self.remade = {} if self.calls else self._remade()

    def found(self) -> Fusion:
        for node in self.nodes:
            self._visit(node)
        groups = {n: self._root(n) for n in self.fuses}
        if self.calls:
            sizes = Counter(groups.values())
            groups = {n: root for n, root in groups.items() if sizes[root] > 1}
        self._between(groups)
        regrouped = frozenset(names for node in self.nodes for names in self._regrouped(node))
        return Fusion(groups, *self._leaving(), self.remade, self._aliases(), regrouped)

    def _remade(self) -> dict[int, str]:
        """Rule (6): of arrays that nobody needs but operations of their own block."""
        tensor, others = self.graph.tensor, set[int]()
        phases: dict[int, set[str]] = defaultdict(set)
        for block in self.blocks:
            others.update((*block.carry_out, *block.saved, *(o for o, _ in block.sliced)))
            others.update(i for i, _ in block.results)
            for node in block.nodes:
                for i in node.op.operands(node.inputs):
                    phases[i].add(node.phase)
                    if isinstance(node.op, Connection) or tensor(i).block != block.id:
                        others.add(i)
        found = {}
        for node in self.nodes:
            if not node.op.converts:
                continue
            (i,), (o,) = node.inputs, node.outputs
            old, new = tensor(i).dtype, tensor(o).dtype
            wider = is_float(old) and is_float(new) and itemsize(old) < itemsize(new)
            if wider and tensor(o).shape and o not in others and phases[o] - {node.phase}:
                found[o] = old
        return found

    def _regrouped(self, node: Node) -> Iterable[frozenset[str]]:
        """Dimensions that a reshape makes one of, or makes of one."""
        if node.op.free and node.op.regroups:
            before, after = (self.graph.tensor(i).shape for i in (node.inputs[0], node.outputs[0]))
            one, other = before.without(*after.names).names, after.without(*before.names).names
            yield from (frozenset(some) for some, rest in ((one, other), (other, one)) if len(rest) == 1)

    def _aliases(self) -> dict[int, frozenset[int]]:
        named: dict[tuple[int, int], set[int]] = defaultdict(set)
        for node in self.nodes:
            for i in node.inputs if node.index in self.fuses else ():
                named[self._root(node.index), self._source(i)].add(i)
        found: dict[int, set[int]] = defaultdict(set)
        for (group, source), names in named.items():
            for name in names if len(names) > 1 else ():
                while (name := self.repeated.get(name, name)) != source:
                    node = self.graph.producer[name]
                    found[node.index].add(group)
                    name = node.inputs[node.outputs.index(name)]
        return {node: frozenset(groups) for node, groups in found.items()}

    def _between(self, groups: dict[int, int]) -> None:
        """Adds the free operations between two of a group."""
        readers: dict[int, set[int]] = defaultdict(set)
        for node in reversed(self.nodes):
            if node.index not in self.group and node.inputs:
                maker = groups.get(self._made(self._source(node.inputs[0])))
                if maker is not None and any(maker in readers[o] for o in node.outputs):
                    groups[node.index] = maker
            if node.index in groups:
                for i in node.inputs:
                    readers[i].add(groups[node.index])

    # -- groups ----------------------------------------------------------------------------------------------

    def _visit(self, node: Node) -> None:
        kind = self._role(node)
        if any(o in self.repeated for o in node.outputs):
            self.same[node.outputs[0]] = self._source(self.repeated[node.outputs[0]])
            return
        if kind == FREE or any(o in self.remade for o in node.outputs):
            self.same.update((o, self._source(i)) for i, o in zip(node.inputs, node.outputs, strict=False))
            return
        sources = [self._source(i) for i in sorted(reads(node))]
        self._begin(node, (m for m in map(self._made, sources) if m in self.group))
        if kind == ALONE:
            return
        self.fuses.add(node.index)
        if kind == PRODUCT:
            self.operands[node.index] = frozenset(self.before[node.index])
            return
        for i in sorted(sources, key=lambda i: -self._made(i)):
            maker = self.graph.producer.get(i)
            if maker is not None and maker.index in self.fuses and self._neighbours(i, maker, node):
                self._join(maker.index, node.index)

    def _role(self, node: Node) -> str:
        op = node.op
        if isinstance(op, Connection):
            return ALONE
        types = tuple(self.graph.tensor(i).type for i in node.inputs)
        kind = role(op, types)
        if kind == MAP and converts_variable(node) and node.inputs[0] in self.stored:
            return ALONE
        if kind == REDUCE and any(o in self.graph.gradient_of for o in self._outwards(node.outputs)):
            return ALONE
        sized = any(t.shape for t in (*types, *(self.graph.tensor(o).type for o in node.outputs)))
        return kind if kind == FREE or sized or self._updates(node) else ALONE

    def _outwards(self, tensors: Iterable[int]) -> list[int]:
        """Tensors and what loops make of them outside."""
        found = list(tensors)
        for t in found:
            block = self.graph.blocks[self.graph.tensor(t).block]
            found.extend(o for i, o in block.results if i == t)
        return found

    def _updates(self, node: Node) -> bool:
        """Whether a node belongs to the update of one variable."""
        return updated(node, self.graph) is not None

    def _begin(self, node: Node, makers: Iterable[int]) -> None:
        n = node.index
        self.group[n] = self.first[n] = self.last[n] = n
        self.before[n] = set(makers)
        tensors = (self.graph.tensor(i) for i in (*node.inputs, *node.outputs))
        self.names[n] = frozenset(name for t in tensors for name in t.shape.names)

    def _made(self, tensor: int) -> int:
        maker = self.graph.producer.get(tensor)
        return -1 if maker is None else maker.index

    def _neighbours(self, tensor: int, maker: Node, node: Node) -> bool:
        """Rule (4) for a node and what makes one of its operands."""
        made = self.graph.tensor(tensor)
        if maker.phase != node.phase or made.block != self.graph.tensor(node.outputs[0]).block:
            return False
        apart = len({KERNEL in each.scope.split("/") for each in (maker, node)}) > 1
        if apart or (self.calls and (not node.call or maker.call != node.call)):
            return False
        return maker.scope == node.scope if self._updates(node) else bool(made.shape)

    def _root(self, node: int) -> int:
        while self.group[node] != node:
            node = self.group[node]
        return node

    def _join(self, maker: int, node: int) -> None:
        """Joins two groups if rules (3) and (5) allow it."""
        one, other = self._root(maker), self._root(node)
        names, more = self.names[one], self.names[other]
        if one == other or not (names <= more or more <= names) or {one, other} <= self.operands.keys():
            return
        both = (one, other), (other, one)  # rule (2): a group's product reads from the other
        if any(self._waits(a, b) or a in map(self._root, self.operands.get(b, ())) for a, b in both):
            return
        self.group[other] = one
        self.names[one] = names | more
        self.before[one] |= self.before.pop(other)
        self.first[one] = min(self.first[one], self.first[other])
        self.last[one] = max(self.last[one], self.last[other])
        if other in self.operands:
            self.operands[one] = self.operands[other]

    def _waits(self, target: int, group: int) -> bool:
        """Whether a group needs something else that needs `target`."""
        others = (d for d in self.before[group] if self._root(d) not in (group, target))
        return any(self._reaches(d, target) for d in others)

    def _reaches(self, node: int, target: int) -> bool:
        """Whether the group of a node is `target`, or reads from it, directly or not."""
        seen: set[int] = set()
        waiting = [node]
        while waiting:
            root = self._root(waiting.pop())
            if root == target:
                return True
            if root not in seen and self.last[root] > self.first[target]:
                seen.add(root)
                waiting.extend(self.before[root])
        return False

    def _source(self, tensor: int) -> int:
        return self.same.get(tensor, tensor)

    # -- what leaves a group ---------------------------------------------------------------------------------

    def _leaving(self) -> tuple[frozenset[int], frozenset[int]]:
        leaving, again = set[int](), set[int]()
        for node in self.nodes:
            leaving.update(self._read_by(node))
        for block in self.blocks:
            # What a loop stacks or adds up is seen in the program itself.
            leaving.update(map(self._source, (*block.carry_out, *(o for o, _ in block.sliced))))
        for block in self.blocks:
            if block.saved:
                again.update(map(self._source, block.saved))
                for node in running_again(block):
                    again.update(self._read_by(node))
            else:
                again.update(t for t in leaving if self.graph.tensor(t).block == block.id)
        names = [{t for t, first in self.repeated.items() if first in found} for found in (leaving, again)]
        return frozenset(leaving | names[0]), frozenset(again | names[1])

    def _read_by(self, node: Node) -> Iterable[int]:
        """What a node reads of other groups (free operations pass it on)."""
        if node.index not in self.group:
            return
        own = self._root(node.index)
        for i in map(self._source, node.inputs):
            if self._made(i) not in self.fuses or self._root(self._made(i)) != own:
                yield i
