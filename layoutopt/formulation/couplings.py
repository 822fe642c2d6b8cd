"""The combinations of options that a restriction allows (`layoutopt.space.restriction`)."""

import math
from collections.abc import Iterator

import numpy as np

from layoutopt.formulation.tables import Index
from layoutopt.solver.relations import Relation
from layoutopt.space.decisions import Decisions


def coupled(decided: Decisions, index: Index) -> Iterator[Relation]:
    """(8): the combinations that a restriction allows."""
    free = {*decided.free}
    for each in decided.couplings:
        names = sorted((n for n in each.names if n in free), key=index.number.__getitem__)
        places = [each.names.index(n) for n in names]
        rows = {tuple(row[i] for i in places) for row in each.within(decided.options).rows}
        cells = np.array(index.rows(names, sorted(rows)), np.int64).reshape(len(rows), len(names))
        yield Relation(index.scope(names), cells)


def count_layouts(decided: Decisions) -> int:
    """The number of combinations of the options, legal or not, that agree with couplings; of couplings that
    share decisions, with the first one."""
    left, count = dict(decided.options), 1
    for each in decided.couplings:
        if left.keys() >= {*each.names}:
            count *= len(each.rows)
            left = {name: options for name, options in left.items() if name not in each.names}
    return count * math.prod(map(len, left.values()))
