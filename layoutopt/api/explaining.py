"""Explains a plan: the value of each split, the limit that binds, the cost of rules and decisions, a check of
the proof, and the best layouts under other conditions."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from costmodels.hardware import Hardware, machine_of
from costmodels.liveness import MemoryProfile
from layoutopt.analysis.certificate import certify, considered_by, proof_of
from layoutopt.analysis.explain import (
    beside,
    compared,
    differences,
    disagreements,
    finder,
    forbidden,
    split_rules,
    under,
)
from layoutopt.analysis.keeping import keepings
from layoutopt.analysis.placed import placed
from layoutopt.analysis.sensitivity import Curves, robustness, sensitivity
from layoutopt.api.pricing import PricedLayout, layout_of
from layoutopt.api.running import model_of
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.heuristics.incumbents import compared_with
from layoutopt.optimize.problems.request import BEYOND
from layoutopt.plan.build import Plan
from layoutopt.plan.details import Proof, Robustness, RuledOut
from layoutopt.plan.layout_results import (
    Against,
    Binding,
    ExplainResult,
    KeptStep,
    OperationDifference,
    PartDifference,
    Placed,
    Worth,
)
from layoutopt.plan.notebook import Shown, table
from layoutopt.plan.schema import ProofStatus
from layoutopt.plan.units import bytes_text, some, step_change
from layoutopt.runtime.clock import Clock
from layoutopt.space.exclusions import CHECK, MEMORY, SENSITIVITY, memory_words, refuse
from layoutopt.space.objective import Objective
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout

LARGEST = 3
"""Tensors named at the peak."""
CONDITIONS = 6
"""Half and twice of three factors."""
SAME = 1e-9
"""Relative difference up to which two steps are the same."""
Progress = Callable[[int, int, str], None]
"""on_progress(searches done, number of searches, current condition)."""


@dataclass(frozen=True, repr=False)
class Explained(Shown):
    """The reasons for a plan's layout.

    Attributes:
      memory: the memory limit in bytes per device.
      evaluation: the plan, lowered and predicted again.
      disagreements: conditions under which the new result contradicts the plan.
      limit: the best plan without the memory limit; None if the search was for the least memory.
      splits: for every split, the best plan without this split.
      pins: the best plan under each further pin.
      decisions: the best plan without each forbidden decision.
      against: the other layout, if one was given.
      alike: the other layout with the plan's other decisions.
      kept: the step time if recomputed loops keep other values.
      curves, robust: the best under other conditions, and how robust the answer is, with `sensitivity=True`.
      proof: the check of the proof, with `check=True`.
    """

    plan: Plan
    hardware: Hardware = field(repr=False)
    memory: float
    evaluation: Evaluation = field(repr=False)
    disagreements: tuple[str, ...]
    limit: Worth | None
    splits: tuple[Worth, ...] = ()
    pins: tuple[Worth, ...] = ()
    decisions: tuple[Worth, ...] = ()
    against: Evaluation | None = None
    alike: Evaluation | None = None
    kept: tuple[KeptStep, ...] = ()
    curves: Curves = ()
    robust: Robustness | None = None
    proof: Proof | None = None

    @property
    def placed(self) -> tuple[Placed, ...]:
        """The table of where the plan's values live."""
        return placed(self.evaluation)

    @property
    def for_memory(self) -> bool:
        """The plan's search was for the least memory."""
        return self.plan.question.objective == Objective.MEMORY

    @property
    def binds(self) -> bool:
        """True if the memory limit keeps a faster layout away."""
        free = None if self.limit is None else self.limit.step_seconds
        return free is not None and free < self.evaluation.cost.step_seconds * (1 - SAME)

    @property
    def differences(self) -> list[OperationDifference]:
        """The operations whose time differs under the other layout, the largest difference first."""
        return [] if self.against is None else differences(self.evaluation.cost, self.against.cost)

    @property
    def parts(self) -> list[PartDifference]:
        """The parts of the step under the plan and the other layout."""
        return [] if self.against is None else beside(self.evaluation, self.against)

    @property
    def details(self) -> dict[str, Any]:
        """Sensitivity, robustness and proof, as fields of a plan's details."""
        found: dict[str, Any] = {}
        if self.robust is not None:
            found |= {"sensitivity": self.curves, "robustness": self.robust}
        return {**found, "proof": self.proof} if self.proof is not None else found

    @property
    def data(self) -> ExplainResult:
        """The result that `layoutopt explain --json` prints."""
        step, peak = self.evaluation.cost.step_seconds, self.evaluation.memory.peak
        return ExplainResult(
            model=self.plan.data.model,
            layout=self.plan.data.layout,
            step_seconds=step,
            agrees=not self.disagreements,
            disagreements=list(self.disagreements),
            memory=Binding(
                peak_bytes=peak,
                peak=peak_text(self.evaluation.memory),
                limit_bytes=int(self.memory),
                binds=self.binds,
                step_seconds_without_limit=None if self.limit is None else self.limit.step_seconds,
            ),
            splits=[*self.splits],
            pins=[*self.pins],
            decisions=self.decisions,
            against=self._beside(),
            placement=self.placed,
            kept=self.kept,
            **self.details,
        )

    def _beside(self) -> Against | None:
        other, alike = self.against, self.alike
        if other is None:
            return None
        return Against(
            mesh=other.program.mesh.as_dict(),
            layout=str(other.layout),
            step_seconds=other.cost.step_seconds,
            step_seconds_with_the_plans_options=alike.cost.step_seconds if alike else None,
            peak_bytes=other.memory.peak,
            parts=self.parts,
            differences=self.differences,
        )

    def to_frame(self) -> Any:
        """One row per condition: the best under it, and how much more that takes than the plan."""
        every = (*self.splits, *self.pins, *self.decisions, *([self.limit] if self.limit else []))
        return table([each.model_dump() for each in every])

    def __repr__(self) -> str:
        step = self.plan.predicted.step_seconds
        said = [
            f"without {a.rule} {'' if a.proven else 'at most '}{step_change(a.step_seconds, step)}"
            for a in self.splits
            if a.step_seconds
        ]
        memory = "the memory limit binds" if self.binds else "the memory does not limit the step"
        return f"Explained({'; '.join([*said, memory])})"


def explain(
    plan: Plan,
    against: Layout | str | Plan | PricedLayout | None = None,
    hardware: str | Hardware | None = None,
    time_limit: float | Clock | None = None,
    pins: Sequence[str] = (),
    without: Sequence[str] = (),
    sensitivity: bool = False,
    check: bool = False,
    on_progress: Progress = lambda *_: None,
    framework: str | None = None,
) -> Explained:
    """Explains a plan's layout: searches again with each of its splits undone, and without the memory limit.

    Args:
      plan: a result of `layoutopt.search`, or `load_plan(path).of(model)`.
      against: another layout on the plan's mesh, or the name of an alternative; on any mesh of as many
        devices, another plan of the model or a result of `layoutopt.cost`.
      hardware: the name of a preset, the path of a hardware file, or a Hardware (None: the plan's hardware).
      time_limit: seconds for all searches together (None: no limit, but 60 seconds if the plan itself is not
        proven).
      pins: rules such as "heads:model". Each rule is required in a separate search.
      without: names of decisions (`space.decisions.FEATURES`). Each decision is forbidden in a separate
        search. "all": every decision that the plan has.
      sensitivity: also search with half and twice the bandwidth, memory and devices, and vary the hardware's
        numbers within their uncertainties.
      check: prove without a solver that no layout of the search space is faster.
      framework: the training software (None: the plan's).

    Raises:
      UserError: the plan's model is not loaded, `without` names a decision that the plan's search could not
        choose, or `sensitivity` or `check` does not support the plan.

    Example:
      >>> import layoutopt
      >>> from examples import mlp
      >>> plan = layoutopt.search(mlp.model(), mesh="data:4", hardware="tpu-v5e")
      >>> explained = layoutopt.explain(plan, check=True)
    """
    if not isinstance(plan, Plan):
        raise UserError(f"explain {plan!r}: pass a result of layoutopt.search, or load_plan(path).of(model)")
    if not isinstance(hardware, Hardware):
        hardware, framework = hardware or plan.data.hardware, framework or plan.data.framework
    model, machine = model_of(plan), machine_of(hardware, framework)
    found, given = evaluate(model, plan.mesh, plan.layout, machine, plan.options), plan
    if plan.data.framework not in (None, machine.framework):
        plan = under(plan, machine.framework, found.predicted)
    asked, rules, memory = plan.question, compared_with(plan, machine), float(plan.limit(machine))
    features = forbidden(plan, rules, without)
    wrong = disagreements(plan, found)
    if wrong and (numbers := _other_numbers(plan, machine)):
        wrong.insert(0, f"the plan used other values for these hardware numbers: {some(numbers, LARGEST)}")
    least = asked.objective == Objective.MEMORY
    refuse({SENSITIVITY: "--sensitivity" if sensitivity else "", MEMORY: memory_words(asked.objective)})
    other = alike = None
    if against is not None:
        named = isinstance(against, str) and against.strip() and ":" not in against
        which: Any = given.alternative(str(against).strip()) if named else against
        if isinstance(against, Plan):
            which = against.mesh, against.of(model).layout, against.options
        elif isinstance(against, PricedLayout):
            which = against.evaluation.program.mesh, against.evaluation.layout, against.options
        elif not named:
            which = layout_of(against)
        other, alike = compared(model, plan, machine, which)
    clock = Clock.of(time_limit)
    if clock.limit is None and plan.solver.status != ProofStatus.OPTIMAL:
        clock = Clock(BEYOND)  # where the search itself had no time for a proof, these would not end

    questions: list[tuple[str, str, float, str | None, str | None]] = []
    questions += [] if least else [("limit", "any memory", math.inf, None, None)]
    questions += [("splits", rule, memory, undone, None) for rule, undone in split_rules(plan)]
    questions += [("pins", rules_of, memory, rules_of, None) for rules_of in pins]
    questions += [("decisions", name, memory, None, name) for name in features]
    total = check + len(questions) + 1 + (CONDITIONS + 1) * sensitivity
    done = iter(range(total + CONDITIONS))

    # What is asked for shares the time.
    proof = None
    if check:
        on_progress(next(done), total, "ruling out the searched layouts")
        proof = _checked(plan, machine, memory, found, wrong, clock.part(1 / (2 + sensitivity)))
    find = finder(plan, found, rules, Objective(asked.objective))
    answers: dict[str, list[Worth]] = {"limit": [], "splits": [], "pins": [], "decisions": []}
    time = clock.part(1 / (1 + sensitivity))
    for n, (kind, condition, bytes_, pinned, feature) in enumerate(questions):
        on_progress(next(done), total, condition)
        own = time.part(1 / (len(questions) - n))
        answers[kind].append(find(condition, bytes_, pinned, own, feature))
    on_progress(next(done), total, "saved values")
    kept = keepings(model, plan.mesh, plan.layout, plan.options, machine, memory)
    varied: dict[str, Any] = {}
    if sensitivity:
        varied = _varied(plan, machine, memory, clock, lambda what: on_progress(next(done), total, what))
    varied |= {kind: tuple(each) for kind, each in answers.items() if kind != "limit"}
    limit = next(iter(answers["limit"]), None)
    more = {"against": other, "alike": alike, "kept": tuple(kept), "proof": proof, **varied}
    return Explained(plan, machine, memory, found, tuple(wrong), limit, **more)


def peak_text(memory: MemoryProfile) -> str:
    """The largest tensors at the peak, and the operation where it is."""
    most = ", ".join(f"{h.what} ({bytes_text(h.bytes)})" for h in memory.holdings[:LARGEST])
    if not memory.points:
        return most
    at = memory.points[memory.at]
    where = "/".join(filter(None, (at.origin.scope, at.name)))
    return f"at {where} in {at.origin.phase}: {most}"


def _other_numbers(plan: Plan, machine: Hardware) -> list[str]:
    """Numbers of the hardware that are not those that the plan was made with, as far as it says these."""
    said, now = plan.data.details.hardware, {path: n.given for path, n in machine.numbers()}
    return [n.path for n in said.numbers if n.path in now and now[n.path] != n.value] if said else []


def _checked(
    plan: Plan, machine: Hardware, limit: float, found: Evaluation, wrong: Sequence[str], clock: Clock
) -> Proof:
    """Rules out every problem of the plan's search once more, or as many as there is time for.

    Raises:
      UserError: a plan that was for memory, claims no proof, or is not what it says.
    """
    asked = plan.question
    if plan.data.details.search is None:
        raise UserError("--check: the plan does not record its search; search again with --out")
    refuse({CHECK: "--check", MEMORY: memory_words(asked.objective)})
    if plan.solver.status != ProofStatus.OPTIMAL:
        raise UserError(
            f"--check: the plan has no proof to check (status: {plan.solver.status}); search again "
            "without a time limit"
        )
    if wrong:
        raise UserError(
            f"--check: the plan disagrees with a new prediction of its layout ({'; '.join(wrong)}); "
            "search again"
        )
    if found.memory.peak > limit:
        raise UserError(
            f"--check: the plan's layout needs {bytes_text(found.memory.peak)}, but the memory limit of its "
            f"search was {bytes_text(limit)}; search again"
        )
    rules = plan.allowed
    problems = certify(found.model, plan, machine, limit, rules, asked.devices, asked.max_axes)
    ruled: list[RuledOut] = []
    complete = clock.within(0.0, lambda: ruled.extend(problems))
    return proof_of(tuple(ruled), rules, considered_by(plan), complete)


def _varied(
    plan: Plan, machine: Hardware, limit: float, clock: Clock, told: Callable[[str], None]
) -> dict[str, Any]:
    """Searches under every changed condition, and prices the alternatives on varied hardware."""
    model, asked = model_of(plan), compared_with(plan, machine)
    curves = sensitivity(model, plan, machine, limit, asked, told, clock)
    told("uncertain hardware")
    return {"curves": curves, "robust": robustness(model, plan, machine, clock=clock)}
