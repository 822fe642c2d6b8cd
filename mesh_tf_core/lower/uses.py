"""The readers of values of a program, or of tensors of a graph: the bookkeeping that passes share; and the
pass `dead`, which removes instructions with unused results, in loops too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace

from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.blocks import Node
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.values import every
from mesh_tf_core.lower.nodes import repeated
from mesh_tf_core.tracing.graph import Graph


def count_uses(code: Iterable[ir.Instr], results: Iterable[int] = ()) -> defaultdict[int, int]:
    """The number of times that each value is read by an instruction, leaves a loop, or is returned; to wait
    for it is not to read it."""
    uses: defaultdict[int, int] = defaultdict(int)

    for instr in every(code):
        for i in () if isinstance(instr, ir.Done) else instr.inputs:
            uses[i] += 1
        for i in instr.leaving if isinstance(instr, ir.Loop) else ():
            uses[i] += 1
    for i in results:
        uses[i] += 1
    return uses


def compact(program: ir.Program) -> ir.Program:
    """Removes values that no instruction uses and numbers the others in order of appearance."""

    def appearing(code: Iterable[ir.Instr]) -> Iterator[int]:
        for instr in code:
            yield from instr.inputs
            if isinstance(instr, ir.Loop):
                yield from (instr.index, *instr.entering)
                yield from appearing(instr.body)
            yield from instr.outputs

    found = dict.fromkeys((*appearing(program.code), *program.results.values()))
    order = {old: new for new, old in enumerate(found)}

    def moved(instr: ir.Instr) -> ir.Instr:
        ins = tuple(order[i] for i in instr.inputs)
        outs = tuple(order[i] for i in instr.outputs)
        if not isinstance(instr, ir.Loop):
            return replace(instr, inputs=ins, outputs=outs)
        return instr.remade(
            index=order[instr.index],
            carried=tuple(ir.Carry(*(order[i] for i in c)) for c in instr.carried),
            sliced=tuple(ir.Sliced(order[s.outer], order[s.inner]) for s in instr.sliced),
            stacked=tuple(ir.Result(order[r.inner], order[r.outer]) for r in instr.stacked),
            summed=tuple(ir.Result(order[r.inner], order[r.outer]) for r in instr.summed),
            body=tuple(moved(i) for i in instr.body),
            runs=None if instr.runs is None else order[instr.runs],
            first=None if instr.first is None else order[instr.first],
        )

    values: list[ir.Value] = [replace(program.values[old], id=new) for old, new in order.items()]
    return replace(
        program,
        values=tuple(values),
        code=tuple(moved(i) for i in program.code),
        feeds={n: order[i] for n, i in program.feeds.items() if i in order},
        results={n: order[i] for n, i in program.results.items()},
    )


class Readers:
    """The readers of the tensors of a graph, and the results of loops.

    Args:
      nodes: those that count, in order.

    Attributes:
      of: tensor -> the nodes that read it, also where a repeated conversion calls it otherwise.
      outer: body tensor -> the tensors that a loop makes of it outside.
      leaving: body tensors that a loop carries on.
    """

    def __init__(self, graph: Graph, nodes: Sequence[Node]) -> None:
        self.graph, self.nodes = graph, nodes
        self.of: dict[int, list[Node]] = defaultdict(list)
        self.outer: dict[int, list[int]] = defaultdict(list)
        self.leaving: set[int] = set()
        again = repeated(graph)
        for node in nodes:
            for i in dict.fromkeys(again.get(i, i) for i in node.op.operands(node.inputs)):
                self.of[i].append(node)
        self.of.update((i, self.of[first]) for i, first in again.items())
        for block in graph.blocks:
            for inner, out in block.handed:
                if graph.tensor(inner).block == block.id:
                    self.outer[inner].append(out)
                else:  # the loop takes it from outside, and reads it as nodes do
                    self.of[inner].append(graph.producer[out])
            self.leaving.update(block.carry_out)

    def inner(self, tensor: int) -> int:
        """The body tensor of a loop's stacked or summed result, or the tensor itself."""
        node = self.graph.producer.get(tensor)
        while node is not None and node.body is not None:
            pairs = {out: inner for inner, out in node.body.results}
            if tensor not in pairs or self.graph.tensor(pairs[tensor]).block != node.body.id:
                break
            tensor = pairs[tensor]
            node = self.graph.producer.get(tensor)
        return tensor

    def maker(self, tensor: int) -> Node:
        """The node that computes a tensor, in whatever loop."""
        return self.graph.producer[self.inner(tensor)]


def drop_dead(program: ir.Program, again: Set[int] = frozenset()) -> ir.Program:
    """Keeps instructions that lead to a result or a written variable (and every input, so that feeds stay as
    declared); of the nodes `again`, also all of their second runs."""
    return replace(program, code=tuple(_sweep(program.code, set(program.results.values()), again)))


def _sweep(code: Sequence[ir.Instr], live: set[int], again: Set[int]) -> list[ir.Instr]:
    kept: list[ir.Instr] = []
    for instr in reversed(code):
        if instr.origin.phase == Phase.RECOMPUTE and instr.origin.node in again:
            live.update(instr.outputs)
        if isinstance(instr, ir.Loop):
            found = _loop(instr, live, again)
            if found is None:
                continue
            instr = found
        elif isinstance(instr, ir.Done):
            awaited = tuple(i for i in instr.inputs if i in live)
            instr = replace(instr, inputs=awaited)
            if not awaited:
                continue
        elif not isinstance(instr, ir.WriteVariable | ir.Input) and not any(o in live for o in instr.outputs):
            continue
        live.update(instr.inputs)
        kept.append(instr)
    return kept[::-1]


def _loop(loop: ir.Loop, live: set[int], again: Set[int]) -> ir.Loop | None:
    stacked = tuple(r for r in loop.stacked if r.outer in live)
    summed = tuple(r for r in loop.summed if r.outer in live)
    carried = tuple(c for c in loop.carried if c.final in live)
    while True:
        inside = {r.inner for r in (*stacked, *summed)} | {c.leave for c in carried}
        inside |= {i for i in (loop.runs, loop.first) if i is not None}
        body = _sweep(loop.body, inside, again)
        # A carry is needed if the body reads it, whether or not its final value is.
        more = tuple(c for c in loop.carried if c in carried or c.enter in inside)
        if len(more) == len(carried):
            break
        carried = more
    if not (stacked or summed or carried):
        return None
    sliced = tuple(s for s in loop.sliced if s.inner in inside)
    return loop.remade(carried=carried, sliced=sliced, stacked=stacked, summed=summed, body=tuple(body))
