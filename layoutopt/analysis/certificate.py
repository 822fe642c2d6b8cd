"""Checks a plan's proof without any solver: every problem that was searched is built again, and shown to hold
nothing faster that fits.

A problem, one mesh shape with one number of microbatches and the same stages, is ruled out in one of these
ways:
  pieces     fewer microbatches on the same mesh have no faster layout, whatever memory it takes, and pieces
             never cost less than their share of the whole (`Pricer.pieces_cost_more`)
  layers     the layers of a stage alone take no less (`layoutopt.optimize.proof.layer_bounds`)
  refused    the model cannot be split like that
  bound      elimination: its best layout, whatever memory it takes, is not faster; by as many tables as it
             takes to say so, over the options that may be in something faster (`fixing`)
  listed     all its layouts that are faster were listed, and none of them fits: a memory row is overfull, or
             lowering the whole graph and walking its memory says so
What takes more than `MOST` layouts to list, or more time than there is, stays open.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from costmodels.hardware import Hardware
from layoutopt.optimize.evaluation.evaluator import Evaluator
from layoutopt.optimize.problems.bounds import EXACT, BoundSource
from layoutopt.optimize.problems.subproblems import Subproblem, related, subproblems
from layoutopt.optimize.proof.fixing import faster
from layoutopt.optimize.proof.layer_bounds import LayerBounds
from layoutopt.plan.build import Plan
from layoutopt.plan.details import Proof, RuledOut
from layoutopt.plan.units import plural
from layoutopt.solver import Choices, ResourceRow
from layoutopt.space.allow import allowed_text
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.mesh_shapes import meshes
from layoutopt.space.stages import suited
from mesh_tf_core.model import Model

MOST = 5000
"""Layouts listed for one problem."""
FASTER = "faster"
"""Marks a problem in which a faster layout fits."""
RULES_OUT = {*BoundSource} - {BoundSource.NOTHING, BoundSource.SHARE, BoundSource.SOLVER}


def proof_of(
    problems: tuple[RuledOut, ...], allowed: SearchSpace, considered: int | None = None, complete: bool = True
) -> Proof:
    """The findings about the problems of a plan's search, in words too.

    Args:
      allowed: the choices in them.
      considered: number of layouts of the plan's search, if the plan has it.
      complete: these are all.
    """
    layouts, ruled_out = sum(p.layouts for p in problems), all(p.how in RULES_OUT for p in problems)
    other = complete and considered not in (None, layouts)
    space = f"{plural(len(problems), 'problem')} with {layouts:,} layouts"
    if faster := next((p for p in problems if p.how == FASTER), None):
        words = f"refuted, because {faster.faster or 'nothing split'} on {faster.mesh} is faster and fits"
    elif not problems:
        words = "no problem was checked within the time limit"
    elif other:
        has = f"the plan's search had {considered:,} layouts, but the check has {layouts:,}"
        words = f"for another search space: {has}"
    else:
        words = f"{space}, ruled out without a solver: {_ways(problems)}"
        words += "" if complete else "; time limit reached before all problems were checked"
    return Proof(
        verified=complete and ruled_out and not other,
        words=words,
        layouts=layouts,
        allowed=allowed_text(allowed),
        problems=problems,
    )


def _ways(problems: Sequence[RuledOut]) -> str:
    """How many problems are ruled out in which way."""
    counts, listed = Counter(p.how for p in problems), sum(p.listed for p in problems)
    ways = {
        BoundSource.TABLES: "by their own bound",
        BoundSource.PIECES: "by the bound of fewer microbatches",
        BoundSource.LAYERS: "by the layers of a stage",
        BoundSource.FIRST_RUNS: "by the first runs of stages",
        BoundSource.REFUSED: "because the model refuses them",
        BoundSource.LISTED: f"by listing {listed:,} layouts that do not fit",
    }
    said = ", ".join(f"{counts[how]} {way}" for how, way in ways.items() if counts[how])
    if counts[BoundSource.NOTHING]:
        said += f"; {counts[BoundSource.NOTHING]} not checked, because there are too many layouts to list"
    return said


def certify(
    model: Model,
    plan: Plan,
    hardware: Hardware,
    limit: float,
    asked: SearchSpace,
    devices: int | None = None,
    max_axes: int = 2,
) -> Iterator[RuledOut]:
    """Checks the problems of the search that made a plan with objective time.

    Args:
      devices, max_axes: what was asked instead of a mesh; None: the plan's mesh was given.
    """
    mesh = plan.mesh if devices is None else None
    evaluator = Evaluator(model, hardware)
    shapes = meshes(mesh, devices, max_axes, hardware, () if devices is None else asked.named)
    shapes = suited(evaluator.model, shapes, asked)
    # A recipe may have a mesh of its own.
    shapes += [plan.mesh] if plan.mesh.shape not in {each.shape for each in shapes} else []
    problems = subproblems(evaluator.model, shapes, asked, evaluator.near)
    yield from rule_out(evaluator, problems, plan.predicted.step_seconds, limit)


def rule_out(
    evaluator: Evaluator, problems: Iterable[Subproblem], claimed: float, limit: float
) -> Iterator[RuledOut]:
    """Checks problems in the order of a search against the claimed least seconds within a memory limit."""
    seconds, layers = claimed * (1 - EXACT), LayerBounds(evaluator)
    for subproblem in related(problems):
        subproblem.inherit(evaluator)
        layers.prove(subproblem, seconds)
        if subproblem.bounds.lower().value < seconds and subproblem.refused:
            subproblem.bounds.prove(math.inf, BoundSource.REFUSED)
        known = subproblem.bounds.lower().value >= seconds
        yield _ruled(subproblem) if known else _looked_at(evaluator, subproblem, seconds, limit)


def considered_by(plan: Plan) -> int | None:
    """The number of layouts of a plan's search; None if the plan has no number."""
    said = plan.solver.layouts_considered.partition(" and ")[0].replace(",", "")
    return int(said) if said.isascii() and said.isdigit() else None


def _where(subproblem: Subproblem) -> str:
    """The mesh, and what of it is stages."""
    stages = (f" with {dim} over {'+'.join(axes)}" for dim, axes in sorted(subproblem.key.stages))
    order = (f" in {subproblem.key.schedule}",) if subproblem.key.stages else ()
    again = (f" with recompute {text}" for text in sorted(subproblem.key.again))
    return "".join((str(subproblem.mesh), *stages, *order, *again))


def _ruled(subproblem: Subproblem, how: str = "", listed: int = 0, faster: str = "") -> RuledOut:
    """What is shown of a problem; `how`: if not by its bound."""
    bound = subproblem.bounds.lower()
    return RuledOut(
        mesh=_where(subproblem),
        microbatches=subproblem.microbatches,
        layouts=subproblem.layouts,
        how=how or bound.source,
        bound=bound.value,
        listed=listed,
        faster=faster,
    )


def _looked_at(evaluator: Evaluator, subproblem: Subproblem, seconds: float, limit: float) -> RuledOut:
    """What tables and a list of all that is faster show of a problem."""
    host, none = evaluator.host, lambda *_: math.inf
    waits = host is not None and faster(host, subproblem, seconds, none) is None
    search = None if waits else faster(evaluator, subproblem, seconds, none)
    if search is None:
        return _ruled(subproblem)
    known, is_open = search.eliminated, _ruled(subproblem, BoundSource.NOTHING)
    if not known.exact or search.extraction.unsplit:
        return is_open
    rows = list(search.rows)
    seen: set[Choices] = set()
    for choices in known.below(seconds):
        if search.refused(choices):
            continue
        decided = choices[: len(search.extraction.names)]
        if decided in seen:
            continue
        if len(seen) == MOST:
            return is_open
        seen.add(decided)
        if not _overfull(rows, choices, limit) and search.evaluate(choices).memory.peak <= limit:
            evaluation = search.evaluate(choices)
            if evaluation.cost.step_seconds < seconds:
                layout = str(search.extraction.read(choices)[0])
                return _ruled(subproblem, FASTER, faster=layout)
    return _ruled(subproblem, BoundSource.LISTED, listed=len(seen))


def _overfull(rows: list[ResourceRow], choices: Sequence[int], limit: float) -> bool:
    """Whether a row is overfull; one that is comes first next time, for it is likely so again."""
    for i, row in enumerate(rows):
        if row.use(choices) > limit * (1 + 1e-9):
            rows.insert(0, rows.pop(i))
            return True
    return False
