"""Agreement of the tables with lowered programs, as far as a plan can check it.

A search proves seconds of the tables, within bytes of the memory rows. A proof about programs assumes that
neither exceeds the program of any layout, including those that were not evaluated. Tests hold that. Here a
few layouts that differ little from the answer are lowered whole and compared, because these could be better:
one that is faster than its tables, or holds less than its rows, invalidates the proof. Rows are also held
against every layout that was evaluated before they were used (`SubproblemSearch.hold_rows`).
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from layoutopt.optimize.heuristics.baselines import by_name
from layoutopt.optimize.problems.bounds import EXACT
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import EvaluatedLayout, SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.plan.units import bytes_text
from layoutopt.solver import TOLERANCE
from layoutopt.space.decisions import Decisions
from layoutopt.space.recompute import Recompute
from mesh_tf_core.errors import LayoutError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options

COMPARED, CHANGED = 8, 3
"""Number of layouts that are lowered and compared, and the largest number of decisions in which each differs
from the answer."""


@dataclass(frozen=True)
class TableAgreement:
    """The tables' costs and those of whole programs, for some layouts.

    Attributes:
      seconds: their sum for the answer.
      program: seconds of the answer's program.
      over: the largest excess of the tables over a program's seconds, relatively, for `count` layouts on its
        mesh, and that layout if it is not the answer.
    """

    seconds: float
    program: float
    over: float
    count: int
    where: str = ""

    @property
    def dearer(self) -> bool:
        """True if their bound is none on programs."""
        return self.seconds > self.program * (1 + TOLERANCE) or self.over > TOLERANCE

    @property
    def said(self) -> str:
        """The differences between tables and programs; "" if none is known."""
        shared = "the cost tables do not model every value that operations share"
        if abs(self.seconds - self.program) > EXACT * self.program:
            return (
                f"the search's cost tables predict {self.seconds:.9g} s for the chosen layout, and its "
                f"lowered program {self.program:.9g} s (the tables differ by "
                f"{(self.seconds / self.program - 1) * 100:+.2g} %), because {shared}"
            )
        if not self.where:
            return ""
        return (
            f"the search's cost tables predict {self.over * 100:.2g} % more time than the lowered program "
            f"of another layout ({self.where}), because {shared}; their bound therefore proves nothing"
        )


def summed(
    request: Request, best: EvaluatedLayout, subproblem: Subproblem, others: Sequence[EvaluatedLayout]
) -> TableAgreement:
    """The tables' sum for the answer, however it was found."""
    of = request.evaluator.table_prices(best.mesh, subproblem.decided).seconds
    seconds = of(best.layout, best.options)
    found = TableAgreement(seconds, best.evaluation.cost.device_seconds, 0.0, 1)
    if not found.dearer:
        return found
    named = [(n.layout, n.options) for n in others]
    named += [(layout, options) for _, mesh, layout, options in by_name(request.model, best.mesh)]
    parts = best.options.microbatches
    layouts = ((x, request.meeting(replace(options, microbatches=parts))) for x, options in named)
    return _beside(request, best, subproblem, replace(found, over=seconds / found.program - 1), layouts)


def compared(
    request: Request, best: EvaluatedLayout, subproblem: Subproblem, tables: TableAgreement
) -> TableAgreement:
    """The same with a few layouts that differ from the answer in some decisions; the fastest there is, if not
    the answer, is likely one of them."""
    return _beside(request, best, subproblem, tables, _near(request, best, subproblem.decided))


def _beside(
    request: Request,
    best: EvaluatedLayout,
    subproblem: Subproblem,
    tables: TableAgreement,
    layouts: Iterable[tuple[Layout, Options]],
) -> TableAgreement:
    """The same with further layouts on the answer's mesh."""
    of = request.evaluator.table_prices(best.mesh, subproblem.decided).seconds
    for layout, options in layouts:
        if (seconds := of(layout, options)) < math.inf:
            over = seconds / _program_seconds(request, best.mesh, layout, options) - 1
            if over > max(tables.over, TOLERANCE):
                tables = replace(tables, over=over, where=str(layout) or "nothing is split")
            tables = replace(tables, count=tables.count + 1)
    return tables


def hold_rows(request: Request, best: EvaluatedLayout, subproblem: Subproblem) -> None:
    """Holds rows against the programs of the answer and of the same layouts, if the search needed any."""
    evaluator, decided = request.evaluator, subproblem.decided
    if evaluator.rows_over is None:
        return
    for layout, options in itertools.chain([(best.layout, best.options)], _near(request, best, decided)):
        if _program_seconds(request, best.mesh, layout, options) < math.inf:
            own = decided.write(layout, options)
            # Which loops run again by themselves decides which rows there are.
            plain = {n: decided.options[n][:1] for n in decided.of(Recompute)}
            alone = decided.within({n: {*plain.get(n, ()), choice} for n, choice in own.items()})
            SubproblemSearch.whole(evaluator, best.mesh, alone).hold_rows()


def rows_said(request: Request) -> str:
    """That rows count more than a program holds; "" if none is known to."""
    if not (over := request.evaluator.rows_over):
        return ""
    return (
        f"the search's memory rows count {bytes_text(over)} more than the lowered program of a layout "
        "holds, so they may have ruled out layouts that fit"
    )


def _near(request: Request, best: EvaluatedLayout, decided: Decisions) -> Iterator[tuple[Layout, Options]]:
    """A few layouts that differ from the answer in some decisions, until the time is over."""
    rng, own = random.Random(0), decided.write(best.layout, best.options)
    free = [name for name, options in decided.options.items() if len(options) > 1]
    for _ in range(COMPARED if free else 0):
        names = rng.sample(free, min(rng.randint(1, CHANGED), len(free)))
        if request.late:
            return
        yield decided.read({**own, **{n: rng.choice(decided.options[n]) for n in names}})


def _program_seconds(request: Request, mesh: Mesh, layout: Layout, options: Options) -> float:
    """Seconds of a layout's program; inf if it is not legal."""
    try:
        return request.evaluator(mesh, layout, options).cost.device_seconds
    except LayoutError:
        return math.inf
