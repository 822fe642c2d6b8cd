"""A layout's program with its cost, its memory, and the texts of a plan about them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodels.hardware import Hardware
from costmodels.kernels.fused import Fused
from costmodels.liveness import MemoryProfile, memory
from costmodels.pipeline_bubble import PipelineBubble, waiting
from costmodels.pricing.compilers import compiler_of
from costmodels.pricing.items import Computed, Sent
from costmodels.pricing.pricer import Cost, Line, Pricer
from costmodels.repeated import Repeated, repeated
from costmodels.utilisation import model_flops, recomputes, run_flops, utilisation
from layoutopt.frameworks import as_built, differences
from layoutopt.optimize.evaluation.slot_pictures import drawn
from layoutopt.plan.known import Known
from layoutopt.plan.machine_details import errors_known
from layoutopt.plan.schema import Predicted
from layoutopt.plan.units import seconds_text, share_text, shorten, size_text
from layoutopt.space.undivided import Undivided, split_stages, stored_at, undivided
from mesh_tf_core.ir.blocks import REPLICA
from mesh_tf_core.ir.instructions import HOST
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Local, Program
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.pipeline import ReplicaPrograms
from mesh_tf_core.lower.placement import Placement, placement
from mesh_tf_core.model import Model
from mesh_tf_core.ops.einsum import Einsum
from mesh_tf_core.tracing.diloco import DiLoCo

DEFAULT = Options()
CHOOSING = 0.05
"""The share of a step from which products that only choose are mentioned."""
ONE_DEVICE = Mesh("all:1")
LAUNCHES = (
    "the host needs about {} to launch {:,.0f} kernels a step, which takes no less; launch fewer, with "
    "larger microbatches or a compiler"
)
WORTH_A_NOTE = 0.01
"""Share of the FLOPs of a type of products that is worth a note."""


@dataclass(frozen=True)
class Evaluation:
    """A layout's program, with its cost and its memory computed on demand.

    Attributes:
      replicas: replicas that train alone for some steps; `program` is the step of one. A step's cost includes
        its share of their outer steps.
      options: options of the lowering.
    """

    model: Model = field(repr=False, compare=False)
    program: Program
    prices: Pricer = field(repr=False, compare=False)
    replicas: ReplicaPrograms | None = None
    options: Options = field(default=DEFAULT, repr=False, compare=False)

    @cached_property
    def placement(self) -> Placement:
        """The table of where the program's values live."""
        if self.replicas is not None:
            return self.replicas.where
        mesh, layout = self.program.mesh, self.program.layout
        return placement(self.model.step_of(mesh, layout, self.options).graph, mesh, layout, self.options)

    @cached_property
    def undivided(self) -> tuple[Undivided, ...]:
        """Variables that their stage cannot split."""
        return tuple(undivided(self.placement))

    def left_whole(self, stage: str) -> tuple[Undivided, ...]:
        """Variables without a stage of their own that a stage could not split under this layout."""
        stages = stored_at(self.placement.variables.values(), stage)
        known = split_stages(self.placement)
        others = self.placement.stored({n: s for n, s in stages.items() if n not in known})
        return tuple(undivided(others))

    @property
    def decided(self) -> Options:
        """The options without stages that split nothing."""
        split = split_stages(self.placement)
        return replace(self.options, storage={n: s for n, s in self.options.storage.items() if n in split})

    @cached_property
    def _kernels(self) -> Fused | None:
        return self.prices.itemiser.compiler.kernels(self.program)

    @cached_property
    def cost(self) -> Cost:
        step = self.prices.cost(self.program, self._kernels)
        if self.replicas is None:
            return step
        lines, share = [*step.lines], 1 / self.replicas.diloco.period
        for met in self._outer:
            found = beside_steps(self.prices.cost(met), self.replicas.diloco, step.step_seconds)
            lines += (replace(x, times=x.times * share, value=-1) for x in found)
        return Cost(tuple(lines), step.interval)

    @property
    def _outer(self) -> tuple[Program, ...]:
        """What runs once in a period."""
        return () if self.replicas is None else self.replicas.meetings

    @cached_property
    def memory(self) -> MemoryProfile:
        step = memory(self.program, self.prices.itemiser.compiler.rules, self._kernels)
        return max((step, *map(self._met, self._outer)), key=lambda found: found.peak)

    def _met(self, outer: Program) -> MemoryProfile:
        """What a device holds while replicas meet: what the step keeps lies there too."""
        met, compiler = replace(outer, variables=self.program.variables), self.prices.itemiser.compiler
        return memory(met, compiler.rules, compiler.kernels(met))

    @property
    def sent(self) -> dict[str, float]:
        """Bytes that a device sends in a step as priced, by mesh axis ('+' joins axes that act together)."""
        found = dict.fromkeys(self.program.mesh.names, 0.0)
        for key, x in (("+".join(x.axes), x) for x in self.cost.lines if isinstance(x.item, Sent)):
            found[key] = found.get(key, 0.0) + x.sent * x.times
        return found

    @property
    def layout(self) -> Layout:
        """The program's layout as a user writes it."""
        rules = {name: axes for name, axes in self.program.layout.written.items() if name != REPLICA}
        return Layout(rules, {path: dict(found) for path, found in self.program.layout.refined})

    @property
    def repeated(self) -> dict[str, Repeated]:
        """Axes whose devices repeat work; a stage that is a program of its own lacks the work of the ends."""
        apart = self.prices.itemiser.compiler.stages(self.program.outline) is not None
        staged = {axis for dim in self.pipeline if apart for axis in self.layout.axes(dim)}
        return {axis: work for axis, work in repeated(self.program).items() if axis not in staged}

    @property
    def pipeline(self) -> Mapping[str, int]:
        """Dimensions of layers that are pipeline stages -> number of stages."""
        return self.model.stages(self.program.mesh, self.program.layout)

    @cached_property
    def known(self) -> Known:
        """The known errors of predictions of its kind."""
        return errors_known(self.prices.hardware, self.model, self.pipeline)

    def room(self, limit: float) -> float:
        """The largest peak within a limit that surely fits."""
        return self.known.room(limit, self.prices.hardware.usable_memory_bytes)

    def doubt(self, limit: float) -> str:
        """Why it may not fit, if it barely does."""
        return self.known.barely(self.memory.peak, limit, self.prices.hardware.usable_memory_bytes)

    @property
    def predicted(self) -> Predicted:
        model, mesh, seconds = self.model, self.program.mesh, self.cost.step_seconds
        replicas = self.replicas.count if self.replicas else 1
        flops = {dtype: replicas * n for dtype, n in unsplit_flops(model).items()}
        chips = (machine := self.prices.hardware).chips(mesh.devices)

        def rate(items: float | None, of: float = 1.0) -> float | None:
            return items / seconds / of if items and seconds else None

        tokens = None if model.tokens is None else model.tokens * replicas
        found = self.prices.itemiser.compiler.stages(self.program.outline)
        done = {} if found is None else found.done
        run = run_flops(self.program, done) if recomputes(self.program) else {}
        return Predicted(
            step_seconds=seconds,
            compute_seconds=self.cost.compute_seconds,
            communication_seconds=self.cost.communication_seconds,
            exposed_communication_seconds=self.cost.exposed_communication_seconds,
            peak_memory_bytes=self.memory.peak,
            usable_memory_bytes=int(machine.usable_memory_bytes),
            flops_per_device=self.cost.flops,
            communication_bytes_per_device=self.sent,
            mfu=utilisation(flops, machine, mesh.devices, seconds),
            hfu=utilisation(run, machine, mesh.devices, seconds) if run else None,
            model_flops=sum(flops.values()),
            model_flops_per_second_per_chip=rate(sum(flops.values()), chips),
            examples_per_second=rate(model.examples * replicas),
            tokens_per_second=rate(tokens),
            tokens_per_second_per_chip=rate(tokens, chips),
            host_seconds=self.cost.host_seconds,
            host_memory_bytes=self.program.host_bytes or None,
            host_bytes_per_device=self.program.transfer_bytes() if self.program.host_bytes else None,
        )

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Differences of kind, known underestimates, and results above every published one."""
        flops, software = unsplit_flops(self.model), self.prices.hardware.framework
        multiplied = [dtype for dtype, n in flops.items() if n >= WORTH_A_NOTE * sum(flops.values())]
        own = (
            *self._assumed(),
            *differences(software, self.model, computed_in(self.model)),
            *map(str, self.undivided),
            *(LAUNCHES.format(seconds_text(s), self.cost.launched) for s in [self.cost.host_seconds] if s),
            *self._offloads(),
            *self._one_hot(),
            *self._meets(),
            *filter(None, [self.prices.hardware.chips_note(self.program.mesh.devices), self.waits]),
            *self.cost.notes,
            *self.prices.itemiser.compiler.lacking(self.program),
            *filter(None, dict.fromkeys(map(self.prices.hardware.peak_note, multiplied))),
        )
        best, mfu = self.prices.hardware.chip.published_mfu, self.predicted.mfu
        if best is None or mfu is None or mfu <= best.value:
            return own
        step, waits = self.cost.step_seconds, self.cost.exposed_communication_seconds
        again = self.cost.by(lambda x: x.origin.phase).get("recompute", 0.0)
        return (
            *own,
            f"the predicted MFU of {share_text(mfu, 1)} is above the highest published one on this chip "
            f"that layoutopt knows ({share_text(best.value, 1)}: {best.source}); the plan spends "
            f"{share_text(again, step)} of the step on recomputation and {share_text(waits, step)} on "
            "exposed communication, and the prediction does not model input pipelines, host overhead and "
            "stragglers",
        )

    def _assumed(self) -> Iterator[str]:
        """The batch, the length and the element type, if nobody chose them."""
        model, devices, name = self.model, self.program.mesh.devices, self.model.batch_setting
        sizes = model.batch.items()
        # half a length: positions may end
        other: dict[str, object] = {n: 2 * size if n == name else -(-size // 2) for n, size in sizes}
        told = {n: f"{n} is {size:,} ({model.assumed[n]})" for n, size in sizes if model.assumed.get(n)}
        if said := model.assumed.get("dtype"):
            own = model.hparams["dtype"]
            other["dtype"] = dtype = "float32" if own == "bfloat16" else "bfloat16"
            times = self.prices.hardware.product_flops(dtype) / self.prices.hardware.product_flops(own)
            peak = f"; the peak of {dtype} is {times:.3g} times as high" * (times > 1)
            told["dtype"] = f"dtype is {own} ({said}{peak})"
        if told:
            words = " and ".join(filter(None, (", ".join([*told.values()][:-1]), [*told.values()][-1])))
            sets = " ".join(f"--set {n}={other[n]}" for n in told)
            yield f"{words} by default; set {'them' if len(told) > 1 else 'it'}, e.g. {sets}"
        size = model.batch.get(name or "", devices)
        if name in model.assumed and self.replicas is None and size < devices:
            yield (
                f"{name} is {size:,} by default, less than the {devices:,} devices; set the "
                f"batch that you train with, e.g. --set {name}={devices}"
            )

    def _meets(self) -> Iterator[str]:
        """What replicas send, at once and in the mean, and what of it a delay hides."""
        if self.replicas is None:
            return
        how = self.replicas.diloco
        sent = [met.communication_bytes().get(how.axis, 0.0) for met in self.replicas.outer]
        costs = [self.prices.cost(met) for met in self.replicas.outer]
        longest = max(over_axis(cost, how.axis) for cost in costs)
        said = (
            f"each device sends {size_text(max(sent))} over {how.axis!r} every {how.every} steps "
            f"({size_text(sum(sent) / how.period)} per step on average), which takes {seconds_text(longest)}"
        )
        if not how.delay:
            yield f"{said}, all of it exposed"
            return
        step = self.prices.cost(self.program, self._kernels).step_seconds
        waits = max(0.0, longest - how.delay * step)
        yield (
            f"{said}, of which {seconds_text(waits)} is exposed; the rest overlaps with {how.delay} steps "
            "if the engine communicates during steps (layoutopt's engines do not)"
        )

    def _offloads(self) -> Iterator[str]:
        """What to know of what lies on the hosts."""
        machine = self.prices.hardware
        if self.program.host_bytes and machine.is_host:
            yield (f"offloading frees no memory on {machine.name}, because devices and host share one memory")
        elif self.program.host_bytes:
            lines = [x for x in self.cost.lines if x.axes == (HOST,)]
            total, waits = sum(x.seconds * x.times for x in lines), sum(x.exposed * x.times for x in lines)
            share = share_text(waits, self.cost.step_seconds)
            yield (
                f"transfers over the host link take {seconds_text(total)} per step, of which "
                f"{seconds_text(waits)} ({share} of the step) is exposed; loads and stores run one after "
                "the other and overlap only with matrix products in loops"
            )
        if self.program.host_bytes and machine.host_memory_bytes is None and not machine.is_host:
            yield (
                f"the host memory of {machine.name} is unknown, so {size_text(self.program.host_bytes)} "
                "per device may not fit there; set the size, e.g. --set-hardware host_memory=64GB"
            )

    def _one_hot(self) -> Iterator[str]:
        """The time of products that only choose, which other programs of the same model do not run."""
        every = self.program.every(Local)
        nodes = {i.origin.node for i in every if isinstance(i.op, Einsum) and not i.op.needed}
        lines = [x for x in self.cost.lines if isinstance(x.item, Computed) and x.origin.node in nodes]
        total, step = sum(x.seconds * x.times for x in lines), self.cost.step_seconds
        if total >= CHOOSING * step:
            longest = max(lines, key=lambda x: x.seconds * x.times)
            yield (
                f"products with one-hot tensors, the longest in {longest.origin.scope or 'the model'}, take "
                f"{share_text(total, step)} of the step; a trainer that sorts or gathers tokens instead does "
                "not run them, so its step is shorter and its best layout may differ"
            )

    @cached_property
    def bubble(self) -> PipelineBubble | None:
        """The pipeline bubble of the stages."""
        return waiting(self.program, self.cost, self.prices.itemiser.compiler.stages(self.program.outline))

    @cached_property
    def waits(self) -> str:
        """The same in words."""
        if (found := self.bubble) is None:
            return ""
        of, share = found.schedule, f"{share_text(found.seconds, self.cost.step_seconds)} of the step"
        if found.fullest:
            return (
                f"stage {found.fullest} of the {of.stages} stages of {found.dim!r} has the most work; "
                f"it waits {seconds_text(found.seconds)} ({share}) for the others"
            )
        padded = f"; {found.empty} of the {found.places} slots for {found.dim} are padding, as slow as layers"
        ticks = ((len(of.done(slot)), slot.name.lower()) for slot in StageAction)
        idle = (f"{n - of.works} of {n} {slot} slots" for n, slot in ticks if n > of.works)
        return (
            f"each of the {of.stages} stages of {found.dim!r} is idle in {', '.join(idle)}; this pipeline "
            f"bubble takes {seconds_text(found.seconds)} ({share})"
        ) + padded * bool(found.empty)

    @cached_property
    def slots(self) -> tuple[str, ...]:
        """The slots of each stage (`drawn`), a line of at most 100 characters each."""
        picture = () if (found := self.bubble) is None else drawn(found.schedule, found.fullest > 0)
        return tuple(shorten("".join(row), 100) for row in picture)

    @cached_property
    def beyond_hosts(self) -> str | None:
        """The reason why values on the hosts do not fit there; None if they fit, as far as is known."""
        host, held = self.prices.hardware.host_memory_bytes, self.program.host_bytes
        if host is None or held <= host:
            return None
        return (
            f"host memory {size_text(held)} per device is {size_text(held - host)} over the limit of "
            f"{size_text(host)}; offload less"
        )

    def reason(self, limit: float | None) -> str | None:
        """Why it does not fit into `limit` bytes, with the largest tensors, or on the hosts, if so."""
        if limit is not None and self.beyond_hosts is not None:
            return self.beyond_hosts
        if limit is None or self.memory.peak <= limit:
            return None
        over = self.memory.peak - limit
        largest = ", ".join(f"{h.what} ({size_text(h.bytes)})" for h in self.memory.holdings[:3])
        return (
            f"peak memory {size_text(self.memory.peak)} is {size_text(over)} over the limit of "
            f"{size_text(limit)}; largest tensors: {largest}"
        )


def over_axis(cost: Cost, axis: str) -> float:
    """Seconds of all messages over an axis."""
    return sum(x.seconds * x.times for x in cost.lines if axis in x.axes)


def beside_steps(met: Cost, how: DiLoCo, step: float) -> Iterator[Line]:
    """The lines of an outer step; the steps of its delay hide as much of its messages between replicas as
    they take; `step`: seconds of one."""
    total = over_axis(met, how.axis)
    left = max(0.0, 1 - how.delay * step / total) if total else 1.0
    for x in met.lines:
        yield replace(x, exposed=x.exposed * left) if how.delay and how.axis in x.axes else x


def as_run(model: Model, hardware: Hardware) -> Model:
    """The model, padded and recomputed as the software of some hardware does."""
    model = as_built(hardware.framework, model)
    return model.second_runs(bool(compiler_of(hardware).rules.to_the_end))


def unsplit(model: Model) -> Program:
    """The step on one device."""
    return model.step_graph.remembered("unsplit", lambda: model.lower(ONE_DEVICE, Layout(), check=False))


def unsplit_flops(model: Model) -> Mapping[str, float]:
    """FLOPs that a step of the model needs, by dtype (`costmodels.utilisation`): those of its program on one
    device, the same under every layout."""
    return model.step_graph.remembered("model_flops", lambda: model_flops(unsplit(model)))


def computed_in(model: Model) -> str:
    """The dtype of the products that most FLOPs of a step are in; "" without products."""
    flops = unsplit_flops(model)
    return max(flops, key=lambda dtype: flops[dtype], default="")
