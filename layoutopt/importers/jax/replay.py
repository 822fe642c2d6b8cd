"""Running a traced function again, equation by equation, in the order in which `internals` reads it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from layoutopt.importers.jax import internals
from layoutopt.importers.jax.equations import KEY, Equation


class Calls:
    """The interface to JAX's own equations."""

    def __init__(self) -> None:
        self.jax = internals.jax_module()
        self.reader = internals.JaxprReader(self.jax)

    def traced(self, fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Any, Any]:
        """The closed jaxpr of fn(*args) as the importer reads it, and the tree of its results."""
        types = self.jax.tree_util.tree_map(
            lambda x: self.jax.ShapeDtypeStruct(np.shape(x), self.jax.dtypes.result_type(x)), tuple(args)
        )
        closed, shapes = self.jax.make_jaxpr(fn, return_shape=True)(*types)
        return internals.without_dead(closed), self.jax.tree_util.tree_structure(shapes)

    def is_literal(self, x: Any) -> bool:
        return isinstance(x, self.reader.core.Literal)

    def literal(self, x: Any, whole: Any) -> Any:
        """The number of a part of the batch, or where they differ that of the whole."""
        return whole.val if self.is_literal(whole) and not whole.aval.shape else x.val

    def name(self, eqn: Any) -> str:
        """The importer's name of an equation."""
        name = str(eqn.primitive.name)
        if name in internals.CALLS:
            return internals.RANDOM.get(str(eqn.params.get("name", "")), name)
        return "custom" if name in internals.CUSTOM else name

    def kind(self, eqn: Any) -> str:
        """inline: its body's equations stand for it; kept: they do, but it runs as it is; one: itself."""
        name = str(eqn.primitive.name)
        if name in internals.CALLS:
            random = str(eqn.params.get("name", "")) in internals.RANDOM and self._keyed(eqn)
            return "one" if random else "inline"
        if name == "custom_jvp_call" and internals.is_jax_own(self.inner(eqn)):
            return "kept"
        return "one"

    def _keyed(self, eqn: Any) -> bool:
        return bool(eqn.invars) and self.reader.dtype(eqn.invars[0].aval) in (KEY, "uint32")

    def inner(self, eqn: Any) -> Any:
        """The closed jaxpr of a call."""
        return self.reader.called(eqn.params)

    def scanned(self, eqn: Any) -> Any:
        """The closed jaxpr of a loop's body."""
        return internals.without_dead(eqn.params["jaxpr"])

    def count(self, eqn: Any) -> int:
        """How many equations the importer reads of a call."""
        found: list[Equation] = []
        inner = self.inner(eqn)
        self.reader.inline(found, inner, [self.reader.var(v) for v in inner.jaxpr.invars], "", "")
        return len(found)

    def bind(self, eqn: Any, ins: Sequence[Any]) -> Sequence[Any]:
        """The results of an equation as it is."""
        params = eqn.primitive.get_bind_params(eqn.params)
        # Older versions give the functions of a call apart.
        functions, params = params if isinstance(params, tuple) else ((), params)
        found = eqn.primitive.bind(*functions, *ins, **params)
        return found if eqn.primitive.multiple_results else [found]

    def bind_scan(self, eqn: Any, inner: Any, body: Callable[..., Any], ins: Sequence[Any]) -> Sequence[Any]:
        """The results of a loop with another body."""
        types = [self.jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in inner.jaxpr.invars]
        closed = self.jax.make_jaxpr(body)(*types)
        found: Sequence[Any] = eqn.primitive.bind(*ins, **{**eqn.params, "jaxpr": closed})
        return found
