"""A program as one JAX function of whole arrays: `shard_map` around the program of one device.

    (variables, batch) -> (new variables, results)

Collectives are JAX's own over the mesh's axes, loops are `lax.scan`. The function is traced once, whatever
the number of devices and of iterations.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mesh_tf_core.engines.jax import compat as jax_compat
from mesh_tf_core.engines.loops import Iterations
from mesh_tf_core.engines.replica import WholeReplica
from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.layout import Axes
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Collective, Instr, Loop
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.kernels.jax_kernel import JaxKernel


def exchanges(code: Iterable[Instr]) -> bool:
    """True if devices exchange something in it."""
    return any(isinstance(i, Collective) or (isinstance(i, Loop) and exchanges(i.body)) for i in code)


@dataclass
class CollectiveOrder:
    """The order of the collectives of one block, for compilers that do not keep it: XLA for CPU devices.

    Its executor begins collectives in one order on all devices, but waits for a loop only where data of it is
    read. A loop with collectives that is still running, and a later collective that does not read its
    results, may run in different orders on different devices. All of them then wait in threads that the
    others need, until XLA ends the process. Barriers and control dependencies are removed before the program
    is compiled. Operations after a loop therefore read one element of all results of the loop, and a loop
    reads one of all earlier exchanges.

    Attributes:
      looped: results of the last loop with collectives.
      since: results of the collectives after it.
    """

    looped: list[Any] = field(default_factory=list)
    since: list[Any] = field(default_factory=list)

    def copy(self) -> CollectiveOrder:
        """The same so far."""
        return CollectiveOrder(self.looped, list(self.since))

    def collective(self, pieces: Sequence[Any]) -> list[Any]:
        """The pieces, there when the loop before is done."""
        return after(pieces, self.looped)

    def loop(self, carries: Sequence[Any]) -> list[Any]:
        """Starts a loop: the values it begins with become ready when every earlier collective is done."""
        return after(carries, [*self.looped, *self.since])

    def exchanged(self, given: Iterable[Any]) -> None:
        """A collective gave this."""
        self.since += given

    def ended(self, left: Any) -> None:
        """A loop left this tree of arrays."""
        self.looped, self.since = jax.tree.leaves(left), []


def after(values: Sequence[Any], done: Sequence[Any]) -> list[Any]:
    """Returns the same values, computed from one element of each of `done` in a form that the compiler of the
    whole program does not simplify. The compiler of each kernel does, so the cost is at most a copy."""
    firsts = [x.reshape(-1)[0].astype(jnp.int32) for x in done if x.size]
    if not firsts:
        return list(values)
    never = reduce(jnp.logical_or, [(first | 1) == 0 for first in firsts])
    # 7: a constant that few values are; of two equal ones nothing would be left to choose.
    return [
        x ^ never if x.dtype == jnp.bool_ else jnp.where(never, jnp.full_like(x, 7), x)
        for x in map(jnp.asarray, values)
    ]


JaxValues = dict[int, Any]
_WIDE = ("float64", "int64")


def is_wide(program: ir.Program) -> bool:
    """True if the program has 64-bit numbers."""
    stored = (s.variable.dtype for s in program.variables.values())
    return any(dtype in _WIDE for dtype in (*(v.dtype for v in program.values), *stored))


@dataclass
class JaxProgram:
    """A program on JAX's mesh.

    Attributes:
      mesh: JAX's mesh with the program's axes; it may be abstract.
      platform: of its devices: cpu, gpu or tpu.
      sent: id of a collective -> (collective, bytes of its input shards, times per step), known once the step
        is traced; `moved`: the same for transfers between device and host.
    """

    program: ir.Program
    mesh: Any
    platform: str
    sent: dict[int, tuple[ir.Collective, int, float]] = field(default_factory=dict)
    moved: dict[int, tuple[ir.Transfer, int, float]] = field(default_factory=dict)

    def jitted(self) -> Any:
        """The step, compiled at the first call; new variables reuse the memory of the old ones."""
        p = self.program
        specs = (
            {name: jax_compat.partition(s.splits) for name, s in p.variables.items()},
            {name: jax_compat.partition(p.values[id].splits) for name, id in p.feeds.items()},
        )
        results = {name: jax_compat.partition(p.values[id].splits) for name, id in p.results.items()}
        step = jax_compat.per_device(self.replica, self.mesh, specs, (specs[0], results))
        if not any(s.host for s in p.variables.values()):
            return jax.jit(step, donate_argnums=0)
        lies = {name: jax_compat.sharding(self.mesh, s.splits, s.host) for name, s in p.variables.items()}
        back = {name: jax_compat.sharding(self.mesh, p.values[id].splits) for name, id in p.results.items()}
        return jax.jit(step, donate_argnums=0, out_shardings=(lies, back))

    def arguments(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Shapes, dtypes and shardings of the variables and of the batch."""
        p = self.program
        variables = {
            name: self._abstract(s.value.shape.sizes, s.variable.dtype, s.splits, s.host)
            for name, s in p.variables.items()
        }
        batch = {
            name: self._abstract(v.shape.sizes, v.dtype, v.splits)
            for name, v in ((name, p.values[id]) for name, id in p.feeds.items())
        }
        return variables, batch

    def lowered(self, **how: Any) -> Any:
        """JAX's lowered step (`how`: see `jax.stages.Traced.lower`)."""
        with jax_compat.wide_numbers(is_wide(self.program)):
            return self.jitted().trace(*self.arguments()).lower(**how)

    def _abstract(
        self, sizes: Sequence[int], dtype: str, splits: tuple[Axes, ...], host: bool = False
    ) -> Any:
        lies = jax_compat.sharding(self.mesh, splits, host)
        return jax.ShapeDtypeStruct(tuple(sizes), np_dtype(dtype), sharding=lies)

    def replica(
        self, variables: Mapping[str, Any], batch: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Runs the program on one device's pieces."""
        kernel, read, feed = JaxKernel(self.platform), variables.__getitem__, batch.__getitem__
        device = _Device(self.program, kernel, read, feed, self.sent, self.moved)
        env: JaxValues = {}
        device.block(self.program.code, env, 1)
        new = {name: device.written.get(name, old) for name, old in variables.items()}
        return new, {name: env[id] for name, id in self.program.results.items()}


@dataclass
class _Pace:
    """How far communication has come in one block.

    Attributes:
      brought: what was gathered, or loaded from the host.
      scattered: the last sum that was scattered.
      now: what was there as a weight was last brought once more.
    """

    brought: set[Hashable] = field(default_factory=set)
    scattered: list[Any] = field(default_factory=list)
    now: list[Any] = field(default_factory=list)


class _Device(WholeReplica):
    """One device, its coordinates known only when it runs."""

    def __init__(
        self,
        program: ir.Program,
        kernel: JaxKernel,
        read: Callable[[str], Any],
        feed: Callable[[str], Any],
        sent: dict[int, tuple[ir.Collective, int, float]],
        moved: dict[int, tuple[ir.Transfer, int, float]],
    ) -> None:
        coordinate = {axis: lax.axis_index(axis) for axis, n in program.mesh.axes if n > 1}
        super().__init__(program, kernel, coordinate, read, feed)
        self.sent, self.moved = sent, moved
        self.pace, self.order, self.inside = _Pace(), CollectiveOrder(), CollectiveOrder()
        self.orders_collectives = kernel.platform == "cpu"

    def block(self, code: Sequence[ir.Instr], env: JaxValues, times: float) -> None:
        around, self.pace, self.order = (self.pace, self.order), _Pace(), self.inside
        self.inside = CollectiveOrder()
        super().block(code, env, times)
        self.pace, self.order = around

    # -- loops -----------------------------------------------------------------------------------------------

    def loop(self, loop: ir.Loop, env: JaxValues, times: float) -> None:
        def body(values: JaxValues) -> None:
            if loop.dim.size == 1:  # the compiler puts the body in the loop's place
                self.inside = self.order.copy()
            self.block(loop.body, values, times * loop.times)

        ordered = self.orders_collectives and exchanges(loop.body)
        if ordered and loop.runs is not None and loop.runs in env:  # a branch, which carries nothing
            (env[loop.runs],) = self.order.loop([env[loop.runs]])
        longer = self.program.longer(loop)
        iterations = Iterations(loop, env, body, self, self.program.added, longer)
        offset = loop.offset or 0
        first = offset if loop.first is None else offset + env[loop.first]
        onto = [
            self.zeros(s.outer) if x is None and s.outer in longer else x
            for s, x in zip(loop.stacked, iterations.onto, strict=True)
        ]

        def place(outer: int, at: Any) -> Any:
            return first + at if outer in longer else at

        def step(before: Any, given: Any) -> Any:
            (state, totals), (at, parts) = before, given
            parts = [
                lax.dynamic_index_in_dim(env[s.outer], place(s.outer, at), 0, False) if x is None else x
                for s, x in zip(loop.sliced, parts, strict=True)
            ]
            values = iterations.begun(at + offset, state, parts)
            if loop.runs is None:
                state, made = iterations.run(values)
            else:
                state, made = lax.cond(
                    values[loop.runs], lambda: iterations.run(values), lambda: iterations.skip(values)
                )
            totals = [
                total if total is None else _added_at(total, x, place(s.outer, at))
                for s, total, x in zip(loop.stacked, totals, made, strict=True)
            ]
            rest = [x if total is None else None for total, x in zip(totals, made, strict=True)]
            return (state, totals), rest

        n = loop.dim.size
        carries = self.order.loop(iterations.carries) if ordered else iterations.carries
        sums = zip(loop.summed, iterations.sums, strict=True)
        start = [*carries, *(self.zeros(s.outer) if x is None else x for s, x in sums)], onto
        given = lax.iota(jnp.int32, n), [None if s.outer in longer else env[s.outer] for s in loop.sliced]
        (state, totals), stacks = lax.scan(step, start, given, length=n, reverse=loop.reverse)
        if ordered:
            self.order.ended((state, totals, stacks))
        pairs = zip(totals, stacks, strict=True)
        iterations.end(state, [stack if total is None else total for total, stack in pairs])

    def zeros(self, id: int) -> Any:
        type = self.program.local(id).places
        made = jnp.zeros(type.shape.sizes, np_dtype(type.dtype))
        return jax_compat.transferred(made, True) if self.program.values[id].host else made

    def add(self, total: Any, term: Any) -> Any:
        return jnp.add(total, term)

    # -- collectives -----------------------------------------------------------------------------------------

    def exchange(self, instr: ir.Collective, env: JaxValues, times: float) -> None:
        pieces = [jnp.asarray(env[i]) for i in instr.inputs]
        if isinstance(instr, ir.AllGather):
            pieces = self._once_more((*instr.inputs, instr.axes, instr.dim), pieces, env)
        if self.orders_collectives:
            pieces = self.order.collective(pieces)
        thin = any(self.program.values[i].shape.sparse is not None for i in instr.inputs)
        payload = sum(x.size * x.dtype.itemsize for x in pieces)
        payload = sum(self.program.local(i).bytes for i in instr.inputs) if thin else payload
        self.sent[id(instr)] = instr, payload, times
        for o, i, x in zip(instr.outputs, instr.inputs, pieces, strict=True):
            env[o] = _exchanged(instr, x, self.program.values[i], self.program.mesh)
        if self.orders_collectives:
            self.order.exchanged(env[o] for o in instr.outputs)
        if isinstance(instr, ir.ReduceScatter):
            self.pace.scattered = [env[o] for o in instr.outputs]

    def transfer(self, instr: ir.Transfer, env: JaxValues, times: float) -> None:
        (i,), (o,) = instr.inputs, instr.outputs
        self.moved[id(instr)] = instr, env[i].size * env[i].dtype.itemsize, times
        there = isinstance(instr, ir.HostStore)
        (piece,) = [env[i]] if there else self._once_more(i, [env[i]], env)
        env[o] = jax_compat.transferred(piece, there)

    def _once_more(self, what: Hashable, pieces: list[Any], env: JaxValues) -> list[Any]:
        """What to gather, or to load from the host: a weight that backward has once more behind a barrier,
        for the compiler would keep what forward had. It waits for what was there as the one before it began,
        so that one is brought ahead, and about two gradients are whole, however early the compiler would
        begin."""
        pace = self.pace
        if what in pace.brought:
            pace.now, before = [next(reversed(env.values())), *pace.scattered], pace.now
            pieces, _ = lax.optimization_barrier((pieces, before))
        pace.brought.add(what)
        return pieces


def _added_at(total: Any, x: Any, at: Any) -> Any:
    """A stack to one element of which something is added."""
    part = lax.dynamic_index_in_dim(total, at, 0, keepdims=False)
    return lax.dynamic_update_index_in_dim(total, part + x, at, 0)


def _exchanged(instr: ir.Collective, x: Any, v: ir.Value, mesh: Mesh) -> Any:
    """One piece after a collective."""
    if x.dtype == jnp.bool_:
        return _exchanged(instr, x.astype(jnp.int32), v, mesh) != 0
    axes = instr.axes
    if isinstance(instr, ir.AllReduce):
        return {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}[instr.combine](x, axes)
    if (dim := ir.scatters(instr, v)) is not None:
        return lax.psum_scatter(x, axes, scatter_dimension=v.shape.index(dim), tiled=True)
    if (dim := ir.gathers(instr, v)) is not None:
        return lax.all_gather(x, axes, axis=v.shape.index(dim), tiled=True)
    if isinstance(instr, ir.AllToAll):
        return lax.all_to_all(x, axes, v.shape.index(instr.split), v.shape.index(instr.concat), tiled=True)
    if isinstance(instr, ir.Permute):
        links = _numbered(mesh, axes, instr.links(mesh.group_size(axes)))
        ordered = tuple(sorted(axes, key=mesh.names.index))  # newer releases of JAX refuse another order
        return lax.ppermute(x, ordered, links) if links else jnp.zeros_like(x)
    raise TypeError(
        f"{instr.text()}: the JAX engine has no code for this instruction; please report this bug"
    )


def _numbered(mesh: Mesh, axes: Axes, links: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Positions in a group as JAX's permutation counts them: in the mesh's order of axes, not in theirs."""
    group = mesh.groups(axes)[0]
    place = [sorted(group).index(rank) for rank in group]
    return [(place[i], place[to]) for i, to in links]
