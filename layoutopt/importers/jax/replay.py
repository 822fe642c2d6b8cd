"""The equations of a function that runs again, each with its imported equation: the visitor of jaxprs that
`constrain` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np

from layoutopt.importers.arrays.contract import KEY, Equation, Operand
from layoutopt.importers.jax.internals import (
    called,
    is_jax_own,
    is_literal,
    jax_module,
    place_of,
    scope_of,
    type_of,
    without_dead,
)
from mesh_tf_core.errors import UserError
from mesh_tf_core.tables import words

CALLS = words("jit pjit closed_call core_call call remat2 checkpoint remat core_closed_call")
RANDOM = {"_uniform": "random_uniform", "_normal_real": "random_normal", "_normal": "random_normal"}
"""Functions of jax.random that are taken as a whole."""
CUSTOM = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr")
"""Functions with custom derivatives."""

V = TypeVar("V")


@dataclass(frozen=True)
class Site:
    """An equation with its location.

    Attributes:
      eqn: JAX's own.
      whole: the same equation of the whole batch, where a function of a part of it is walked.
      name: the importer's name of it; "custom" if it has a custom derivative.
      inner: the closed jaxpr of a call, None for an operation.
      own: a function of JAX whose custom derivative equals that of its operations except for rounding.
      scope: names that the model's library gave; where: file and line of the user's code.
    """

    eqn: Any
    whole: Any
    name: str
    inner: Any = None
    own: bool = False
    scope: str = ""
    where: str = ""


class JaxprVisitor(Protocol[V]):
    """The meaning of a jaxpr's values and equations."""

    def constant(self, value: Any, aval: Any) -> V:
        """A number or an array that the jaxpr contains."""

    def equation(self, site: Site, ins: Sequence[V]) -> Sequence[V]:
        """The results of an operation."""

    def call(self, site: Site, ins: Sequence[V], inline: Callable[[], Sequence[V]]) -> Sequence[V]:
        """The results of a call; `inline` visits the equations of its body."""


def interpret(
    visitor: JaxprVisitor[V], body: Any, ins: Sequence[V], whole: Any = None, scope: str = "", where: str = ""
) -> list[V]:
    """Visits the equations of a closed jaxpr, `body`; its results.

    Args:
      whole: the same function of the whole batch, whose numbers are used: a mean over a part of the batch
        divides by the size of the whole.
      scope, where: scope and location of the call whose body the jaxpr is.

    Raises:
      UserError: the function has other equations than `whole`.
    """
    jaxpr, same = body.jaxpr, body.jaxpr if whole is None else whole.jaxpr
    if len(jaxpr.eqns) != len(same.eqns):
        raise differs("its operations for part of a batch differ from those for the whole batch")
    consts = zip(jaxpr.constvars, body.consts, strict=True)
    known: dict[Any, V] = {v: visitor.constant(value, v.aval) for v, value in consts}
    known.update(zip(jaxpr.invars, ins, strict=True))

    def read(x: Any, of_whole: Any) -> V:
        if not is_literal(x):
            return known[x]
        shared = is_literal(of_whole) and not of_whole.aval.shape
        return visitor.constant(of_whole.val if shared else x.val, x.aval)

    for eqn, alike in zip(jaxpr.eqns, same.eqns, strict=True):
        operands = [read(x, y) for x, y in zip(eqn.invars, alike.invars, strict=True)]
        site = _site(eqn, alike, "/".join(filter(None, (scope, scope_of(eqn)))), place_of(eqn) or where)
        outs = _visited(visitor, site, operands)
        known.update(zip(eqn.outvars, outs, strict=True))
    return [read(x, x) for x in jaxpr.outvars]


def _visited(visitor: JaxprVisitor[V], site: Site, ins: Sequence[V]) -> Sequence[V]:
    if site.inner is None:
        return visitor.equation(site, ins)

    def inline() -> Sequence[V]:
        whole = called(site.whole.params)
        return interpret(visitor, site.inner, ins, whole, site.scope, site.where)

    return visitor.call(site, ins, inline)


def _site(eqn: Any, whole: Any, scope: str, where: str) -> Site:
    name = str(eqn.primitive.name)
    if name in CALLS:
        random = RANDOM.get(str(eqn.params.get("name", "")))
        if random and eqn.invars and type_of(eqn.invars[0].aval) in (KEY, "uint32"):
            return Site(eqn, whole, random, scope=scope, where=where)
        return Site(eqn, whole, name, called(eqn.params), False, scope, where)
    if name in CUSTOM:
        inner = called(eqn.params)
        own = name == "custom_jvp_call" and is_jax_own(inner)
        return Site(eqn, whole, "custom", inner, own, scope, where)
    return Site(eqn, whole, name, scope=scope, where=where)


def differs(how: str) -> UserError:
    """The error of a function that is not the one that was imported."""
    return UserError(
        f"plan.jax: this function is not the one that from_jax imported: {how}; import this function with "
        "from_jax and search again"
    )


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
