"""The layouts that training software can express: one file per framework, with a `SAYS` of its name.

A framework's prices are in `costmodels.frameworks`. A search under a framework is over its `SAYS` alone, so
its plan is one that the framework can run, and its proof is about no other plans.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules

from costmodels.frameworks import load_framework
from costmodels.frameworks.framework import VERSION
from layoutopt.front_ends import front_end_of
from layoutopt.space.restriction import EVERYTHING, Restriction
from mesh_tf_core.model import Model
from mesh_tf_core.padding import padded as longer


def restriction_of(framework: str) -> Restriction:
    """The restriction of a framework, by the name that `--framework` takes."""
    return of_version(says(load_framework(framework).says), framework)


def of_version(restriction: Restriction, framework: str) -> Restriction:
    """The restriction of the version that a framework's name has."""
    version = load_framework(framework).options().get(VERSION, "") if framework else ""
    return restriction.versions.get(version, restriction)


def says(name: str) -> Restriction:
    """The restriction to what `NAME[@VERSION]` can express; none if nobody says what."""
    name, _, version = name.partition("@")
    module = name.replace("-", "_")
    if module not in {each.name for each in iter_modules(__path__)}:
        return EVERYTHING
    found: Restriction = import_module(f"{__name__}.{module}").SAYS
    return found.versions.get(version, found)


def as_built(framework: str, model: Model) -> Model:
    """The model as a framework writes and pads it; programs of users stay as they are."""
    if getattr(model, "front_end", ""):
        return model
    found = load_framework(framework)
    if written := getattr(model, "written_as", None):
        model = written({name: its.value for name, its in found.choices().items()})
    for dim, its in found.pads.items():
        model = longer(model, dim, its.multiple)
    return model


def differences(framework: str, model: Model, multiplied: str) -> Iterator[str]:
    """How the program that a framework runs differs from a model's own, a sentence each; most products are
    in the type `multiplied`."""
    found, front = load_framework(framework), front_end_of(model)
    before, after = (model.given or model).graph.dims(), model.graph.dims()
    changed = [f"{n} from {max(own):,} to {max(after[n]):,}" for n, own in before.items() if own != after[n]]
    if changed:
        yield f"{found.name} pads {', '.join(changed)}"
    uneven = [n for n, its in found.pads.items() if any(size % its.multiple for size in after.get(n, ()))]
    if uneven and not front:
        own = "the prediction is without, as of models with gradients of their own, such as in float8"
        yield f"{found.name} pads {', '.join(uneven)}: {own}"
    if (runs := found.programs) is None:
        return
    predicted = f"the prediction is of these operations as {found.name} would run them"
    family = getattr(model, "family", "")
    if front is not None and front.name not in runs.libraries:
        own = f"; --framework {model.framework} predicts {front.program} itself"
        yield f"{found.name} does not run {front.program}: {predicted}{own}"
    elif family and runs.families is not None and family not in runs.families:
        yield f"{found.name} has no model of the family {family!r}: {predicted}"
    if runs.dtype and multiplied == "float32":
        how = "--set dtype=bfloat16" if front is None else front.half
        own = f"unless its {runs.setting} says otherwise, this program in {multiplied}, as predicted"
        yield f"{found.name} multiplies in {runs.dtype} {own}; to plan {runs.dtype}: {how}"
