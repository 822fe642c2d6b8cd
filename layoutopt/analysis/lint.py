"""Likely mistakes in a layout that a person wrote, and their corrections.

  not expressed      the framework has no setting for the layout
  wasted axis        no product is split over a mesh axis: its devices all do the same work
  repeated work      some products are not split over an axis that splits others
  indivisible        no split saves much repeated work, and a dimension would need another size to be split
  undivided storage  variables that their stage of storage cannot split, so they are stored whole
  repeated memory    variables and optimizer state that every device of an axis stores
  axis of one        a rule names an axis of one device: it splits nothing
  no kernel          attention without a library kernel runs in blocks and is slower
  placed unlike      an array lies otherwise than operations read it
  does not fit       the peak is above the memory
  unnecessary        a decision that saves memory costs time, and the layout fits without it
  slower             the operations with most of the time that the best layout saves

A fix is a layout that was lowered and priced; it is only given if it is faster (or, for memory, leaner).

Changes of one kind of decision beside a layout, for all its subjects alike, each lowered and priced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from costmodels.hardware import Hardware
from costmodels.pricing.hidden import Cost, Line
from costmodels.repeated import Repeated, near_sizes
from layoutopt.frameworks import restriction_of
from layoutopt.optimize.evaluation.evaluation import Evaluation
from layoutopt.optimize.evaluation.evaluator import evaluate
from layoutopt.optimize.heuristics.incumbents import decisions_of
from layoutopt.optimize.problems.subproblems import SubproblemKey
from layoutopt.plan.build import decided
from layoutopt.plan.results import Finding
from layoutopt.plan.units import seconds_text, size_text, step_change, used_text
from layoutopt.runtime.clock import Clock
from layoutopt.space.allow import EVERYTHING, resolved
from layoutopt.space.decisions import KINDS, Decisions, SearchSpace, beyond
from layoutopt.space.kind import EVERY_VARIABLE, MIXED, Choice, Chosen, Decision, Target
from layoutopt.space.objective import Objective
from layoutopt.space.recompute import COUNT, Recompute
from layoutopt.space.splits import Split
from layoutopt.space.storage import Storage
from layoutopt.space.undivided import stored_at
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.layout import Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.program import Program
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.options import DEFAULT
from mesh_tf_core.lower.storage import STAGES, read_stage
from mesh_tf_core.model import Model


@dataclass(frozen=True)
class SingleChange:
    """A step in which one kind of decision is taken otherwise; `plain`: is not taken at all."""

    kind: type[Decision]
    plain: bool
    evaluation: Evaluation

    def words(self, before: Evaluation, limit: float) -> str:
        """'recompute layers: 14.2 GiB of 22.9 GiB (62.0%), step 3.1 % longer'."""
        found = self.evaluation
        said = self.kind.in_words(decided(found.decided, found.layout, found.pipeline))[1]
        return (
            f"{said or f'without {self.kind.label}'}: {used_text(found.memory.peak, limit)}, step "
            f"{step_change(found.cost.step_seconds, before.cost.step_seconds)}"
        )


def single_changes(of: Evaluation, clock: Clock) -> Iterator[SingleChange]:
    """Every change that can be lowered, until the time is over."""
    machine = of.prices.hardware
    target = Target.on(machine, of.model, of.program.mesh)
    for kind in KINDS:
        own, choices = _choices(kind, target)
        for changed in choices:
            options = replace(of.options, **{**own, **changed})
            if clock.over or options.key == of.options.key:
                continue
            try:
                found = evaluate(of.model, target.mesh, of.layout, machine, options)
            except UserError:
                continue
            if found.decided.key != of.decided.key:
                yield SingleChange(kind, not changed, found)


def _choices(kind: type[Decision], target: Target) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The fields of `Options` that a kind sets, with their defaults, and what each of its choices sets."""
    widest = {name: value for name, value in kind.widest(target).items() if value}
    try:
        made = [*kind.about(target.model.step_graph, target.mesh, SearchSpace(**widest))]
    except UserError:
        return {}, []
    found = []
    for choice in dict.fromkeys(choice for each in made for choice in each.options):
        to = Chosen()
        for each in made:
            if choice in each.options:
                each.apply(choice, to)
        if not to.splits:
            found.append(to.options)
    return {name: getattr(DEFAULT, name) for options in found for name in options}, found


Lost = tuple[str, str, tuple[Layout, Options] | None]
"""A setting that a framework lacks, and a change that mends it, in words and as what then runs."""
NOTHING: Lost = "", "", None


def unexpressed(model: Model, machine: Hardware, mesh: Mesh, layout: Layout, options: Options) -> Lost:
    """Finds what a framework has no setting for, if anything."""
    restriction = restriction_of(machine.framework).of(model)
    if restriction.says is None:
        return NOTHING
    if lost := beyond(restriction, decided(options, layout, model.stages(mesh, layout))):
        return f"a plan in which {lost.words}", "", None
    target = Target.on(machine, model, mesh)
    space = resolved(SearchSpace(allow=(EVERYTHING,)), [target]).settled(Objective.TIME)
    again = (*space.recompute, *(f"{COUNT}{each.only}" for each in options.recompute if each.only))
    space = space.but(microbatches=(options.microbatches,), recompute=again)
    space = restriction.narrowed(space).but(restriction=restriction)
    near = tuple({a for stage in options.storage.values() for a in read_stage(stage).over or ()})
    key = SubproblemKey.of(model, mesh, layout, options)
    found = decisions_of(key, space, model, lambda _: near)
    return NOTHING if found is None else _odd(found, layout, options)


def _chosen(of: Decision, choice: Choice, options: Options) -> str:
    """An option in the words of commands: "storage zero1@data", "recompute layers:count=8"."""
    if isinstance(of, Split):
        return f"{of.name} over {'+'.join(choice)}" if choice else f"{of.name} whole"
    if isinstance(of, Recompute):
        of.apply(choice, to := Chosen())
        return f"recompute {', '.join(map(str, to.options.get('recompute', ()))) or 'never'}"
    name = of.name.removesuffix(f" of {EVERY_VARIABLE}")
    if choice == MIXED and isinstance(of, Storage):  # a stage for all, which some of them have no use for
        given = dict.fromkeys(str(read_stage(options.storage.get(v, 0))) for v in of.variables)
        return f"{name} {' and '.join(given)}"
    return f"{name} {'@'.join(filter(None, (*choice[:1], '+'.join(choice[1:])))) or 'no'}"


def _odd(found: Decisions, layout: Layout, options: Options) -> Lost:
    chosen = found.write(layout, options)

    def said(*names: str, **other: Choice) -> str:
        return ", ".join(_chosen(found.named[n], other.get(n, chosen[n]), options) for n in names)

    odd = [n for n, every in found.options.items() if chosen[n] not in every]
    broken = [n for each in found.couplings if not each.allows(chosen) for n in reversed(each.names)]
    for name in (odd or dict.fromkeys(broken)) if len(odd) < 2 else ():
        own, stored = chosen[name], isinstance(found.named[name], Storage)
        for other in sorted(found.options[name], key=lambda c: (c[:1] != own[:1], stored and not c)):
            changed = {**chosen, name: other}
            if all(each.allows(changed) for each in found.couplings):
                return said(name), said(name, **{name: other}), found.read(changed)
    return said(*(odd or dict.fromkeys(n for n in broken[::-1] if chosen[n]))), "", None


MEMORY_SHARE = 0.02
"""Shares of its peak memory below this are not mentioned."""
SLOWER = 1.02
"""Times of the best step up to this are not mentioned."""


@dataclass(frozen=True)
class UnlikeArray:
    """An array that a user places otherwise than operations read it.

    Attributes:
      message, mend: what is placed how, and a placement without the conflict.
      layout, options: of the mended step; None: its cost is unknown.
    """

    message: str
    mend: str
    layout: Layout | None = None
    options: Options = DEFAULT


def lint(
    model: Model, evaluation: Evaluation, hardware: Hardware, options: Options, limit: float | None = None
) -> list[Finding]:
    """The findings about a layout, the costliest kind first; none if nothing looks like a mistake.

    Args:
      evaluation: the lowered and predicted layout; `options` are those of lowering.
      limit: of memory, in bytes per device; None: the hardware's.
    """
    return list(_Lint(model, evaluation, hardware, options).findings(limit))


def slower(found: Cost, best: Cost) -> Finding | None:
    """The largest part of the time that a step takes longer than the best one; None if it hardly does."""
    if found.step_seconds <= SLOWER * best.step_seconds:
        return None
    place = _more(found, best, lambda x: x.origin.scope)
    here = [Cost(tuple(x for x in cost.lines if x.origin.scope == place)) for cost in (found, best)]
    what = _more(here[0], here[1], _words)
    took, least = (cost.step_seconds for cost in here)
    part = here[0].by(_words)[what] - here[1].by(_words).get(what, 0.0)
    return Finding(
        kind="slower",
        message=f"{place or 'the part outside all scopes'} takes {seconds_text(took)} per step in this "
        f"layout and {seconds_text(least)} in the best layout; the largest difference is in {what} "
        f"({seconds_text(part)})",
    )


def placed_unlike(odd: UnlikeArray, of: Evaluation, mended: Evaluation | None) -> Finding:
    """A conflict of a user's own shardings, with its largest message and the price of its mend."""
    if mended is None:
        return Finding(kind="placed unlike", message=odd.message, fix=odd.mend)
    sent, least = (Cost(tuple(x for x in e.cost.lines if x.axes)) for e in (of, mended))
    more = _more(sent, least, _words) if sent.lines else ""
    takes = sent.by(_words)[more] - least.by(_words).get(more, 0.0) if more else 0.0
    moved = f"; {more} takes {seconds_text(takes)} more per step" if takes > 0 else ""
    change = step_change(mended.cost.step_seconds, of.cost.step_seconds)
    held, before = size_text(mended.memory.peak), size_text(of.memory.peak)
    fix = f"{odd.mend}: step {change}" + (f", {held} instead of {before}" if held != before else "")
    return Finding(kind="placed unlike", message=odd.message + moved, fix=fix, layout=str(mended.layout))


def in_memory(
    of: Evaluation, limit: float, changes: Sequence[SingleChange], best: Evaluation | None
) -> Iterator[Finding]:
    """That a layout does not fit, and what does; or what it does to fit that it need not do.

    Args:
      changes: of the layout; those that fit, the fastest first.
      best: the best layout that fits, if one is known.
    """
    reason, fits = of.reason(limit), of.known.fits
    if reason is not None:
        fix = changes[0].words(of, limit) if changes else None
        if fix is None and best is not None:
            fix = f"no single change fits; {best.layout} does: {used_text(best.memory.peak, limit)}"
        yield Finding(kind="does not fit", message=reason, fix=fix)
        return
    for found in changes:
        later = found.evaluation
        faster = later.cost.step_seconds * SLOWER <= of.cost.step_seconds
        if found.plain and faster and fits(later.memory.peak, limit) == "yes":
            message = f"{found.kind.label} is not needed: the layout uses {used_text(of.memory.peak, limit)}"
            yield Finding(kind="unnecessary", message=message, fix=found.words(of, limit))


def _more(found: Cost, best: Cost, key: Callable[[Line], str]) -> str:
    """That for which the first cost is the most above the second."""
    least = best.by(key)
    more = {name: seconds - least.get(name, 0.0) for name, seconds in found.by(key).items()}
    return max(more, key=lambda name: more[name])


def _words(x: Line) -> str:
    over = f" over {'+'.join(x.axes)}" if x.axes else ""
    return f"{x.name.replace('_', '-')}{over} ({x.origin.phase})"


class _Lint:
    def __init__(self, model: Model, evaluation: Evaluation, hardware: Hardware, options: Options) -> None:
        self.model, self.evaluation, self.hardware, self.options = model, evaluation, hardware, options
        self.program: Program = evaluation.program
        self.mesh, self.layout = evaluation.program.mesh, evaluation.program.layout
        self.lost = self._unexpressed(self.layout)

    def findings(self, limit: float | None) -> Iterator[Finding]:
        framework = self.hardware.framework
        if lost := self.lost[0]:
            message = f"{framework} has no setting for {lost}; the prediction is as if it had"
            yield Finding(kind="not expressed", message=message, fix=f"{framework} {self._runs(limit)}")
        for axis, found in self.evaluation.repeated.items():
            mended, layout, saved = self._split_more(axis, found.dims)
            yield self._work(axis, found, mended, layout)
            if saved < found.share / 4:
                yield from self._indivisible(axis, found)
        for name, axis in ((name, axis) for name, axes in self.layout.items() for axis in axes):
            if self.mesh.size(axis) == 1:
                yield Finding(
                    kind="axis of one",
                    message=f"{name!r} is split over {axis!r}, an axis of one device, so nothing is split",
                    fix=f"remove {axis!r} from the layout, or set its size to at least 2",
                )
        for each in self.evaluation.undivided:
            yield Finding(kind="undivided storage", message=str(each))
        yield from self._memory()
        for message in self.evaluation.prices.itemiser.compiler.lacking(self.program):
            yield Finding(kind="no kernel", message=message)

    def _work(self, axis: str, found: Repeated, fix: str | None, layout: str | None) -> Finding:
        ways = self.mesh.size(axis)
        if axis not in self.layout.used:
            message = f"axis {axis!r} splits nothing, so its {ways} devices all do the same work"
            return Finding(kind="wasted axis", message=message, fix=fix, layout=layout)
        where = sorted(found.flops, key=lambda s: -found.flops[s])
        most = ", ".join(where[:3]) + (f" and {len(where) - 3} more" if len(where) > 3 else "")
        if any(axis in self.layout.axes(dim) for dim in self.evaluation.pipeline):
            most += " (a program per stage computes this on one stage, in the same time)"
        return Finding(
            kind="repeated work",
            message=f"the {ways} devices of {axis!r} repeat {100 * found.share:.0f}% of the matmuls' FLOPs: "
            f"{most}",
            fix=fix,
            layout=layout,
        )

    def _split_more(self, axis: str, dims: Mapping[str, int]) -> tuple[str | None, str | None, float]:
        """The fastest layouts with one of these dimensions split over the axis too, of those that are faster
        and that the framework has, in words, the first of them, and the share of the step that it saves."""
        now, faster = self.evaluation.cost.step_seconds, list[tuple[float, str, Layout]]()
        for name, size in dims.items():
            axes = (*self.layout.axes(name), axis)
            if axis in self.layout.axes(name) or size % self.mesh.group_size(axes):
                continue
            more = self.layout.with_rules({name: tuple(a for a in self.mesh.names if a in axes)})
            seconds = found.cost.step_seconds if (found := self._evaluated(more, self.options)) else now
            if seconds < now and (self.lost[0] or not self._unexpressed(more)[0]):
                faster.append((seconds, name, more))
        faster = [x for x in sorted(faster, key=lambda x: x[0]) if 2 * (now - x[0]) > now - min(faster)[0]]
        said = (f"{n!r} over {'+'.join(x.axes(n))}: {100 * (1 - s / now):.0f}%" for s, n, x in faster[:2])
        if not faster:
            return None, None, 0.0
        return f"split {', or '.join(said)} less step time", str(faster[0][2]), 1 - faster[0][0] / now

    def _runs(self, limit: float | None) -> str:
        """What the framework runs instead, with its time and memory."""
        _, mend, runs = self.lost
        if runs is None:
            return "can run what a search under it finds"
        found = self._evaluated(*runs)
        if found is None:
            return f"runs this layout with {mend}"
        peak, most = found.memory.peak, self.hardware.usable_memory_bytes if limit is None else limit
        step = step_change(found.cost.step_seconds, self.evaluation.cost.step_seconds)
        fits = found.known.fits(peak, most)
        return f"runs this layout with {mend}: step {step}, {used_text(peak, most)}, fits: {fits}"

    def _unexpressed(self, layout: Layout) -> Lost:
        return unexpressed(self.model, self.hardware, self.mesh, layout, self.options)

    def _evaluated(self, layout: Layout, options: Options) -> Evaluation | None:
        with suppress(UserError):
            return evaluate(self.model, self.mesh, layout, self.hardware, options)
        return None

    def _indivisible(self, axis: str, found: Repeated) -> Iterator[Finding]:
        ways = self.mesh.size(axis)
        sizes = self.model.graph.dims()
        for name, size in sorted(found.dims.items(), key=lambda item: -item[1]):
            if size > ways and size % ways and not self.layout.axes(name) and len(sizes.get(name, ())) == 1:
                yield Finding(
                    kind="indivisible",
                    message=f"{name!r} has size {size}, which is not divisible by the {ways} devices of "
                    f"{axis!r}",
                    fix=f"change the size to {' or '.join(map(str, near_sizes(size, ways)))}",
                )

    def _memory(self) -> Iterator[Finding]:
        """Variables that are held more often than once, if storing them split saves memory worth it."""
        held = repeated = 0
        for stored in self.program.variables.values():
            ways = self.mesh.group_size(a for axes in stored.splits for a in axes)
            here = stored.value.local_bytes(self.mesh)
            held += here
            repeated += here - here * ways // self.mesh.devices
        peak = self.evaluation.memory.peak
        if repeated <= 0.25 * peak:
            return
        yield Finding(
            kind="repeated memory",
            message=f"each device stores {size_text(held)} of variables and optimizer state, of which "
            f"{size_text(repeated)} is redundant",
            fix=self._stored_split(peak),
        )

    def _stored_split(self, peak: int) -> str | None:
        """The lowest stage that saves memory, and what it costs."""
        for stage in STAGES[1:]:
            stages = stored_at(self.model.graph.variables.values(), stage)
            found = self._evaluated(self.layout, replace(self.options, storage=stages))
            if found is not None and found.memory.peak < (1 - MEMORY_SHARE) * peak:
                return (
                    f"--storage {stage}: peak memory {size_text(found.memory.peak)} instead of "
                    f"{size_text(peak)}, step "
                    f"{step_change(found.cost.step_seconds, self.evaluation.cost.step_seconds)}"
                )
        return None
