"""Named strategies of experts (baselines). Each is the search itself with less to choose from.

  data parallel           data dimensions over all axes, weights whole between uses (ZeRO up to stage 2)
  fully sharded (FSDP)    the same, with every variable stored split (ZeRO stage 3)
  data + context parallel, FSDP + context parallel
                          the same where all devices do not divide the batch: the others split a sequence or
                          an image
  tensor parallel         inner dimensions of weights, and perhaps others, over all axes, the batch whole
                          (Megatron-LM, Shoeybi et al. 2019, section 3)
  data + tensor parallel  data over the first axes, the same of weights over the others (Shazeer et al. 2018,
                          section 5; GSPMD, Xu et al. 2021, section 5)
  expert parallel         data over all axes, experts over the same, with all-to-alls between (GShard,
                          Lepikhin et al. 2021); of mixtures of experts alone

`parallelism` decides the role of each dimension. A name covers many plans: the split dimensions of weights,
the shape of the mesh, storage, recomputation and microbatches are searched (`best_plans`), and if weights are
split, also further splits over their axes elsewhere (sequence parallelism, Korthikanti et al. 2022).

Simpler searches on the same mesh: their results show the value of the proof.

  greedy        from nothing split: the one split more that saves most, as long as one saves anything
  least memory  the splits with the smallest peak, whatever they cost in time; what Mesh-TensorFlow's own
                optimiser (`mesh_tensorflow/auto_mtf`) looks for
Both decide about splits alone; storage, recomputation and microbatches are chosen after them (`best_plans`).
Neither needs tables: greedy predicts single layouts, and memory follows from the legal assignments.
"""

from __future__ import annotations

import itertools
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass

from layoutopt.formulation.extract import legal_problem
from layoutopt.optimize.problems.least_memory import lean, leanest
from layoutopt.optimize.problems.request import Request
from layoutopt.optimize.problems.subproblem import SubproblemSearch
from layoutopt.optimize.problems.subproblems import Subproblem
from layoutopt.space.decisions import ANYTHING, ARGUMENTS, Decisions, SearchSpace, decisions
from layoutopt.space.kind import HYBRID, Choice
from layoutopt.space.parallelism import parallelism
from layoutopt.space.restriction import RestrictionError
from layoutopt.space.sequence_parallel import Elsewhere
from layoutopt.space.splits import Split, domains
from layoutopt.space.stages import runs_again
from layoutopt.space.undivided import mostly_split, storage_of, stored_at
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import divisors
from mesh_tf_core.ir.layout import AT, Axes, Layout
from mesh_tf_core.ir.mesh import Mesh
from mesh_tf_core.lower import Options
from mesh_tf_core.lower.storage import BETWEEN, SPLIT, STAGES, VARIABLE
from mesh_tf_core.model import Model

Baseline = tuple[Layout, Options]


def greedy(request: Request, subproblem: Subproblem) -> Baseline:
    """The layout at which no single split more, or wider, saves time by the tables."""
    decided = subproblem.decided
    table_prices = request.evaluator.table_prices(subproblem.mesh, decided)
    plain = Options(microbatches=decided.microbatches)
    layout = Layout({n: decided.options[n][0] for n in decided.of(Split)})
    seconds = table_prices.seconds(layout, plain)
    while True:
        wider = ((table_prices.seconds(more, plain), str(more), more) for more in _one_more(decided, layout))
        best = min(wider, default=(math.inf, "", layout))
        if not best[0] < seconds:
            return layout, plain
        seconds, layout = best[0], best[2]


def _one_more(decided: Decisions, layout: Layout) -> Iterator[Layout]:
    """Every layout with one dimension split over more axes."""
    rules = dict(layout.items())
    for name in decided.of(Split):
        for choice in decided.options[name]:
            if set(choice) > set(layout.axes(name)):
                yield Layout({**rules, name: choice})


def least_memory(request: Request, subproblem: Subproblem) -> Baseline | None:
    """The splits with a small peak; None if there are none in time."""
    decided = subproblem.decided
    others = [n for n in decided.free if n not in decided.of(Split)]
    known = legal_problem(request.model, subproblem.mesh, decided, request.evaluator.prices(subproblem.mesh))
    if any(() not in known.decided.options[n] for n in others):
        return None
    plain: dict[str, Choice] = {n: () for n in others if n in known.names}
    search = SubproblemSearch(request.evaluator, known)
    found = lean(search, plain, request.clock) or leanest(search, request.clock, plain)[0]
    return None if found is None else (found.layout, found.options)


HEURISTICS: dict[str, Callable[[Request, Subproblem], Baseline | None]] = {
    "greedy": greedy,
    "least-memory splits": least_memory,
}
"""The heuristics beside an answer, by their names in plans."""
STORED_SPLIT = tuple(stage for stage in STAGES if (VARIABLE, BETWEEN) in SPLIT[stage])
"""Stages at which a variable is split between its updates."""
WHOLE = tuple(stage for stage in STAGES if stage not in STORED_SPLIT)
FSDP, CONTEXT = "fully sharded (FSDP)", "FSDP + context parallel"
"""Plans in which most parameters are stored split; in the first, all devices split the batch."""


def chosen_by_name(allowed: SearchSpace) -> SearchSpace:
    """The space of a named plan: the choices of a search that the name does not fix. Named plans have no
    pipeline stages, and the user's pins do not apply to them."""
    whole = tuple(stage for stage in allowed.storage if stage != HYBRID and AT not in stage)
    said = {name: getattr(allowed, name) for name, argument in ARGUMENTS.items() if argument.by_name}
    return SearchSpace(**{**said, "storage": whole or STAGES[:1], "restriction": allowed.restriction})


class Plans(ABC):
    """Plans on one mesh.

    Attributes:
      data: axes that the data dimensions are split over, all of them.
      rest: axes over which other dimensions may be split: `also`, and at least one of `split`, if it names
        any.
    """

    mesh: Mesh
    data: Axes = ()
    rest: Axes = ()
    split: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    @abstractmethod
    def decided(self, allowed: SearchSpace, microbatches: int) -> Decisions | None:
        """The decisions with this number of microbatches; None if there are none."""

    def plain(self) -> tuple[Layout, Options] | None:
        """One of them, as written without a search."""
        return None


@dataclass(frozen=True)
class NamedStrategy(Plans):
    """Plans of one name on one mesh.

    Attributes:
      stages: of storage, where these are of the name.
    """

    model: Model
    mesh: Mesh
    data: Axes
    rest: Axes
    split: tuple[str, ...]
    stages: tuple[str, ...] = ()
    also: tuple[str, ...] = ()

    def decided(self, allowed: SearchSpace, microbatches: int) -> Decisions | None:
        stages = tuple(s for s in allowed.storage if s in self.stages) or self.stages[:1] or allowed.storage
        if not any(allowed.restriction.expresses("storage", stage) for stage in stages):
            return None
        wanted = chosen_by_name(allowed).but(storage=stages, microbatches=(microbatches,))
        try:
            every = decisions(self.model.training_step(microbatches).graph, self.mesh, wanted)
        except RestrictionError:
            return None
        further = {name: _within(every.options[name], self.rest) for name in every.of(Elsewhere)}
        every = every.within(further)
        options = self.options({n: every.options[n] for n in every.of(Split)})
        return None if options is None else every.within(options).agreeing()

    def options(self, every: Mapping[str, tuple[Axes, ...]]) -> dict[str, tuple[Axes, ...]] | None:
        """The options left of the splits of every dimension; None if the name allows none."""
        dims = parallelism(self.model)
        options: dict[str, tuple[Axes, ...]] = dict.fromkeys(every, ((),))
        shared = set(self.rest) & set(self.data)
        for name in every.keys() & {*self.split, *self.also}:
            found = _within(every[name], self.rest)
            # As one axis, unless data dimensions may have some of them.
            options[name] = tuple(o for o in found if shared or len(o) in (0, len(self.rest)))
        if self.split and not any(any(options.get(n, ())) for n in self.split):
            return None
        # What stands beside another that may have its axes has to choose.
        rivals = (*dims.data, *(self.split if shared else ()))
        for name in dims.data if self.data else ():
            found = _within(every.get(name, ((),)), self.data)
            whole = tuple(axes for axes in found if len(axes) == len(self.data))
            first = name == dims.data[0]
            if first and not whole:
                return None
            options[name] = whole if whole and (first or dims.apart(name, rivals)) else found
        return options

    def plain(self) -> tuple[Layout, Options] | None:
        """Everything as wide as can be."""
        options, dims = self.options(domains(self.model.graph, self.mesh, ANYTHING)), parallelism(self.model)
        if options is None:
            return None
        rules: dict[str, Axes] = {}
        for name in dict.fromkeys((*dims.data[:1], *self.split, *self.also, *dims.data)):
            taken = {a for n, axes in rules.items() if not dims.apart(name, (n,)) for a in axes}
            free = [axes for axes in options.get(name, ()) if not taken & set(axes)]
            rules[name] = widest(free, self.mesh)
        stage = self.stages[0] if self.stages else STAGES[0]
        return Layout(rules), Options(stored_at(self.model.graph.variables.values(), stage))

    @property
    def is_split(self) -> bool:
        """True if storage splits most parameters, where everything is as wide as can be."""
        found = self.plain()
        if found is None:
            return False
        layout, options = found
        return mostly_split(storage_of(self.model.step_graph, self.mesh, layout, options.storage))


@dataclass(frozen=True)
class Pinned(Plans):
    """Plans with these splits, which a simpler search has found."""

    model: Model
    mesh: Mesh
    layout: Layout

    def decided(self, allowed: SearchSpace, microbatches: int) -> Decisions | None:
        ways = self.model.stages(self.mesh, self.layout)
        stages = {dim: self.layout.axes(dim) for dim in ways}
        try:
            schedule = allowed.restriction.among(allowed, "schedule")[:1]
            again = next(runs_again(self.model, stages, allowed), frozenset())
            graph = self.model.training_step(microbatches, ways, schedule[0], again).graph
            pins = {n: self.layout.axes(n) for n in graph.dims() if n not in stages}
            wanted = allowed.but(pins=pins, forbid={}, microbatches=(microbatches,))
            wanted = wanted.but(stages=stages, schedule=schedule, again=again)
            return decisions(graph, self.mesh, wanted)
        except UserError:
            return None


def _axes(mesh: Mesh) -> Axes:
    """The axes that can split something."""
    return tuple(a for a in mesh.names if mesh.size(a) > 1)


def widest(options: Iterable[Axes], mesh: Mesh) -> Axes:
    """The option with most devices; of several, that over the last axes, which have the fastest links."""
    order = mesh.names.index
    return max(options, key=lambda o: (mesh.group_size(o), sorted(map(order, o))), default=())


def _within(options: Iterable[Axes], axes: Axes) -> tuple[Axes, ...]:
    return tuple(o for o in options if set(o) <= set(axes))


class Baselines:
    """The named plans of one model for as many devices as a mesh has.

    Args:
      mesh: plans on it come first.
      shapes: of other meshes that there may be (None: all of one or two axes).
    """

    def __init__(self, model: Model, mesh: Mesh, shapes: Set[tuple[int, ...]] | None = None) -> None:
        self.model, self.mesh, self.devices, self.shapes = model, mesh, mesh.devices, shapes
        self.dims, self.sizes = parallelism(model), model.graph.dims()

    def plans(self) -> dict[str, list[NamedStrategy]]:
        """Name -> where its plans are."""
        found = {
            "data parallel": [p for p in self._data(WHOLE) if not p.rest],
            FSDP: [p for p in self._data(STORED_SPLIT) if not p.rest],
            "data + context parallel": [p for p in self._data(WHOLE) if p.split],
            CONTEXT: [p for p in self._data(STORED_SPLIT) if p.split],
            "tensor parallel": [*self._tensor()],
            "data + tensor parallel": [*self._both()],
            "expert parallel": [*self._experts()],
        }
        return {name: plans for name, plans in found.items() if plans}

    def _data(self, stages: tuple[str, ...]) -> Iterator[NamedStrategy]:
        most = self.devices
        if self.dims.data:
            most = math.gcd(most, *self.sizes[self.dims.data[0]])
        for mesh in self._meshes([(("data", most), ("model", self.devices // most))]):
            data = max(self._parts(mesh), key=mesh.group_size, default=())
            rest = tuple(a for a in _axes(mesh) if a not in data)
            if data:
                found = NamedStrategy(
                    self.model, mesh, data, rest, self.dims.sequence if rest else (), stages
                )
                if found.is_split or stages != STORED_SPLIT:
                    yield found
            if not rest:
                break

    def _tensor(self) -> Iterator[NamedStrategy]:
        for mesh in self._meshes([(("model", self.devices),)]):
            yield NamedStrategy(self.model, mesh, (), _axes(mesh), self.dims.inner, also=self.dims.weights)
            break

    def _both(self) -> Iterator[NamedStrategy]:
        ways = self._ways(self.dims.inner)
        for mesh in self._meshes((("data", self.devices // n), ("model", n)) for n in ways):
            for data in self._parts(mesh):
                rest = tuple(a for a in _axes(mesh) if a not in data)
                if rest:
                    yield NamedStrategy(self.model, mesh, data, rest, self.dims.inner, also=self.dims.weights)

    def _experts(self) -> Iterator[NamedStrategy]:
        ways = self._ways(self.dims.experts)
        for mesh in self._meshes([(("data", self.devices // n), ("data2", n)) for n in ways]):
            if self.dims.experts and _axes(mesh) in self._parts(mesh):
                yield NamedStrategy(self.model, mesh, _axes(mesh), _axes(mesh), self.dims.experts)

    def _meshes(self, others: Iterable[Iterable[tuple[str, int]]]) -> Iterator[Mesh]:
        """The given mesh and others, without axes of one device."""
        yield self.mesh
        for axes in others:
            found = [(name, size) for name, size in axes if size > 1]
            for mesh in (Mesh(found), Mesh(found[::-1])) if self.shapes is not None else (Mesh(found),):
                if mesh.shape != self.mesh.shape and (self.shapes is None or mesh.shape in self.shapes):
                    yield mesh
                    break

    def _ways(self, names: Iterable[str]) -> list[int]:
        """Into how many pieces one of these dimensions can be split, more than one."""
        found = {math.gcd(self.devices, *self.sizes[n]) for n in names}
        return sorted({n for most in found for n in divisors(most) if n > 1})

    def _parts(self, mesh: Mesh) -> list[Axes]:
        """Axes that the batch may be split over, the most first: any of the given mesh, else `data`."""
        names = _axes(mesh)
        every = [x for count in range(len(names), 0, -1) for x in itertools.combinations(names, count)]
        if mesh != self.mesh:
            every = [tuple(a for a in names if a.startswith("data"))]
        sizes = self.sizes[self.dims.data[0]] if self.dims.data else ()
        return [x for x in every if x and sizes and all(n % mesh.group_size(x) == 0 for n in sizes)]


def by_name(
    model: Model, mesh: Mesh, names: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Mesh, Layout, Options]]:
    """(name, mesh, layout, options) of one plan of every name on a mesh, as written without a search, of the
    layout without splits, and of the model's own expert layouts.

    Args:
      names: names of the mesh's axes in a plan, if they differ.
    """
    yield "replicated", mesh, Layout(), Options()
    for name, plans in Baselines(model, mesh, frozenset()).plans().items():
        found = next(filter(None, (plan.plain() for plan in plans)), None)
        if found is not None:
            yield name, mesh, *found
    own = {new: old for old, new in (names or {}).items()}
    called = called_mesh(mesh, names or {})
    for name, (mesh_text, layout_text) in model.layouts.items():
        layout, its = Layout(layout_text), Mesh(mesh_text) if mesh_text else called
        axes = {a for found in layout.values() for a in found}
        if its.devices == mesh.devices and axes <= set(its.names):
            if its == called:
                its, layout = mesh, Layout({n: tuple(own.get(a, a) for a in x) for n, x in layout.items()})
            yield name, its, layout, Options()


def called_mesh(mesh: Mesh, names: Mapping[str, str]) -> Mesh:
    """A mesh with other names of axes."""
    return Mesh([(names.get(a, a), n) for a, n in mesh.axes])


def in_names(text: str, names: Mapping[str, str]) -> str:
    """A text about a searched mesh, with the names of its axes in a plan (`axis_names`)."""
    return re.sub(r"\w+", lambda word: names.get(word[0], word[0]), text)


def axis_names(layout: Layout, mesh: Mesh, request: Request) -> dict[str, str]:
    """Names for axes of a searched mesh: `data` splits the batch, `pipe` layers, `model` others; what rules
    name keeps its name."""
    model, named = request.model, request.allowed.named
    on_batch = set(layout.axes(model.batch_dim)) if model.batch_dim else set()
    on_layers = {axis for dim in model.stages(mesh, layout) for axis in layout.axes(dim)}
    names = {axis: axis for axis in mesh.names if axis in named}
    for axis in (a for a in mesh.names if a not in named):
        word = "data" if axis in on_batch else "pipe" if axis in on_layers else "model"
        numbered = itertools.chain([word], (f"{word}{n}" for n in itertools.count(2)))
        names[axis] = next(name for name in numbered if name not in names.values())
    return names
