"""Pass `pending sums`: moves an all-reduce behind linear operations, so that values that are added anyway are
summed once.

Rewrites, each where the all-reduced value has no other reader:
  (1) all_reduce(all_reduce(x, a), b)          ->  all_reduce(x, a+b)
  (2) f(all_reduce(x, a), all_reduce(y, a))    ->  all_reduce(f(x, y), a)       f linear
  (3) slice(all_reduce(x, a), dim, b)          ->  for b in a: reduce_scatter(x, b, dim), then all_reduce over
                                                   a less b; for b = first + a + rest: slice over first,
                                                   reduce_scatter over a, slice over rest
      also with casts between the two, which then come after
  (4) loop { stack or sum all_reduce(x, a) }   ->  all_reduce(loop { stack or sum x }, a)
      not of a branch, which may not run, unless it waits behind the loop around too
  (5) total(all_reduce(x, a), all_reduce(y, b), z)  ->  all_reduce(total(x, y, z), a+b)
      in an update; devices along b have the same x, and each adds its share of it
  (6) f(reduce_scatter(x, a, d), reduce_scatter(y, a, d))  ->  reduce_scatter(f(x, y), a, d)
      f linear, of pieces of d by themselves, where a rule for elsewhere splits d over a: a block's sum is
      scattered once
Within microbatches a sum, or what a scatter leaves of it, also waits behind casts (the sum of rounded parts
is taken once, after all of them). A gradient's sum is taken before the update begins (rule 2 stops there), so
that `combine` finds all of them together.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cached_property

from mesh_tf_core.ir.blocks import MICROBATCH, TICK, Connection, Node
from mesh_tf_core.ir.builder import ProgramRewriter, take_out
from mesh_tf_core.ir.dtypes import TensorType, is_float
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Instr, Local, Loop, Program, ReduceScatter, Result, Slice
from mesh_tf_core.ir.values import every
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.uses import Readers, count_uses
from mesh_tf_core.ops.basic import Total


def rounds(op: Op, dtype: str) -> bool:
    """True if an operation, with a result of this dtype, gives but for rounding the same before a sum and
    after it: not one that drops fractions."""
    return op.converts and is_float(dtype)


def across(phase: Phase, other: Phase) -> bool:
    """True if an update begins between two phases: no sum waits that long."""
    return (phase == Phase.UPDATE) != (other == Phase.UPDATE)


def waiting_nodes(uses: Readers) -> Iterator[tuple[Node, Node]]:
    """Pairs of nodes that these rewrites couple under some layout: the maker of an operand whose sum may move
    behind a node by rules (2) and (4), or by rule (3) behind a conversion, and this node."""
    pending: set[int] = set()
    # What the stages of a pipeline add up is a sum over their devices.
    stages = {uses.inner(i) for b in uses.graph.blocks if b.spread for i, _ in b.summed}

    def waits(tensor: int, reader: Node) -> bool:
        """Whether `tensor` may reach its only reader as a pending sum."""
        inner = uses.inner(tensor)
        if inner not in pending or len(uses.of[tensor]) != 1 or tensor in uses.leaving:
            return False
        if inner != tensor and (uses.of[inner] or len(uses.outer[inner]) != 1):
            return False
        if inner == tensor and uses.outer[tensor]:
            return False
        return not across(uses.maker(tensor).phase, reader.phase)

    for node in uses.nodes:
        op = node.op
        if isinstance(op, Connection):
            continue
        found = [waits(i, node) for i in op.operands(node.inputs)]
        # Of several outputs each follows its own operand.
        behind = (op.linear or op.converts) and (any if len(node.outputs) > 1 else all)(found) and bool(found)
        for i in op.operands(node.inputs) if behind else ():
            yield uses.maker(i), node
        roles = op.roles(*(uses.graph.tensor(i).type for i in node.inputs))
        reduced = roles.reduced if roles.combine == "sum" else ()
        for o in node.outputs:
            if behind or o in stages or any(name not in uses.graph.tensor(o).shape.names for name in reduced):
                pending.add(o)


def into_totals(uses: Readers) -> Iterator[int]:
    """The tensors whose sum rule (5) takes, whatever its axes: only an update's total reads them."""
    for node in uses.nodes:
        if isinstance(node.op, Total) and node.phase == Phase.UPDATE:
            for i in node.inputs:
                if uses.of[i] == [node] and node.inputs.count(i) == 1:
                    yield i


def totalled(program: Program, tensors: Collection[int]) -> tuple[tuple[Axes, str], ...]:
    """Axes and dtype of the sums of such tensors, in a program without the total."""
    values = program.values
    return tuple(
        (instr.axes, values[instr.inputs[0]].dtype)
        for instr in (program.code if tensors else ())
        if isinstance(instr, AllReduce) and values[instr.outputs[0]].tensor in tensors
    )


def delay_sums(program: Program, oracle: Oracle | None = None) -> Program:
    """Applies the rewrites of the module's text, once through the program.

    Args:
      oracle: of the program's mesh; records the queries.
    """
    if not any(isinstance(instr, AllReduce) for instr in every(program.code)):
        return program
    state = _Sums(program, oracle or Oracle.of(program))
    code, _ = state.summed(program.code)
    return state.rewritten(code)


class _Sums(ProgramRewriter):
    def __init__(self, program: Program, oracle: Oracle) -> None:
        super().__init__(program)
        self.oracle = oracle
        self.uses = count_uses(program.code, program.results.values())
        self.parts, self.terms = False, set[int]()
        self.further = {*program.layout.elsewhere}
        self.scattered: dict[int, ReduceScatter] = {}

    @cached_property
    def sliced(self) -> set[int]:
        """What is sliced."""
        return {i for instr in self.program.every(Slice) for i in instr.inputs}

    def summed(self, code: Sequence[Instr]) -> tuple[list[Instr], dict[int, AllReduce]]:
        """The rewritten code, and the sums in it by result."""
        out: list[Instr] = []
        sums: dict[int, AllReduce] = {}
        around, self.scattered = self.scattered, {}

        def take(id: int) -> AllReduce:
            found = sums.pop(id)
            take_out(found, out)
            return found

        for instr in code:
            single = {i: sums[i] for i in instr.inputs if i in sums and self.uses[i] == 1} if sums else {}
            if isinstance(instr, Local):
                if single and self._passes(instr, single):
                    self._delayed(instr, [take(i) for i in instr.inputs], out, sums)
                elif single and isinstance(instr.op, Total) and instr.origin.phase == Phase.UPDATE:
                    self._totalled(instr, instr.op, {i: take(i) for i in single}, out, sums)
                else:
                    self._scattered_late(instr, out)
            elif isinstance(instr, Loop):
                loop, hoisted = self._hoisted(instr)
                out.append(loop)
                for reduce in hoisted:
                    self._add(reduce, out, sums)
            elif isinstance(instr, AllReduce) and instr.combine == "sum":
                if single:
                    inner = take(instr.inputs[0])
                    axes = self.oracle.ordered(inner.axes + instr.axes)
                    instr = replace(instr, inputs=inner.inputs, axes=axes)
                    self.values[inner.inputs[0]] = replace(self.values[inner.inputs[0]], partial=axes)
                self._add(instr, out, sums)
            elif isinstance(instr, Slice) and (chain := self._casts(instr, out, sums)) is not None:
                for cast in chain:
                    take_out(cast, out)
                source = chain[0].inputs[0] if chain else instr.inputs[0]
                self._scatter(instr, chain, take(source), out, sums)
            else:
                out.append(instr)
        self.scattered = around
        return out, sums

    def _casts(self, instr: Slice, out: list[Instr], sums: dict[int, AllReduce]) -> list[Local] | None:
        """Rule (3): the casts between a sum and a slice of it, none of them read elsewhere; None if it does
        not apply."""
        chain: list[Local] = []
        id = instr.inputs[0]
        while self.uses[id] == 1:
            if id in sums:
                axes, wanted = sums[id].axes, instr.axes
                nested = set(wanted) <= set(axes) or _place(wanted, axes) is not None
                return chain[::-1] if nested else None
            found = next((i for i in reversed(out) if id in i.outputs), None)
            if not (isinstance(found, Local) and found.op.converts):
                return None
            chain.append(found)
            id = found.inputs[0]
        return None

    def _scatter(
        self,
        instr: Slice,
        chain: Sequence[Local],
        reduce: AllReduce,
        out: list[Instr],
        sums: dict[int, AllReduce],
    ) -> None:
        axes = tuple(a for a in instr.axes if a in reduce.axes)
        left = tuple(a for a in reduce.axes if a not in axes)
        start = _place(instr.axes, axes) or 0
        first, rest = instr.axes[:start], instr.axes[start + len(axes) :]
        split = self.values[instr.outputs[0]]
        dtype = self.values[reduce.inputs[0]].dtype
        behind = self.parts and all(rounds(c.op, self.values[c.outputs[0]].dtype) for c in chain)
        later = left if behind else ()
        last = self.values[(chain[-1] if chain else reduce).outputs[0]].dtype
        steps: list[tuple[Callable[..., Instr], str, tuple[Axes, Axes]]] = []
        if first:
            gone = (instr.axes[start:], reduce.axes)
            steps.append((lambda i, o: Slice((i,), (o,), instr.origin, instr.dim, first), dtype, gone))
        steps.append(
            (lambda i, o: ReduceScatter((i,), (o,), reduce.origin, axes, instr.dim), dtype, (rest, left))
        )
        if left and not behind:
            steps.append((lambda i, o: AllReduce((i,), (o,), reduce.origin, left), dtype, (rest, ())))
        if rest:
            steps.append((lambda i, o: Slice((i,), (o,), instr.origin, instr.dim, rest), dtype, ((), later)))
        for cast in chain:
            to = self.values[cast.outputs[0]].dtype
            steps.append((lambda i, o, c=cast: Local((i,), (o,), c.origin, c.op), to, ((), later)))
        if later:
            steps.append((lambda i, o: AllReduce((i,), (o,), reduce.origin, left), last, ((), ())))
        id = reduce.inputs[0]
        for number, (make, to, (missing, partial)) in enumerate(steps):
            if number == len(steps) - 1:
                result = instr.outputs[0]
            else:
                at = split.shape.index(instr.dim)
                splits = [s[: len(s) - len(missing)] if i == at else s for i, s in enumerate(split.splits)]
                result = self.otherwise(split.id, tuple(splits), partial, to)
            out.append(made := make(id, result))
            self.uses[result] = self.uses[result] or 1
            id = result
            if isinstance(made, AllReduce):
                sums[result] = made  # what is left of the sum may wait on
            elif isinstance(made, ReduceScatter) and (made.dim, made.axes) in self.further:
                self.scattered[result] = made

    def _passes(self, instr: Local, single: dict[int, AllReduce]) -> bool:
        """Rule (2): linear, every operand an all-reduce of its own over the same axes."""
        if not (instr.op.linear or (self.parts and self._rounds(instr))):
            return False
        if len(set(instr.inputs)) < len(instr.inputs) or len(instr.outputs) > 1:
            return False
        if any(across(r.origin.phase, instr.origin.phase) for r in single.values()):
            return False
        return all(i in single for i in instr.inputs) and len({r.axes for r in single.values()}) == 1

    def _rounds(self, instr: Local) -> bool:
        """Whether a sum of an instruction's result only has other roundings. What a slice reads stays behind
        the sum: scattering costs less before a conversion widens the values."""
        (result, *_) = instr.outputs
        return rounds(instr.op, self.values[result].dtype) and result not in self.sliced

    def _delayed(
        self, instr: Local, inner: Sequence[AllReduce], out: list[Instr], sums: dict[int, AllReduce]
    ) -> None:
        (result,), axes = instr.outputs, inner[0].axes
        pending = self.otherwise(result, partial=self.oracle.ordered(axes + self.values[result].partial))
        waits = Local(tuple([r.inputs[0] for r in inner]), (pending,), instr.origin, instr.op)
        self._scattered_late(waits, out)
        self._add(AllReduce((pending,), (result,), instr.origin, axes), out, sums)
        if self.values[result].partial:
            self.uses[result] = 1

    def _scattered_late(self, instr: Local, out: list[Instr]) -> None:
        """Rule (6), where it applies."""
        (first, *others) = found = [self.scattered.get(i) for i in instr.inputs] or [None]
        if (
            first is None
            or not self._takes_pieces(instr, first)
            or any(other is None or (other.axes, other.dim) != (first.axes, first.dim) for other in others)
        ):
            out.append(instr)
            return
        for scatter in found:
            take_out(scatter, out)  # type: ignore[arg-type]
        split = self.values[instr.outputs[0]]
        at, gone = split.shape.index(first.dim), len(first.axes)
        splits = tuple(s[: len(s) - gone] if i == at else s for i, s in enumerate(split.splits))
        whole = self.otherwise(split.id, splits, self.oracle.ordered((*first.axes, *split.partial)))
        self.uses[whole] = 1
        inputs = tuple(scatter.inputs[0] for scatter in found if scatter is not None)
        out.append(Local(inputs, (whole,), instr.origin, instr.op))
        made = ReduceScatter((whole,), instr.outputs, instr.origin, first.axes, first.dim)
        out.append(made)
        self.scattered[made.outputs[0]] = made

    def _takes_pieces(self, instr: Local, scatter: ReduceScatter) -> bool:
        """Whether an instruction is linear, makes of pieces of a dimension that piece of its result, and is
        the only one that reads them."""
        ids = instr.inputs
        if not instr.op.linear or len({*ids}) < len(ids) or len(instr.outputs) > 1:
            return False
        types = [TensorType(self.values[i].shape, self.values[i].dtype) for i in ids]
        same_pass = not across(scatter.origin.phase, instr.origin.phase)
        return (
            same_pass
            and all(self.uses[i] == 1 for i in ids)
            and scatter.dim in instr.op.roles(*types).parallel
            and scatter.dim in self.values[instr.outputs[0]].shape.names
        )

    def _totalled(
        self,
        instr: Local,
        op: Total,
        inner: dict[int, AllReduce],
        out: list[Instr],
        sums: dict[int, AllReduce],
    ) -> None:
        """Rule (5)."""
        axes = self.oracle.ordered(a for reduce in inner.values() for a in reduce.axes)
        pending = self.otherwise(instr.outputs[0], partial=axes)
        known = {i: reduce.axes for i, reduce in inner.items()}
        shares = (self.oracle.ways(tuple(a for a in axes if a not in known.get(i, ()))) for i in instr.inputs)
        parts = tuple(inner[i].inputs[0] if i in inner else i for i in instr.inputs)
        out.append(Local(parts, (pending,), instr.origin, replace(op, shares=tuple(shares))))
        self._add(AllReduce((pending,), instr.outputs, instr.origin, axes), out, sums)

    def _hoisted(self, loop: Loop) -> tuple[Loop, list[AllReduce]]:
        """Rule (4)."""
        if not any(isinstance(instr, AllReduce) for instr in every(loop.body)):
            return loop, []
        parts, terms = self.parts, self.terms
        self.parts = parts or loop.dim.name in (MICROBATCH, TICK)
        self.terms = {result.inner for result in loop.summed}
        body, sums = self.summed(loop.body)
        self.parts, self.terms = parts, terms
        hoisted: list[AllReduce] = []

        def waiting(result: Result) -> Result:
            reduce = sums.get(result.inner)
            if reduce is None or self.uses[result.inner] != 1:
                return result
            if loop.branch and not (result.outer in terms and self.uses[result.outer] == 1):
                return result
            take_out(reduce, body)
            pending = self.otherwise(result.outer, partial=self.oracle.ordered(reduce.axes))
            hoisted.append(AllReduce((pending,), (result.outer,), reduce.origin, reduce.axes))
            return Result(reduce.inputs[0], pending)

        stacked, summed = (tuple(map(waiting, results)) for results in (loop.stacked, loop.summed))
        if not hoisted and tuple(body) == loop.body:
            return loop, []
        return loop.remade(body=tuple(body), stacked=stacked, summed=summed), hoisted

    def _add(self, reduce: AllReduce, out: list[Instr], sums: dict[int, AllReduce]) -> None:
        out.append(reduce)
        sums[reduce.outputs[0]] = reduce


def _place(axes: Axes, part: Axes) -> int | None:
    """Where `part` begins among `axes`, next to each other and in order; None if it does not."""
    return next((i for i in range(len(axes)) if axes[i : i + len(part)] == part), None)
