"""The values that stay for backward, where a profile keeps others than the program's stacks and rings.

A value that a loop over layers keeps has many names: its stack, the ring of a stage, the part that an
iteration of backward reads. `kept_values` finds them in the graph, so that a rule is about values, not about
names, and holds under every layout.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field

from costmodels.kernels.fusion import ALONE, FREE, MAP, REDUCE, Fuses, casts_variable, role
from mesh_tf_core.ir.blocks import IN_FLIGHT, Connection, Node, Outline, per_graph
from mesh_tf_core.ir.dtypes import TensorType, is_float, itemsize
from mesh_tf_core.ir.op import PRODUCTS, Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllGather, Collective, HostLoad, Instr, Local, Loop, Program
from mesh_tf_core.layers.recurrent import AGAIN, KERNEL
from mesh_tf_core.ops.index import DynamicSlice, DynamicUpdate
from mesh_tf_core.ops.unary import UnaryGrad

STEPS = {"gelu_fast": (6, 9, 13), "gelu_new": (3, 8, 11)}
"""Functions that PyTorch's models write in steps: arrays that these keep for backward besides the operand,
and kernels forward and backward."""
OF_RESULT = {"softmax", "log_softmax", "relu", "tanh", "sigmoid", "exp", "sqrt", "rsqrt", "reciprocal"}
"""Calls whose derivative reads their result alone (tools/autograd/derivatives.yaml of PyTorch)."""


def of_ring(op: Op) -> bool:
    """True if an operation puts a value into a ring of a stage, or reads one out of it."""
    return isinstance(op, DynamicUpdate | DynamicSlice) and op.dim == IN_FLIGHT


@dataclass
class KeptValues:
    """The values that loops keep for backward.

    Attributes:
      of: tensor -> the value that it is a name of, in or outside of the body that computes it.
      names: value -> its tensors outside of that body: stacks, rings and their parts. Of values that no loop
        keeps, only those `inside`, with all their tensors.
      remade: values that kernels of backward make again from others; `inside`: those that one call of a
        library makes and reads, in loops or outside of them.
      views: tensors that are another name of a value that a loop keeps under its first name.
      masks: value -> masks of dropout, of its shape, that are kept as long; `apart`: arrays of its size that
        are, where functions of it have a kernel for each step (`STEPS`), or it stands for a wider operand.
    """

    of: dict[int, int] = field(default_factory=dict)
    names: dict[int, frozenset[int]] = field(default_factory=dict)
    remade: frozenset[int] = frozenset()
    inside: frozenset[int] = frozenset()
    views: frozenset[int] = frozenset()
    masks: dict[int, int] = field(default_factory=dict)
    apart: dict[int, float] = field(default_factory=dict)

    def without_memory(self, fuses: Fuses) -> frozenset[int]:
        """The tensors that have no memory where these operations share kernels."""
        calls = fuses is Fuses.CALLS
        remade, views = (self.inside, self.views) if calls else (self.remade, frozenset[int]())
        return views.union(*(self.names[value] for value in remade))


@per_graph
def kept_values(graph: Outline) -> KeptValues:
    """The values that the loops of a graph keep."""
    return _Finder(graph).found()


class _Finder:
    """Attributes:
    same: tensor -> another name of its value, towards the one that stands for all.
    makers: value -> the nodes that compute it; `read`: the roles of the operations that read it in backward;
      `calls`: the calls of those that read it, in forward of a loop or not.
      `results`: block and call, of `OF_RESULT` -> the value that it makes last in forward; `wider`: value
        that stands for a wider operand -> `KeptValues.apart` of it.
    """

    def __init__(self, graph: Outline) -> None:
        self.graph, self.same = graph, dict[int, int]()
        for block in graph.blocks:
            self._join((*block.sliced, *block.stacked, *block.saved.items()))
            for node in block.nodes:
                self._join(_moved(node))
        self.makers: dict[int, list[Node]] = {}
        self.read: dict[int, set[str]] = {}
        self.calls: dict[int, set[tuple[str, bool]]] = {}
        self.results: dict[tuple[int, str], int] = {}
        self.wider: dict[int, float] = {}
        for node in (n for block in graph.blocks for n in block.nodes if n.body is None):
            moved = {o for _, o in _moved(node)}
            for o in (o for o in node.outputs if o not in moved and not self._constant(node)):
                self.makers.setdefault(self.value(o), []).append(node)
            name = re.sub(r"_*(_\d+)?$", "", node.call).lstrip("_")
            if node.phase == Phase.FORWARD and name in OF_RESULT:
                self.results[self._site(node)] = self.value(node.outputs[0])
            for i in node.inputs if not moved else ():
                looped = node.phase == Phase.FORWARD and not self._outside(node)
                self.calls.setdefault(self.value(i), set()).add((node.call, looped))
                if node.phase != Phase.FORWARD:
                    self.read.setdefault(self.value(i), set()).add(self._role(node))
        for block in graph.blocks:
            pairs = zip(block.carry_in, block.carry_out, strict=False)
            carried = (self.value(i) for i, o in pairs if self.value(i) != self.value(o))
            for value in (*carried, *(self.value(inner) for inner, _ in block.summed)):
                self.read.setdefault(value, set()).add(ALONE)

    def value(self, tensor: int) -> int:
        """The name that stands for a tensor's value."""
        while tensor in self.same:
            tensor = self.same[tensor]
        return tensor

    def _join(self, pairs: Iterable[tuple[int, int]]) -> None:
        for a, b in pairs:
            a, b = self.value(a), self.value(b)
            if a != b:
                self.same[max(a, b)] = min(a, b)

    def _constant(self, node: Node) -> bool:
        makers = (self.graph.producer.get(i) for i in node.inputs)
        return bool(node.inputs) and all(m is not None and not m.inputs and m.body is None for m in makers)

    def found(self) -> KeptValues:
        graph = self.graph
        stacks = {o for block in graph.blocks for o in block.saved.values()}
        rings = {i for n, _ in graph.walk() if of_ring(n.op) for i in n.inputs[:1]}
        self.kept = {self.value(i) for i in stacks | rings}
        home = {
            value: {graph.tensor(o).block for node in self.makers.get(value, ()) for o in node.outputs}
            for value in self.kept
        }
        read = {v for v in self.read if any(self._outside(node) for node in self.makers.get(v, ()))}
        made = {v: self.makers.get(v, ()) for v in self.kept | read}
        again = frozenset(v for v, by in made.items() if by and all(n.call.endswith(AGAIN) for n in by))
        found = KeptValues(inside=self._inside(self.kept | read) | again, apart=self.wider)
        names: dict[int, set[int]] = {value: set() for value in self.kept | found.inside}
        for tensor in range(len(graph.tensors)):
            value = self.value(tensor)
            if value in self.kept:
                found.of[tensor] = value
                if tensor in stacks or graph.tensor(tensor).block not in home[value]:
                    names[value].add(tensor)
            elif value in names:
                names[value].add(tensor)
        found.names = {value: frozenset(tensors) for value, tensors in names.items()}
        remade = (value for value in self.kept if self._remade(value, self.kept))
        found.remade = again.intersection(self.kept).union(remade)
        found.views = frozenset(self._views())
        for block in graph.blocks:
            here = Counter(v for node in block.nodes for v in self._like(node, found))
            found.masks.update((v, max(n, found.masks.get(v, 0))) for v, n in here.items())
            for n in block.nodes:
                if isinstance(n.op, UnaryGrad) and n.op.fn in STEPS:
                    found.apart[self.value(n.inputs[1])] = STEPS[n.op.fn][0]
        return found

    def _like(self, node: Node, found: KeptValues) -> list[int]:
        """Of dropout: a value of its body, and of its result's shape, that the loop over this body keeps."""
        types = self._types(node)
        draws = node.op.kind == "random" and node.phase == Phase.FORWARD and types[0] == types[-1]
        made = self.graph.tensor(node.outputs[0]) if draws else None
        dim = self.graph.blocks[made.block].dim if made is not None else None
        if dim is None:
            return []
        like = (v for t, v in found.of.items() if self.graph.tensor(t) == made and v not in found.remade)
        shapes = ((v, self.graph.tensor(t).shape.names) for v in like for t in found.names[v])
        return [v for v, names in shapes if dim.name in names][:1]

    def _types(self, node: Node) -> tuple[TensorType, ...]:
        return tuple(self.graph.tensor(i).type for i in (*node.inputs, *node.outputs))

    def _remade(self, value: int, known: Set[int]) -> bool:
        makers = self.makers.get(value, ())
        fused = makers and self.read.get(value, set()) <= {MAP, REDUCE} and all(map(self._fused, makers))
        return bool(fused) and all(self._follows(node, node, known) for node in makers)

    def _views(self) -> Iterator[int]:
        """Stacks of a value that a loop saves under another name too: views of one array in PyTorch."""
        for block in self.graph.blocks:
            first = dict[int, int]()
            for inner, stack in block.saved.items():
                if first.setdefault(self.value(inner), stack) != stack:
                    yield stack

    def _outside(self, node: Node) -> bool:
        """Whether a node of forward is in no loop."""
        return node.phase == Phase.FORWARD and self._site(node)[0] == 0

    def _inside(self, kept: Set[int]) -> frozenset[int]:
        """The kept values that a call makes for itself alone, and makes again from its operands. Where an
        operand is not kept, the first value that follows from it takes its place."""
        own = sorted(filter(self._in_one_call, kept))
        operands: dict[int, int] = {}
        for value in own:
            for node in self.makers.get(value, ()):
                made = self.graph.tensor(node.outputs[0])
                for i in node.inputs if self._role(node) == MAP else ():
                    maker = self.graph.producer.get(i)
                    if maker is not None and maker.call == node.call:
                        continue
                    read = self.graph.tensor(i)
                    alike = read == made or (made.dtype == "bool" and read.shape == made.shape)
                    if alike and self.value(i) not in kept | operands.keys():
                        operands[self.value(i)] = value
                        self.wider[value] = itemsize(read.dtype) / itemsize(made.dtype) - 1
        known = kept | operands.keys()
        found = {v for v in own if v not in operands.values() and self._remade(v, known)}
        for value in own:
            makers = self.makers.get(value)
            result = self.results.get(self._site(makers[0])) if makers else None
            found = (found | {value}) - {result} if result in kept else found
        return frozenset(found)

    def _site(self, node: Node) -> tuple[int, str]:
        """The block and the call of a node."""
        return self.graph.tensor((*node.outputs, *node.inputs)[0]).block, node.call

    def _in_one_call(self, value: int) -> bool:
        """Whether backward reads a value for the call that makes it. What no loop keeps has memory for all
        its readers, or none."""
        calls = {node.call for node in self.makers.get(value, ())}
        readers = self.calls.get(value, set())
        calls |= {call for call, looped in readers if not (looped and value in self.kept)}
        return len(calls) == 1 and "" not in calls

    def _fused(self, node: Node) -> bool:
        """Whether a kernel makes elements one by one, with statistics of their row at most."""
        sizes = [type.shape.size for type in self._types(node)]
        return self._role(node) in (MAP, REDUCE) and max(sizes) == sizes[-1]

    def _follows(self, node: Node, last: Node, known: Set[int]) -> bool:
        """Whether backward has the operands of a node: each is `known`, is there for all iterations, lacks
        dimensions of what the `last` node makes, so that keeping it takes little, or follows from such."""
        made = self.graph.tensor(last.outputs[0])
        for i in node.inputs:
            operand, maker = self.graph.tensor(i), self.graph.producer.get(i)
            there = self.value(i) in known or operand.block != made.block
            if there or maker is None or not {*made.shape.names} <= {*operand.shape.names}:
                continue
            fused = maker.body is None and self._role(maker) in (FREE, MAP)
            if not (fused and self._follows(maker, last, known)):
                return False
        return True

    def _role(self, node: Node) -> str:
        if isinstance(node.op, Connection) or KERNEL in node.scope.split("/"):
            return ALONE
        return role(node.op, self._types(node)[: len(node.inputs)])


def beside(program: Program, fuses: Fuses) -> dict[int, float]:
    """The kept tensors of a program beside which masks of dropout are kept, a byte an element, or arrays of
    functions in steps, and the bytes of these for each of theirs."""
    kept = kept_values(program.outline)
    apart = kept.apart if fuses is Fuses.CALLS else {}
    values = ((v, kept.of.get(v.tensor, -1)) for v in program.values)
    return {
        v.tensor: kept.masks.get(value, 0) / itemsize(v.dtype) + apart.get(value, 0)
        for v, value in values
        if (value in kept.masks or value in apart) and v.tensor in kept.names[value]
    }


def gathered(program: Program) -> dict[int, int]:
    """The kept tensors of a program that products read gathered, and over how many devices."""
    kept, found = kept_values(program.outline), dict[int, int]()
    ways: dict[int, tuple[int, int]] = {}
    for instr, _ in program.walk():
        if instr.origin.phase != Phase.FORWARD:
            continue
        if isinstance(instr, AllGather):
            n = program.mesh.group_size(instr.axes)
            ways.update(
                (o, (program.values[i].tensor, n)) for i, o in zip(instr.inputs, instr.outputs, strict=True)
            )
        elif isinstance(instr, Local) and instr.op.free:
            ways.update((o, ways[i]) for i, o in zip(instr.inputs, instr.outputs, strict=False) if i in ways)
        elif isinstance(instr, Local) and instr.op.kind in PRODUCTS:
            for tensor, n in (ways[i] for i in instr.inputs if i in ways):
                names = kept.names.get(kept.of.get(tensor, -1), frozenset())
                found.update(dict.fromkeys(names, n))
    return found


def logits(program: Program) -> dict[int, float]:
    """The values that were cast to a wider type, of which labels pick elements, and their gradients, each
    with the part of its bytes that PyTorch's arrays have: where the cast is the loss's own, it is done in
    registers, and the arrays have the type before it."""
    makers = program.outline.producer
    wider, found = dict[int, tuple[str, float]](), dict[int, float]()
    for instr, _ in program.walk():
        if isinstance(instr, Collective):
            wider |= {o: wider[i] for i, o in zip(instr.inputs, instr.outputs, strict=False) if i in wider}
        if not isinstance(instr, Local):
            continue
        read, made = ([program.values[i] for i in ids] for ids in (instr.inputs, instr.outputs))
        maker = makers.get(made[0].tensor)
        call = "" if maker is None else maker.call
        share = itemsize(read[0].dtype) / itemsize(made[0].dtype) if read else 1.0
        if instr.op.converts and is_float(read[0].dtype) and share < 1:
            wider[made[0].id] = call, share
        elif instr.op.labels(*(TensorType(v.shape, v.dtype) for v in read)):
            of = ((i, *wider[i]) for i in instr.inputs if i in wider)
            found |= {i: share if own == call != "" else 1.0 for i, own, share in of}
        elif instr.origin.phase == Phase.BACKWARD and not found.keys().isdisjoint(instr.inputs):
            alike = {(x.shape, x.dtype): found[x.id] for x in read if x.id in found}
            found |= {y.id: alike[y.shape, y.dtype] for y in made if (y.shape, y.dtype) in alike}
    return found


def _moved(node: Node) -> Iterator[tuple[int, int]]:
    """Pairs of names of one value: what a node reads, and what it only hands on."""
    if node.body is not None:
        yield from zip(node.inputs, node.body.carry_in, strict=False)
        yield from zip(node.body.carry_out, node.outputs, strict=False)
    elif of_ring(node.op):
        yield node.inputs[0], node.outputs[0]
        if isinstance(node.op, DynamicUpdate):
            yield node.inputs[1], node.outputs[0]
    elif node.op.free and node.inputs:
        yield node.inputs[0], node.outputs[0]


def staying(program: Program) -> Iterator[int]:
    """Values that are put into a ring or read out of one, rule (8)."""
    for instr in program.every(Local):
        if of_ring(instr.op):
            yield instr.inputs[1] if isinstance(instr.op, DynamicUpdate) else instr.outputs[0]


def variable_casts(program: Program, every: bool = False) -> Iterator[tuple[int, Local, int, int]]:
    """The casts of variables: position at the top level, the cast, the value that its operand is a part of,
    and how many parts that has.

    Args:
      every: also of those outside of loops, but for pieces that are gathered at once.
    """
    part: dict[int, tuple[int, int]] = {}
    loaded: set[int] = {i for instr in program.code if isinstance(instr, AllGather) for i in instr.inputs}
    for position, top in enumerate(program.code):
        for instr in _within(top) if isinstance(top, Loop) or not every else (top,):
            if isinstance(instr, Loop):
                part.update({s.inner: (s.outer, program.local(s.outer).shape.sizes[0]) for s in instr.sliced})
            elif isinstance(instr, HostLoad):
                loaded.update(instr.outputs)
            elif isinstance(instr, Local) and casts_variable(instr, program):
                if loaded.issuperset(instr.inputs) or (instr is top and loaded.issuperset(instr.outputs)):
                    continue
                (source,), times = instr.inputs, 1
                while source in part:
                    source, n = part[source]
                    times *= n
                yield position, instr, source, times


def _within(instr: Instr) -> Iterator[Instr]:
    """What is in a loop, outer loops first, and the loop itself; nothing for other instructions."""
    if isinstance(instr, Loop):
        yield instr
        for inner in instr.body:
            yield from _within(inner) if isinstance(inner, Loop) else (inner,)
