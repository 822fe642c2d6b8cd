"""Steps that take a variable out: one choice left, an edge without effect, an edge that is a function.

A pair table in which every choice of v allows exactly one choice of w makes w a function of v: w's costs,
edges and usages move to v. A leaf whose best answer to each choice of its neighbour is unique becomes such a
function through `prune.conditional`.
"""

from __future__ import annotations

import numpy as np

from layoutopt.solver.form import Ints
from layoutopt.solver.reductions.state import ReductionState


def fixed(state: ReductionState, variable: int) -> bool:
    """Takes out a variable with one choice left."""
    if len(state.unary[variable]) != 1 or variable in state.locked:
        return False
    state.constant += float(state.unary[variable][0])
    for other, table in state.pairs[variable].items():
        state.unary[other] = state.unary[other] + table[0]
    state.remove(variable, lambda choices: 0)
    return True


def separable(state: ReductionState, variable: int) -> bool:
    """Moves pair tables that are a sum of two unary costs into those."""
    changed = False
    for other, table in list(state.pairs[variable].items()):
        if variable < other and np.isfinite(table).all():
            mine = table[:, 0]
            yours = table[0] - table[0, 0]
            # Splitting whole numbers below 2^50, or zeros and equal values, loses nothing to rounding.
            whole = (table == np.floor(table)).all() and np.abs(table).max() < 2.0**50
            exact = whole or (table == table[0, 0]).all()
            if (mine[:, None] + yours[None, :] == table).all() and exact:
                state.unary[variable] = state.unary[variable] + mine
                state.unary[other] = state.unary[other] + yours
                state.drop_pair(variable, other)
                changed = True
    return changed


def functional(state: ReductionState, variable: int) -> bool:
    """Merges into `variable` the neighbours that it determines."""
    changed = False
    for other in list(state.pairs[variable]):
        table = state.pairs[variable].get(other)
        if table is None or other in state.locked:
            continue
        allowed = np.isfinite(table)
        if (allowed.sum(axis=1) != 1).any():
            continue
        one_to_one = (allowed.sum(axis=0) == 1).all() and variable not in state.locked
        if one_to_one and len(state.pairs[other]) > len(state.pairs[variable]):  # move the fewer edges
            _absorb(state, other, variable, allowed.argmax(axis=0))
            return True
        _absorb(state, variable, other, allowed.argmax(axis=1))
        changed = True
    return changed


def _absorb(state: ReductionState, master: int, slave: int, follows: Ints) -> None:
    """slave = follows[master]: all that depends on the slave now depends on the master."""
    table = state.pairs[master][slave]
    state.unary[master] = (
        state.unary[master] + table[np.arange(len(follows)), follows] + state.unary[slave][follows]
    )
    for other, costs in list(state.pairs[slave].items()):
        if other != master:
            state.add_pair(master, other, costs[follows])
    for key, uses in state.use[slave].items():
        state.add_use(master, key, uses[follows])
    state.remove(slave, lambda choices: int(follows[choices[master]]))
