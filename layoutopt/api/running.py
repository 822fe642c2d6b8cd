"""Runs layouts and compares with their predictions; compiles a layout with the real TPU compiler."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from costmodels.calibration.runner import OnProbe
from costmodels.hardware import Hardware, load_hardware, machine_of
from layoutopt.analysis import validate as validation
from layoutopt.analysis.validate import ValidationRuns
from layoutopt.analysis.verify import Verified, generation
from layoutopt.analysis.verify import verify as compiled
from layoutopt.api.pricing import HARDWARE, PricedLayout
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.plan.build import Plan
from layoutopt.plan.evidence import Validation
from layoutopt.plan.notebook import Shown, table
from layoutopt.plan.units import plural, share_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.exclusions import VERIFY, refuse
from layoutopt.space.keywords import gathered
from mesh_tf_core.errors import UserError
from mesh_tf_core.exclusions import REPLICAS
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.model import Model


@dataclass(frozen=True, repr=False)
class Validated(Shown):
    """The measured and predicted times of layouts."""

    found: Validation

    @property
    def data(self) -> Validation:
        """The result that `layoutopt validate --json` prints."""
        return self.found

    def to_frame(self) -> Any:
        """A pandas DataFrame with one row per layout."""
        return table([row.model_dump() for row in self.data.rows])

    def __repr__(self) -> str:
        d = self.data
        known = [("error", d.mape), ("regret", d.regret)]
        said = [f"{name} {share_text(value, 1)}" for name, value in known if value is not None]
        return f"Validated({', '.join([plural(len(d.timed), 'layout'), *said])})"


def validate(
    model: Model,
    mesh: Mesh | str,
    hardware: str | Hardware = HARDWARE,
    layouts: Sequence[Layout | str] | None = None,
    runs: ValidationRuns | None = None,
    on_progress: OnProbe | None = None,
    framework: str | None = None,
    **more: Any,
) -> Validated:
    """Runs layouts of a model on this machine and compares measured with predicted times.

    Args:
      model: the model to run.
      mesh: a mesh, or its axes such as "data:4".
      hardware: the hardware for the predictions; `cpu-local` means this machine's calibrated profile, if
        there is one.
      layouts: at least two layouts to run (None: the best layout, named layouts and random layouts).
      runs: the number of layouts and steps, the engine and the input.
      on_progress: called before each layout.
      framework: the training software that is predicted (None: the model's own).
      more: fields of `ValidationRuns`, such as `steps=20`, which override `runs`.

    Raises:
      UserError: fewer than two layouts are given, or a layout is illegal.
    """
    if isinstance(layouts, str):
        raise UserError(f"layouts {layouts!r}: pass a list of at least two layouts")
    (how,) = gathered("validate", more, (ValidationRuns, runs))
    found = validation.validate(
        model, mesh, machine_of(hardware, framework, model.framework), layouts, how, on_progress
    )
    return Validated(found)


def verify(
    priced: Plan | PricedLayout,
    topology: str,
    time_limit: float | Clock | None = None,
    on_progress: Callable[[str], object] = lambda text: None,
) -> Verified:
    """Compiles a layout with the TPU compiler and compares collectives, peak memory and step time with the
    prediction. No TPU is needed.

    Args:
      priced: a result of `cost` or `search`.
      topology: the compiler's name for a slice with as many devices as the mesh, such as "v5e:2x4".
      time_limit: seconds for the compilation (None: no limit); after it, the result has the predictions only.
      on_progress: called with what begins, and every 15 seconds with how long it has taken.

    Raises:
      UserError: JAX or libtpu is missing, the topology is unknown or its number of devices differs from
        the mesh's, or the layout has replicas.
    """
    if not isinstance(priced, Plan | PricedLayout):
        raise UserError(
            f"verify {priced!r}: pass a result of layoutopt.search or layoutopt.cost, or "
            "load_plan(path).of(model)"
        )
    machine = load_hardware(generation(topology).hardware)
    if isinstance(priced, PricedLayout):
        of = priced.evaluation
        model, mesh, layout = of.model, of.program.mesh, of.layout
    else:
        model, mesh, layout = model_of(priced), priced.mesh, priced.layout
    options, own = priced.options, getattr(model, "step_on", None)
    refuse({VERIFY: "verify", REPLICAS: "" if options.diloco is None else f"--diloco {options.diloco}"})
    step = own and (lambda devices: own(mesh, layout, options, devices))
    clock = Clock.of(time_limit)
    known = priced.evaluation if isinstance(priced, PricedLayout) else None
    if known is None or known.prices.hardware != machine:
        known = evaluate(model, mesh, layout, machine, options)
    return compiled(known, topology, machine, step, clock, on_progress)


def model_of(plan: Plan) -> Model:
    """The model of a plan; it must be loaded."""
    if plan.model is None:
        raise UserError("a plan from a file has no model; attach a model with load_plan(path).of(model)")
    return plan.model
