"""The cache of decoding: keys, values and states that layers keep while a text grows, position by position.

A model's function `logits(tokens, cache)` runs in three modes, with the same code and the same variables:

  cache = None                whole texts [.., length], as in training
  cache.position is None      whole prompts; every layer leaves what it remembers with `put`
  cache.position = t          one position [..]; every layer takes what it remembers with `get`, and puts the
                              new state where it changes

The second happens once, before the loop over positions; the third is the loop's body.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.tracing.scan import scan


@dataclass(frozen=True)
class CachedState:
    """A value that a layer stores between positions.

    Attributes:
      changes: True if each position changes it; False for values of an encoder, which stay.
      loops: numbers of the model's `scan`s around it, outermost first; the tensor has their dimensions first.
    """

    value: Tensor
    changes: bool
    loops: tuple[int, ...]

    def with_value(self, value: Tensor) -> CachedState:
        """The same state of another value."""
        return replace(self, value=value)


class Cache:
    """The state that a decoding model passes to each of its layers.

    Attributes:
      start: int32 scalar, the position at which the loop begins; earlier positions are cached.
      length: number of positions in all.
      position: int32 scalar, the position of the layers' input (None: all positions; see the module).
      states: states by whole name.
    """

    def __init__(
        self,
        start: Tensor,
        length: int,
        position: Tensor | None = None,
        states: Mapping[str, CachedState] | None = None,
    ) -> None:
        self.start, self.length, self.position = start, length, position
        self.states: dict[str, CachedState] = dict(states or {})
        self._loops: tuple[int, ...] = ()
        self._count = 0

    def put(self, name: str, value: Tensor, changes: bool = True) -> None:
        """Remembers `value` under a name of the current scope.

        Args:
          changes: False for values that all positions share.
        """
        full = value.graph.path(name)
        old = self.states.get(full)
        if self.position is None and old is not None:
            raise UserError(
                f"decoding: two layers write the cache entry {full!r}; give the layers different names"
            )
        if self.position is not None:
            old = self._known(full)
            if old.value.type != value.type:
                raise UserError(
                    f"decoding: cache entry {full!r} had type {old.value.type} when the prompts were read "
                    f"and now has type {value.type}; keep the type the same"
                )
        self.states[full] = CachedState(value, changes, self._loops)

    def get(self, graph: Any, name: str) -> Tensor:
        """The entry of a name in the current scope."""
        return self._known(graph.path(name)).value

    def _known(self, full: str) -> CachedState:
        if full not in self.states:
            raise UserError(
                f"decoding: the cache has no entry {full!r}, because no layer wrote it while the prompts "
                f"were read; {known_names(full, self.states)}"
            )
        return self.states[full]

    def at(self, position: Tensor, values: Sequence[Tensor]) -> Cache:
        """For one position, with these values of the states that change."""
        given = dict(zip(self.changing, values, strict=True))
        states = {n: s.with_value(given.get(n, s.value)) for n, s in self.states.items()}
        return Cache(self.start, self.length, position, states)

    @property
    def changing(self) -> list[str]:
        """Names of the states that change, in the order in which they were put."""
        return [name for name, state in self.states.items() if state.changes]

    @property
    def values(self) -> list[Tensor]:
        """The states that change."""
        return [self.states[name].value for name in self.changing]

    def scan(self, fn: Callable[[Any], Any], carry: Any, dim: Dim) -> Any:
        """A stack of layers; each has its own states."""
        saved, self._loops = self._loops, (*self._loops, self._count)
        self._count += 1
        outside = dict(self.states)
        depth = len(self._loops)
        inside = [n for n, s in outside.items() if s.loops[:depth] == self._loops]
        made: list[str] = []
        count = self._count

        def body(x: Any, *parts: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
            # Run once per iteration in eager steps: each begins with what was there before.
            self.states, self._count = dict(outside), count
            for name, part in zip(inside, parts, strict=True):
                self.states[name] = outside[name].with_value(part)
            y = fn(x)
            known = [n for n in inside if outside[n].changes]
            made[:] = [*known, *(n for n in self.states if n not in outside)]
            return y, tuple(self.states[n].value for n in made)

        found, stacked = scan(body, carry, dim, [outside[n].value for n in inside])
        for name in inside:
            self.states[name] = outside[name]
        for name, value in zip(made, stacked, strict=True):
            self.states[name] = self.states[name].with_value(value)
        self._loops = saved
        return found


def scan_layers(fn: Callable[[Any], Any], carry: Any, dim: Dim, cache: Cache | None = None) -> Any:
    """Runs `mtf.scan` over a stack of equal layers that may decode with a cache.

    Args:
      fn: fn(carry) -> carry; it passes `cache` to its layers itself.
    """
    return scan(fn, carry, dim) if cache is None else cache.scan(fn, carry, dim)
