"""The layouts that training software can express: one file per framework, with a `SAYS` of its name.

A framework's prices are in `costmodels.frameworks`. A search under a framework is over its `SAYS` alone, so
its plan is one that the framework can run, and its proof is about no other plans.
"""

from __future__ import annotations

from importlib import import_module
from pkgutil import iter_modules

from costmodels.frameworks import load_framework
from layoutopt.space.restriction import EVERYTHING, Restriction


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
