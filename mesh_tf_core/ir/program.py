"""SPMD programs: plain data that every device runs on its own pieces. Engines, cost models, reports and tests
read this.

A program is a tuple of frozen instructions over numbered values (`instructions`). A value has a global shape,
the mesh axes that split each dimension, and the axes over which it is still partial (a pending sum).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import TypeVar

from mesh_tf_core.ir.blocks import NO_OUTLINE, Outline
from mesh_tf_core.ir.dims import PaddedDim, SparseDim
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.instructions import (
    COLLECTIVES,
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Done,
    HostLoad,
    HostStore,
    Input,
    Local,
    Message,
    Permute,
    ReadVariable,
    ReduceScatter,
    Slice,
    Transfer,
    WriteVariable,
)
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.op import TensorType
from mesh_tf_core.ir.values import Carry, Instr, Loop, Origin, Result, Sliced, Value, every

OneKind = TypeVar("OneKind", bound=Instr)


@dataclass(frozen=True)
class Stored:
    """The storage of a variable on the devices, or in the memory of their hosts, between steps.

    Attributes:
      padded: the dimension that is stored longer than the variable has it, so that its devices divide it.
    """

    variable: Variable
    splits: tuple[Axes, ...]
    host: bool = False
    padded: PaddedDim | None = None

    @property
    def value(self) -> Value:
        """The same as a value, of no program."""
        shape = self.variable.lying.shape
        shape = shape if self.padded is None else shape.resized(self.padded)
        return Value(-1, shape, self.variable.dtype, self.splits, host=self.host)


@dataclass(frozen=True)
class Program:
    """The instructions that every device runs in one step.

    Attributes:
      values: values by id.
      code: instructions in order.
      variables: name -> how it is stored.
      feeds: name -> value of the batch's tensor.
      results: name -> value that the step returns.
      outline: structure of the graph for cost models; engines do not read it.
      beside: of a part of a graph, the moves by which another part makes what it is given.
    """

    mesh: Mesh
    layout: Layout
    values: tuple[Value, ...]
    code: tuple[Instr, ...]
    variables: Mapping[str, Stored] = field(default_factory=dict)
    feeds: Mapping[str, int] = field(default_factory=dict)
    results: Mapping[str, int] = field(default_factory=dict)
    outline: Outline = field(default=NO_OUTLINE, repr=False, compare=False)
    beside: tuple[Instr, ...] = ()

    def walk(self) -> Iterator[tuple[Instr, int]]:
        """Every instruction once (loops before their bodies), with how often it runs at most."""
        return _visited(self.code, 1, lambda loop: loop.dim.size)

    def every(self, kind: type[OneKind]) -> Iterator[OneKind]:
        """The instructions of a kind, each once."""
        return (instr for instr in every(self.code) if isinstance(instr, kind))

    @property
    def used(self) -> set[str]:
        """The variables that a step reads or writes."""
        return {each.variable for each, _ in self.walk() if isinstance(each, ReadVariable | WriteVariable)}

    def expected(self) -> Iterator[tuple[Instr, float]]:
        """As `walk`, with how often a price counts it (see `Loop.times`)."""
        exact = _visited(self.code, Fraction(1), lambda loop: Fraction(loop.dim.size) * (loop.branch or 1))
        return ((instr, float(times)) for instr, times in exact)

    def local(self, id: int) -> TensorType:
        """Type of one device's piece of a value."""
        return self.values[id].local(self.mesh)

    @cached_property
    def added(self) -> Mapping[int, int]:
        """Stacks of loops, and sums of branches, that are terms of a sum of the loop around, and read by
        nothing else -> that sum.

        They are never made: an iteration's part is added to its part of the sum (gradients of stacked layers,
        over microbatches), and a branch adds to the sum where it is taken.
        """
        return {s: total for loop in self.every(Loop) for s, total in _added(loop)}

    @cached_property
    def joined(self) -> Mapping[int, int]:
        """Parts of a value -> that value, in which they lie from the start (`Op.joins`)."""
        found = (i for i in self.every(Local) if i.op.joins)
        return {part: instr.outputs[0] for instr in found for part in instr.inputs}

    def share(self, loop: Loop, stack: int) -> tuple[int, float]:
        """The stack that a loop writes to, and the loop's share of it, where several loops write one."""
        whole = self.joined.get(self.added.get(stack, stack), stack)
        return whole, loop.dim.size / self.values[whole].shape.sizes[0]

    def longer(self, loop: Loop) -> frozenset[int]:
        """The stacks that are longer than a loop that reads or makes a part (`Loop.first`, `offset`)."""
        if loop.first is None and loop.offset is None:
            return frozenset()
        stacks = (*(s.outer for s in loop.sliced), *(r.outer for r in loop.stacked))
        return frozenset(i for i in stacks if self.values[i].shape.sizes[0] != loop.dim.size)

    def communication_bytes(self) -> dict[str, float]:
        """Bytes that a device sends in one step, per mesh axis (axes that act together are joined by '+'), as
        `expected`: a branch counts half of the time, so that an engine sends more or less."""
        out: dict[str, float] = dict.fromkeys(self.mesh.names, 0.0)
        for instr, times in self.expected():
            if isinstance(instr, Collective):
                payload = sum(self.values[i].local_bytes(self.mesh) for i in instr.inputs)
                count_sent(out, self.mesh, instr, payload, times)
        return out

    def transfer_bytes(self) -> dict[str, float]:
        """Bytes that a device loads from its host in a step, and stores there, by the instruction's name."""
        out = {"host_load": 0.0, "host_store": 0.0}
        for instr, times in self.expected():
            if isinstance(instr, Transfer):
                out[instr.name] += times * sum(self.values[i].local_bytes(self.mesh) for i in instr.inputs)
        return out

    @property
    def host_bytes(self) -> int:
        """Bytes that a device keeps in its host's memory: variables, and the stacks of loops."""
        stacks = (s.outer for loop in self.every(Loop) for s in loop.stacked)
        kept = [self.values[i] for i in stacks if self.values[i].host]
        kept += [s.value for s in self.variables.values() if s.host]
        return sum(v.local_bytes(self.mesh) for v in kept)

    def wire_bytes(self, instr: Collective) -> float:
        """Bytes that a device sends in one run of a collective (see `wire_bytes`)."""
        payload = sum(self.values[i].local_bytes(self.mesh) for i in instr.inputs)
        return wire_bytes(instr.name, payload, self.mesh.group_size(instr.axes))


def _added(loop: Loop) -> Iterator[tuple[int, int]]:
    """`Program.added` of one loop and those directly in it."""
    if not loop.summed or (loop.stops and loop.branch is None):
        return
    inner = [i for i in loop.body if isinstance(i, Loop)]
    direct = {stack.outer for instr in inner if not instr.stops for stack in instr.stacked}
    direct |= {own.outer for instr in inner if instr.branch is not None for own in instr.summed}
    reads = Counter((*loop.leaving, *(i for instr in loop.body for i in instr.inputs)))
    for term, total in loop.summed:
        if term in direct and reads[term] == 1:
            yield term, total


Times = TypeVar("Times", int, Fraction)


def _visited(
    code: Iterable[Instr], times: Times, of: Callable[[Loop], Times]
) -> Iterator[tuple[Instr, Times]]:
    for instr in code:
        yield instr, times
        if isinstance(instr, Loop):
            yield from _visited(instr.body, times * of(instr), of)


def wire_bytes(kind: str, payload: int, n: int) -> float:
    """Bytes that each of n devices sends in a collective (see `Collective.sent`).

    Args:
      payload: bytes of the piece that a device puts in.
    """
    return COLLECTIVES[kind].sent(n) * payload


def scatters(instr: Instr, v: Value) -> str | None:
    """The dimension of a value that an engine scatters as it adds arrays up. It does so, too, where an
    all-to-all brings elements of a sparse dimension together: each device has other places filled."""
    if isinstance(instr, AllToAll):
        return instr.split if isinstance(v.shape.dim(instr.concat), SparseDim) else None
    return instr.dim if isinstance(instr, ReduceScatter) else None


def gathers(instr: Instr, v: Value) -> str | None:
    """The dimension of a value that an engine gathers. It does so, too, where an all-to-all sends elements of
    a sparse dimension to their devices: an engine's messages have one size whatever is chosen."""
    if isinstance(instr, AllToAll):
        return instr.concat if isinstance(v.shape.dim(instr.split), SparseDim) else None
    return instr.dim if isinstance(instr, AllGather) else None


def count_sent(
    sent: dict[str, float], mesh: Mesh, instr: Collective, payload: int, times: float = 1.0
) -> None:
    """Adds up the bytes that a device sends per mesh axis (axes that act together are joined by '+').

    Args:
      payload: bytes of the pieces that a device puts in.
      times: how often the collective runs.
    """
    key = "+".join(instr.axes)
    bytes = times * wire_bytes(instr.name, payload, mesh.group_size(instr.axes))
    sent[key] = sent.get(key, 0.0) + bytes


def text(program: Program) -> str:
    """The program in words, one instruction a line."""
    lines = [f"program mesh [{program.mesh}] layout [{program.layout}]"]

    def show(code: tuple[Instr, ...], indent: str) -> None:
        for instr in code:
            if isinstance(instr, Loop):
                lines.append(f"{indent}{instr.text()} index %{instr.index} {{")
                for c in instr.carried:
                    lines.append(f"{indent}  %{c.enter} = carry(%{c.init})  {program.values[c.enter]}")
                for outer, inner in instr.sliced:
                    lines.append(f"{indent}  %{inner} = part(%{outer})  {program.values[inner]}")
                show(instr.body, indent + "  ")
                for c in instr.carried:
                    lines.append(f"{indent}  yield %{c.leave} -> %{c.final}  {program.values[c.final]}")
                for kind, found in (("stack", instr.stacked), ("sum", instr.summed)):
                    for inner, outer in found:
                        how = f" added to %{program.added[outer]}" if outer in program.added else ""
                        lines.append(f"{indent}  {kind} %{inner} -> %{outer}{how}  {program.values[outer]}")
                lines.append(f"{indent}}}")
                continue
            ins = " ".join(f"%{i}" for i in instr.inputs)
            outs = ", ".join(f"%{o}" for o in instr.outputs)
            types = ", ".join(str(program.values[o]) for o in instr.outputs)
            left = f"{outs} = " if outs else ""
            lines.append(f"{indent}{left}{instr.text()} {ins}".rstrip() + (f"  {types}" if types else ""))

    show(program.code, "  ")
    lines += [f"  return {name} %{i}" for name, i in program.results.items()]
    return "\n".join(lines) + "\n"
