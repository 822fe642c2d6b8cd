"""The equations of a function that runs again, each with its imported equation: the visitor of jaxprs that
`constrain` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from layoutopt.importers.arrays.contract import Equation, Operand
from layoutopt.importers.jax.internals import jax_module, without_dead
from layoutopt.importers.jax.interpreter import Site, differs

Ref = int
"""A value of the running function: it has a number of its own, also if one jaxpr is called twice."""


@dataclass(frozen=True)
class KnownValue:
    """A value that is there before the function runs."""

    value: Any


ReplayedValue = Ref | KnownValue


@dataclass(frozen=True)
class ReplayedEquation:
    """One equation of the function that runs.

    Attributes:
      equations: imported equations of it; several if a function of JAX runs unchanged.
    """

    site: Site
    equations: tuple[Equation, ...]
    ins: tuple[ReplayedValue, ...]
    outs: tuple[Ref, ...]


class ReplayVisitor:
    """Lists the equations to run, in order.

    Attributes:
      rest: imported equations that were not matched yet.
      refs: numbers for new values.
      values: value -> imported value; filled during the run.
    """

    def __init__(self, rest: Iterator[Equation], refs: Iterator[Ref], values: dict[Ref, Operand]) -> None:
        self.rest, self.refs, self.values = rest, refs, values
        self.steps: list[ReplayedEquation] = []

    def constant(self, value: Any, aval: Any) -> ReplayedValue:
        return KnownValue(value)

    def equation(self, site: Site, ins: Sequence[ReplayedValue]) -> Sequence[ReplayedValue]:
        e = next(self.rest, None)
        if e is None or e.prim != site.name:
            raise differs(
                f"the imported function {f'has {e.prim} at {e.where}' if e else 'ends'}, but this function "
                f"has {site.name}"
            )
        outs = self._step(site, (e,), ins)
        self.values.update(zip(outs, e.outs, strict=True))
        return outs

    def call(
        self, site: Site, ins: Sequence[ReplayedValue], inline: Callable[[], Sequence[ReplayedValue]]
    ) -> Sequence[ReplayedValue]:
        if site.own:
            # JAX's own function with its own derivative runs as it is.
            before = len(self.steps)
            inline()
            inside = self.steps[before:]
            del self.steps[before:]
            return self._step(site, [e for s in inside for e in s.equations], ins)
        return self.equation(site, ins) if site.name == "custom" else inline()

    def _step(self, site: Site, equations: Sequence[Equation], ins: Sequence[ReplayedValue]) -> list[Ref]:
        outs = [next(self.refs) for _ in site.eqn.outvars]
        self.steps.append(ReplayedEquation(site, tuple(equations), tuple(ins), tuple(outs)))
        return outs


def retraced(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
    """The closed jaxpr of fn(*args) as the importer reads it, and the tree of its results."""
    jax = jax_module()
    types = jax.tree_util.tree_map(
        lambda x: jax.ShapeDtypeStruct(np.shape(x), jax.dtypes.result_type(x)), tuple(args)
    )
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*types)
    return without_dead(closed), jax.tree_util.tree_structure(shapes)


def bind(eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
    """Runs an equation unchanged and returns its results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    # Older versions give the functions of a call apart.
    functions, params = params if isinstance(params, tuple) else ((), params)
    found = eqn.primitive.bind(*functions, *ins, **params)
    return found if eqn.primitive.multiple_results else [found]


def bind_scan(eqn: Any, inner: Any, body: Callable[..., Any], ins: Sequence[Any]) -> Sequence[Any]:
    """The results of a loop with another body for the variables of `inner`."""
    jax = jax_module()
    types = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.jaxpr.invars]
    closed = jax.make_jaxpr(body)(*types)
    found: Sequence[Any] = eqn.primitive.bind(*ins, **{**eqn.params, "jaxpr": closed})
    return found
