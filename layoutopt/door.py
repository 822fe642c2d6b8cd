"""What the commands `cost`, `explain`, `validate` and `verify` do, from Python: typed results with frames, as
notebooks show them.

    priced = layoutopt.cost(model, "data:2;model:4", "batch:data;heads:model", hardware="tpu-v5e")
    priced.predicted.step_seconds, priced.fits, priced.to_frame()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from costmodels.hardware import Hardware, load_hardware, machine_of
from layoutopt.analysis.explain import WhatIfAnswer, finder, split_rules
from layoutopt.analysis.validate import validate as measured
from layoutopt.analysis.verify import Verified, generation
from layoutopt.analysis.verify import verify as compiled
from layoutopt.clock import UNLIMITED, Clock
from layoutopt.details.of_machine import errors_known
from layoutopt.evaluator import Evaluation, check_limit, evaluate
from layoutopt.plan.build import Plan
from layoutopt.plan.evidence import Validation
from layoutopt.plan.schema import Predicted
from layoutopt.plan.units import plural, seconds_text, share_text, used_text
from layoutopt.shown import Shown, table
from layoutopt.space.recorded import allowed_by
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model

HARDWARE = "cpu-local"


@dataclass(frozen=True, repr=False)
class Priced(Shown):
    """A layout with its price.

    Attributes:
      limit: bytes that a device may hold.
      evaluation: the lowered program, its `cost` line by line, its `memory` instruction by instruction.
    """

    evaluation: Evaluation = field(repr=False)
    options: Options
    limit: float

    @property
    def predicted(self) -> Predicted:
        return self.evaluation.predicted

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why it does not fit, naming the largest tensors; None if it fits."""
        return self.evaluation.reason(self.limit)

    @property
    def notes(self) -> tuple[str, ...]:
        """What to know of the price, and of how it fits."""
        doubt = errors_known(self.evaluation.prices.hardware).barely(
            self.predicted.peak_memory_bytes, self.limit
        )
        return (*self.evaluation.notes, *([doubt] if doubt else []))

    @property
    def _fit(self) -> str:
        """What to know of how it fits; '' where there is nothing."""
        if not self.fits:
            return ", does not fit"
        known = errors_known(self.evaluation.prices.hardware)
        return ", barely fits" if known.barely(self.predicted.peak_memory_bytes, self.limit) else ""

    def to_frame(self) -> Any:
        """Every priced instruction, in the order of the program; numbers are of one of its `runs`."""
        return table(
            [
                {
                    "operation": x.name,
                    "scope": x.origin.scope,
                    "phase": x.origin.phase,
                    "axes": "+".join(x.axes),
                    "runs": x.times,
                    "seconds": x.seconds,
                    "exposed_seconds": x.exposed,
                    "flops": x.flops,
                    "bytes": x.bytes,
                    "sent_bytes": x.sent,
                }
                for x in self.evaluation.cost.lines
            ]
        )

    def __repr__(self) -> str:
        p, program = self.predicted, self.evaluation.program
        return (
            f"Priced({self.evaluation.layout} on {program.mesh}: {seconds_text(p.step_seconds)} a step, "
            f"{used_text(p.peak_memory_bytes, self.limit)}{self._fit})"
        )


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """Why a plan's layout: what each of its splits is worth, and what the memory limit costs.

    Attributes:
      limit: the best without the memory limit.
      splits: for every split the best where it is undone.
      against: another layout, where one was asked for.
    """

    plan: Plan
    limit: WhatIfAnswer
    splits: tuple[WhatIfAnswer, ...]
    against: Priced | None = None

    @property
    def binds(self) -> bool:
        """Whether the memory limit keeps a faster layout away."""
        free = self.limit.seconds
        return free is not None and free < self.plan.predicted.step_seconds * (1 - 1e-9)

    def to_frame(self) -> Any:
        """A row for every condition: seconds of the best under it, and how much more than the plan's."""
        step = self.plan.predicted.step_seconds
        rows = []
        for each in (*self.splits, self.limit):
            more = None if each.seconds is None else each.seconds - step
            rows.append({**asdict(each), "costs_seconds": more})
        return table(rows)

    def __repr__(self) -> str:
        step = self.plan.predicted.step_seconds
        said = [
            f"{a.condition} costs {'' if a.proven else 'at most '}{share_text(a.seconds - step, step)}"
            for a in self.splits
            if a.seconds
        ]
        memory = "the memory limit binds" if self.binds else "the memory limit does not bind"
        return f"Explained({'; '.join([*said, memory])})"


@dataclass(frozen=True, repr=False)
class Validated(Shown):
    """Layouts that ran, beside their predictions; `data` is what `layoutopt validate --json` prints."""

    data: Validation

    def to_frame(self) -> Any:
        """A row for every layout."""
        return table([row.model_dump() for row in self.data.rows])

    def to_json(self) -> dict[str, Any]:
        """For `Plan.report(validation=...)`."""
        return self.data.to_json()

    def __repr__(self) -> str:
        d = self.data
        known = [("error", d.mape), ("regret", d.regret)]
        said = [f"{name} {share_text(value, 1)}" for name, value in known if value is not None]
        return f"Validated({', '.join([plural(len(d.timed), 'layout'), *said])})"


def cost(
    model: Model,
    mesh: Mesh | str | Plan,
    layout: Layout | str = "",
    hardware: str | Hardware | None = None,
    memory: float | None = None,
    options: Options | None = None,
) -> Priced:
    """What a layout costs.

    Args:
      mesh: or a plan, which has the layout and the options too.
      hardware: a preset's name, a file, or a Hardware (None: that which the plan says; without one,
        `cpu-local`).
      memory: bytes that a device may hold (None: what the hardware has).
      options: what is decided beside the layout: storage, recomputation, microbatches.

    Raises:
      UserError: a layout that is not legal; one that does not fit is priced.
    """
    check_limit(memory)
    if not isinstance(model, Model):
        raise UserError(f"cost: {model!r} is no Model; build one, as a model file's model() does")
    if isinstance(mesh, Plan):
        if layout or options is not None:
            raise UserError("a plan has its layout and options; leave them out")
        plan = mesh
        mesh, layout, options = plan.mesh, plan.layout, plan.options
        hardware = plan.data.hardware if hardware is None else hardware
    machine = machine_of(HARDWARE if hardware is None else hardware)
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    layout = _layout(layout)
    options = options or Options()
    found = evaluate(model, mesh, layout, machine, options)
    return Priced(found, options, machine.usable_memory_bytes if memory is None else float(memory))


def explain(
    plan: Plan,
    against: Layout | str | None = None,
    hardware: str | Hardware | None = None,
    time_limit: float | Clock | None = None,
) -> Explained:
    """Why a plan's layout and not another: the search again with each of its splits undone, and without the
    memory limit.

    Args:
      plan: of `layoutopt.search`, or `load_plan(path).of(model)`.
      against: another layout on the plan's mesh.
      hardware: None: that which the plan says.
      time_limit: seconds for all searches together.

    Raises:
      UserError: the plan's model is not at hand, or the plan is one for the least memory.
    """
    if not isinstance(plan, Plan):
        raise UserError(f"explain {plan!r}: give what layoutopt.search gave, or load_plan(path).of(model)")
    against = None if against is None else _layout(against)
    model, machine = _model_of(plan), machine_of(hardware or plan.data.hardware)
    asked = plan.data.details.search
    if asked is not None and asked.objective == "memory":
        raise UserError(
            "explain: a plan for the least memory; layoutopt explain PLAN says what its splits save"
        )
    clock = time_limit if isinstance(time_limit, Clock) else Clock(time_limit) if time_limit else UNLIMITED
    find = finder(model, plan, machine, allowed_by(asked))
    limit = None if asked is None or asked.memory_bytes is None else float(asked.memory_bytes)
    rules = split_rules(plan)
    splits = [
        find(f"without {rule}", limit, undone, clock.part(1 / (len(rules) + 1 - n)), None)
        for n, (rule, undone) in enumerate(rules)
    ]
    free = find("without the memory limit", 1e30, None, clock, None)
    other = None if against is None else cost(model, plan.mesh, against, machine, limit, plan.options)
    return Explained(plan, free, tuple(splits), other)


def validate(
    model: Model,
    mesh: Mesh | str,
    hardware: str | Hardware = HARDWARE,
    layouts: Sequence[Layout | str] | None = None,
    count: int = 12,
    steps: int = 7,
    batch: Mapping[str, Any] | None = None,
    engine: str = "auto",
) -> Validated:
    """Runs layouts of a model on this machine's mesh, and compares with their predictions.

    Args:
      hardware: that predicts; this machine's calibrated profile stands for `cpu-local`, if there is one.
      layouts: those to run, two at least (None: `count`, the best, named ones, and others).
      steps: samples of each layout.
      batch: what every step is fed (None: zeros).

    Raises:
      UserError: fewer than two layouts, or one that is not legal.
    """
    if isinstance(layouts, str):
        raise UserError(f"layouts {layouts!r}: give a list of them, two at least")
    found = measured(model, mesh, machine_of(hardware), layouts, count, steps, batch, engine=engine)
    return Validated(Validation.model_validate(found))


def verify(priced: Plan | Priced, topology: str) -> Verified:
    """What the TPU compiler makes of a layout, without a TPU: collectives, peak memory, compute time.

    Args:
      priced: what `cost` or `search` gave.
      topology: chips as the compiler names them, as "v5e:2x4"; as many devices as the mesh has.

    Raises:
      UserError: JAX or libtpu is missing, an unknown topology, or one of another number of devices.
    """
    if not isinstance(priced, Plan | Priced):
        raise UserError(
            f"verify {priced!r}: give what layoutopt.search or layoutopt.cost gave, "
            "or load_plan(path).of(model)"
        )
    machine = load_hardware(generation(topology).hardware)
    if isinstance(priced, Priced):
        of = priced.evaluation
        model, mesh, layout = of.model, of.program.mesh, of.layout
    else:
        model, mesh, layout = _model_of(priced), priced.mesh, priced.layout
    options, own = priced.options, getattr(model, "step_on", None)
    step = own and (lambda devices: own(mesh, layout, options, devices))
    return compiled(evaluate(model, mesh, layout, machine, options), topology, machine, step)


def _model_of(plan: Plan) -> Model:
    if plan.model is None:
        raise UserError("a plan file holds no model; write load_plan(path).of(model)")
    return plan.model


def _layout(said: Layout | str) -> Layout:
    if not isinstance(said, Layout | str):
        raise UserError(f'layout {said!r}: write it as "batch:data;heads:model"')
    return Layout(said) if isinstance(said, str) else said
