"""Settings in force for everything added to a graph next: names, phases, how variables are made,
and the lines of the model's own code that add it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.initializers import Initial, Initializer, Variable, initializer
from mesh_tf_core.ir.phase import Phase

Change = Callable[[str, Initializer], Initial]
Inside = AbstractContextManager[None]


@contextmanager
def having(what: object, **values: Any) -> Iterator[None]:
    """Attributes of an object have other values for what is done inside."""
    saved = {name: getattr(what, name) for name in values}
    vars(what).update(values)
    try:
        yield
    finally:
        vars(what).update(saved)


class Scopes:
    """The part of a graph that its context managers set, and the variables that are made under it."""

    name: str
    float8_loops: str = ""
    """The float8 recipe of layers in loops."""

    def __init__(self) -> None:
        self.variables: dict[str, Variable] = {}
        self._scope: list[str] = []
        self._phase = Phase.FORWARD
        self._named: str | None = None
        self._call = ""
        self._shared: int | None = None
        self._around: int | None = None
        self._frozen = False
        self._float8 = ""
        self._initial: tuple[Change, ...] = ()

    @property
    def _loops(self) -> Sequence[object]:
        """The loops around new operations, whose dimensions new variables have."""
        raise NotImplementedError

    def path(self, name: str) -> str:
        """The whole name of something below the current scope."""
        return "/".join([*self._scope, name])

    def scope(self, name: str) -> Inside:
        """Operations built inside are reported under this name; variables' names begin with it."""
        return having(self, _scope=[*self._scope, name])

    def phase(
        self, name: Phase | str, scope: str | None = None, named: str | None = None, call: str = ""
    ) -> Inside:
        """Marks operations as backward or update; `scope` replaces the path of names, `named` is the name of
        the operation that they belong to, and `call` is as of `in_call`. UserError if it is no phase."""
        if name not in {*Phase}:
            raise UserError(f"unknown phase {name!r}; {known_names(name, Phase)}")
        path = [scope] if scope else ([] if scope == "" else self._scope)
        return having(self, _phase=Phase(name), _scope=path, _named=named, _call=call)

    def in_call(self, call: str) -> Inside:
        """Operations built inside are what one call of a library computes, which has a kernel for all of
        them; "": each is a call of its own."""
        return having(self, _call=call)

    def sharing(self) -> Inside:
        """Variables made inside are shared: a loop opened inside has one value for all its iterations, and a
        name that is made again is the same variable. So one block is applied again and again:

            with graph.sharing():
                x = mtf.scan(block, x, Dim("steps", 6))
        """
        return having(self, _shared=len(self._loops) if self._shared is None else self._shared)

    def again(self) -> Inside:
        """Model code that has run before, once more: a variable that exists is the same one, whatever loops
        were opened around this since. So one layer stack is used for whole texts and, in a loop, for one
        position at a time (see `decoding`)."""
        return having(self, _around=len(self._loops))

    def frozen(self) -> Inside:
        """Variables made inside are stored but not trained, such as those of a teacher."""
        return having(self, _frozen=True)

    def float8(self, recipe: str = "tensor") -> Inside:
        """Layers built inside multiply by their weights in float8 (see `mtf.float8_einsum`); norms, softmax,
        routers and attention itself stay as they are. "" is no recipe."""
        return having(self, _float8=recipe)

    @property
    def in_float8(self) -> str:
        """The recipe by which layers multiply by their weights; "": in their own dtype."""
        return self._float8 or (self.float8_loops if self._loops else "")

    def initialized(self, change: Change) -> Inside:
        """Variables made inside start with the initializer that change(whole name, default initializer)
        returns."""
        return having(self, _initial=(change, *self._initial))

    def _changed(self, name: str, given: Initial) -> Initializer:
        """A new variable's initializer, changed from the innermost `initialized` to the outermost."""
        found = initializer(f"variable {name!r}", given)
        for change in self._initial:
            found = initializer(f"variable {name!r}", change(name, found))
        return found

    def lookup(self, name: str) -> Variable:
        """The variable of this name below the current scope, or of this whole name."""
        below = self.path(name)
        if below in self.variables:
            return self.variables[below]
        if name not in self.variables:
            raise UserError(
                f"graph {self.name!r} has no variable {name!r}; {known_names(name, self.variables)}"
            )
        return self.variables[name]

    def _shared_one(self, asked: Variable) -> Variable | None:
        """The variable of the name of one that is asked for; UserError if it may not stand for both."""
        found = self.variables.get(asked.name)
        if found is not None and self._shared is None and self._around is None:
            raise UserError(
                f"variable {asked.name!r} already exists; choose another name, use the existing "
                "variable's tensor, or make both inside graph.sharing()"
            )
        if found is not None and found.type != asked.type:
            raise UserError(
                f"variable {asked.name!r} is shared, but was made with type {found.type} and is now "
                f"requested with type {asked.type}; choose another name"
            )
        return found


MOST = 16
"""Frames that are looked through: an operation of a layer is a few calls below the model's line."""
_ROOT = Path(__file__).resolve().parents[2]
OURS = tuple(f"{_ROOT / name}/" for name in ("mesh_tf_core", "costmodels", "layoutopt"))


def caller() -> str:
    """'file:line' of the nearest caller outside of these packages; '' if none is near."""
    frame = sys._getframe(1)
    for _ in range(MOST):
        file = frame.f_code.co_filename
        if not file.startswith(OURS):
            return f"{file}:{frame.f_lineno}"
        if frame.f_back is None:
            break
        frame = frame.f_back
    return ""
