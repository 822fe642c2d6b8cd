"""A program as one function of a replica's number, variables and batch, for XLA:

    (rank, pieces of the variables, pieces of the batch) -> (written pieces, results)

Loops are loops of the compiled program, so the graph grows neither with devices nor with iterations. The
function has no side effect: a step, or several, happens wholly or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

from mesh_tf_core.engines.replica import WholeReplica, group_index
from mesh_tf_core.engines.tf.tpu_collectives import TpuExchange
from mesh_tf_core.ir.program import Collective, Loop, Program, WriteVariable
from mesh_tf_core.kernels.tf_kernel import XlaKernel

Env = dict[int, Any]
Count = Callable[[Collective, int, float], None]
State = Mapping[str, Any]


class TpuProgram:
    """What every replica does.

    Args:
      count: called with every collective, the bytes of the pieces put in, and how often it runs in a step.
    """

    def __init__(self, program: Program, exchange: TpuExchange, count: Count) -> None:
        self.program, self.exchange, self.count = program, exchange, count
        self.written = [i.variable for i, _ in program.walk() if isinstance(i, WriteVariable)]

    def step(self, rank: Any, variables: State, batch: State) -> tuple[dict[str, Any], list[Any]]:
        """One step: the new pieces of `written`, and the results' pieces in the program's order."""
        device = _Device(self, rank, variables, batch)
        env: Env = {}
        device.block(self.program.code, env, 1)
        new = {name: tf.convert_to_tensor(piece) for name, piece in device.written.items()}
        return new, [tf.convert_to_tensor(env[id]) for id in self.program.results.values()]

    def steps(
        self, rank: Any, variables: State, batches: State, count: int
    ) -> tuple[dict[str, Any], list[Any]]:
        """`count` steps on batches stacked along a new first dimension; the results are stacked too."""
        types = [self.program.local(id) for id in self.program.results.values()]
        stacks = [tf.zeros((count, *t.shape.sizes), t.dtype) for t in types]

        def body(i: Any, state: list[Any], stacks: list[Any]) -> tuple[Any, list[Any], list[Any]]:
            held = {**variables, **dict(zip(self.written, state, strict=True))}
            new, results = self.step(rank, held, {name: tf.gather(x, i) for name, x in batches.items()})
            filled = [_filled(stack, i, x) for stack, x in zip(stacks, results, strict=True)]
            return i + 1, [new[name] for name in self.written], filled

        start = (tf.constant(0), [variables[name] for name in self.written], stacks)
        _, state, results = tf.while_loop(lambda i, *_: i < count, body, start, parallel_iterations=1)
        return dict(zip(self.written, state, strict=True)), results


class _Device(WholeReplica):
    """One replica in one step."""

    def __init__(self, of: TpuProgram, rank: Any, variables: State, batch: State) -> None:
        mesh = of.program.mesh
        coordinate = {axis: group_index(mesh, rank, (axis,)) for axis, n in mesh.axes if n > 1}
        super().__init__(of.program, XlaKernel(), coordinate, variables.__getitem__, batch.__getitem__)
        self.of = of

    def exchange(self, instr: Collective, env: Env, times: float) -> None:
        pieces = [tf.convert_to_tensor(env[i]) for i in instr.inputs]
        payload = sum(x.dtype.size * x.shape.num_elements() for x in pieces)
        self.of.count(instr, payload, times)
        env.update(zip(instr.outputs, self.of.exchange.run(instr, pieces), strict=True))

    def loop(self, loop: Loop, env: Env, times: float) -> None:
        n, added = loop.dim.size, self.program.added

        def body(i: Any, *state: Any) -> tuple[Any, list[Any], list[Any], list[Any]]:
            carried, sums, stacks = state
            at = n - 1 - i if loop.reverse else i
            inner = dict(env)
            inner[loop.index] = at
            inner.update(zip((c.enter for c in loop.carried), carried, strict=True))
            inner.update((v, tf.gather(env[outer], at)) for outer, v in loop.sliced)
            inner.update((s.outer, total) for s, total in zip(loop.summed, sums, strict=True))
            new, terms, parts = self._iteration(loop, inner, carried, times)
            sums = [
                x if s.inner in added else total + x
                for s, total, x in zip(loop.summed, sums, terms, strict=True)
            ]
            stacks = [
                _filled(stack, at, tf.gather(stack, at) + x if s.outer in added else x)
                for s, stack, x in zip(loop.stacked, stacks, parts, strict=True)
            ]
            return i + 1, new, sums, stacks

        start = (
            tf.constant(0),
            [tf.convert_to_tensor(env[c.init]) for c in loop.carried],
            self._zeros([s.outer for s in loop.summed]),
            [env[added[s.outer]] if s.outer in added else self._zeros([s.outer])[0] for s in loop.stacked],
        )
        _, final, sums, stacks = tf.while_loop(lambda i, *_: i < n, body, start, parallel_iterations=1)
        env.update(zip((c.final for c in loop.carried), final, strict=True))
        env.update(zip((s.outer for s in loop.summed), sums, strict=True))
        env.update(zip((s.outer for s in loop.stacked), stacks, strict=True))

    def _iteration(self, loop: Loop, env: Env, carried: list[Any], times: float) -> list[list[Any]]:
        """What leaves one run of the body (carried, summed, stacked), unless the loop says that it does not
        run."""
        parts = ([s.inner for s in loop.summed], [s.inner for s in loop.stacked])

        def run() -> list[list[Any]]:
            self.block(loop.body, env, times * loop.times)
            ids = ([c.leave for c in loop.carried], *parts)
            return [[tf.convert_to_tensor(env[i]) for i in group] for group in ids]

        if loop.runs is None:
            return run()
        kept = [[tf.identity(x) for x in carried], *(self._zeros(group) for group in parts)]
        found: list[list[Any]] = tf.cond(env[loop.runs], run, lambda: kept)
        return found

    def _zeros(self, ids: Sequence[int]) -> list[Any]:
        return [tf.zeros(t.shape.sizes, t.dtype) for t in map(self.program.local, ids)]


def _filled(stack: Any, i: Any, part: Any) -> Any:
    """The stack with its i-th part replaced."""
    begin = [i, *[0] * part.shape.rank]
    return gen_xla_ops.xla_dynamic_update_slice(stack, part[None], begin)
