"""Runs a program device by device in one process, with any kernel: the oracle of tests.

Values are lists with one piece per device; a collective computes from the lists. Exact, eager, slow and
simple.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np

from mesh_tf_core.engines.feeds import check_array, stored
from mesh_tf_core.engines.loops import Iterations, Left, in_turn
from mesh_tf_core.engines.meter import Meter
from mesh_tf_core.engines.pieces import (
    DevicePieces,
    VariablePiece,
    in_order,
    initial,
    joined,
    lying,
    per_device,
    region,
)
from mesh_tf_core.engines.replica import Device, applied, at
from mesh_tf_core.engines.stepping import OneByOne, Stepping, check_beside
from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.kernel import Kernel
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.kernels.numpy_kernel import NumpyKernel


class LockstepEngine(Stepping):
    """See `engines.protocol.Engine`. Arrays are NumPy's unless another kernel is given."""

    is_chief = True

    def __init__(self, program: ir.Program, kernel: Kernel | None = None) -> None:
        self.program, self.mesh = program, program.mesh
        self.k: Kernel = kernel or NumpyKernel()
        self.devices = range(program.mesh.devices)
        self.places = [Device(program, self.k, rank) for rank in self.devices]
        self.state: dict[str, DevicePieces] = {}
        self._owner = True
        self._meter: Meter | None = None
        self.communication_bytes: dict[str, float] = {}
        self.transfer_bytes: dict[str, float] = {}
        self.compile_seconds = 0.0

    # -- pieces ----------------------------------------------------------------------------------------------

    def cut(self, array: Any, v: ir.Value) -> DevicePieces:
        """A global array as pieces."""
        sizes = v.local(self.mesh).shape.sizes
        return [self.k.slice(array, v.begin(self.mesh, rank), sizes) for rank in self.devices]

    def join(self, pieces: DevicePieces, v: ir.Value) -> Any:
        """Pieces as a global array; raises if devices disagree about a part they share."""
        sizes, begins = v.local(self.mesh).shape.sizes, [v.begin(self.mesh, rank) for rank in self.devices]
        out = joined(v, self.mesh, dict(zip(begins, pieces, strict=True)))
        for rank, begin in enumerate(begins):
            piece = np.asarray(pieces[rank]).astype(out.dtype)
            if not np.array_equal(out[region(begin, sizes)], piece, equal_nan=v.dtype != "bool"):
                raise ValueError(
                    f"device {rank} and another device have different values for the same part of {v}; "
                    "please report this bug"
                )
        return out

    # -- state -----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        for name, variable in self.program.variables.items():
            v = variable.value
            piece = partial(initial, name, variable, extent=v.local(self.mesh).shape.sizes)
            made = per_device(v, self.mesh, self.devices, piece)
            self.state[name] = [self.k.cast(x, v.dtype) for x in made]

    def _ready(self) -> None:
        if not self.state:
            self.initialize()

    def read(self, name: str) -> Any:
        variable = stored(self.program, name)
        self._ready()
        return in_order(variable, self.join(self.state[name], variable.value))

    def write(self, name: str, array: Any) -> None:
        variable = stored(self.program, name)
        whole, v = check_array(variable.variable, array), variable.value
        self._ready()
        self.state[name] = [self.k.cast(x, v.dtype) for x in self.cut(lying(variable, whole), v)]

    def snapshot(self) -> Mapping[VariablePiece, Any]:
        self._ready()
        kept = {
            VariablePiece.all_of(v.variable): (self.state[name], v)
            for name, v in self.program.variables.items()
        }
        return OneByOne(kept, lambda found: in_order(found[1], self.join(found[0], found[1].value)))

    def beside(self, program: ir.Program) -> LockstepEngine:
        check_beside(self.program, program)
        self._ready()
        other = LockstepEngine(program, self.k)
        other.state, other._owner = self.state, False
        return other

    def _held(self, host: bool) -> int:
        self._ready()
        variables = self.program.variables
        lies = {name for name, stored in variables.items() if stored.host}
        return sum(_bytes(pieces) for name, pieces in self.state.items() if (name in lies) is host)

    @property
    def peak_memory_bytes(self) -> int | None:
        return self._meter.peak if self._meter else None

    def close(self) -> None:
        if self._owner:
            self.state.clear()

    # -- running ---------------------------------------------------------------------------------------------

    def feed(self, batch: Mapping[str, Any]) -> Any:
        return self._feeds.checked(batch)

    def run(self, fed: Any) -> dict[str, Any]:
        self._ready()
        self.communication_bytes = dict.fromkeys(self.mesh.names, 0.0)
        self.transfer_bytes = {"host_load": 0, "host_store": 0}
        env: dict[int, DevicePieces] = {}
        new: dict[str, DevicePieces] = {}
        self._meter = Meter(self.program, self.variable_bytes)
        self.run_code(self.program.code, env, fed, new)
        self.state.update(new)
        return {n: self.join(env[i], self.program.values[i]) for n, i in self.program.results.items()}

    def run_code(
        self,
        code: Sequence[ir.Instr],
        env: dict[int, DevicePieces],
        batch: Mapping[str, Any],
        new: dict[str, DevicePieces],
        around: Iterations[DevicePieces] | None = None,
    ) -> None:
        """Runs a block; `around`: the loop whose body it is."""
        for instr in code:
            unread: Sequence[int] = ()
            if isinstance(instr, ir.Loop):
                unread = self.loop(instr, env, batch, new)
            elif isinstance(instr, ir.Local):
                self.local(instr, env)
            elif isinstance(instr, ir.Input):
                v = self.program.values[instr.outputs[0]]
                env[v.id] = self.cut(batch[instr.feed], v)
            elif isinstance(instr, ir.ReadVariable):
                env[instr.outputs[0]] = self.state[instr.variable]
            elif isinstance(instr, ir.WriteVariable):
                new[instr.variable] = env[instr.inputs[0]]
            elif isinstance(instr, ir.Transfer):
                env[instr.outputs[0]] = env[instr.inputs[0]]
                self.transfer_bytes[instr.name] += self._bytes(instr.inputs[0], env)
            elif isinstance(instr, ir.Slice):
                (i,), (o,) = instr.inputs, instr.outputs
                env[o] = self.own_part(env[i], self.program.values[i], instr.dim, instr.axes)
            elif isinstance(instr, ir.Collective):
                for i, o in zip(instr.inputs, instr.outputs, strict=True):
                    env[o] = self.collective(instr, env[i], self.program.values[i])
            elif not isinstance(instr, ir.Done):  # every message has come when it was sent
                raise TypeError(
                    f"{instr.text()}: the lockstep engine has no code for this instruction; please report "
                    "this"
                )
            if self._meter and not isinstance(instr, ir.Loop):
                unread = self._meter.ran(instr, lambda i: self._bytes(i, env))
            if around is not None:
                around.add(instr.outputs, env)
            for i in unread:
                env.pop(i, None)

    def on(self, rank: int) -> AbstractContextManager[Any]:
        """The context in which a device's own work is done."""
        return nullcontext()

    def local(self, instr: ir.Local, env: dict[int, DevicePieces]) -> None:
        on_device, results = at(self.program, instr), []
        for place in self.places:
            with self.on(place.rank):
                inputs = [env[i][place.rank] for i in instr.inputs]
                results.append(applied(self.k, instr, on_device(place.index), inputs))
        env.update(zip(instr.outputs, map(list, zip(*results, strict=True)), strict=True))

    # -- loops (see `engines.loops`) -------------------------------------------------------------------------

    def loop(
        self,
        loop: ir.Loop,
        env: dict[int, DevicePieces],
        batch: Mapping[str, Any],
        new: dict[str, DevicePieces],
    ) -> Sequence[int]:
        """Runs a loop; returns values that are no longer used."""

        def body(values: dict[int, DevicePieces]) -> None:
            self.run_code(loop.body, values, batch, new, iterations)
            if self._meter:
                self._meter.iterated(loop)

        if self._meter:
            self._meter.entered(loop, lambda i: self.program.local(i).bytes)
        iterations = Iterations(loop, env, body, self, self.program.added, self.program.longer(loop))
        in_turn(iterations, self)
        return self._meter.left(loop, lambda i: self._bytes(i, env)) if self._meter else ()

    def number(self, at: int) -> DevicePieces:
        return [self.k.scalar(at, "int32") for _ in self.devices]

    def zeros(self, id: int) -> DevicePieces:
        type = self.program.local(id).places
        return [self.k.full(type.shape.sizes, 0, type.dtype) for _ in self.devices]

    def add(self, total: DevicePieces, term: DevicePieces) -> DevicePieces:
        return [self.k.binary("add", a, b) for a, b in zip(total, term, strict=True)]

    def parts(self, stack: DevicePieces) -> list[DevicePieces]:
        return [[x[at] for x in stack] for at in range(stack[0].shape[0])]

    def stack(self, parts: Sequence[DevicePieces]) -> DevicePieces:
        by_device = zip(*parts, strict=True)
        return [self.k.concat([self.k.reshape(x, (1, *x.shape)) for x in xs], 0) for xs in by_device]

    def chunk(self, stack: DevicePieces, first: DevicePieces, size: int) -> DevicePieces:
        starts = [[place, *(0 for _ in x.shape[1:])] for place, x in zip(first, stack, strict=True)]
        return [self.k.slice(x, at, (size, *x.shape[1:])) for x, at in zip(stack, starts, strict=True)]

    def within(self, chunk: DevicePieces, first: DevicePieces, stack: DevicePieces) -> DevicePieces:
        def one(new: Any, begin: int, old: Any) -> Any:
            end = begin + len(new)
            before = self.k.slice(old, [0] * old.ndim, (begin, *old.shape[1:]))
            after = self.k.slice(old, [end, *[0] * (old.ndim - 1)], (len(old) - end, *old.shape[1:]))
            return self.k.concat([before, new, after], 0)

        return [one(x, int(at), old) for x, at, old in zip(chunk, first, stack, strict=True)]

    def chosen(
        self, iterations: Iterations[DevicePieces], values: dict[int, DevicePieces]
    ) -> Left[DevicePieces]:
        assert iterations.loop.runs is not None
        runs = bool(np.asarray(values[iterations.loop.runs][0]))
        return iterations.run(values) if runs else iterations.skip(values)

    # -- collectives -----------------------------------------------------------------------------------------

    def _bytes(self, id: int, env: Mapping[int, DevicePieces]) -> int:
        """Bytes of one device's piece: of a sparse dimension those of the elements that it expects."""
        thin = self.program.values[id].shape.sparse
        return _bytes(env[id]) if thin is None else self.program.local(id).bytes

    def own_part(self, pieces: DevicePieces, v: ir.Value, dim: str, axes: Axes) -> DevicePieces:
        """Every device's part of `dim` among its group over `axes`."""
        return [place.part(x, v, dim, axes) for place, x in zip(self.places, pieces, strict=True)]

    def collective(self, instr: ir.Collective, pieces: DevicePieces, v: ir.Value) -> DevicePieces:
        ir.count_sent(self.communication_bytes, self.mesh, instr, self._bytes(v.id, {v.id: pieces}))
        out: DevicePieces = [None] * len(pieces)
        for group in self.mesh.groups(instr.axes):
            members = [pieces[r] for r in group]
            for rank, x in zip(group, self.exchanged(instr, members, v), strict=True):
                out[rank] = x
        if isinstance(instr, ir.ReduceScatter):
            return self.own_part(out, v, instr.dim, instr.axes)
        if isinstance(instr, ir.AllToAll):
            return self.own_part(out, _joined(v, instr), instr.split, instr.axes)
        return out

    def exchanged(self, instr: ir.Collective, members: DevicePieces, v: ir.Value) -> DevicePieces:
        """The pieces that each member of one group holds after an exchange, before it takes its own part."""
        n = len(members)
        if isinstance(instr, ir.AllReduce) or ir.scatters(instr, v) is not None:
            fn = {"sum": "add", "max": "max", "min": "min"}[getattr(instr, "combine", "sum")]
            total = members[0]
            for x in members[1:]:
                total = self.k.binary(fn, total, x)
            return [total] * n
        if isinstance(instr, ir.AllGather | ir.AllToAll):
            dim = instr.dim if isinstance(instr, ir.AllGather) else instr.concat
            return [self.k.concat(members, v.shape.index(dim))] * n
        assert isinstance(instr, ir.Permute)
        zeros = self.k.full(members[0].shape, 0, v.dtype)
        sources = {to: i for i, to in instr.links(n)}
        return [members[sources[i]] if i in sources else zeros for i in range(n)]


def _bytes(pieces: DevicePieces) -> int:
    """Bytes of one device's piece."""
    return int(np.asarray(pieces[0]).nbytes)


def _joined(v: ir.Value, instr: ir.AllToAll) -> ir.Value:
    splits = list(v.splits)
    at = v.shape.index(instr.concat)
    splits[at] = splits[at][: -len(instr.axes)]
    return ir.Value(v.id, v.shape, v.dtype, tuple(splits), v.partial)
