"""Turns a program into one TensorFlow graph for all devices of this process.

Every part of the program between two collectives is traced once, as a function of a device's rank and pieces,
and called for every device; collectives join the pieces of all devices in the graph around the calls. The
body of a loop is traced once too and called per iteration; a while loop that only passes its state on, as
decoding does, is a loop of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from mesh_tf_core.engines.loops import Iterations, Left, in_turn
from mesh_tf_core.engines.parts import Exchange, LocalSegment, ProgramPart, Repeat, cut
from mesh_tf_core.engines.pieces import StackedPieces, whole
from mesh_tf_core.engines.replica import Replica
from mesh_tf_core.engines.tf.exchange import LocalExchange
from mesh_tf_core.engines.tf.graph import GraphWriter, Wire
from mesh_tf_core.engines.tf.variables import Variables
from mesh_tf_core.ir import program as ir
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.kernels.tf_kernel import TfKernel

TensorsById = dict[int, Any]
"""Value id -> one wire per device, or `StackedPieces` of such lists."""


class StepTrace:
    """One step's graph.

    Args:
      devices: device names by rank.
      count: called with every collective, the bytes of the piece that a device puts in, and how often it
        runs.
      returned: for every result in the program's order, which of the devices' pieces the step returns.

    Attributes:
      sizes: value id -> bytes of a device's piece, of every value that was traced.
    """

    def __init__(
        self,
        program: ir.Program,
        devices: Sequence[str],
        variables: Variables,
        count: Callable[[ir.Collective, int, float], None],
        returned: Sequence[Sequence[int]],
    ) -> None:
        self.program, self.devices, self.variables = program, tuple(devices), variables
        self.count, self.returned = count, returned
        self.sizes: dict[int, int] = {}
        self.writer = GraphWriter()
        self.exchange = LocalExchange(program, self.devices, self.writer)
        self.traced: dict[int, tuple[LocalSegment, Any]] = {}
        self.choices: dict[int, _Choice] = {}

    def step(self) -> Callable[..., Sequence[Any]]:
        """The step as a function of the inputs (see `_inputs`)."""
        program = self.program
        self.feeds = {name: self._inputs(id) for name, id in program.feeds.items()}
        self.ranks = [self.writer.constant(rank, d) for rank, d in enumerate(self.devices)]
        # Every message has come when it was sent.
        code = tuple(instr for instr in program.code if not isinstance(instr, ir.Done))
        self.update = self._own_update(code)
        code = code[: len(code) - len(self.update)]
        writes = {i.variable: i.inputs[0] for i in code if isinstance(i, ir.WriteVariable)}
        inside = {o for instr in self.update for o in instr.outputs}
        reads = dict.fromkeys(i for instr in self.update for i in instr.inputs if i not in inside)
        # What is only read from a variable is read again where it is updated, not handed through the graph.
        again = [i for i in code if isinstance(i, ir.ReadVariable) and reads.keys() & set(i.outputs)]
        self.update = (*again, *self.update)
        for o in (o for i in again for o in i.outputs):
            del reads[o]
        held = list(dict.fromkeys((*writes.values(), *reads)))
        made = self._computed(code, [*program.results.values(), *held])
        pairs = zip(made, self.returned, strict=False)
        results = [pieces[rank] for pieces, ranks in pairs for rank in ranks]
        kept = dict(zip(held, made[len(program.results) :], strict=True))
        return self.writer.compiled(self._committed(results, kept, writes))

    def _own_update(self, code: tuple[ir.Instr, ...]) -> tuple[ir.Instr, ...]:
        """The end of the program in which every device updates its variables from what it has: arithmetic
        that cannot fail, so it may be done while they are stored, in the memory of the old ones."""
        results, begin = set(self.program.results.values()), len(code)
        for instr in reversed(code):
            local = isinstance(instr, ir.Local | ir.Slice | ir.ReadVariable | ir.Transfer | ir.WriteVariable)
            if not local or instr.origin.phase != Phase.UPDATE or results & set(instr.outputs):
                break
            begin -= 1
        return code[begin:]

    def _computed(self, code: Sequence[ir.Instr], wanted: Sequence[int]) -> list[list[Wire]]:
        """For every wanted value of `code`, one wire per device."""
        env: TensorsById = {}
        self._parts(cut(code, wanted), env)
        return [whole(env[id]) for id in wanted]

    def _inputs(self, id: int) -> list[Wire]:
        """A piece per device, cut from one argument that holds the whole: handing a tensor over costs more
        than cutting it."""
        v, mesh, w = self.program.values[id], self.program.mesh, self.writer
        parts: dict[tuple[int, ...], Wire] = {(): w.input(tf.as_dtype(v.dtype), v.shape.sizes)}
        for axis, axes in enumerate(v.splits):
            cuts = {k: w.split(x, mesh.group_size(axes), axis, self.devices[0]) for k, x in parts.items()}
            parts = {(*k, i): x for k, xs in cuts.items() for i, x in enumerate(xs)}
        ranks = range(len(self.devices))
        pieces = [parts[tuple(mesh.group_index(rank, axes) for axes in v.splits)] for rank in ranks]
        self.sizes[id] = _bytes(pieces)
        return pieces

    def _parts(self, parts: Sequence[ProgramPart], env: TensorsById) -> None:
        for part in parts:
            if isinstance(part, LocalSegment):
                self._segment(part, env)
            elif isinstance(part, Exchange):
                self._exchanged(part.instr, env)
            else:
                self._loop(part, env)

    def measure(self, ids: Iterable[int], env: TensorsById) -> None:
        """Notes the sizes of values."""
        self.sizes.update((id, self._bytes(id, env[id])) for id in ids)

    def _bytes(self, id: int, pieces: Any) -> int:
        """Bytes of one device's piece: of a sparse dimension those of the elements that it expects."""
        thin = self.program.values[id].shape.sparse
        return _bytes(pieces) if thin is None else self.program.local(id).bytes

    # -- local work ------------------------------------------------------------------------------------------

    def _segment(self, part: LocalSegment, env: TensorsById) -> None:
        if not part.outputs:
            return
        names = [i.feed for i in part.code if isinstance(i, ir.Input)]
        inputs = [self.ranks, *(whole(env[i]) for i in part.inputs), *(self.feeds[name] for name in names)]
        if id(part) not in self.traced:
            self.traced[id(part)] = part, self._function(part, names, [x[0] for x in inputs])
        function = self.traced[id(part)][1]
        made = [
            self.writer.call(function, device, [x[rank] for x in inputs])
            for rank, device in enumerate(self.devices)
        ]
        env.update((o, [m[k] for m in made]) for k, o in enumerate(part.outputs))

    def _function(self, part: LocalSegment, feeds: Sequence[str], examples: Sequence[Wire]) -> Any:
        """The part as a function of rank and pieces."""
        n = len(part.inputs)

        def body(rank: Any, *args: Any) -> list[Any]:
            env = dict(zip(part.inputs, args[:n], strict=True))
            fed = dict(zip(feeds, args[n:], strict=True))
            Replica(self.program, TfKernel(), rank, self.variables.value, fed.__getitem__).run(part.code, env)
            self.measure((o for instr in part.code for o in instr.outputs), env)
            return [tf.convert_to_tensor(env[o]) for o in part.outputs]

        return self.writer.function(body, [(x.dtype, x.shape) for x in examples])

    # -- communication ---------------------------------------------------------------------------------------

    def _exchanged(self, instr: ir.Collective, env: TensorsById) -> None:
        payload = 0
        for i, o in zip(instr.inputs, instr.outputs, strict=True):
            pieces = env[i]
            payload += self._bytes(i, pieces)
            if isinstance(pieces, StackedPieces) and instr.name == "all_reduce":
                env[o] = StackedPieces(
                    [self.exchange.run(instr, i, part) for part in pieces.parts], pieces.join
                )
            else:
                env[o] = self.exchange.run(instr, i, whole(pieces))
        self.measure(instr.outputs, env)
        self.count(instr, payload, 1.0)

    # -- loops (see `engines.loops`) -------------------------------------------------------------------------

    def _loop(self, part: Repeat, env: TensorsById) -> None:
        loop = part.loop

        def body(values: TensorsById) -> None:
            self.measure(loop.entering, values)
            self._parts(part.body, values)

        iterations = Iterations(loop, env, body, self, self.program.added, self.program.longer(loop))
        if _passes_state_only(loop):
            self._while(iterations)
        else:
            in_turn(iterations, self)
        self.measure(loop.outputs, env)

    def number(self, at: int) -> list[Wire]:
        return [self.writer.constant(at, d) for d in self.devices]

    def zeros(self, id: int) -> list[Wire]:
        type = self.program.local(id).places
        zero = self.writer.zeros(tf.as_dtype(type.dtype), type.shape.sizes, self.devices[0])
        return [zero] * len(self.devices)

    def add(self, total: Any, term: Any) -> list[Wire]:
        pairs = zip(whole(total), whole(term), self.devices, strict=True)
        return [self.writer.combined("sum", [x, y], device) for x, y, device in pairs]

    def parts(self, stack: Any) -> list[Any]:
        return self._stack(stack).parts

    def stack(self, parts: Sequence[Any]) -> StackedPieces:
        return StackedPieces([whole(part) for part in parts], self._join)

    def chunk(self, stack: Any, first: Any, size: int) -> list[Wire]:
        triples = zip(whole(stack), whole(first), self.devices, strict=True)
        return [self.writer.chunk(x, at, size, device) for x, at, device in triples]

    def within(self, chunk: Any, first: Any, stack: Any) -> list[Wire]:
        each = zip(whole(chunk), whole(first), whole(stack), self.devices, strict=True)
        return [self.writer.within(x, at, old, device) for x, at, old, device in each]

    def chosen(self, iterations: Iterations[Any], values: TensorsById) -> Left[Any]:
        loop = iterations.loop
        assert loop.runs is not None
        if id(loop) not in self.choices:
            self.choices[id(loop)] = self._choice(iterations, values)
        choice, n = self.choices[id(loop)], len(self.devices)
        for instr, payload, times in choice.sent:
            self.count(instr, payload, times)
        inputs = [wire for i in choice.reads for wire in self._pieces(i, values)]
        found = self.writer.choice(whole(values[loop.runs])[0], choice.run, choice.skip, inputs, choice.like)
        left = [found[at : at + n] for at in range(0, len(found), n)]
        state = len(iterations.state)
        return [*left[:state]], left[state:]

    def _choice(self, iterations: Iterations[Any], values: TensorsById) -> _Choice:
        """Both cases of an iteration that may not run, as functions of all devices' pieces."""
        loop, outer, count = iterations.loop, self.writer, self.count
        share = loop.times / loop.dim.size
        sent: list[tuple[ir.Collective, int, float]] = []
        self.count = lambda instr, payload, times: sent.append((instr, payload, times * share))
        reads = list(dict.fromkeys((loop.index, *iterations.state, *loop.entering, *loop.outside)))
        examples = {i: self._pieces(i, values) for i in reads}

        def function(case: Callable[[TensorsById], Left[Any]]) -> tuple[str, list[Wire]]:
            self._write_to(outer.inside())
            state, stacked = case(self._arguments(examples))
            made = [x for pieces in (*state, *stacked) for x in whole(pieces)]
            return self.writer.closed(made), made

        run, like = function(iterations.run)
        skip, _ = function(iterations.skip)
        self._write_to(outer)
        self.count = count
        return _Choice(reads, like, run, skip, sent)

    def _while(self, iterations: Iterations[Any]) -> None:
        """A loop whose body is in the graph once, and runs while the state says so."""
        loop, outer, count, n = iterations.loop, self.writer, self.count, len(self.devices)
        self.count = lambda instr, payload, times: count(instr, payload, times * loop.times)
        start = {loop.index: self.number(0)}
        known = zip((*loop.entering, *loop.outside), loop.inputs, strict=True)
        start.update((i, whole(iterations.env[o])) for i, o in known)

        self._write_to(outer.inside())
        values, first = self._arguments(start), self.devices[0]
        assert loop.runs is not None
        more = self.writer.less(values[loop.index][0], self.writer.constant(loop.dim.size, first), first)
        condition = self.writer.closed([self.writer.both(values[loop.runs][0], more, first)])

        self._write_to(outer.inside())
        values = self._arguments(start)
        passed = [values[i] for i in loop.outside]
        index = self.add(values[loop.index], self.number(1))
        iterations.body(values)
        made = [index, *(whole(values[i]) for i in loop.leaving), *passed]
        body = self.writer.closed([x for xs in made for x in xs])

        self._write_to(outer)
        self.count = count
        found = outer.repeated(condition, body, [x for xs in start.values() for x in xs])
        iterations.end([found[at * n : (at + 1) * n] for at, _ in enumerate(loop.carried, 1)], [])

    def _arguments(self, like: Mapping[int, Sequence[Wire]]) -> TensorsById:
        """Values as arguments of the function that is being written."""
        return {i: [self.writer.input(x.dtype, x.shape) for x in xs] for i, xs in like.items()}

    def _pieces(self, id: int, values: TensorsById) -> list[Wire]:
        """A value's pieces; zeros, if nothing has been added to a sum."""
        return whole(values[id]) if id in values else self.zeros(id)

    def _write_to(self, writer: GraphWriter) -> None:
        self.writer, self.exchange = writer, LocalExchange(self.program, self.devices, writer)
        self.ranks = [writer.constant(rank, d) for rank, d in enumerate(self.devices)]

    def _join(self, parts: Sequence[Wire], rank: int) -> Wire:
        return self.writer.stack(parts, self.devices[rank])

    def _stack(self, pieces: Any) -> StackedPieces:
        """A stacked value by its parts, which share its memory."""
        if isinstance(pieces, StackedPieces):
            return pieces
        cut = [self.writer.unstack(x, device) for x, device in zip(pieces, self.devices, strict=True)]
        return StackedPieces([list(parts) for parts in zip(*cut, strict=True)], self._join)

    # -- the end of a step -----------------------------------------------------------------------------------

    def _committed(
        self, results: Sequence[Wire], kept: Mapping[int, Sequence[Wire]], writes: Mapping[str, int]
    ) -> list[Wire]:
        """Updates and stores variables once everything that may fail is done everywhere; returns the results
        after that.

        Args:
          kept: value id -> pieces, of what is written and of what the update reads.
          writes: variable -> value, of those that the update does not make.
        """
        if not kept and not self.update:
            return list(results)
        w, first = self.writer, self.devices[0]
        pieces = [[x[rank] for x in kept.values()] for rank in range(len(self.devices))]
        seen: set[Wire] = set()
        ready = []
        for held, device in zip(pieces, self.devices, strict=True):
            # A sum that devices share is waited for once.
            ready.append(w.barrier(device, [w.done(x, device) for x in held if x not in seen]))
            seen.update(held)
        everywhere = w.barrier(first, [*ready, *(w.done(r, first) for r in results)])
        store = self._store(list(kept), writes, [self.ranks[0], *pieces[0]])
        done = []
        for held, number, device in zip(pieces, self.ranks, self.devices, strict=True):
            (stored,) = w.call(store, device, [number, *held], after=[everywhere])
            done.append(w.done(stored, device))
        after = [w.barrier(first, done)]
        return [w.identity(r, first, after) for r in results]

    def _store(self, ids: Sequence[int], writes: Mapping[str, int], examples: Sequence[Wire]) -> Any:
        """Of one device: the update and the stores, as a function of its rank and pieces."""
        code = [i for i in self.update if not isinstance(i, ir.WriteVariable)]
        written = {i.variable: i.inputs[0] for i in self.update if isinstance(i, ir.WriteVariable)}

        def body(rank: Any, *values: Any) -> list[Any]:
            env = dict(zip(ids, values, strict=True))
            Replica(self.program, TfKernel(), rank, self.variables.value, self.feeds.__getitem__).run(
                code, env
            )
            self.measure((o for instr in code for o in instr.outputs), env)
            old = [env[o] for i in code if isinstance(i, ir.ReadVariable) for o in i.outputs]
            with tf.control_dependencies(old):
                stores = [self.variables.assign(n, env[id]) for n, id in {**writes, **written}.items()]
            with tf.control_dependencies(stores):
                return [tf.constant(0)]

        return self.writer.function(body, [(x.dtype, x.shape) for x in examples])


@dataclass(frozen=True)
class _Choice:
    """An iteration that may not run, as two functions of the same inputs and outputs.

    Attributes:
      reads: values, of which every device has a piece.
      like: an output of `run` each.
      run, skip: names of the functions.
      sent: collectives of `run`: what `StepTrace.count` is told of them.
    """

    reads: list[int]
    like: list[Wire]
    run: str
    skip: str
    sent: list[tuple[ir.Collective, int, float]]


def _passes_state_only(loop: ir.Loop) -> bool:
    """Whether a loop that may end early has nothing that counts its iterations: it is not differentiated."""
    parts = (*loop.sliced, *loop.results)
    return not parts and not loop.reverse and loop.runs in [c.enter for c in loop.carried]


def _bytes(pieces: Any) -> int:
    """Bytes of one device's piece: a tensor, the first of a list of wires, or a stack of such lists."""
    if isinstance(pieces, StackedPieces):
        return sum(_bytes(part) for part in pieces.parts)
    if isinstance(pieces, list):
        return int(pieces[0].bytes)
    tensor = tf.convert_to_tensor(pieces)
    return int(tensor.dtype.size * tensor.shape.num_elements())
