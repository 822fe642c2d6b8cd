"""Steps that shrink a domain (forbidden choices, dominated choices), and steps that take a variable out (one
choice left, an edge without effect, an edge that is a function).

Dominance is Goldstein's dead-end elimination (Biophysical Journal 66, 1994), with resources: choice b of
variable v goes if some other a uses no more of any resource and

    c_v(a) - c_v(b) + sum over neighbours w of max over d_w of (c_vw(a, d_w) - c_vw(b, d_w)) <= 0.

Conditioned on a neighbour's choice (`conditional`), the same test forbids single cells of a pair table, which
turns edges into functions: a pair table in which every choice of v allows exactly one choice of w makes w a
function of v, and w's costs, edges and usages move to v (`functional`).
"""

from __future__ import annotations

import numpy as np

from layoutopt.solver.form import Bools, Floats, Ints, Sparse
from layoutopt.solver.reductions.state import ReductionState

LARGEST = 1 << 21
"""Cells of the comparison (choices x choices x neighbour's choices) above which dominance is not tried."""


def forbidden(state: ReductionState, variable: int) -> bool:
    """Removes choices that a unary cost, a pair table or a wide term forbids for every choice of the
    others."""
    possible = np.isfinite(state.unary[variable])
    for table in state.pairs[variable].values():
        possible &= np.isfinite(table).any(axis=1)
    for number in state.locked.get(variable, ()):
        if number % 2 == 0:
            possible &= _supported(state, number // 2, variable)
    if possible.all():
        return False
    if not possible.any():
        state.infeasible = True
        return False
    state.keep(variable, np.flatnonzero(possible))
    return True


def _supported(state: ReductionState, wide: int, variable: int) -> Bools:
    scope, table = state.wide[wide]
    axis, size = scope.index(variable), len(state.unary[variable])
    if isinstance(table, Sparse):
        seen = np.zeros(size, dtype=bool)
        seen[table.assignments[np.isfinite(table.values), axis]] = True
        return seen
    others = tuple(other for other in range(table.ndim) if other != axis)
    return np.asarray(np.isfinite(table).any(axis=others))


def worst_extra(table: Floats) -> Floats:
    """max over the neighbour's choices of table[a] - table[b] for all a, b, where b is not forbidden."""
    if not np.isinf(table).any():
        return (table[:, None, :] - table[None, :, :]).max(axis=2)
    with np.errstate(invalid="ignore"):
        difference = table[:, None, :] - table[None, :, :]
    difference[:, np.isinf(table)] = -np.inf
    return difference.max(axis=2)


def _uses_no_more(state: ReductionState, variable: int) -> Bools:
    """Whether choice a uses at most what b uses, of everything; shape (choices, choices)."""
    size = len(state.unary[variable])
    uses = state.use[variable]
    if not uses:
        return np.ones((size, size), dtype=bool)
    table = np.unique(np.stack(list(uses.values())), axis=0).T
    return np.asarray((table[:, None, :] <= table[None, :, :]).all(axis=2))


def too_large(state: ReductionState, variable: int) -> bool:
    """Comparing all pairs of choices would take too long."""
    widest = max((table.shape[1] for table in state.pairs[variable].values()), default=1)
    return len(state.unary[variable]) ** 2 * widest > LARGEST


def _compared(state: ReductionState, variable: int) -> Bools | None:
    """Whether choice a may replace b by what they use; None if no choice may, or none is compared."""
    if len(state.unary[variable]) == 1 or variable in state.locked or too_large(state, variable):
        return None
    better = _uses_no_more(state, variable)
    np.fill_diagonal(better, False)
    return better if better.any() else None


def dominated(state: ReductionState, variable: int) -> bool:
    """Drops choices that another choice replaces without loss."""
    unary, better = state.unary[variable], _compared(state, variable)
    if better is None:
        return False
    extra = unary[:, None] - unary[None, :]
    for table in state.pairs[variable].values():
        with np.errstate(invalid="ignore"):
            extra = extra + worst_extra(table)
    kept, instead = _survivors(better & (extra <= 0))
    if len(kept) == len(unary):
        return False
    state.keep(variable, kept, instead)
    return True


def _survivors(beats: Bools) -> tuple[Ints, Ints]:
    """What stays when beaten choices go one by one, each beaten by one still there; what replaces whom."""
    size = len(beats)
    alive = np.ones(size, dtype=bool)
    master = np.arange(size)
    for choice in range(size - 1, -1, -1):
        winners = np.flatnonzero(beats[:, choice] & alive)
        if len(winners):
            alive[choice] = False
            master[choice] = winners[0]
    for choice in range(size):
        while not alive[master[choice]]:
            master[choice] = master[master[choice]]
    kept = np.flatnonzero(alive).astype(np.int64)
    number = np.full(size, -1, dtype=np.int64)
    number[kept] = np.arange(len(kept))
    return kept, number[master]


def conditional(state: ReductionState, variable: int) -> bool:
    """Forbids pair cells (d_w, b) where, given d_w, another choice replaces b without loss."""
    unary, better = state.unary[variable], _compared(state, variable)
    if better is None:
        return False
    changed = False
    for other in list(state.pairs[variable]):
        base = unary[:, None] - unary[None, :]
        for third, table in state.pairs[variable].items():
            if third != other:
                with np.errstate(
                    invalid="ignore"
                ):  # inf - inf: b is forbidden altogether, and NaN beats nothing
                    base = base + worst_extra(table)
        better_here = better & (base < np.inf)
        if better_here.any():
            changed |= _conditional_on(state, variable, other, np.where(better_here, base, np.inf))
    return changed


def _conditional_on(state: ReductionState, variable: int, other: int, base: Floats) -> bool:
    table = state.pairs[variable][other]
    result = table.copy()
    for given in range(table.shape[1]):
        column = table[:, given]
        here = np.flatnonzero(np.isfinite(column))
        if len(here) < 2:
            continue
        costs = column[here]
        beats = base[np.ix_(here, here)] + costs[:, None] - costs[None, :] <= 0
        if beats.any():
            kept, _ = _survivors(beats)
            gone = np.delete(here, kept)
            result[gone, given] = np.inf
    if (np.isinf(result) == np.isinf(table)).all():
        return False
    state.pairs[variable][other] = result
    state.pairs[other][variable] = result.T
    state.touch((variable, other))
    return True


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
