"""The bytes that a lowered cluster holds of every tensor that it makes or is given, and when.

A cluster is lowered alone, so its program determines which of its tensors have memory under its decisions: a
renamed tensor shares its operand's memory, one inside a kernel has none, a scattered sum exists only in
shards. `Lifetimes` follows from the instructions, which most layouts have in common; `ClusterMemory` adds the
sizes of one layout. Memory rows of the search are sums of these bytes
(`layoutopt.formulation.memory_points`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cached_property

from costmodels.liveness import MemoryRules, ValueSizes, kernel_memory
from costmodels.pricing.templates import structural_key
from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.liveness import Liveness
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Subgraph
from mesh_tf_core.ops.chunks import ChunkAs
from mesh_tf_core.ops.stages import StageStack


class ByteRule(Enum):
    """The rule by which the bytes of a tensor are read off a lowered cluster.

    OWN: of the tensor's value; 0 if it shares another's memory or is inside a kernel. ANY: the same in any
    memory. CASTS: as ANY, for a cast that is kept for all iterations; 0 if each loads the operand from the
    host. ONCE: as OWN, but 0 where a loop may stack it under another name. RESULT: as OWN while the node that
    makes it runs; 0 where it takes the place of a dying operand, or is
      made after the node's main instruction.
    OPERAND: as a node that reads it is given it; 0 where only a moved copy is read from there on.
    LATER: the same after that node.
    GIVEN: as the cluster is given it.
    COPY: of its gathered copy in a block.
    UNCOPIED: as OWN, but 0 where there is such a copy.
    INSIDE: of the values of no tensor that live while the main instruction of a node runs.
    STACK: of the stack that a loop keeps of it for backward, or that loops around stack of that one: `more`
      counts these loops.
    KEPT: by `more` (another rule, its own `more`), for a value that nothing in its loop reads any more but
    that is stacked for backward; 0 if it is recomputed instead. VARIABLE: of a variable as stored on the
    devices.
    """

    OWN = auto()
    ANY = auto()
    CASTS = auto()
    ONCE = auto()
    RESULT = auto()
    OPERAND = auto()
    LATER = auto()
    GIVEN = auto()
    COPY = auto()
    UNCOPIED = auto()
    INSIDE = auto()
    STACK = auto()
    KEPT = auto()
    VARIABLE = auto()


class Lifetimes:
    """The value of a lowered cluster for each tensor, and the interval in which it has memory.

    Args:
      nodes: of the graph, by their index.
      rules: of the compiler.

    Attributes:
      value: tensor -> its value, before it is moved.
      given: tensor -> the value of it that the program reads and does not make.
      stacks: tensor, and number of nested loops that stack it -> that stack.
      stacked: tensors that loops stack.
      copies: (tensor, node of the loop in which it is, or 0) -> its gathered copy.
      born, until: value -> numbers of the first and last instruction with its memory.
      main: node -> number of its last instruction before its sums are reduced.
    """

    def __init__(
        self, program: ir.Program, nodes: Mapping[int, Node], subgraph: Subgraph, rules: MemoryRules
    ) -> None:
        self.program, self._nodes = program, nodes
        kernels = kernel_memory(program, rules, anyhow=True)
        self.live = Liveness(program, kernels.shared, kernels.nowhere)
        self.instrs: list[ir.Instr] = []
        self.born, self.until, self.main = dict[int, int](), dict[int, int](), dict[int, int]()
        self.maker, self._block, self._read_at = dict[int, ir.Instr](), dict[int, int](), dict[int, int]()
        self._visit(program.code, 0)
        self.tensor = [v.tensor for v in program.values]
        own = [nodes[i] for i in subgraph.nodes]
        self._name(own)
        self.value = self._values(own)
        given = [i for n in self.instrs for i in n.inputs if i not in self.born and self.tensor[i] >= 0]
        self.given = {self.tensor[i]: i for i in reversed(given)}
        loops = [instr for instr in self.instrs if isinstance(instr, ir.Loop)]
        stacked = [r for loop in loops for r in loop.stacked]
        self.stacks = {named: value for value, named in stacks_of(program, self.tensor).items()}
        self.stacked = {self.tensor[r.inner] for r in stacked}
        lies = {r.outer: self.live.memory(r.inner) for r in stacked if self.live.memory(r.inner) != r.inner}
        self.twice = {stack for stack, memory in lies.items() if memory not in self.born}
        self.copies = dict(self._copies())

    def _visit(self, code: Sequence[ir.Instr], block: int) -> None:
        summed: set[int] = set()
        memory, until = self.live.memory, self.until
        for instr in code:
            at, span, node = len(self.instrs), self.live.span(instr), instr.origin.node
            self.instrs.append(instr)
            for o in instr.outputs:
                self.born[o], self.maker[o], self._block[o] = at, instr, block
            if isinstance(instr, ir.AllReduce | ir.ReduceScatter):
                summed.add(node)
            if isinstance(instr, ir.Local) and node not in summed:
                self.main[node] = at
            if not isinstance(instr, ir.Loop):
                until.update(dict.fromkeys(span.frees, at))
                for i in map(memory, instr.inputs):
                    self._read_at[i] = at
                    if i not in self.maker and until.get(i, -1) < at:
                        until[i] = at
                continue
            for i in instr.entering:
                self.born[i], self._block[i] = at, node
            self._visit(instr.body, node)
            end = len(self.instrs) - 1
            self._read_at.update((memory(i), end) for i in instr.leaving)
            for i in (*span.leaves, *span.enters, *span.frees):
                until.setdefault(i, end)
            # What a body reads from around it lasts until the loop's end.
            for i in map(memory, instr.outside):
                until[i] = max(until.get(i, 0), end)

    def _name(self, own: Sequence[Node]) -> None:
        """Gives values that lowering names no tensor the one that they are: carries, sums that are still
        pending, what lies in another's memory, results that are moved at once."""
        tensor, born = self.tensor, self.born
        reads = Counter(i for instr in self.instrs for i in instr.inputs)
        for instr in self.instrs:
            body = self._nodes[instr.origin.node].body if isinstance(instr, ir.Loop) else None
            if isinstance(instr, ir.Loop) and body is not None:
                for carry, t in zip(instr.carried, body.carry_in, strict=False):
                    tensor[carry.enter] = t if tensor[carry.enter] < 0 else tensor[carry.enter]
            elif isinstance(instr, ir.AllReduce):
                for i, o in zip(instr.inputs, instr.outputs, strict=True):
                    if tensor[i] < 0 and reads[i] == 1:
                        tensor[i] = tensor[o]
        for v in born:
            m = self.live.memory(v)
            if m != v and tensor[v] >= 0 and m in born and tensor[m] < 0:
                tensor[m] = tensor[v]
        made, outline = {tensor[v] for v in born}, self.program.outline
        for node in own:
            # In chunks, others follow what makes the result.
            for instr in reversed(self.instrs[: self.main.get(node.index, -1) + 1]):
                if instr.origin.node == node.index and len(instr.outputs) == len(node.outputs):
                    for o, t in zip(instr.outputs, node.outputs, strict=True):
                        size = {d.name: d.size for d in self.program.values[o].shape}
                        whole = all(size.get(d.name, 0) >= d.size for d in outline.tensor(t).shape)
                        if t not in made and tensor[o] < 0 and whole:
                            tensor[o] = t
                            made.add(t)

    def _values(self, own: Sequence[Node]) -> dict[int, int]:
        tensor, found = self.tensor, dict[int, int]()
        for v in sorted(self.born, key=self.born.__getitem__):
            if tensor[v] >= 0:
                found[tensor[v]] = v
        self._last = dict(found)
        for t, v in found.items():
            found[t] = self._first(t, v)
        for node in own:
            # A cast that is made where it is read.
            if node.op.converts and node.outputs[0] not in found and node.inputs[0] in found:
                found[node.outputs[0]] = found[node.inputs[0]]
        return found

    def _first(self, t: int, v: int) -> int:
        """The value in whose memory a tensor lies first: before its sum is reduced, under its own name."""
        while True:
            m = self.live.memory(v)
            if m != v and m in self.born and self.tensor[m] == t:
                v = m
            made_by = self.maker.get(v)
            if not isinstance(made_by, ir.AllReduce):
                return v
            before = made_by.inputs[made_by.outputs.index(v)]
            if self.tensor[before] != t:
                return v
            v = before

    def _copies(self) -> Iterator[tuple[tuple[int, int], int]]:
        for v, instr in self.maker.items():
            if self.tensor[v] < 0 and isinstance(instr, ir.AllGather):
                source = instr.inputs[0]
                while self.tensor[source] < 0 and isinstance(
                    made_by := self.maker.get(source), ir.Collective | ir.Slice
                ):
                    source = made_by.inputs[0]
                if self.tensor[source] >= 0:
                    yield (self.tensor[source], self._block[v]), v

    @cached_property
    def inside(self) -> dict[int, tuple[int, ...]]:
        """Node -> the values of no tensor that are held while its main instruction runs; none that another
        node computes, whose result is counted (products in chunks add up their results side by side)."""
        spans = [
            (v, self.born[v], self.until.get(v, len(self.instrs)))
            for v, instr in self.maker.items()
            if self.tensor[v] < 0 and self.live.has(v) and not isinstance(instr, ir.Loop)
        ]
        of = {v: i.origin.node for v, i in self.maker.items() if isinstance(i, ir.Local)}
        main = self.main.items()
        return {n: tuple(v for v, a, b in spans if a <= at <= b and of.get(v, n) == n) for n, at in main}

    @cached_property
    def chunked(self) -> frozenset[int]:
        """The nodes of products in chunks, and of what is done with their chunks: these run side by side."""
        count = Counter(i.origin.node for i in self.maker.values() if isinstance(i, ir.Local))
        chunks = any(isinstance(i, ir.Local) and isinstance(i.op, ChunkAs) for i in self.instrs)
        return frozenset(n for n in count if chunks and count[n] > 1)

    def read(self, tensor: int, node: int, later: bool) -> int | None:
        """The value of a tensor that a node's main instruction, or what is `later`, still reads."""
        value = self.given.get(tensor, self._last.get(tensor))
        if value is None or node not in self.main:
            return None
        return value if self._read_at.get(self.live.memory(value), -1) >= self.main[node] + later else None


def stacks_of(program: ir.Program, tensor: Sequence[int]) -> dict[int, tuple[int, int]]:
    """The stacks that loops save and that are not tensors: value -> the stacked tensor, and the number of
    nested loops.

    Args:
      tensor: value -> the tensor that it is, or -1.
    """
    loops, inner = set[int](), dict[int, int]()
    for instr, _ in program.walk():
        if isinstance(instr, ir.Loop):
            inner.update((r.outer, r.inner) for r in instr.stacked)
            loops.update(r.outer for r in instr.stacked)
        elif isinstance(instr, ir.Local) and isinstance(instr.op, StageStack):
            inner[instr.outputs[0]] = instr.inputs[0]
    found: dict[int, tuple[int, int]] = {}
    for stack in (v for v in loops if tensor[v] < 0):
        value, count = stack, 0
        while tensor[value] < 0 and value in inner:
            count += value in loops
            value = inner[value]
        if tensor[value] >= 0:
            found[stack] = tensor[value], count
    return found


def sums_of(program: ir.Program, tensor: Sequence[int]) -> dict[int, int]:
    """The sums over ticks that are no tensors until they are one stack of all stages, which lies in their
    memory: value -> the tensor that is this stack.

    Args:
      tensor: value -> the tensor that it is, or -1.
    """
    every = [instr for instr, _ in program.walk()]
    summed = {r.outer for loop in every if isinstance(loop, ir.Loop) for r in loop.results}
    stacked = (i for i in every if isinstance(i, ir.Local) and isinstance(i.op, StageStack))
    made = {instr.inputs[0]: tensor[instr.outputs[0]] for instr in stacked}
    return {value: t for value, t in made.items() if value in summed and tensor[value] < 0 <= t}


@dataclass(frozen=True)
class ClusterMemory:
    """The lifetimes of a lowered cluster under one layout."""

    lifetimes: Lifetimes
    program: ir.Program
    mesh: Mesh
    sizes: ValueSizes

    def bytes(self, reading: ByteRule, what: int, more: Hashable) -> int:
        """Bytes of a tensor on one device (INSIDE: of the internal values of a node).

        Args:
          more: the node, block, variable or dying operands that the reading is about.
        """
        found, value = self.lifetimes, self.lifetimes.value.get(what)
        match reading:
            case ByteRule.VARIABLE:
                stored = self.program.variables.get(str(more))
                if stored is None or stored.host:
                    return 0
                return self.sizes.of(stored.value, self.mesh)
            case ByteRule.INSIDE:
                assert isinstance(more, frozenset)
                values = (v for v in found.inside.get(what, ()) if not self._over(v, found.main[what], more))
                return sum(map(self._size, values))
            case ByteRule.STACK:
                assert isinstance(more, int)
                return self._size(found.stacks.get((what, more)))
            case ByteRule.KEPT:
                reading, more = more  # type: ignore[misc]
                return self.bytes(reading, what, more) if what in found.stacked else 0
            case ByteRule.GIVEN:
                return self._size(found.given.get(what))
            case ByteRule.OPERAND | ByteRule.LATER:
                assert isinstance(more, int)
                return self._size(found.read(what, more, reading is ByteRule.LATER))
            case ByteRule.COPY:
                assert isinstance(more, int)
                return self._size(found.copies.get((what, more)))
            case ByteRule.ANY:
                return self._size(value)
            case ByteRule.CASTS:
                made = found.maker.get(-1 if value is None else value)
                sources = (found.maker.get(i) for i in made.inputs) if made is not None else ()
                return 0 if any(isinstance(each, ir.HostLoad) for each in sources) else self._size(value)
        if value is None or not found.live.has(value):
            return 0
        return 0 if self._absent(value, reading, what, more) else self._size(value)

    def _absent(self, value: int, reading: ByteRule, what: int, more: Hashable) -> bool:
        found = self.lifetimes
        match reading, more:
            case ByteRule.UNCOPIED, _:
                return (what, more) in found.copies
            case ByteRule.ONCE, _:
                return value in found.twice
            case ByteRule.RESULT, (int(node), frozenset() as dying):
                at = found.main.get(node, -1)
                return found.born[value] > at or self._over(value, at, dying)
        return False

    def _over(self, value: int, at: int, dying: AbstractSet[int]) -> bool:
        """Whether the instruction `at` makes a value in the place of an operand: one of the tensors `dying`,
        or one of no tensor."""
        found = self.lifetimes
        instr = found.maker.get(value)
        if found.born[value] != at or not isinstance(instr, ir.Local) or instr.op.kind != "elementwise":
            return False
        for i in instr.inputs:
            m = found.live.memory(i)
            free = (m in found.born and found.tensor[m] < 0) or not dying.isdisjoint(
                (found.tensor[i], found.tensor[m])
            )
            if free and self._size(m) == self._size(value):
                return True
        return False

    def _size(self, value: int | None) -> int:
        if value is None or self._value(value).host:
            return 0
        return self.sizes.of(self._value(value), self.mesh)

    def _value(self, value: int) -> ir.Value:
        return self.program.values[value]


@dataclass
class LifetimesCache:
    """The lifetimes of the programs of one graph, by their structural keys."""

    _known: dict[Hashable, Lifetimes] = field(default_factory=dict)
    _of: dict[int, tuple[ir.Program, Lifetimes]] = field(default_factory=dict)

    def of(
        self, program: ir.Program, nodes: Mapping[int, Node], subgraph: Subgraph, rules: MemoryRules
    ) -> Lifetimes:
        known = self._of.get(id(program))
        if known is None:
            key = subgraph, rules, structural_key(program)[0]
            if key not in self._known:
                self._known[key] = Lifetimes(program, nodes, subgraph, rules)
            # The program is kept, so that its id stays its own.
            known = self._of[id(program)] = program, self._known[key]
        return known[1]
