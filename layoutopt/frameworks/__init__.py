"""The layouts that training software can express: one file per framework, with a `SAYS` of its name.

A framework's prices are in `costmodels.frameworks`. A search under a framework is over its `SAYS` alone, so
its plan is one that the framework can run, and its proof is about no other plans.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from costmodels.frameworks import load_framework
from layoutopt.front_ends import FRONT_ENDS
from layoutopt.space.restriction import EVERYTHING, Restriction
from mesh_tf_core.model import Model
from mesh_tf_core.padding import padded as longer


def restriction_of(framework: str) -> Restriction:
    """The restriction of a framework, by the name that `--framework` takes."""
    return says(load_framework(framework).says)


def says(name: str) -> Restriction:
    """The restriction to what a framework can express; none if nobody says what."""
    module = name.replace("-", "_")
    if module not in {each.name for each in iter_modules(__path__)}:
        return EVERYTHING
    found: Restriction = import_module(f"{__name__}.{module}").SAYS
    return found


def padded(framework: str, model: Model) -> Model:
    """The model with the dimensions that a framework pads; programs of users stay as they are."""
    pads = {} if getattr(model, "front_end", "") else load_framework(framework).pads
    for dim, its in pads.items():
        model = longer(model, dim, its.multiple)
    return model


def padding_note(framework: str, model: Model) -> str:
    """The dimensions of a padded model, in words; "" if it is none."""
    before, after = (model.given or model).graph.dims(), model.graph.dims()
    changed = [f"{n} from {max(own):,} to {max(after[n]):,}" for n, own in before.items() if own != after[n]]
    return f"{load_framework(framework).name} pads {', '.join(changed)}" if changed else ""


def type_note(framework: str, model: Model, multiplied: str) -> str:
    """That a framework would multiply in another type than the program, unless it is told; "" if not."""
    found, front = load_framework(framework), FRONT_ENDS.get(getattr(model, "front_end", ""))
    runs = found.programs
    if runs is None or not runs.dtype or multiplied != "float32":
        return ""
    how = "--set dtype=bfloat16" if front is None else front.half
    return (
        f"{found.name} multiplies in {runs.dtype} unless its {runs.setting} says otherwise, this program in "
        f"{multiplied}, as predicted; to plan {runs.dtype}: {how}"
    )


def runs_another(framework: str, model: Model) -> str:
    """How the program that a framework runs differs from a model's own; "" if it runs that."""
    found, front = load_framework(framework), FRONT_ENDS.get(getattr(model, "front_end", ""))
    runs, family = found.programs, getattr(model, "family", "")
    if runs is None:
        return ""
    predicted = f"the prediction is of these operations as {found.name} would run them"
    if front is not None and front.name not in runs.libraries:
        own = f"; --framework {model.framework} predicts {front.program} itself"
        return f"{found.name} does not run {front.program}: {predicted}{own}"
    if family and runs.families is not None and family not in runs.families:
        return f"{found.name} has no model of the family {family!r}: {predicted}"
    return ""
