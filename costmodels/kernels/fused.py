"""The kernels of a program on hardware with a fusing compiler: the inputs, the computation and the outputs of
each.

`costmodels.kernels.fusion` decides which operations may share a kernel. In a program a group falls into
several kernels, one after the other:
  (1) what is sent by a collective, or moved otherwise, is written first; what follows on it is a later kernel
  (2) a reduction's result is used in a later kernel; softmax and normalisation are the reductions and maps
      that they consist of (`Op.expand`)
      What only works on such results (a mean from a sum) is a kernel between the two, not part of the
      later one, which would do it again for every element
  (3) a value is written if something outside of its kernel needs it. A later kernel of its own group reads it
      too, or computes it again from what it reads anyway, whichever moves fewer bytes
  (4) what a loop stacks is written in its place in the stack, and priced there
  (5) a cast of a variable runs once in a step: in a loop that of all layers is kept, for backward too;
      outside of loops it is made where it is read, and costs what its readers have to read more, but for
      the half of a split master copy (`mesh_tf_core.lower.storage`): that is written
  (6) a cast that its readers make (`costmodels.kernels.fusion`, rule (6)) is not a kernel and no array
  (7) the kernel that makes a term of a loop's sum adds it to the sum
Where a library has a kernel for each of its calls, an addition reads a term before its cast, as PyTorch's
`add_` takes operands of two types, and what is made of positions alone is no kernel (`made_of_positions`).
So a chain of maps behind a product costs the product, its operands and the chain's last result.

All of this is local to a group, and a cluster of the search holds whole groups: prices of clusters add up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from costmodels.kernels.fusion import ALONE, PRODUCT, Fuses, casts_variable
from costmodels.kernels.groups import Group, GroupContext, VariableCast
from costmodels.kernels.partition import FusedKernel
from mesh_tf_core.ir.blocks import Outline, per_graph
from mesh_tf_core.ir.instructions import STEP
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import HostLoad, Instr, Local, Loop, Permute, Program
from mesh_tf_core.ops.index import Range
from mesh_tf_core.ops.kinds import SourceOp


@dataclass(frozen=True)
class Fused:
    """A program as kernels.

    Attributes:
      items: instructions that are not fused, and kernels, each with how often it runs.
      inner: values without memory of their own: maps and reductions whose results stay inside a kernel, or in
        a loop's stack. A product's result represents that of its kernel.
      casts: values that are computed where they are read -> their operands.
    """

    items: tuple[tuple[Instr | FusedKernel, float], ...]
    inner: frozenset[int]
    casts: Mapping[int, int]


FusionUnit: TypeAlias = "Instr | Group | VariableCast"
"""A unit that is priced on its own."""


def fused(program: Program, fuses: Fuses = Fuses.ALL) -> Fused:
    """The kernels of a program."""
    found = _Fuser(program, fuses)
    items, inner = list[tuple[Instr | FusedKernel, float]](), set[int]()
    for item, times in found.run():
        made: Sequence[Instr | FusedKernel] = (item,) if isinstance(item, Instr) else ()
        if isinstance(item, VariableCast):
            made = item.kernels(program.local)
        elif isinstance(item, Group):
            partition, sizes = item.partition(program.local)
            outcome = partition.outcome(sizes.bytes)
            made = partition.kernels(outcome, sizes)
            inner |= partition.inside(outcome)
        items += [(one, times) for one in made]
    return Fused(tuple(items), frozenset(inner), found.casts)


def unwritten(program: Program, fuses: Fuses) -> tuple[set[int], dict[int, int]]:
    """The values that stay inside of kernels under some sizes, and its `casts`."""
    found = _Fuser(program, fuses)
    inside: set[int] = set()
    for item, _ in found.run():
        if isinstance(item, Group):
            inside |= item.steps(program.local).unwritten
    return inside, found.casts


def grouped(program: Program, fuses: Fuses = Fuses.ALL) -> list[tuple[FusionUnit, float]]:
    """As the items of `fused`, with whole groups in place of the kernels that they fall into."""
    return _Fuser(program, fuses).run()


def cast_terms(program: Program, loop: Loop) -> dict[int, int]:
    """The terms of sums that a loop casts for nothing else -> what it casts."""
    casts = {i.outputs[0]: i.inputs[0] for i in loop.body if isinstance(i, Local) and i.op.converts}
    terms = {r.inner for r in loop.summed} | {r.inner for r in loop.stacked if r.outer in program.added}
    read = {i for instr in loop.body for i in instr.inputs} | program.added.keys()
    return {term: casts[term] for term in terms & casts.keys() - read}


@per_graph
def made_of_positions(graph: Outline) -> frozenset[int]:
    """The nodes that count positions, and those that read nothing but such (sines, masks). Models make them
    once and keep them (`freqs_cis` of torchtitan's torchtitan/models/llama3/model/model.py)."""
    found, known = set[int](), set[int]()
    for node, _ in graph.walk():
        fixed = known.issuperset(node.inputs) if node.inputs else isinstance(node.op, SourceOp)
        if fixed and node.body is None:
            known.update(node.outputs)
            if isinstance(node.op, Range) or not found.isdisjoint(node.inputs):
                found.update(node.outputs)
    return frozenset(graph.producer[i].index for i in found)


def made_by_kernels(loop: Loop) -> set[int]:
    """The terms of a loop's sums that kernels of its body make, and add, rule (7)."""
    made = {o for instr in loop.body if isinstance(instr, Local) and not instr.op.free for o in instr.outputs}
    return {term for term, _ in loop.summed if term in made}


class _Fuser:
    """Walks a program block by block."""

    def __init__(self, program: Program, fuses: Fuses) -> None:
        self.program, self.compiled = program, fuses is Fuses.ALL
        self.context = GroupContext(program, fuses)
        self.context.producer.update((o, move) for move in program.beside for o in move.outputs)
        self.items, self.casts = list[tuple[FusionUnit, float]](), dict[int, int]()
        loops = () if self.compiled else program.every(Loop)
        self.terms = frozenset(term for loop in loops for term in cast_terms(program, loop))
        self.tables = frozenset[int]() if self.compiled else made_of_positions(program.outline)

    def run(self) -> list[tuple[FusionUnit, float]]:
        self.block(self.program.code, self.program.results.values(), (), 1)
        return self.items

    def block(
        self,
        code: Sequence[Instr],
        ends: Iterable[int],
        stacked: Iterable[int],
        times: float,
        looped: bool = False,
    ) -> None:
        """One block; `ends` are values that leave it, `stacked` those that its loop stacks."""
        context = self.context
        groups: dict[tuple[int, bool], list[Group]] = defaultdict(list)
        own: dict[int, Group] = {}
        for instr in code:
            if self._is_kept(instr):
                continue
            if isinstance(instr, Local) and (instr.op.free or self._is_remade(instr)):
                if not instr.op.free:
                    self.casts[instr.outputs[0]] = instr.inputs[0]
                if instr.op.cuts or instr.op.joins:
                    continue  # Its readers read the part alone, or the whole.
                context.same.update((o, context.source(i)) for i in instr.inputs[:1] for o in instr.outputs)
                continue
            group = self._group(instr, groups)
            if group is not None:
                own[id(instr)] = group
            context.producer.update(dict.fromkeys(instr.outputs, instr))
            for i in instr.inputs:
                context.readers[context.source(i)].add(group)
        for i in ends:
            context.readers[context.source(i)].add(None)
        if self.compiled:  # else a stack is the arrays that were made, each where it was made
            context.stacked.update(map(context.source, stacked))
        whole = {id(g.instrs[-1]): g for found in groups.values() for g in found}
        casts = self.casts
        for group in whole.values():
            group.casts = casts
        self.casts = dict(casts)
        for instr in code:
            if id(instr) not in own:
                self.items += [(item, times) for item in self._alone(instr, looped)]
            elif id(instr) in whole:
                self.items.append((whole[id(instr)], times))
            if isinstance(instr, Loop):
                leaving = (*(c.leave for c in instr.carried), *(r.inner for r in instr.summed))
                stack = (r.inner for r in instr.stacked)
                self.block(instr.body, leaving, stack, times * instr.times, looped=True)

    def _alone(self, instr: Instr, looped: bool) -> Iterable[Instr | VariableCast]:
        """What is not in a group, and what becomes of casts by rules (5) and (6)."""
        if self._is_kept(instr) or (isinstance(instr, Local) and self._is_remade(instr)):
            return
        if not self.compiled or not isinstance(instr, Local) or not casts_variable(instr, self.program):
            yield instr
        elif not looped and not self._is_half(instr):
            self.casts[instr.outputs[0]] = instr.inputs[0]
            yield VariableCast(self.context, instr, self.casts)
        elif not looped or instr.origin.phase == Phase.FORWARD:
            yield instr
        elif isinstance(self.context.producer.get(instr.inputs[0]), HostLoad):
            yield instr  # It comes from the host in every iteration, so nobody has casts of all.

    def _is_kept(self, instr: Instr) -> bool:
        """Whether it is a table of positions, or the cast of a term of a sum."""
        return isinstance(instr, Local) and (
            instr.origin.node in self.tables or instr.outputs[0] in self.terms
        )

    def _is_remade(self, instr: Local) -> bool:
        """Whether it is a cast that its readers make (`costmodels.kernels.fusion`, rule (6))."""
        return (
            instr.op.converts and self.program.values[instr.outputs[0]].tensor in self.context.fusion.remade
        )

    def _is_half(self, cast: Local) -> bool:
        """Whether a cast is what the layout's whole copy of a variable is gathered from."""
        made, read = (self.program.values[i].tensor for i in (cast.outputs[0], cast.inputs[0]))
        return made == read

    def _group(self, instr: Instr, groups: dict[tuple[int, bool], list[Group]]) -> Group | None:
        """The group that an instruction belongs to, with it in it: of a node that is several products, one
        after the other (`mesh_tf_core.lower.collective_matmul`), the last one's; what reads what comes
        beside that is behind it."""
        number = self.context.fusion.group.get(instr.origin.node)
        if number is None or not isinstance(instr, Local):
            return None
        kind = self.context.role(instr)
        if kind == ALONE:
            return None
        again = instr.origin.phase == Phase.RECOMPUTE
        found = groups[number, again]
        begins = (
            PRODUCT in found[-1].roles and (kind == PRODUCT or self._waits_for_step(instr)) if found else True
        )
        if begins or self._runs_once_more(instr, found[-1]):
            found.append(Group(self.context, again))
        group = found[-1]
        group.instrs.append(instr)
        group.roles.append(kind)
        return group

    def _runs_once_more(self, instr: Local, group: Group) -> bool:
        """Whether a group has another run of the same: what stages do, and what is made again beside their
        backward, may stand in one block."""
        if instr.origin.phase != Phase.RECOMPUTE:
            return False
        values = self.program.values
        made = [values[o].tensor for o in instr.outputs if values[o].tensor >= 0]
        same = (i for i in group.instrs if i.origin == instr.origin and i.op == instr.op)
        return any(values[o].tensor in made for i in same for o in i.outputs)

    def _waits_for_step(self, instr: Local) -> bool:
        """Whether it reads what comes in a step of a decomposed collective: no kernel before waits for it."""
        made = (self.context.producer.get(self.context.source(i)) for i in instr.inputs)
        return any(isinstance(m, Permute) and m.rule == STEP for m in made)
