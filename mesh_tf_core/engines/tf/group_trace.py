"""The step's graph with group collectives: the whole program is traced once, as one function of a device's
rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from mesh_tf_core.engines.parts import Exchange, Part, Repeat, Segment, cut
from mesh_tf_core.engines.replica import Replica
from mesh_tf_core.engines.tf.graph import Wire
from mesh_tf_core.engines.tf.group import STRIDE, TIMEOUT, GroupExchange, Groups, keys_for
from mesh_tf_core.engines.tf.trace import Trace
from mesh_tf_core.ir.program import Collective, Instr, Loop
from mesh_tf_core.kernels.tf_kernel import TfKernel

Env = dict[int, Any]
"""Value id -> this device's tensor."""


class GroupTrace(Trace):
    """See `engines.tf.trace.Trace`; collectives are TensorFlow's group operations.

    Attributes:
      timeout: seconds that a device waits in one of them.
    """

    timeout = TIMEOUT

    def _inputs(self, id: int) -> list[Wire]:
        """An argument per device, which lies there already."""
        type = self.program.local(id)
        self.sizes[id] = type.bytes
        return [self.writer.input(tf.as_dtype(type.dtype), type.shape.sizes) for _ in self.devices]

    def _computed(self, code: Sequence[Instr], wanted: Sequence[int]) -> list[list[Wire]]:
        """For every wanted value of `code`, one wire per device."""
        groups, parts = Groups(self.program.mesh), cut(code, wanted)
        names = list(self.feeds)

        def body(rank: Any, *feeds: Any) -> list[Any]:
            fed = dict(zip(names, feeds, strict=True))
            env: Env = {}
            _Block(self, groups, rank, tf.constant(0), 1, 1.0, fed).run(parts, env)
            return [tf.convert_to_tensor(env[id]) for id in wanted]

        inputs = [self.ranks, *self.feeds.values()]
        function = self.writer.function(body, [(x[0].dtype, x[0].shape) for x in inputs])
        made = [
            self.writer.call(function, device, [x[rank] for x in inputs])
            for rank, device in enumerate(self.devices)
        ]
        self._made = [list(pieces) for pieces in zip(*made, strict=True)]
        return self._made

    def _committed(
        self, results: Sequence[Wire], kept: Mapping[int, Sequence[Wire]], writes: Mapping[str, int]
    ) -> list[Wire]:
        """Every device must run, also one whose pieces nobody reads: the others wait for it."""
        if kept:
            return super()._committed(results, kept, writes)
        w, first = self.writer, self.devices[0]
        done = [w.identity(x, d) for xs in self._made for x, d in zip(xs, self.devices, strict=True)]
        after = [w.barrier(first, [x.name.partition(":")[0] for x in done])]
        return super()._committed([w.identity(r, first, after) for r in results], kept, writes)


class _Block:
    """Runs parts on one device, in a function that is being traced.

    Args:
      turn: int32 scalar, which run of this block it is in the step.
      times: how often the block runs in a step, at most.
      weight: how often it is counted (see `Loop.times`).
    """

    def __init__(
        self,
        trace: GroupTrace,
        groups: Groups,
        rank: Any,
        turn: Any,
        times: int,
        weight: float,
        feeds: dict[str, Any],
    ) -> None:
        self.trace, self.groups, self.rank, self.feeds = trace, groups, rank, feeds
        self.turn, self.times, self.weight = turn, times, weight
        first_key = tf.constant(keys_for(times)) + turn * STRIDE
        token = f"{trace.variables.prefix}/order"
        self.exchange = GroupExchange(trace.program, groups, rank, first_key, token, trace.timeout)
        self.replica = Replica(trace.program, TfKernel(), rank, trace.variables.value, feeds.__getitem__)

    def run(self, parts: Sequence[Part], env: Env) -> None:
        for part in parts:
            if isinstance(part, Segment):
                self.replica.run(part.code, env)
                self.trace.measure((o for instr in part.code for o in instr.outputs), env)
            elif isinstance(part, Exchange):
                self._exchanged(part.instr, env)
            else:
                self._loop(part, env)

    def _exchanged(self, instr: Collective, env: Env) -> None:
        pieces = [env[i] for i in instr.inputs]
        payload = sum(x.dtype.size * x.shape.num_elements() for x in pieces)
        self.trace.count(instr, payload, self.weight)
        env.update(zip(instr.outputs, self.exchange.run(instr, pieces), strict=True))
        self.trace.measure(instr.outputs, env)

    def _loop(self, part: Repeat, env: Env) -> None:
        """The body as a nested function, called once per iteration with instance keys of its own."""
        loop = part.loop
        order = range(loop.dim.size)
        outside = list(dict.fromkeys(loop.outside))
        sums = [s.outer for s in loop.summed]
        # A loop inside that adds to a sum of this one reads it.
        inner = [loop.index, *loop.entering, *sums, *outside]
        added, carries = self.trace.program.added, len(loop.carried)
        end = carries + len(loop.stacked)

        def body(rank: Any, turn: Any, *args: Any) -> list[Any]:
            values: Env = dict(zip(inner, args, strict=True))
            self.trace.measure(loop.entering, values)
            times, weight = self.times * loop.dim.size, self.weight * loop.times
            _Block(self.trace, self.groups, rank, turn, times, weight, self.feeds).run(part.body, values)
            return [tf.convert_to_tensor(values[i]) for i in loop.leaving]

        state = [env[c.init] for c in loop.carried]
        sources = [tf.unstack(env[s.outer]) for s in loop.sliced]
        totals = self._zeros(sums)
        onto = [tf.unstack(env[added[s.outer]]) if s.outer in added else None for s in loop.stacked]
        made: dict[int, list[Any]] = {}
        function: Any = None
        for step in reversed(order) if loop.reverse else order:
            turn = self.turn * loop.dim.size + step
            args = [tf.constant(step), *state, *(s[step] for s in sources), *totals]
            args += [env[i] for i in outside]
            if function is None:
                specs = [tf.TensorSpec(x.shape, x.dtype) for x in (self.rank, turn, *args)]
                function = tf.function(body, autograph=False, input_signature=specs).get_concrete_function()
            left = self._iteration(loop, function, turn, dict(zip(inner, args, strict=True)))
            state, parts, terms = left[:carries], left[carries:end], left[end:]
            made[step] = [
                x if total is None else total[step] + x for total, x in zip(onto, parts, strict=True)
            ]
            totals = [
                x if s.inner in added else total + x
                for s, total, x in zip(loop.summed, totals, terms, strict=True)
            ]
        env.update(zip((c.final for c in loop.carried), state, strict=True))
        for k, (_, o) in enumerate(loop.stacked):
            env[o] = tf.stack([made[step][k] for step in order])
        env.update(zip(sums, totals, strict=True))
        self.trace.measure(loop.outputs, env)

    def _iteration(self, loop: Loop, function: Any, turn: Any, args: Env) -> list[Any]:
        """One run of the body, unless the loop says that it does not run."""

        def run() -> list[Any]:
            return list(function(self.rank, turn, *args.values()))

        def skip() -> list[Any]:
            zeros = self._zeros([r.inner for r in loop.results])
            return [*(tf.identity(args[c.enter]) for c in loop.carried), *zeros]

        if loop.runs is None:
            return run()
        return list(tf.cond(args[loop.runs], run, skip))

    def _zeros(self, ids: Sequence[int]) -> list[Any]:
        return [tf.zeros(t.shape.sizes, t.dtype) for t in map(self.trace.program.local, ids)]
