"""The first screen: which layout, how fast, does it fit, how accurate, proven or not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from layoutopt.plan.details import Proof, sources_text
from layoutopt.plan.evidence import CalibrationEvidence, Validation, typical_of
from layoutopt.plan.known import Known
from layoutopt.plan.schema import PlanFile
from layoutopt.plan.training import lasts, money_text
from layoutopt.plan.units import (
    bytes_text,
    count,
    number,
    percent,
    plural,
    seconds_text,
    shorten,
    some,
    step_change,
    times_text,
)
from reports.plan import dims_on
from reports.theme import axis_token
from reports.views import facts as told
from reports.views.choices import best_alternative
from reports.views.view import AxisTag

GOOD_ERROR = 0.15
"""Mean error up to which predictions distinguish most layouts."""
ENOUGH = 3
"""Number of published steps from which their mean error is meaningful."""
BAD_ERROR = 0.5
"""Mean error from which a predicted time is unreliable."""


@dataclass(frozen=True)
class PageAnswer:
    """One question of the first screen.

    Attributes:
      state: 'good', 'warn', 'bad' or '' (neither).
      share: filled part of a meter, above 1 when too much; None draws none.
    """

    question: str
    value: str
    note: str
    state: str = ""
    share: float | None = None


@dataclass(frozen=True)
class AxisUse:
    """A mesh axis, the dimensions split over it, and the usual name of that parallelism."""

    chip: AxisTag
    size: int
    dims: str
    form: str


def axis_uses(plan: PlanFile, most: int = 5) -> tuple[AxisUse, ...]:
    """The uses of every axis, in words that fit one line or two."""
    return tuple(
        AxisUse(
            AxisTag(shorten(axis, 32), axis_token(axis, plan.mesh)),
            size,
            some(dims_on(plan, axis), most, 24),
            shorten(parallelism_text(plan.details.parallelism.get(axis, "")), 64),
        )
        for axis, size in plan.mesh.items()
    )


PARALLEL = ("data", "tensor", "expert", "pipeline", "context", "sequence")
"""Forms whose usual name ends in parallelism."""


def parallelism_text(forms: str) -> str:
    """The usual name for the use of an axis: 'data parallelism (FSDP)', 'tensor + expert parallelism'."""
    *others, last = forms.split(" + ")
    name, paren, stored = last.partition(" (")
    return " + ".join([*others, f"{name} parallelism{paren}{stored}"]) if name in PARALLEL else forms


def run(plan: PlanFile) -> tuple[PageAnswer, ...]:
    """The training run: its model, time and cost, as far as the plan states them."""
    p, found = plan.predicted, []
    examples = round((p.examples_per_second or 0.0) * p.step_seconds)
    tokens = round((p.tokens_per_second or 0.0) * p.step_seconds)
    if examples:
        parts = f" in {plan.microbatches} microbatches" if plan.microbatches > 1 else ""
        said = f"{tokens:,} tokens" if tokens else "examples"
        found.append(PageAnswer("Batch", f"{examples:,}", f"{said} per step{parts}"))
    if examples and tokens and tokens % examples == 0:
        found.append(PageAnswer("Length", f"{tokens // examples:,}", "tokens per example"))
    if dtype := _dtype(plan):
        found.append(PageAnswer("Data type", dtype, "of most parameters"))
    if (cost := plan.training) is not None:
        if cost.tokens:
            found.append(PageAnswer("How long", lasts(cost.seconds), cost.words))
        hours = f"{number(cost.chip_hours)} chip-hours"
        rate = f"{hours} at {cost.price:g} each" if cost.price is not None else "no price given"
        rate += "" if cost.tokens else "; for one hour of training"
        found.append(PageAnswer("Cost", hours if cost.money is None else money_text(cost.money), rate))
    return tuple(found)


def _dtype(plan: PlanFile) -> str:
    """In which most bytes of the parameters are; as the model says where the plan has no variables."""
    held: Counter[str] = Counter()
    for v in plan.details.variables:
        if v.kind == "parameter":
            held[v.dtype] += int(v.bytes)
    told = plan.model.hparams.get("dtype")
    return held.most_common(1)[0][0] if held else shorten(told, 24) if isinstance(told, str) else ""


def answers(plan: PlanFile) -> tuple[PageAnswer, ...]:
    """Everything but the layout itself, which is drawn."""
    return (speed(plan), fit(plan), accuracy(plan), proof(plan))


def speed(plan: PlanFile) -> PageAnswer:
    """Step time, and how much faster it is than the alternatives."""
    p, other = plan.predicted, best_alternative(plan)
    kernels = (
        "" if p.host_seconds is None else f" to launch kernels that take {seconds_text(p.device_seconds)}"
    )
    said = note = f"per step, predicted{kernels}" + (f" ({p.speed})" if p.speed else "")
    if other is not None and other.ratio is not None:
        name = shorten(other.names, 36)
        note = (
            f"{said}; the next best layout, {name}, takes {step_change(other.ratio, 1.0)}"
            if other.ratio >= 1
            else f"{said}; {name} is predicted to take only {times_text(other.ratio)} this time"
        )
    elif plan.alternatives and all(a.feasible is False for a in plan.alternatives):
        note = f"{said}; no alternative fits in memory"
    state = "warn" if other is not None and other.ratio is not None and other.ratio < 0.999 else ""
    return PageAnswer("How fast", seconds_text(p.step_seconds), note, state)


def fit(plan: PlanFile) -> PageAnswer:
    """Peak memory against the limit."""
    peak, limit = plan.predicted.peak_memory_bytes, plan.memory_limit
    question = "Does it fit"
    if limit is None:
        return PageAnswer(
            question,
            bytes_text(peak),
            "peak memory per device; the plan does not record how much memory a device has",
            "warn",
        )
    share = peak / limit if limit else 2.0
    if peak > limit:
        helps = (
            f"; {plural(len(found), 'change')} below would make it fit"
            if (found := plan.details.repairs)
            else ""
        )
        note = f"the plan needs {bytes_text(peak)}, but a device has {bytes_text(limit)}{helps}"
        return PageAnswer(question, "No", note, "bad", share)
    used = f"{bytes_text(peak)} of {bytes_text(limit)} ({percent(share)}) on the fullest device"
    if doubt := plan.known.barely(peak, limit, plan.predicted.usable_memory_bytes):
        return PageAnswer(question, "Barely", f"{used}; {doubt}", "warn", share)
    return PageAnswer(question, "Yes", used, "good", share)


def accuracy(plan: PlanFile) -> PageAnswer:
    """The evidence behind the predictions: measurements of steps, a calibration, or published numbers; and
    whether the answer stays the fastest within their uncertainty."""
    found = _measured(plan)
    robust = plan.details.robustness
    said = told.robust(robust) if robust is not None else ""
    if robust is None or not said:
        return found
    state = "warn" if robust.close and found.state == "good" else found.state
    return replace(found, note=f"{found.note}; {said}", state=state)


def _measured(plan: PlanFile) -> PageAnswer:
    question = "How accurate"
    checked, calibration = plan.details.validation, plan.details.calibration
    if checked is not None and checked.timed and checked.mape is not None:
        return _validated(plan, checked, checked.mape)
    if calibration is not None and calibration.samples:
        return PageAnswer(
            question, "Calibrated", f"{fit_words(calibration)}; no whole training step was measured", "warn"
        )
    hardware = plan.details.hardware
    if hardware is not None and hardware.known.words:
        return _known(hardware.known)
    if hardware is not None and hardware.numbers:
        note = f"based on {sources_text(hardware.numbers)}"
        return PageAnswer(question, "Not measured", note, "warn")
    return PageAnswer(question, "Not measured", "this plan records neither measurements nor sources", "warn")


def _known(known: Known) -> PageAnswer:
    """What is known of predictions for this hardware, where no step of this model was measured."""
    question, runs = "How accurate", known.runs
    if runs is None:
        value = "Only compiled" if known.compiler is not None else "No run alike"
        return PageAnswer(question, value, known.words, "warn")
    good = runs.rows >= ENOUGH and runs.mean <= GOOD_ERROR
    return PageAnswer(question, f"±{percent(runs.mean)}", known.words, "good" if good else "warn")


def _validated(plan: PlanFile, checked: Validation, error: float) -> PageAnswer:
    worst = max(abs(r.predicted_seconds / r.measured_seconds - 1) for r in checked.timed)
    parts = [f"mean error over {plural(len(checked.timed), 'measured layout')} (worst {percent(worst)})"]
    if checked.regret is not None:
        parts.append(
            "the predicted best layout was the fastest measured"
            if checked.regret <= 0
            else (f"the predicted best layout was {percent(checked.regret)} slower than the fastest measured")
        )
    other = best_alternative(plan)
    close = other is not None and other.ratio is not None and 1 <= other.ratio < 1 + error
    if close:
        parts.append("the next best layout is closer than this error, so measure both")
    if error > BAD_ERROR:
        return PageAnswer("How accurate", f"{percent(error)} off", "; ".join(parts), "bad")
    state = "good" if error <= GOOD_ERROR and not close else "warn"
    return PageAnswer("How accurate", f"±{percent(error)}", "; ".join(parts), state)


def fit_words(found: CalibrationEvidence) -> str:
    """The error of a calibration's fit on held-out measurements, or the fact that there are none."""
    fitted, unseen = typical_of(found, held_out=False), typical_of(found, held_out=True)
    words = f"fitted to {plural(sum(not s.held_out for s in found.samples), found.of)}"
    if unseen is not None:
        return f"{words}; {_off(found, unseen, held_out=True)} on held-out operations"
    return f"{words}, {_off(found, fitted, held_out=False)}" if fitted is not None else words


def _off(found: CalibrationEvidence, middle: float, held_out: bool) -> str:
    worst = max(abs(s.residual) for s in found.samples if s.held_out == held_out)
    return f"median error {percent(middle)}, worst {percent(worst)}"


def proof(plan: PlanFile) -> PageAnswer:
    """The solver's proof, and never more."""
    found = told.proof(plan, plan.space.names if plan.space else "")
    note = "; ".join((found.words, *found.more))
    answer = PageAnswer("Proven or not", found.value, note, found.state)
    return _checked(answer, plan.details.proof) if found.state == "good" else answer


def _checked(answer: PageAnswer, check: Proof | None) -> PageAnswer:
    """The proof after it was looked at a second time, without a solver."""
    if check is None:
        return answer
    if check.refuted:
        return replace(
            answer, value="Refuted", note=f"a check of the proof failed: {check.words}", state="bad"
        )
    again = (
        "the proof was verified without a solver"
        if check.verified
        else (f"check of the proof: {check.words}")
    )
    return replace(answer, note=f"{answer.note}; {again}")


def subject(plan: PlanFile) -> str:
    """The subject of the plan: which model on which devices."""
    parts = [f"{count(plan.model.parameters)} parameters"] if plan.model.parameters else []
    hardware = shorten(plan.hardware, 48)
    parts.append(
        f"{plural(plan.devices, 'device')} of {hardware}" if hardware else plural(plan.devices, "device")
    )
    return " on ".join(parts)
