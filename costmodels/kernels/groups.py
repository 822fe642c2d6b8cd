"""Groups of operations that may share a kernel, and the kernels that each falls into, by the rules of
`costmodels.kernels.fused`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from costmodels.kernels.fusion import MAP, PRODUCT, REDUCE, Fuses, Fusion, fusion_of, role
from costmodels.kernels.partition import FusedKernel, KernelStep, OperandKey, Partition, Sizes, Types
from costmodels.kernels.quantities import ExpandedOperation, flops_of, parts_of, tiling
from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import Collective, Instr, Local, Loop, Program, Slice


@dataclass
class GroupContext:
    """The program around a group, as the group sees it.

    Attributes:
      same: a renamed value -> the one that it is.
      producer: value -> the instruction that computes it.
      readers: value -> the groups that read it; None for anything else.
      stacked: values that loops stack.
      fuses: the operations that may share a kernel.
    """

    program: Program
    fuses: Fuses = Fuses.ALL
    same: dict[int, int] = field(default_factory=dict)
    producer: dict[int, Instr] = field(default_factory=dict)
    readers: dict[int, set[Group | None]] = field(default_factory=lambda: defaultdict(set))
    stacked: set[int] = field(default_factory=set)

    @cached_property
    def fusion(self) -> Fusion:
        return fusion_of(self.program, self.fuses)

    def source(self, value: int) -> int:
        """The value that a renamed one is."""
        return self.same.get(value, value)

    def role(self, instr: Local) -> str:
        """The role of an instruction in fusion, whatever is left of its operands on a device."""
        values = (self.program.values[i] for i in instr.inputs)
        return role(instr.op, tuple(TensorType(v.shape, v.dtype) for v in values))

    def width(self, value: int, casts: Mapping[int, int]) -> int:
        """Bytes that an element of a value moves when it is written or read, where `casts` are made."""
        return itemsize(self._narrow(value, casts) or self.program.values[value].dtype)

    def _narrow(self, value: int, casts: Mapping[int, int]) -> str | None:
        """The dtype that a cast is read in, also where it was moved."""
        remade = self.fusion.remade.get(self.program.values[value].tensor)
        if remade is not None:
            return remade
        if value in casts:
            return self.program.values[casts[value]].dtype
        maker = self.producer.get(value)
        if isinstance(maker, Collective | Slice):
            return self._narrow(maker.inputs[min(maker.outputs.index(value), len(maker.inputs) - 1)], casts)
        return None


@dataclass(frozen=True)
class VariableCast:
    """A cast of a variable outside loops, rule (5): a kernel for the additional bytes that are read."""

    context: GroupContext
    instr: Local
    casts: Mapping[int, int]

    def kernels(self, local: Types) -> list[FusedKernel]:
        """As of a group."""
        size = float(local(self.instr.inputs[0]).shape.size * self._width)
        return [FusedKernel((self.instr,), (self.instr,), None, size, 0.0, 0.0, False, 0)]

    def signature(self) -> tuple[Hashable, Sequence[int]]:
        """As of a group."""
        return ("cast", self.instr.op, self._width), (*self.instr.inputs, *self.instr.outputs)

    @property
    def _width(self) -> int:
        return self.context.width(self.instr.inputs[0], self.casts)


class Group:
    """One group of a block: its instructions, and the kernels that they fall into."""

    def __init__(self, context: GroupContext, again: bool) -> None:
        self.context = context
        self.instrs, self.roles = list[Local](), list[str]()
        self.casts: Mapping[int, int] = {}
        fusion = context.fusion
        self.leaving = fusion.again if again else fusion.leaving
        self._partitions: dict[Hashable, Partition] = {}

    def kernels(self, local: Types) -> list[FusedKernel]:
        """The kernels that the group falls into where values have pieces of some types."""
        partition, sizes = self.partition(local)
        return partition.kernels(partition.outcome(sizes.bytes), sizes)

    def partition(self, local: Types) -> tuple[Partition, Sizes]:
        """Its steps, and their sizes."""
        parts = self._parts(local)
        return self._steps(parts), self._sizes(parts, local)

    def steps(self, local: Types) -> Partition:
        """Its steps."""
        return self._steps(self._parts(local))

    def _parts(self, local: Types) -> list[Sequence[ExpandedOperation]]:
        return [parts_of(i.op, tuple(map(local, i.inputs))) if i.op.expands() else () for i in self.instrs]

    def _steps(self, parts: Sequence[Sequence[ExpandedOperation]]) -> Partition:
        key = tuple(tuple((p.kind, p.inputs, p.output, p.narrow) for p in found) for found in parts)
        if key not in self._partitions:
            self._partitions[key] = self._partitioned(parts)
        return self._partitions[key]

    def signature(self) -> tuple[Hashable, Sequence[int]]:
        """The key that determines the group's kernels: the operations, their connections, and their needed
        results; of the values, only the types of the shards."""
        context = self.context
        number, after, made = dict[int, int](), dict[int, Hashable](), set[int]()

        def called(value: int) -> int:
            return number.setdefault(value, len(number))

        def follows(value: int) -> Hashable:
            """The results of this group that a value from outside comes from, rule (1)."""
            if value not in after:
                maker = context.producer.get(value)
                ways: tuple[Hashable, ...] = ()
                if maker is not None and not isinstance(maker, Loop) and self._passes(maker):
                    sources = map(context.source, maker.inputs)
                    ways = tuple(called(s) if s in made else follows(s) for s in sources)
                after[value] = tuple(w for w in ways if w is not None) or None
            return after[value]

        def sums(value: int) -> Hashable:
            """Those that collectives alone bring it from: they bring statistics."""
            maker = context.producer.get(value)
            sources = map(context.source, maker.inputs) if isinstance(maker, Collective) else ()
            return tuple([called(s) if s in made else sums(s) for s in sources])

        parts: list[Hashable] = []
        for instr, kind in zip(self.instrs, self.roles, strict=True):
            sources = [context.source(i) for i in instr.inputs]
            inputs = tuple((called(i), called(s)) for i, s in zip(instr.inputs, sources, strict=True))
            behind = [(s, follows(s)) for s in sources if s not in made]
            outside = tuple([(ways, sums(s) if ways else ()) for s, ways in behind])
            made.update(instr.outputs)
            parts.append((instr.op, kind, inputs, outside, tuple(map(called, instr.outputs))))
        needed = tuple((self._needed(o), o in context.stacked) for i in self.instrs for o in i.outputs)
        widths = tuple(context.width(i, self.casts) for i in number)
        return (tuple(parts), needed, widths, context.fusion.regrouped), tuple(number)

    @cached_property
    def _widths(self) -> dict[int, int]:
        """Of all values that its steps work on; see `GroupContext.width`."""
        values = {v for instr in self.instrs for v in (*instr.inputs, *instr.outputs)}
        values.update(map(self.context.source, tuple(values)))
        return {v: self.context.width(v, self.casts) for v in values}

    def _sizes(self, parts: Sequence[Sequence[ExpandedOperation]], local: Types) -> Sizes:
        widths = self._widths
        types = {v: local(v) for v in widths}
        bytes: dict[OperandKey, int] = {v: types[v].shape.size * width for v, width in widths.items()}
        flops, elements = list[float](), list[int]()
        for instr, kind, found in zip(self.instrs, self.roles, parts, strict=True):
            if not found:
                values = (*instr.inputs, *instr.outputs)
                inputs = tuple([types[i] for i in instr.inputs])
                flops.append(0.0 if kind == PRODUCT else _flops(instr.op, inputs))
                elements.append(max([types[v].shape.size if widths[v] else 0 for v in values]))
            whole = not any(widths[o] for o in instr.outputs)
            for part in found:
                flops.append(part.flops)
                elements.append(0 if whole else part.elements)
                bytes[instr.outputs[0], part.output] = 0 if whole else part.bytes
        return Sizes(bytes, flops, elements, self._tiles(parts, types, elements))

    def _tiles(
        self,
        parts: Sequence[Sequence[ExpandedOperation]],
        types: Mapping[int, TensorType],
        elements: Sequence[int],
    ) -> tuple[Mapping[OperandKey, float], Sequence[float]] | None:
        """`Sizes.tiles`. What others make lies as the group reads it first: a cluster does not know its other
        names."""
        regrouped, source = self.context.fusion.regrouped, self.context.source
        laid = {o: o for instr in self.instrs for o in instr.outputs}
        for v in (i for instr in self.instrs for i in instr.inputs):
            laid.setdefault(source(v), v)
        wastes = ((v, tiling(types[laid.get(v, v)].shape, regrouped)) for v in types)
        found: dict[OperandKey, float] = {v: more for v, more in wastes if more > 1}
        if not found:
            return None
        padded: list[float] = []
        rest = iter(elements)
        for instr, steps in zip(self.instrs, parts, strict=True):
            most = max((*instr.inputs, *instr.outputs), key=lambda v: types[v].shape.size)
            more = found.get(most, 1.0)
            padded += [next(rest) * more for _ in steps or (instr,)]
            found.update(dict.fromkeys(((instr.outputs[0], p.output) for p in steps), more))
        return found, padded

    def _partitioned(self, parts: Sequence[Sequence[ExpandedOperation]]) -> Partition:
        """Its steps in their kernels, rules (1) and (2)."""
        context = self.context
        steps, made, within = list[KernelStep](), set[OperandKey](), set[OperandKey]()
        statistics, ready = set[OperandKey](), dict[OperandKey, int]()

        def first(key: OperandKey) -> int:
            """The first kernel of the group that may compute with a value."""
            if key in ready or not isinstance(key, int):
                return ready[key]
            maker = context.producer.get(key)
            found = 0
            if maker is not None and not isinstance(maker, Loop) and self._passes(maker):
                sources = map(context.source, maker.inputs)
                found = max((first(s) + 2 for s in sources if s in made or first(s) > 0), default=0)
            ready[key] = found
            return found

        def reduced(key: OperandKey) -> bool:
            """Whether a value is what a reduction of the group made, or follows from that."""
            maker = context.producer.get(key) if isinstance(key, int) else None
            if key in statistics or not isinstance(maker, Collective):
                return key in statistics
            return any(reduced(context.source(i)) for i in maker.inputs)

        for instr, kind, found in zip(self.instrs, self.roles, parts, strict=True):
            for what, inputs, outputs, narrow in self._links(instr, kind, found):
                number = max(map(first, inputs), default=0)
                between = narrow and what == MAP and any(map(reduced, inputs))
                steps.append(KernelStep(what, inputs, outputs, instr, number - between, between))
                made.update(outputs)
                if between or what == REDUCE:
                    statistics.update(outputs)
                ready.update(dict.fromkeys(outputs, number + 2 * (what == REDUCE)))
                within.update(made.intersection(inputs))
        leaving = frozenset(k for k in made if self._leaves(k, within))
        return Partition(steps, leaving, frozenset(filter(self._stacked, made)))

    def _links(
        self, instr: Local, kind: str, parts: Sequence[ExpandedOperation]
    ) -> list[tuple[str, tuple[OperandKey, ...], tuple[OperandKey, ...], bool]]:
        """Kind, inputs and outputs of an instruction, or of each of the smaller ones that it equals; and
        whether it lacks dimensions of the others."""
        given = tuple(map(self.context.source, instr.inputs))
        if not parts:
            return [(kind, given, instr.outputs, self._dims(instr) < self._every_dim)]
        (out,) = instr.outputs

        def key(i: int) -> OperandKey:
            return given[i] if i < len(given) else out if i == parts[-1].output else (out, i)

        return [(p.kind, tuple(map(key, p.inputs)), (key(p.output),), p.narrow) for p in parts]

    @cached_property
    def _every_dim(self) -> set[str]:
        return set[str]().union(*map(self._dims, self.instrs))

    def _dims(self, instr: Local) -> set[str]:
        """Names of all dimensions that an instruction works on."""
        values = self.context.program.values
        return {n for v in (*instr.inputs, *instr.outputs) for n in values[v].shape.names}

    def _passes(self, maker: Instr) -> bool:
        """Whether an instruction may lead from this group back to it: a move, or part of one of its nodes."""
        number = self.context.fusion.group.get
        return not isinstance(maker, Local) or number(maker.origin.node) == number(self.instrs[0].origin.node)

    def _leaves(self, key: OperandKey, within: set[OperandKey]) -> bool:
        """Rule (3): somebody else needs it (if nobody here does, then somebody whom we do not see)."""
        if not isinstance(key, int):
            return False
        return self._needed(key) or key not in within or key in self.context.stacked

    def _stacked(self, key: OperandKey) -> bool:
        """Rule (4): nobody but its loop needs it."""
        return isinstance(key, int) and key in self.context.stacked and not self._needed(key)

    def _needed(self, value: int) -> bool:
        """Whether anybody outside of the group reads a value, as far as we see or are told."""
        if self.context.program.values[value].tensor in self.leaving:
            return True
        return any(reader is not self for reader in self.context.readers[value])


_flops = lru_cache(maxsize=1 << 16)(flops_of)
