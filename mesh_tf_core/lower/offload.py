"""Values in the memory of the devices' hosts instead of the devices'.

    optimizer    the optimizer's state of a variable: the update loads it over the host link, works on it as
                 ever, and stores it there again (Ren et al. 2021, "ZeRO-Offload", but for the place of the
                 arithmetic, which stays on the device; MaxText's `optimizer_memory_host_offload`)
    activations  what loops over a dimension save for their backward: all that it reads, or where they run
                 again what that keeps (their state, and what `remat_policy` says): stored as an iteration
                 begins or ends, loaded as its backward does
    weights      a variable: forward loads it where it reads it, in a loop over layers one layer at a time,
                 backward once more, and the update, which stores it (Rajbhandari et al. 2021,
                 "ZeRO-Infinity", section 5.1.1)

It has the same splits as on the devices; each device's shard lies on its own host. In a program these are the
instructions `host_load` and `host_store`; no operation computes on values `on host`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.lower.remat_policy import Recomputed, policies

OPTIMIZER, ACTIVATIONS, WEIGHTS = "optimizer", "activations", "weights"
KINDS = (OPTIMIZER, ACTIVATIONS, WEIGHTS)
OffloadSet = frozenset[tuple[str, str]]
"""(kind, name of the variable or the state's variable, or dimension of the loops)."""


def place_of(variable: Variable) -> tuple[str, str]:
    """The entry of `OffloadSet` that puts a variable or an optimizer's slot on the hosts."""
    if variable.slot_of is not None:
        return OPTIMIZER, variable.slot_of
    return WEIGHTS, variable.name


def check_offload(offload: OffloadSet, variables: Mapping[str, Variable]) -> None:
    """UserError unless there are values of each kind and variable; `check_saved` checks loops.

    Args:
      variables: of a training step.
    """
    for kind, name in sorted(offload):
        if kind not in KINDS:
            raise UserError(f"offload: unknown kind {kind!r}; {known_names(kind, KINDS)}")
        if kind == ACTIVATIONS:
            continue
        if name not in variables:
            raise UserError(
                f"offload {kind}: the model has no variable {name!r}; {known_names(name, variables)}"
            )
        if kind == WEIGHTS:
            if (owner := variables[name].slot_of) is not None:
                raise UserError(
                    f"offload {kind}: {name!r} is optimizer state; name its variable: {OPTIMIZER}={owner}"
                )
            continue
        if not any(v.slot_of == name for v in variables.values()):
            raise UserError(
                f"offload {kind}: the optimizer has no state for {name!r}; remove this variable, or use "
                "an optimizer with state, e.g. Adam"
            )


def offload_of(
    words: Iterable[str], variables: Mapping[str, Variable], recompute: Iterable[str | Recomputed] = ()
) -> OffloadSet:
    """Parses `KIND` or `KIND=NAME`; a kind alone means all variables that have dimensions (optimizer: all
    trained ones), or all recomputed loops."""
    stored = [v for v in variables.values() if v.own_storage]
    again = sorted(each.dim for each in policies(recompute))
    found: set[tuple[str, str]] = set()
    for word in words:
        kind, _, name = (part.strip() for part in word.partition("="))
        own = [v.name for v in stored if v.trainable or kind == WEIGHTS]
        every = again if kind == ACTIVATIONS else own
        if kind == ACTIVATIONS and not (name or every):
            raise UserError(
                "offload activations: only loops that are recomputed are offloaded, and there are none; "
                "recompute a loop, e.g. layers, or name a loop whose saved values all go to the host, "
                "e.g. activations=layers"
            )
        found.update((kind, each) for each in ([name] if name else every))
    return frozenset(found)
