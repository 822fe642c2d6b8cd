"""The price of one layout: the whole graph is lowered under it, and the program is priced. No table, no
solver.

`evaluate` runs once; an `Evaluator` caches, for a search, the common parts of one model's layouts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator, Mapping
from functools import cache, cached_property, partial
from typing import Any

from costmodels.hardware import Hardware
from costmodels.kernels.compute import MATMUL_CLASSES
from costmodels.pricing.pricer import LaunchPricer, Pricer, pricer
from costmodels.stage_times import slots_of
from layoutopt.formulation.extract import Draft, latency, own_seconds, shared_seconds
from layoutopt.optimize.evaluation.evaluation import DEFAULT, ONE_DEVICE, Evaluation, as_run, unsplit
from layoutopt.space.decisions import Decisions
from mesh_tf_core.arguments import is_number
from mesh_tf_core.errors import LayoutError, UserError
from mesh_tf_core.ir.layout import Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.schedules import KINDS, PipelineSchedule
from mesh_tf_core.ir.stage_orders import StageAction
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.messages import BucketKey
from mesh_tf_core.model import Model


class TablePrices:
    """Costs of layouts of one problem, as its tables would have them, without making the tables."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft

    def seconds(self, layout: Layout, options: Options) -> float:
        """Seconds of a step; inf if that is not legal."""
        draft, prices, chosen = self.draft, self.draft.pricer, self.draft.decided.write(layout, options)
        sizes, stages = draft.context.graph.dims(), draft.decided.stages
        split = ((n, draft.mesh.group_size(axes)) for n, axes in layout.rules if n not in stages)
        if any(size % ways for name, ways in split for size in sizes.get(name, ())):
            return math.inf
        total, alpha = draft.fixed_seconds, dict[BucketKey, float]()
        for cluster in draft.left:
            entry = draft.tabler_of(cluster).entry(cluster, draft.decided, chosen)
            if entry is None:
                return math.inf
            alpha.update({k: latency(k, prices) for k in entry.small if k not in alpha})
            total += cluster.multiplicity * own_seconds(entry, alpha, prices)
        return total + shared_seconds(alpha.keys(), prices)


def computed_alone(model: Model, hardware: Hardware) -> float:
    """Seconds that one device computes on a step: no layout takes less than a device's share of them, as far
    as pieces never cost less than their share of the whole; else 0."""
    prices = pricer(hardware, ONE_DEVICE)
    return Evaluation(model, unsplit(model), prices).cost.compute_seconds if prices.pieces_cost_more else 0.0


def layers_alone(
    model: Model, hardware: Hardware, dim: str, kinds: Collection[str] = MATMUL_CLASSES
) -> tuple[float, ...]:
    """The part of `computed_alone` in loops over a dimension, before the update, in some kinds of kernels
    (none: all), by the slots of a pipeline that it is in (`StageAction`)."""
    prices, slots = pricer(hardware, ONE_DEVICE), slots_of(model.step_graph, dim)
    found = [0.0] * len(StageAction)
    for x in Evaluation(model, unsplit(model), prices).cost.lines if prices.pieces_cost_more else ():
        slot = slots.get(x.origin.node) if x.origin.phase != Phase.UPDATE else None
        if slot is not None and (x.kind in kinds or not kinds):
            found[slot] += x.seconds * x.times
    return tuple(found)


def check_limit(memory: Any) -> None:
    """UserError if the value is not a limit of a device's memory, at run time; None is no limit."""
    if memory is not None and not (is_number(memory) and float(memory) > 0):
        raise UserError(f"memory is {memory!r}; give a positive number of bytes")


def evaluate(
    model: Model,
    mesh: Mesh,
    layout: Layout,
    hardware: Hardware,
    options: Options = DEFAULT,
    prices: Pricer | None = None,
    check: bool = True,
) -> Evaluation:
    """Lowers one layout to price and walk it; `check` as in `lower`. LayoutError if it is not legal."""
    model, prices = as_run(model, hardware), prices or pricer(hardware, mesh)
    if options.diloco is not None:
        found = model.replicas(mesh, layout, options, check=check)
        return Evaluation(model, found.inner, prices, found, options)
    program = model.lower(mesh, layout, options, check=check)
    return Evaluation(model, program, prices, options=options)


class Evaluator:
    """Evaluations of one model on one piece of hardware, with a shared cache.

    Attributes:
      tight: the fastest layout of some mesh did not fit, so those of others may not fit either.
      alone, layers: `computed_alone` and `layers_alone` of this model; of: the one whose `host` it is.
      rows_over: the most bytes that rows count more than the program of an evaluated layout; None: no row was
        needed.
    """

    def __init__(self, model: Model, hardware: Hardware, of: Evaluator | None = None) -> None:
        self.model, self.hardware, self.of = as_run(model, hardware), hardware, of
        self.tight = False
        self._known: dict[tuple[Mesh, Layout, Hashable], Evaluation | str] = of._known if of else {}
        self._prices: dict[Mesh, Pricer] = {}
        self._table_prices: TablePrices | None = None
        self.rows_over: float | None = None
        self.alone = cache(partial(computed_alone, self.model, hardware))
        self.layers = cache(partial(layers_alone, self.model, hardware))

    @cached_property
    def host(self) -> Evaluator | None:
        """The same, with tables of the host's seconds (`LaunchPricer`); None if it launches no kernels."""
        return Evaluator(self.model, self.hardware, self) if self.hardware.chip.host_interval else None

    def prices(self, mesh: Mesh) -> Pricer:
        if mesh not in self._prices:
            found = self.of.prices(mesh) if self.of else pricer(self.hardware, mesh)
            self._prices[mesh] = LaunchPricer(self.hardware, found.placement) if self.of else found
        return self._prices[mesh]

    def least(self, mesh: Mesh, plans: Mapping[str, PipelineSchedule]) -> float:
        """Seconds that every layout takes at least: a device computes its share, and pipeline stages that of
        their products in every slot that counts; plans: dimensions of layers -> the schedule of their stages.
        """
        every = ((self.slot_runs(mesh, dim, plan), self.layers(dim)) for dim, plan in plans.items())
        slots = [[*zip(*each, strict=True)] for each in every]
        if plans and self.apart(mesh):
            # Only what is in layers: one stage alone has the others' work. Some stage has an equal part.
            return max(max(sum(map(math.prod, s)), sum(x for _, x in s)) for s in slots) / mesh.devices
        more = (sum(max(runs - 1, 0.0) * s for runs, s in each) for each in slots)
        return (self.alone() + max(more, default=0.0)) / mesh.devices

    def apart(self, mesh: Mesh) -> bool:
        """True if each stage is a program of its own."""
        return self.prices(mesh).itemiser.compiler.memory.stage_programs

    def slot_runs(self, mesh: Mesh, dim: str, plan: PipelineSchedule) -> tuple[float, ...]:
        """How often a step counts slots of each kind (`StageAction`) of the layers of one stage, at least, as
        a multiple of the microbatches and of an equal part of the layers."""
        kind, parts = KINDS[plan.kind], plan.microbatches
        if not kind.one_way:
            return (0.0,) * len(StageAction)  # What is on the longest way depends on the seconds of slots.
        if self.apart(mesh):  # Slots of the fullest stage, and of others for the first and last microbatch.
            counts = plan.order.of_stages(max(self.model.graph.dims()[dim]))
            if counts.min() < counts.max():
                return (0.0,) * len(StageAction)  # The longest way may pass other stages.
            if kind.split:  # slots of weights fill what would be idle
                return (1.0, 1.0, max(0, parts - plan.stages + 1) / parts)
            return (1 + (plan.stages - 1) / (parts * plan.chunks),) * len(StageAction)
        busy = plan.busy.sum(axis=0) / plan.works
        # Without slots of their own, weights are part of backward.
        return tuple(float(busy[slot if busy[slot] else StageAction.BACKWARD]) for slot in StageAction)

    def near(self, mesh: Mesh) -> Axes:
        """Its axes inside nodes or slices, where others lie between them."""
        return self.prices(mesh).placement.near

    def table_prices(self, mesh: Mesh, decided: Decisions) -> TablePrices:
        """The costs of a problem's layouts by its tables; those of the latest problem are cached."""
        found = self._table_prices
        if found is None or found.draft.mesh != mesh or found.draft.decided is not decided:
            self._table_prices = found = TablePrices(
                Draft(self.model, mesh, decided, self.prices(mesh), whole=True)
            )
        return found

    def evaluated(self) -> Iterator[tuple[Mesh, Layout, Evaluation]]:
        """All layouts that were evaluated."""
        for (mesh, layout, _), found in [*self._known.items()]:
            if isinstance(found, Evaluation):
                yield mesh, layout, found

    def knows(self, mesh: Mesh, layout: Layout, options: Options = DEFAULT) -> bool:
        """True if asking takes no time."""
        return (mesh, layout, options.key) in self._known

    def __call__(self, mesh: Mesh, layout: Layout, options: Options = DEFAULT) -> Evaluation:
        """As `evaluate`, but the program is not checked: `make_plan` checks that of the answer."""
        key = mesh, layout, options.key
        found = self._known.get(key)
        if found is None:
            try:
                prices = (self.of or self).prices(mesh)
                found = evaluate(self.model, mesh, layout, self.hardware, options, prices, check=False)
            except LayoutError as error:
                found = str(error)
            self._known[key] = found
        if isinstance(found, str):
            raise LayoutError(found)
        return found
