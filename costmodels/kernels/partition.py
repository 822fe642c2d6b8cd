"""The kernels of a group's steps, by the rules of `costmodels.kernels.fused`.

Nearly all of it follows from how the steps are connected. Sizes decide only whether a later kernel reads a
value or computes it again (rule (3)); where no step has that choice, nothing is decided twice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cached_property

from costmodels.kernels.fusion import MAP, PRODUCT, REDUCE
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.program import Local

OperandKey = int | tuple[int, int]
"""A value of the program, or (output of an instruction, number) for one inside of it."""

Types = Callable[[int], TensorType]
"""Type of one device's piece of a value."""


@dataclass(frozen=True)
class FusedKernel:
    """Operations that run as one.

    Attributes:
      instrs: in order; `product` is the matrix product among them, `ends` are those that no later kernel
        continues.
      read, written: bytes of memory.
      vector: FLOPs of all but the product.
      reduces: whether a reduction is among them.
      elements: of the largest array that it works on.
      tiled: bytes moved and elements as they lie in tiles (`Sizes.tiles`); None where that is the same.
      between: it works on statistics alone (`KernelStep.between`).
    """

    instrs: tuple[Local, ...]
    ends: tuple[Local, ...]
    product: Local | None
    read: float
    written: float
    vector: float
    reduces: bool
    elements: int
    tiled: tuple[float, float] | None = None
    between: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class KernelStep:
    """One map, reduction or product of a group, in kernel `number`.

    Attributes:
      between: it works on statistics alone, between the kernels of whole arrays.
    """

    kind: str
    inputs: tuple[OperandKey, ...]
    outputs: tuple[OperandKey, ...]
    instr: Local
    number: int
    between: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes that determine a partition besides its steps: the bytes of every value; for each step its
    FLOPs and the elements of its largest array.

    Attributes:
      tiles: how much more than its bytes a value takes in tiles, where that is more; by step, elements in
        tiles.
    """

    bytes: Mapping[OperandKey, int]
    flops: Sequence[float]
    elements: Sequence[int]
    tiles: tuple[Mapping[OperandKey, float], Sequence[float]] | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """The values written; by kernel its reads, the values of `written` that it makes, and the steps that it
    runs (by position in the partition)."""

    written: Set[OperandKey]
    reads: Sequence[Sequence[OperandKey]]
    makes: Sequence[Sequence[OperandKey]]
    runs: Sequence[Sequence[int]]


class Partition:
    """The steps of a group in order.

    Args:
      leaving: values that must be written, rule (3).
      stacked: those of them that are written elsewhere, rule (4).
    """

    def __init__(
        self, steps: Sequence[KernelStep], leaving: Set[OperandKey], stacked: Set[OperandKey]
    ) -> None:
        self.steps, self.leaving, self.stacked = steps, leaving, stacked
        self.maker = {key: i for i, step in enumerate(steps) for key in step.outputs}
        self.numbers = sorted({step.number for step in steps})
        self._settled: Outcome | None = None
        last = {id(step.instr): 0 for step in steps}
        for step in steps:
            last[id(step.instr)] = max(last[id(step.instr)], step.number)
        self.members = []
        for number in self.numbers:
            own = [step for step in steps if step.number == number]
            instrs = tuple({id(step.instr): step.instr for step in own}.values())
            product = next((step.instr for step in reversed(own) if step.kind == PRODUCT), None)
            ends = tuple(i for i in instrs if last[id(i)] == number)
            self.members.append((instrs, ends, product, any(step.kind == REDUCE for step in own)))

    def kernels(self, outcome: Outcome, sizes: Sizes) -> list[FusedKernel]:
        found = []
        by_kernel = zip(self.members, outcome.reads, outcome.makes, outcome.runs, strict=True)
        for (instrs, ends, product, reduces), reads, makes, runs in by_kernel:
            read, written = sum([sizes.bytes[k] for k in reads]), sum([sizes.bytes[k] for k in makes])
            vector = sum([sizes.flops[i] for i in runs if self.steps[i].kind != PRODUCT], 0.0)
            most = max([sizes.elements[i] for i in runs])
            tiled = None
            if sizes.tiles is not None:
                more, elements = sizes.tiles
                moved = sum([sizes.bytes[k] * more.get(k, 1.0) for k in (*reads, *makes)])
                tiled = moved, max([elements[i] for i in runs])
            whole = float(read), float(written), vector, reduces, most, tiled
            found.append(FusedKernel(instrs, ends, product, *whole, all(self.steps[i].between for i in runs)))
        return found

    @cached_property
    def _results(self) -> frozenset[int]:
        """What it makes, but for the results of kernels with a product."""
        whole = {o for _, _, product, _ in self.members if product is not None for o in product.outputs}
        return frozenset(key for key in self.maker if isinstance(key, int) and key not in whole)

    def inside(self, outcome: Outcome) -> set[int]:
        """Values without memory of their own."""
        return {o for o in self._results if o not in outcome.written or o in self.stacked}

    @cached_property
    def unwritten(self) -> frozenset[int]:
        """Values without memory of their own under some sizes."""
        return frozenset(o for o in self._results if o not in self.leaving or o in self.stacked)

    def outcome(self, size: Mapping[OperandKey, int]) -> Outcome:
        """The values that are written, and the steps of each kernel."""
        if self._settled is not None:
            return self._settled
        found = _Settling(self, size)
        outcome = found.run()
        if not found.weighed:
            self._settled = outcome
        return outcome


class _Settling:
    """Runs every step in its kernel, and what it needs.

    Attributes:
      weighed: whether sizes were asked.
    """

    def __init__(self, partition: Partition, size: Mapping[OperandKey, int]) -> None:
        self.partition, self.size, self.weighed = partition, size, False
        self.written = set(partition.leaving)
        self.reads: dict[int, dict[OperandKey, None]] = {number: {} for number in partition.numbers}
        self.runs: dict[int, dict[int, None]] = {number: {} for number in partition.numbers}

    def run(self) -> Outcome:
        partition = self.partition
        for i, step in enumerate(partition.steps):
            self._compute(i, step.number)
        makes: dict[int, list[OperandKey]] = {number: [] for number in partition.numbers}
        for key in self.written - partition.stacked:
            makes[partition.steps[partition.maker[key]].number].append(key)
        reads, runs = tuple(map(tuple, self.reads.values())), tuple(map(tuple, self.runs.values()))
        return Outcome(frozenset(self.written), reads, tuple(makes.values()), runs)

    def _compute(self, i: int, number: int) -> None:
        """Runs a step in a kernel, and what it needs."""
        if i not in self.runs[number]:
            self.runs[number][i] = None
            for key in self.partition.steps[i].inputs:
                self._need(key, number)

    def _need(self, key: OperandKey, number: int) -> None:
        """Brings a value into a kernel."""
        i = self.partition.maker.get(key)
        if i is None:
            self.reads[number][key] = None
            return
        step = self.partition.steps[i]
        if step.number == number and step.kind != REDUCE:
            return
        again = step.kind == MAP and not step.between
        if key not in self.written and again and self._again_moves(key) < 2 * self._weigh(key):
            self._compute(i, number)
        else:
            self.written.add(key)
            self.reads[number][key] = None

    def _weigh(self, key: OperandKey) -> int:
        self.weighed = True
        return self.size[key]

    def _again_moves(self, key: OperandKey) -> int:
        """Bytes moved if a later kernel computes a value again, from what is or would then be written."""
        partition = self.partition
        moved, seen, waiting = 0, {key}, [key]
        while waiting:
            for k in partition.steps[partition.maker[waiting.pop()]].inputs:
                if k in seen:
                    continue
                seen.add(k)
                i = partition.maker.get(k)
                if i is None or k in self.written:
                    moved += self._weigh(k)
                elif partition.steps[i].kind == MAP:
                    waiting.append(k)
                else:
                    moved += 2 * self._weigh(k)
        return moved
