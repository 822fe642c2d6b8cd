"""Walks over a jaxpr with calls inlined; a visitor interprets its equations.

`reader` writes them as plain data, `replay` lists them to run again. Both visitors see the same equations
under the same names, in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from layoutopt.importers.arrays.contract import KEY
from layoutopt.importers.jax.internals import called, is_jax_own, is_literal, place_of, scope_of, type_of
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
    visitor: JaxprVisitor[V],
    closed: Any,
    ins: Sequence[V],
    whole: Any = None,
    scope: str = "",
    where: str = "",
) -> list[V]:
    """Visits the equations of a closed jaxpr; its results.

    Args:
      whole: the same function of the whole batch, whose numbers are used: a mean over a part of the batch
        divides by the size of the whole.
      scope, where: scope and location of the call whose body the jaxpr is.

    Raises:
      UserError: the function has other equations than `whole`.
    """
    jaxpr, same = closed.jaxpr, closed.jaxpr if whole is None else whole.jaxpr
    if len(jaxpr.eqns) != len(same.eqns):
        raise differs("its operations for part of a batch differ from those for the whole batch")
    consts = zip(jaxpr.constvars, closed.consts, strict=True)
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
