"""Runs a program device by device in one process, with any kernel: the oracle of tests.

Values are lists with one piece per device; a collective computes from the lists. Exact, eager, slow and
simple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

from mesh_tf_core.engines.feeds import check_batch
from mesh_tf_core.engines.loops import Iterations, Left, in_turn
from mesh_tf_core.engines.meter import Meter
from mesh_tf_core.engines.stepping import OneByOne, Stepping, check_beside
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.program import (
    AllGather,
    AllReduce,
    AllToAll,
    Collective,
    Input,
    Instr,
    Local,
    Loop,
    Permute,
    Program,
    ReadVariable,
    ReduceScatter,
    Slice,
    Value,
    WriteVariable,
    wire_bytes,
)
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel, np_dtype
from mesh_tf_core.kernels.protocol import At, Kernel

Pieces = list[Any]


class LockstepEngine(Stepping):
    """See `engines.protocol.Engine`. Arrays are NumPy's unless another kernel is given."""

    is_chief = True

    def __init__(self, program: Program, kernel: Kernel | None = None) -> None:
        self.program, self.mesh = program, program.mesh
        self.k: Kernel = kernel or NumpyKernel()
        self.devices = range(program.mesh.devices)
        self.state: dict[str, Pieces] = {}
        self._owner = True
        self._meter: Meter | None = None
        self.communication_bytes: dict[str, float] = {}
        self.compile_seconds = 0.0

    # -- pieces ----------------------------------------------------------------------------------------------

    def begin(self, rank: int, v: Value) -> list[int]:
        """Index of the first element of a device's piece, per dimension."""
        local = v.local(self.mesh).shape.sizes
        return [self.mesh.group_index(rank, axes) * n for axes, n in zip(v.splits, local, strict=True)]

    def cut(self, array: Any, v: Value) -> Pieces:
        """A global array as pieces."""
        sizes = v.local(self.mesh).shape.sizes
        return [self.k.slice(array, self.begin(rank, v), sizes) for rank in self.devices]

    def join(self, pieces: Pieces, v: Value) -> Any:
        """Pieces as a global array; raises if devices disagree about a part they share."""
        out = np.empty(v.shape.sizes, np_dtype(v.dtype))
        sizes = v.local(self.mesh).shape.sizes
        for rank in self.devices:
            where = tuple(slice(b, b + n) for b, n in zip(self.begin(rank, v), sizes, strict=True))
            out[where] = np.asarray(pieces[rank])
        for rank in self.devices:
            where = tuple(slice(b, b + n) for b, n in zip(self.begin(rank, v), sizes, strict=True))
            same = np.array_equal(
                out[where], np.asarray(pieces[rank]).astype(out.dtype), equal_nan=v.dtype != "bool"
            )
            if not same:
                raise ValueError(f"device {rank} disagrees with others about its part of {v}")
        return out

    # -- state -----------------------------------------------------------------------------------------------

    def _stored(self, name: str) -> Value:
        stored = self.program.variables[name]
        return Value(-1, stored.variable.shape, stored.variable.dtype, stored.splits)

    def initialize(self) -> None:
        for name, stored in self.program.variables.items():
            v = self._stored(name)
            sizes = v.local(self.mesh).shape.sizes
            self.state[name] = [
                self.k.cast(
                    stored.variable.initializer.piece(name, v.shape.sizes, self.begin(rank, v), sizes),
                    v.dtype,
                )
                for rank in self.devices
            ]

    def read(self, name: str) -> Any:
        return self.join(self.state[name], self._stored(name))

    def write(self, name: str, array: Any) -> None:
        v = self._stored(name)
        self.state[name] = [self.k.cast(x, v.dtype) for x in self.cut(np.asarray(array), v)]

    def snapshot(self) -> Mapping[str, Any]:
        kept = {name: (self.state[name], self._stored(name)) for name in self.program.variables}
        return OneByOne(kept, lambda found: self.join(*found))

    def beside(self, program: Program) -> LockstepEngine:
        check_beside(self.program, program)
        other = LockstepEngine(program, self.k)
        other.state, other._owner = self.state, False
        return other

    @property
    def variable_bytes(self) -> int:
        if not self.state:
            self.initialize()
        return sum(int(np.asarray(pieces[0]).nbytes) for pieces in self.state.values())

    @property
    def peak_memory_bytes(self) -> int | None:
        return self._meter.peak if self._meter else None

    def close(self) -> None:
        if self._owner:
            self.state.clear()

    # -- running ---------------------------------------------------------------------------------------------

    def feed(self, batch: Mapping[str, Any]) -> Any:
        return check_batch(self.program, batch)

    def run(self, fed: Any) -> dict[str, Any]:
        if not self.state and self.program.variables:
            self.initialize()
        self.communication_bytes = dict.fromkeys(self.mesh.names, 0.0)
        env: dict[int, Pieces] = {}
        new: dict[str, Pieces] = {}
        self._meter = Meter(self.program, self.variable_bytes)
        self.run_code(self.program.code, env, fed, new)
        self.state.update(new)
        return {n: self.join(env[i], self.program.values[i]) for n, i in self.program.results.items()}

    def run_code(
        self, code: Sequence[Instr], env: dict[int, Pieces], batch: Mapping[str, Any], new: dict[str, Pieces]
    ) -> None:
        for instr in code:
            if isinstance(instr, Loop):
                self.loop(instr, env, batch, new)
                continue
            if isinstance(instr, Local):
                self.local(instr, env)
            elif isinstance(instr, Input):
                v = self.program.values[instr.outputs[0]]
                env[v.id] = self.cut(batch[instr.feed], v)
            elif isinstance(instr, ReadVariable):
                env[instr.outputs[0]] = self.state[instr.variable]
            elif isinstance(instr, WriteVariable):
                new[instr.variable] = env[instr.inputs[0]]
            elif isinstance(instr, Slice):
                (i,), (o,) = instr.inputs, instr.outputs
                env[o] = self.own_part(env[i], self.program.values[i], instr.dim, instr.axes)
            elif isinstance(instr, Collective):
                for i, o in zip(instr.inputs, instr.outputs, strict=True):
                    env[o] = self.collective(instr, env[i], self.program.values[i], self.program.values[o])
            else:
                raise TypeError(f"lockstep engine: unknown instruction {instr.text()}")
            for unread in self._meter.ran(instr, lambda i: _bytes(env[i])) if self._meter else ():
                env.pop(unread, None)

    def on(self, rank: int) -> AbstractContextManager[Any]:
        """Where a device's own work is done."""
        return nullcontext()

    def local(self, instr: Local, env: dict[int, Pieces]) -> None:
        values = [self.program.values[i] for i in (*instr.inputs, *instr.outputs)]
        types = [v.local(self.mesh) for v in values]
        n = len(instr.inputs)
        where = {d: a for v in values for d, a in zip(v.shape.names, v.splits, strict=True) if a}
        size = {d.name: d.size for t in types for d in t.shape}
        results = []
        for rank in self.devices:

            def offset(name: str, rank: int = rank) -> int:
                return self.mesh.group_index(rank, where[name]) * size[name]

            at = At(tuple(types[:n]), tuple(types[n:]), frozenset(where), offset)
            with self.on(rank):
                made = instr.op.kernel(self.k, at, *(env[i][rank] for i in instr.inputs))
            results.append(made if isinstance(made, tuple) else (made,))
        for j, o in enumerate(instr.outputs):
            env[o] = [r[j] for r in results]

    # -- loops (see `engines.loops`) -------------------------------------------------------------------------

    def loop(
        self, loop: Loop, env: dict[int, Pieces], batch: Mapping[str, Any], new: dict[str, Pieces]
    ) -> None:
        def body(values: dict[int, Pieces]) -> None:
            self.run_code(loop.body, values, batch, new)
            if self._meter:
                self._meter.iterated(loop)

        if self._meter:
            self._meter.entered(loop, lambda i: self.program.local(i).bytes)
        in_turn(Iterations(loop, env, body, self), self)
        for unread in self._meter.left(loop, lambda i: _bytes(env[i])) if self._meter else ():
            env.pop(unread, None)

    def number(self, at: int) -> Pieces:
        return [self.k.scalar(at, "int32") for _ in self.devices]

    def zeros(self, id: int) -> Pieces:
        type = self.program.local(id)
        return [self.k.full(type.shape.sizes, 0, type.dtype) for _ in self.devices]

    def add(self, total: Pieces, term: Pieces) -> Pieces:
        return [self.k.binary("add", a, b) for a, b in zip(total, term, strict=True)]

    def parts(self, stack: Pieces) -> list[Pieces]:
        return [[x[at] for x in stack] for at in range(stack[0].shape[0])]

    def stack(self, parts: Sequence[Pieces]) -> Pieces:
        by_device = zip(*parts, strict=True)
        return [self.k.concat([self.k.reshape(x, (1, *x.shape)) for x in xs], 0) for xs in by_device]

    def chosen(self, iterations: Iterations[Pieces], values: dict[int, Pieces]) -> Left[Pieces]:
        assert iterations.loop.runs is not None
        runs = bool(np.asarray(values[iterations.loop.runs][0]))
        return iterations.run(values) if runs else iterations.skip(values)

    # -- collectives -----------------------------------------------------------------------------------------

    def own_part(self, pieces: Pieces, v: Value, dim: str, axes: Axes) -> Pieces:
        """Every device's part of `dim` among its group over `axes`."""
        axis = v.shape.index(dim)
        out = []
        for rank, x in enumerate(pieces):
            sizes = list(v.local(self.mesh).shape.sizes)
            sizes[axis] //= self.mesh.group_size(axes)
            begin = [0] * len(sizes)
            begin[axis] = self.mesh.group_index(rank, axes) * sizes[axis]
            out.append(self.k.slice(x, begin, sizes))
        return out

    def collective(self, instr: Collective, pieces: Pieces, v: Value, result: Value) -> Pieces:
        payload = _bytes(pieces)
        key = "+".join(instr.axes)
        sent = wire_bytes(instr.name, payload, self.mesh.group_size(instr.axes))
        self.communication_bytes[key] = self.communication_bytes.get(key, 0.0) + sent
        out: Pieces = [None] * len(pieces)
        for group in self.mesh.groups(instr.axes):
            members = [pieces[r] for r in group]
            for rank, x in zip(group, self.exchanged(instr, members, v), strict=True):
                out[rank] = x
        if isinstance(instr, ReduceScatter):
            return self.own_part(out, v, instr.dim, instr.axes)
        if isinstance(instr, AllToAll):
            return self.own_part(out, _joined(v, instr), instr.split, instr.axes)
        return out

    def exchanged(self, instr: Collective, members: Pieces, v: Value) -> Pieces:
        """What each member of one group holds afterwards (before taking its own part)."""
        n = len(members)
        if isinstance(instr, AllReduce | ReduceScatter):
            fn = {"sum": "add", "max": "max", "min": "min"}[getattr(instr, "combine", "sum")]
            total = members[0]
            for x in members[1:]:
                total = self.k.binary(fn, total, x)
            return [total] * n
        if isinstance(instr, AllGather | AllToAll):
            dim = instr.dim if isinstance(instr, AllGather) else instr.concat
            return [self.k.concat(members, v.shape.index(dim))] * n
        assert isinstance(instr, Permute)
        zeros = self.k.full(members[0].shape, 0, v.dtype)
        sources = {to: i for i, to in instr.links(n)}
        return [members[sources[i]] if i in sources else zeros for i in range(n)]


def _bytes(pieces: Pieces) -> int:
    """Bytes of one device's piece."""
    return int(np.asarray(pieces[0]).nbytes)


def _joined(v: Value, instr: AllToAll) -> Value:
    splits = list(v.splits)
    at = v.shape.index(instr.concat)
    splits[at] = splits[at][: -len(instr.axes)]
    return Value(v.id, v.shape, v.dtype, tuple(splits), v.partial)
