"""Prices a layout, and finds likely mistakes in it.

priced = layoutopt.cost(model, "data:2;model:4", "batch:data;heads:model", hardware="tpu-v5e")
priced.predicted.step_seconds, priced.fits, priced.to_frame()
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from costmodels.hardware import Hardware, machine_of
from layoutopt.analysis import lint as linting
from layoutopt.analysis.lint import single_changes
from layoutopt.front_ends import front_end_of, made_by
from layoutopt.importers.arrays.written import WrittenLayout
from layoutopt.optimize.entry import search
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import check_limit, evaluate
from layoutopt.optimize.problems.bounds import EXACT
from layoutopt.plan.build import Plan, axes_of, given_fields
from layoutopt.plan.notebook import Shown, table
from layoutopt.plan.results import Best, CostResult, Finding, LintResult
from layoutopt.plan.schema import Predicted, ProofStatus
from layoutopt.plan.training import TrainingForecast, check_tokens, training
from layoutopt.plan.units import seconds_text, times_text, used_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.decisions import BY_HAND, typed
from mesh_tf_core.errors import InfeasibleError, LimitError, UserError, known_names
from mesh_tf_core.ir.instructions import STEP
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Permute
from mesh_tf_core.lower import Options
from mesh_tf_core.model import Model

HARDWARE = "cpu-local"
LOOKING = 60.0
"""Seconds that `lint` looks for the best layout, and for changes of the layout."""
SEARCHING = 0.8
"""The share of these for the search."""


@dataclass(frozen=True, repr=False)
class PricedLayout(Shown):
    """A layout with its predicted time and memory.

    Attributes:
      limit: the memory limit in bytes per device.
      evaluation: the lowered program with its time (`cost`, per line) and its memory (per instruction).
      training: time and cost of training, if tokens or a price were given.
    """

    evaluation: Evaluation = field(repr=False)
    options: Options
    limit: float
    training: TrainingForecast | None = None

    @property
    def predicted(self) -> Predicted:
        return self.evaluation.predicted

    @property
    def fits(self) -> bool:
        return self.reason is None

    @property
    def reason(self) -> str | None:
        """Why the layout does not fit in memory, with the largest tensors; None if the layout fits."""
        return self.evaluation.reason(self.limit)

    @cached_property
    def findings(self) -> list[Finding]:
        """Likely mistakes in the layout."""
        of = self.evaluation
        return linting.lint(of.model, of, of.prices.hardware, self.options, self.limit)

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """Notes on the predicted time and memory."""
        of, said = self.evaluation, {found.message for found in self.findings}
        doubt = of.doubt(self.limit)
        notes = [n for n in (*of.model.notes(self.options), *of.notes) if n not in said]
        return (*notes, *_idle(of, self.options), *([doubt] if doubt else []))

    @property
    def data(self) -> CostResult:
        """The result that `layoutopt cost --json` prints."""
        of = self.evaluation
        notes: dict[str, Any] = {"notes": list(self.notes)} if self.notes else {}
        return CostResult(
            **given_fields(of.model, of.program.mesh, of.layout, of.decided),
            hardware=of.prices.hardware.name,
            framework=of.prices.hardware.framework,
            predicted=self.predicted,
            training=self.training,
            feasible=self.fits,
            reason=self.reason,
            findings=[*self.findings],
            **notes,
        )

    @property
    def _fit(self) -> str:
        """A doubt about the memory; '' where there is none."""
        if not self.fits:
            return ", does not fit"
        return ", barely fits" if self.evaluation.doubt(self.limit) else ""

    def to_frame(self) -> Any:
        """One row per instruction, in the order of the program. Times are those of one of its `runs`."""
        lines = self.evaluation.cost.lines
        return table([{"operation": x.name, **x.facts(), "axes": "+".join(x.axes)} for x in lines])

    def __repr__(self) -> str:
        p, of = self.predicted, self.evaluation
        return (
            f"PricedLayout({of.layout} on {of.program.mesh}: {seconds_text(p.step_seconds)} a step, "
            f"{used_text(p.peak_memory_bytes, self.limit)}{self._fit})"
        )


@dataclass(frozen=True, repr=False)
class Linted(Shown):
    """Likely mistakes in a layout, and the best layout of its mesh.

    Attributes:
      best: the answer of the search; None if it found nothing that fits.
      fastest: the fastest layout that fits: that answer, the layout itself, or a change of it that was
        predicted too.
      status: of it; the search's proof is about its own answer.
    """

    priced: PricedLayout
    best: Plan | None
    fastest: Evaluation | None
    status: ProofStatus
    findings: tuple[Finding, ...]

    @property
    def data(self) -> LintResult:
        """The result that `layoutopt lint --json` prints."""
        of, best, fastest = self.priced.evaluation, None, self.fastest
        if fastest is not None:
            seconds = fastest.cost.step_seconds
            best = Best(layout=axes_of(fastest.layout), step_seconds=seconds, status=self.status)
        return LintResult(
            **given_fields(of.model, of.program.mesh, of.layout, of.decided),
            hardware=of.prices.hardware.name,
            framework=of.prices.hardware.framework,
            predicted=self.priced.predicted,
            feasible=self.priced.fits,
            findings=[*self.findings],
            best=best,
        )

    @property
    def costs(self) -> str:
        """The cost of the layout against the fastest one that fits."""
        if self.fastest is None:
            return "it does not fit, and no layout that fits was found"
        loses = times_text(self.priced.predicted.step_seconds, self.fastest.predicted.step_seconds)
        return f"{loses} the best step" + ("" if self.priced.fits else ", but it does not fit")

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per finding."""
        return table([found.model_dump() for found in self.findings])

    def __repr__(self) -> str:
        kinds = ", ".join(found.kind for found in self.findings) or "no likely mistake"
        return f"Linted({kinds}; {self.costs})"


def cost(
    model: Model,
    mesh: Mesh | str | Plan,
    layout: Layout | str = "",
    hardware: str | Hardware | None = None,
    memory: float | None = None,
    options: Options | None = None,
    tokens: float | None = None,
    price: float | None = None,
    framework: str | None = None,
    **decided: Any,
) -> PricedLayout:
    """Predicts the time and memory of a layout.

    Args:
      model: the model to predict.
      mesh: a mesh, its axes such as "data:4", or a plan, which also gives the layout and the options.
      layout: the layout, such as "batch:data;heads:model" ("": every device holds everything).
      hardware: the name of a preset, the path of a hardware file, or a Hardware (None: the plan's hardware,
        else `cpu-local`).
      memory: memory of a device in bytes (None: the hardware's memory).
      options: the decisions other than the layout.
      tokens, price: also report days and cost of training on this many tokens at this price per chip-hour.
      framework: the training software, `NAME[@VERSION][:variant=option,…]` (None: the plan's, else the
        model's own).
      decided: instead of `options`, any of storage, recompute, microbatches, context, offload, schedule,
        collective_matmul and diloco, written as on the command line or as lists of texts.

    Raises:
      UserError: the layout is illegal. A layout that does not fit in memory is not an error.

    Example:
      >>> import layoutopt
      >>> from examples import mlp
      >>> priced = layoutopt.cost(mlp.model(), "data:4", "batch:data", hardware="tpu-v5e")
      >>> priced.fits, 0 < priced.predicted.step_seconds < 1e-3
      (True, True)
    """
    check_limit(memory)
    if not isinstance(model, Model):
        raise UserError(
            f"cost: {model!r} is not a Model; pass a layoutopt Model, e.g. the result of a model file's "
            "model()"
        )
    check_tokens(tokens, model.tokens)
    if isinstance(mesh, Plan):
        if layout or options is not None or decided:
            raise UserError("cost: the plan sets the layout and the options; remove the arguments for them")
        plan = mesh
        mesh, layout, options = plan.mesh, plan.layout, plan.options
        if hardware is None:
            hardware, framework = plan.data.hardware, framework or plan.data.framework
    machine = machine_of(HARDWARE if hardware is None else hardware, framework, model.framework)
    mesh = mesh if isinstance(mesh, Mesh) else Mesh(mesh)
    options = options_of(model, options, decided)
    found = evaluate(model, mesh, layout_of(layout), machine, options)
    limit = machine.usable_memory_bytes if memory is None else float(memory)
    rate, chips = found.predicted.tokens_per_second, machine.chips(mesh.devices)
    total = None if tokens is None and price is None else training(rate, chips, tokens, price)
    return PricedLayout(found, options, limit, total)


def lint(
    model: Model,
    mesh: Mesh | str | Plan,
    layout: Layout | str | None = None,
    hardware: str | Hardware | None = None,
    options: Options | None = None,
    time_limit: float | Clock | None = LOOKING,
    shardings: Any = None,
    framework: str | None = None,
    **decided: Any,
) -> Linted:
    """Finds likely mistakes in a layout, and the time that they cost against the best layout of the mesh.

    Args:
      model, mesh, hardware, options, framework, decided: as in `cost`.
      layout: as in `cost`; None: the placements of the module that `from_torch` was given, or no split.
      time_limit: seconds for the search for the best layout (four fifths) and for single changes.
      shardings: the user's own, in place of a layout: two pytrees of PartitionSpec, (parameters, batch), or a
        PyTorch module with its placements and the mesh axes of the batch's rows, (module, axes).

    Raises:
      UserError: the layout is illegal.

    Example:
      >>> import layoutopt
      >>> from examples import mlp
      >>> found = layoutopt.lint(mlp.model(), "data:4", "", hardware="tpu-v5e")
    """
    clock, odd = Clock.of(time_limit), list[linting.UnlikeArray]()
    if shardings is None and not isinstance(mesh, Plan) and layout is None:
        shardings = getattr(model, "carried", None)
    if shardings is not None:
        own = own_layout(model, mesh, shardings, options_of(model, options, decided))
        mesh, layout, options, odd, decided = own.mesh, own.layout, own.options, own.unlike, {}
    priced = cost(model, mesh, layout or "", hardware, options=options, framework=framework, **decided)
    of, limit = priced.evaluation, priced.limit
    mesh, machine = of.program.mesh, of.prices.hardware
    answer = None
    try:
        best = search(
            model,
            mesh=mesh,
            hardware=machine,
            time_limit=None if clock.rest is None else SEARCHING * clock.rest,
            alternatives=False,
        )
        answer = evaluate(model, best.mesh, best.layout, machine, best.options)
    except (InfeasibleError, LimitError):
        best = None
    mended = [
        None if each.layout is None else evaluate(model, mesh, each.layout, machine, each.options)
        for each in odd
    ]
    lost = _lost(of)
    fits = (c for c in single_changes(of, clock.again()) if c.evaluation.reason(limit) is None)
    changes = [c for c in fits if lost or not _lost(c.evaluation)]
    changes.sort(key=lambda c: c.evaluation.cost.step_seconds)
    more = [of, *(each for each in mended if each), *(change.evaluation for change in changes)]
    known = [answer] if answer else []
    known += [each for each in more if each.reason(limit) is None]
    fastest = min(
        known, key=lambda each: each.cost.step_seconds * (1 - EXACT if each is answer else 1), default=None
    )
    findings = [
        *(linting.placed_unlike(each, of, less) for each, less in zip(odd, mended, strict=True)),
        *linting.in_memory(of, limit, changes, answer),
        # A program that has its placements could say them.
        *(f for f in priced.findings if shardings is None or f.kind != "not expressed"),
    ]
    if fastest is not None and priced.fits and (loss := linting.slower(of.cost, fastest.cost)):
        findings.append(loss)
    proven = best is not None and fastest is answer and best.solver.proven
    status = ProofStatus.OPTIMAL if proven else ProofStatus.FEASIBLE
    return Linted(priced, best, fastest, status, tuple(findings))


def own_layout(model: Model, mesh: Mesh | str | Plan, shardings: Any, options: Options) -> WrittenLayout:
    """The layout of the user's own shardings, as `lint` takes them.

    Raises:
      UserError: shardings that are none, or do not fit the model.
    """
    if isinstance(shardings, WrittenLayout):
        return shardings
    front = front_end_of(model)
    if isinstance(mesh, Plan) or front is None:
        lost = (
            f"needs a model of {made_by()}" if front is None else "is for a mesh, and a plan has its layout"
        )
        raise UserError(f"lint: shardings= {lost}")
    return front.written(model, mesh if isinstance(mesh, Mesh) else Mesh(mesh), shardings, options)


def layout_of(said: Layout | str) -> Layout:
    """A layout as Python gives it."""
    if not isinstance(said, Layout | str):
        raise UserError(f'layout {said!r}: write it as "batch:data;heads:model"')
    return Layout(said) if isinstance(said, str) else said


def _lost(of: Evaluation) -> bool:
    """True if the framework cannot express a layout."""
    given = of.model, of.prices.hardware, of.program.mesh, of.layout, of.decided
    return bool(linting.unexpressed(*given)[0])


def options_of(model: Model, options: Options | None, decided: dict[str, Any]) -> Options:
    """The decisions besides a layout, given as `Options` or as keywords like the options of commands."""
    if options is not None and decided:
        raise UserError(f"options= sets every decision; remove the other arguments: {', '.join(decided)}")
    if options is not None:
        return options
    known = {option.parameter: option.name for option in BY_HAND}
    for name in decided:
        if name not in known:
            raise UserError(f"cost: no argument {name!r}; {known_names(name, known)}")
    given = {known[name]: said for name, said in decided.items() if said is not None}
    many = {n: [*v] if isinstance(v, list | tuple | set | frozenset) else [str(v)] for n, v in given.items()}
    return typed(model, {name: [*map(str, said)] for name, said in many.items() if said})


def _idle(found: Evaluation, options: Options) -> list[str]:
    """That nothing goes in chunks beside products, where it was asked for."""
    asked = ",".join(sorted(options.collective_matmul))
    if not asked or any(i.rule == STEP for i in found.program.every(Permute)):
        return []
    return [
        f"--collective-matmul {asked} changes nothing here: no matmul with these dimensions has an "
        "all-gather or reduce-scatter over their axes; add sequence parallelism (length@elsewhere:AXIS)"
    ]
