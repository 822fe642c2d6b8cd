"""Compares the program of the TPU compiler with the prediction: collectives, peak memory, compute.

The compiler may merge equal collectives, let several travel as one, and write a reduce-scatter as an
all-reduce and a slice. Collectives are therefore compared by the bytes that they move: for every group size,
the bytes that a device contributes to sums (all-reduce and reduce-scatter together), gathers, exchanges and
permutations.

(1) compute seconds of the compiler = sum of its cycle estimates / clock
    (`costmodels.calibration.tpu_compiled`). It estimates nothing of a library's kernels, attention and
    experts: they are left out on both sides
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from typing import Any

from costmodels.calibration.tpu_compiled import GENERATIONS, Generation
from costmodels.hardware import Hardware
from costmodels.kernels.compute import Quantity, compute_cost
from costmodels.pricing.hidden import Cost
from costmodels.pricing.items import Computed
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.plan.build import given_fields
from layoutopt.plan.notebook import Shown, table
from layoutopt.plan.results import Collectives, Compared, Moved, VerifyResult
from layoutopt.plan.units import bytes_text, duration_text, seconds_text
from layoutopt.runtime.clock import UNLIMITED, Clock
from mesh_tf_core.engines.jax.compile import CompilerRefusal, Executable, compile_for
from mesh_tf_core.engines.jax.hlo import HloCollective, HloSummary, read
from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir import program as ir
from mesh_tf_core.kernels.array_kernel import np_dtype
from mesh_tf_core.ops.experts import ToExperts
from mesh_tf_core.ops.grouped import GroupedOuter, GroupedProduct

EVERY = 15.0
"""Seconds between reports of a compilation."""
_FAMILIES = {"all_reduce": "sum", "reduce_scatter": "sum"}


def generation(topology: str) -> Generation:
    """The TPU that a topology is made of; UserError for an unknown one."""
    name = topology.partition(":")[0]
    if name not in GENERATIONS:
        raise UserError(
            f"--topology {topology!r}: no TPU generation {name!r}; {known_names(name, GENERATIONS)}; "
            "write a topology such as v5e:2x4"
        )
    return GENERATIONS[name]


@dataclass(frozen=True, kw_only=True)
class CompilerResult(Executable):
    """The compiled program's facts.

    Attributes:
      read: off its text.
      compute_seconds: by its own cycle estimates, without communication and calls of libraries.
    """

    read: HloSummary
    compute_seconds: float


@dataclass(frozen=True, repr=False)
class Verified(Shown):
    """A program and the compiler's version of it; `refusal` if the compiler refused it.

    Attributes:
      compute_seconds: predicted seconds of the parts that the compiler estimates.
      evaluation: the program that was compiled, priced.
    """

    topology: str
    compute_seconds: float
    predicted: tuple[HloCollective, ...]
    compiled: CompilerResult | None
    refusal: CompilerRefusal | None
    moved: tuple[Moved, ...]
    evaluation: Evaluation | None = None

    @property
    def data(self) -> VerifyResult:
        """The object that `layoutopt verify --json` prints."""
        of, made, refusal = self.evaluation, self.compiled, self.refusal
        assert of is not None

        def listed(found: Iterable[HloCollective]) -> list[Collectives]:
            return [Collectives(kind=k, group_size=n, count=c) for k, n, c in counted(found)]

        def by_host(way: str) -> Compared:
            compiler = made.read.transfers.get(way, 0) if made else None
            return Compared(compiler=compiler, predicted=of.program.transfer_bytes()[way])

        return VerifyResult(
            topology=self.topology,
            compiled=made is not None,
            out_of_memory=refusal is not None and refusal.out_of_memory,
            reason=refusal.reason if refusal else None,
            **given_fields(of.model, of.program.mesh, of.layout, of.options),
            collectives=listed(made.read.collectives) if made else [],
            predicted_collectives=listed(self.predicted),
            moved=[*self.moved],
            same_collectives=self.same_collectives if made else None,
            peak_memory_bytes=Compared(
                compiler=made.peak_bytes if made else refusal.used if refusal else None,
                predicted=of.memory.peak,
            ),
            allocated_bytes=made.allocated_bytes if made else None,
            host_memory_bytes=Compared(
                compiler=made.host_bytes if made else None, predicted=of.program.host_bytes
            ),
            host_load_bytes=by_host("host_load"),
            host_store_bytes=by_host("host_store"),
            compute_seconds=Compared(
                compiler=made.compute_seconds if made else None, predicted=self.compute_seconds
            ),
            unknown_loops=made.read.unknown_loops if made else None,
            compile_seconds=made.seconds if made else None,
        )

    @property
    def same_collectives(self) -> bool:
        """True if the compiled program moves the same bytes as the program."""
        return self.compiled is not None and all(m.same for m in self.moved)

    def to_frame(self) -> Any:
        """A row for every family of collectives and size of groups; for a refused program, its predicted
        bytes."""
        if self.compiled is None:
            kinds = counted(self.predicted)
            return table([{"family": k, "group_size": size, "predicted_count": n} for k, size, n in kinds])
        return table(
            [
                {
                    "family": m.family,
                    "group_size": m.group_size,
                    "ratio": m.bytes.ratio,
                    **{f"predicted_{n}": getattr(m, n).predicted for n in ("count", "bytes")},
                    **{f"compiler_{n}": getattr(m, n).compiler for n in ("count", "bytes")},
                }
                for m in self.moved
            ]
        )

    def __repr__(self) -> str:
        if self.compiled is None:
            return f"Verified({self.topology}: refused, {self.refusal.reason if self.refusal else 'unknown'})"
        same = "the same collectives" if self.same_collectives else "other collectives"
        took, said = seconds_text(self.compiled.compute_seconds), seconds_text(self.compute_seconds)
        held = bytes_text(self.compiled.peak_bytes)
        return f"Verified({self.topology}: {same}, {took} of compute ({said} predicted), peak {held})"


def verify(
    evaluation: Evaluation,
    topology: str,
    hardware: Hardware,
    own: Callable[[Any], Any] | None = None,
    clock: Clock = UNLIMITED,
    tell: Callable[[str], object] = lambda text: None,
) -> Verified:
    """Compiles an evaluated program for a TPU that need not be there.

    Args:
      own: mesh of JAX -> the user's own step, traced for it, which is compiled in the program's place.
      clock: ends the compilation; the result then has the predictions only.
      tell: called with what begins, and then from time to time with how long it has taken.

    Raises:
      UserError: no JAX or libtpu, an unknown topology, or one of another number of devices than the mesh's.
    """
    program = evaluation.program
    tpu = generation(topology)
    predicted = collectives(program)
    made = _in_time(lambda begins: compile_for(program, topology, own, begins), clock, tell)
    if isinstance(made, CompilerRefusal):
        return Verified(topology, evaluation.cost.compute_seconds, predicted, None, made, (), evaluation)
    said = read(made.text)
    said = replace(said, collectives=tuple(_sized(f, program.mesh.devices) for f in said.collectives))
    compiled = CompilerResult(**vars(made), read=said, compute_seconds=said.cycles / tpu.clock(hardware))
    seconds = estimated(evaluation.cost, hardware, said.libraries)
    differing = moved(predicted, said.collectives)
    return Verified(topology, seconds, predicted, compiled, None, differing, evaluation)


def _in_time(
    work: Callable[[Callable[[str], object]], Executable | CompilerRefusal],
    clock: Clock,
    tell: Callable[[str], object],
) -> Executable | CompilerRefusal:
    """What `work` returns, or that the time is over. The compiler is one call into C, which nothing ends: it
    runs in a thread that is left alone."""
    ended: Future[Executable | CompilerRefusal] = Future()
    began, now = time.monotonic(), ["the compiler starts"]

    def begins(what: str) -> None:
        if clock.over:  # nobody waits for it, and who listened is gone
            raise TimeoutError(what)
        now[0] = what
        tell(what)

    def run() -> None:
        try:
            ended.set_result(work(begins))
        except BaseException as error:
            ended.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not clock.over:
        if wait([ended], EVERY if clock.left is None else min(EVERY, clock.left)).done:
            return ended.result()
        tell(f"{now[0]}: {duration_text(time.monotonic() - began)} so far")
    why = f"the time limit of {clock.limit:g} s passed ({now[0]}); raise the time limit"
    return CompilerRefusal(why, False, late=True)


def estimated(cost: Cost, hardware: Hardware, libraries: int) -> float:
    """Predicted compute seconds of the parts that the compiler estimates: without kernels of attention and of
    experts (but with the preparation of their operands) if a library's kernels ran."""
    left_out = 0.0
    for x in cost.lines if libraries else ():
        if isinstance(x.item, Computed) and (x.kind == "attention" or _tiled(x.name, x.item.quantity)):
            left_out += x.times * (x.seconds - compute_cost(hardware, x.item.quantity).memory_seconds)
    return cost.compute_seconds - left_out


def _tiled(name: str, of: Quantity) -> bool:
    """True for a product of groups of rows whose sizes a library's kernel has tiles for."""
    product, outer = (
        name in {each.__name__.lower() for each in (op, *op.__subclasses__())}
        for op in (GroupedProduct, GroupedOuter)
    )
    if not (product or outer) or of.matmul_dims is None:
        return False
    from mesh_tf_core.kernels.jax_experts import tiles

    m, n, k, groups = of.matmul_dims
    return tiles(np_dtype(of.dtype), *((m * groups, k, n) if product else (k * groups, m, n))) is not None


def collectives(program: ir.Program) -> tuple[HloCollective, ...]:
    """The program's own collectives, as far as they move anything, as the JAX engine sends them: rows of
    experts in arrays of a fixed size (`gathers`, `scatters`)."""
    out, alike = [], set[int]()
    for instr, times in program.walk():
        if isinstance(instr, ir.Local) and isinstance(instr.op, ToExperts) and instr.op.alike:
            alike.update(instr.outputs)
        if not isinstance(instr, ir.Collective):
            continue
        size = program.mesh.group_size(instr.axes)
        if isinstance(instr, ir.Permute):
            size = _linked(instr.links(size))
        values = [program.values[i] for i in instr.inputs]
        payload = sum(v.local(program.mesh).places.bytes for v in values)
        kind = instr.name
        if isinstance(instr, ir.AllToAll) and values[0].shape.sparse is not None:
            kind = ir.AllGather.name if ir.gathers(instr, values[0]) else ir.ReduceScatter.name
            # The compiler gathers a token before it copies it for each of its experts.
            payload //= values[0].shape.sparse.filled if instr.inputs[0] in alike else 1
        if size > 1:
            out.append(HloCollective(kind, size, len(instr.inputs), payload, times))
    return tuple(out)


def _linked(links: Sequence[tuple[int, int]]) -> int:
    """Devices that a permutation connects with its first sender: none (1) if nobody sends."""
    seen = {links[0][0]} if links else {0}
    while more := {end for link in links for end in link if not seen.isdisjoint(link)} - seen:
        seen |= more
    return len(seen)


def _sized(found: HloCollective, devices: int) -> HloCollective:
    size = found.group_size or devices
    return HloCollective(found.kind, size, found.tensors, found.bytes, found.times)


def moved(predicted: Iterable[HloCollective], compiled: Iterable[HloCollective]) -> tuple[Moved, ...]:
    """Both sides by family and group size, the most predicted bytes first."""
    totals: dict[tuple[str, int], list[int]] = {}
    for side, found in ((0, predicted), (2, compiled)):
        for f in found:
            if f.group_size > 1:
                key = (_FAMILIES.get(f.kind, f.kind), f.group_size)
                row = totals.setdefault(key, [0, 0, 0, 0])
                row[side] += f.times
                row[side + 1] += f.times * f.bytes
    rows = [
        Moved(
            family=family,
            group_size=size,
            count=Compared(compiler=theirs, predicted=ours),
            bytes=Compared(compiler=their_bytes, predicted=our_bytes),
        )
        for (family, size), (ours, our_bytes, theirs, their_bytes) in totals.items()
    ]
    return tuple(sorted(rows, key=lambda m: -(m.bytes.predicted or 0)))


def counted(found: Iterable[HloCollective]) -> list[tuple[str, int, int]]:
    """(kind, group size, number in a step), sorted."""
    counts: dict[tuple[str, int], int] = {}
    for f in found:
        if f.group_size > 1:
            counts[f.kind, f.group_size] = counts.get((f.kind, f.group_size), 0) + f.times
    return [(kind, size, n) for (kind, size), n in sorted(counts.items())]
