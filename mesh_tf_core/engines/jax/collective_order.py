"""The order of exchanges between devices, for compilers that do not keep it: XLA for CPU devices.

Its executor begins collectives in one order on all devices, but waits for a loop only where data of it is
read. A loop with collectives that is still running, and a later collective that does not read its results,
may run in different orders on different devices. All of them then wait in threads that the others need, until
XLA ends the process. Barriers and control dependencies are removed before the program is compiled. Operations
after a loop therefore read one element of all results of the loop, and a loop reads one of all earlier
exchanges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from mesh_tf_core.ir.program import Collective, Instr, Loop


def exchanges(code: Iterable[Instr]) -> bool:
    """True if devices exchange something in it."""
    return any(isinstance(i, Collective) or (isinstance(i, Loop) and exchanges(i.body)) for i in code)


@dataclass
class CollectiveOrder:
    """The order of the collectives of one block.

    Attributes:
      looped: results of the last loop with collectives.
      since: results of the collectives after it.
    """

    looped: list[Any] = field(default_factory=list)
    since: list[Any] = field(default_factory=list)

    def copy(self) -> CollectiveOrder:
        """The same so far."""
        return CollectiveOrder(self.looped, list(self.since))

    def collective(self, pieces: Sequence[Any]) -> list[Any]:
        """The pieces, there when the loop before is done."""
        return after(pieces, self.looped)

    def loop(self, carries: Sequence[Any]) -> list[Any]:
        """Starts a loop: the values it begins with become ready when every earlier collective is done."""
        return after(carries, [*self.looped, *self.since])

    def exchanged(self, given: Iterable[Any]) -> None:
        """A collective gave this."""
        self.since += given

    def ended(self, left: Any) -> None:
        """A loop left this tree of arrays."""
        self.looped, self.since = jax.tree.leaves(left), []


def after(values: Sequence[Any], done: Sequence[Any]) -> list[Any]:
    """Returns the same values, computed from one element of each of `done` in a form that the compiler of the
    whole program does not simplify. The compiler of each kernel does, so the cost is at most a copy."""
    firsts = [x.reshape(-1)[0].astype(jnp.int32) for x in done if x.size]
    if not firsts:
        return list(values)
    never = reduce(jnp.logical_or, [(first | 1) == 0 for first in firsts])
    # 7: a constant that few values are; of two equal ones nothing would be left to choose.
    return [
        x ^ never if x.dtype == jnp.bool_ else jnp.where(never, jnp.full_like(x, 7), x)
        for x in map(jnp.asarray, values)
    ]
