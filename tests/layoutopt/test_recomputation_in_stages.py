"""What runs again in the stages of a pipeline: a search decides all that `cost` prices. Every set of loops is
priced as a whole program, and held against what searches find, and prove, under limits that bind."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.pricing.pricer import pricer
from examples.moe_lm import model as experts
from examples.transformer_lm import model as transformer
from layoutopt.analysis.certificate import certify, considered_by, proof_of
from layoutopt.formulation.extract import Draft
from layoutopt.optimize.evaluation.evaluator import TablePrices, evaluate
from layoutopt.optimize.problems.subproblems import subproblems
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.kind import ALL
from layoutopt.space.restriction import Restriction
from layoutopt.space.splits import parse_rules
from mesh_tf_core.errors import InfeasibleError
from mesh_tf_core.ir.schedules import rounds_of
from mesh_tf_core.lower.remat_policy import SETS, Recomputed
from tests.marks import by_day
from tests.searching import search

SAME = 1e-9


@dataclass(frozen=True)
class Case:
    """A pipeline of which everything is pinned but what runs again, and, if `hosted`, whether the optimizer's
    state lies on the hosts."""

    model: mtf.Model
    mesh: str
    hardware: str
    layout: str
    schedule: str
    microbatches: int
    storage: str = "layout"
    selective: bool = False
    some: tuple[int, ...] = ()
    hosted: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """As arguments of a search."""
        dims = {d for d in self.model.graph.dims() if not d.endswith("_of_stage")}
        pins = {**dict.fromkeys(dims, ()), **parse_rules(self.layout)}
        return {
            "allow": ("usual",),
            "pins": pins,
            "storage": (self.storage,),
            "recompute": (False, *["selective"] * self.selective, *(f"count={n}" for n in self.some), True),
            "microbatches": (self.microbatches,),
            "context": ("gather",),
            "pipeline": ("layers",),
            "schedule": (self.schedule,),
            "offload": ("optimizer",) * self.hosted,
            "restriction": Restriction(granularity={"offload": ALL}),
        }

    def priced(self) -> dict[frozenset[str], tuple[float, int]]:
        """Every set of loops, and "offload" -> seconds of a step, and bytes of a device; `cost` prices no
        others."""
        machine, mesh = load_hardware(self.hardware), mtf.Mesh(self.mesh)
        keeps = ((), *SETS) if self.selective else ((),)
        found: dict[frozenset[str], tuple[float, int]] = {}
        storage = (
            {}
            if self.storage == "layout"
            else dict.fromkeys(self._stored(self.storage), int(self.storage[-1]))
        )
        hosted = frozenset(("optimizer", name) for name in self._stored("zero1"))
        for texts, host in itertools.product(_texts(keeps, self.some), (False, True)[: 1 + self.hosted]):
            offload = hosted if host else frozenset()
            how = mtf.Options(storage, texts, self.microbatches, offload=offload, schedule=self.schedule)
            try:
                step = evaluate(self.model, mesh, mtf.Layout(parse_rules(self.layout)), machine, how)
            except mtf.UserError as error:
                if "have no values of kind or scope" not in str(error):
                    raise
                continue
            found[texts | {"offload"} if host else texts] = step.cost.step_seconds, step.memory.peak
        return found

    def _stored(self, storage: str) -> list[str]:
        """The variables that a search stores so: from zero2 on, those of the stages alone."""
        few = storage != "zero1"
        variables = [v for v in self.model.graph.variables.values() if v.trainable and len(v.shape)]
        return [v.name for v in variables if "layers" in v.shape.names or not few]


def _texts(keeps: Iterable[tuple[str, ...]], some: Iterable[int] = ()) -> Iterator[frozenset[str]]:
    each = [["", *(str(Recomputed(dim, keep)) for keep in keeps)] for dim in ("layers", "tick")]
    each[0] += [f"layers:count={n}" for n in some]
    for chosen in itertools.product(*each):
        yield frozenset(filter(None, chosen))


def check(case: Case, limits: Iterable[float] | None = None) -> int:
    """Holds searches under limits against all that is priced; how many were held."""
    priced, mesh, count = case.priced(), mtf.Mesh(case.mesh), 0
    least = min(peak for _, peak in priced.values())
    fewest = search(case.model, mesh=mesh, hardware=case.hardware, objective="memory", **case.asked)
    assert fewest.predicted.peak_memory_bytes == least, case
    for limit in limits or _limits([peak for _, peak in priced.values()]):
        count += 1
        fits = [seconds for seconds, peak in priced.values() if peak <= limit]
        given = {"mesh": mesh, "hardware": case.hardware, "memory": limit, **case.asked}
        if not fits:
            with pytest.raises(InfeasibleError):
                search(case.model, **given)
            continue
        plan = search(case.model, **given)
        assert plan.solver.status == "OPTIMAL", (case, limit)
        assert plan.predicted.step_seconds == pytest.approx(min(fits), rel=SAME), (case, limit)
        assert plan.predicted.peak_memory_bytes <= limit
        assert all(" " in note for note in plan.data.notes), plan.data.notes
    return count + 1


def _limits(peaks: list[int]) -> list[float]:
    """Limits between the peaks, and below all of them."""
    kinds = sorted(set(peaks))
    return [kinds[0] - 1.0, *(float(peak) for peak in kinds)]


def deep() -> mtf.Model:
    return transformer(
        layers=16, d_model=128, d_kv=32, heads=4, d_ff=512, vocab=64, batch=64, length=128, dtype="bfloat16"
    )


@pytest.fixture(scope="module", params=by_day(["gpipe", "1f1b"]))
def stages(request: pytest.FixtureRequest) -> Case:
    return Case(_deep(), "pipe:4;data:2", "tpu-v4", "layers:pipe;batch:data", request.param, 8)


@functools.cache
def _deep() -> mtf.Model:
    return deep()


@pytest.mark.nightly
def test_layers_that_run_again_are_found_and_proven(stages: Case) -> None:
    """Layers beat whole stages in both columns; with gpipe both together need least."""
    priced, layers = stages.priced(), frozenset({"layers"})
    seconds, peak = priced[layers]
    assert peak < priced[frozenset({"tick"})][1]
    assert check(stages, [float(peak)]) == 2
    plan = search(
        stages.model, mesh=stages.mesh, hardware=stages.hardware, memory=float(peak), **stages.asked
    )
    assert plan.data.recompute == ["layers"]
    asked = SearchSpace(**stages.asked)
    proof = certify(stages.model, plan, load_hardware(stages.hardware), peak, asked)
    assert proof_of(tuple(proof), asked, considered_by(plan)).verified
    worse = search(
        stages.model, mesh=stages.mesh, hardware=stages.hardware, **{**stages.asked, "recompute": (True,)}
    )
    assert worse.predicted.step_seconds >= seconds


@pytest.mark.nightly
def test_whole_stages_and_their_layers_together_need_least() -> None:
    case = Case(_deep(), "pipe:4;data:2", "tpu-v4", "layers:pipe;batch:data", "gpipe", 8)
    priced, both = case.priced(), frozenset({"layers", "tick"})
    assert priced[both][1] == min(peak for _, peak in priced.values())
    limit = float(priced[both][1])
    plan = search(case.model, mesh=case.mesh, hardware=case.hardware, memory=limit, **case.asked)
    assert plan.data.recompute == ["layers", "tick"]
    assert plan.solver.status == "OPTIMAL"
    with pytest.raises(InfeasibleError, match="no layout needs less than") as error:
        more = {"memory": 0.999 * limit, "alternatives": True}
        search(case.model, mesh=case.mesh, hardware=case.hardware, **{**case.asked, **more})
    assert error.value.nearest is not None
    assert error.value.nearest.predicted.peak_memory_bytes == limit


@pytest.mark.nightly
def test_a_mixture_of_experts_with_everything_free() -> None:
    """Splits, storage and schedules too: no layout of the answer's with other loops is better."""
    model = experts(layers=4, d_model=32, d_kv=8, heads=4, d_ff=64, vocab=32, batch=8, length=16, experts=4)
    mesh, machine = mtf.Mesh("x:4;y:2"), load_hardware("tpu-v5p")
    asked: dict[str, Any] = {"pipeline": ("layers",), "microbatches": (2,), "pins": "layers:x"}
    roomy = search(model, mesh=mesh, hardware=machine, objective="memory", **asked)
    limit = 1.02 * roomy.predicted.peak_memory_bytes
    plan = search(model, mesh=mesh, hardware=machine, memory=limit, **asked)
    assert plan.solver.status == "OPTIMAL"
    for texts in _texts([()]):
        for each in (plan, roomy):
            how = {**vars(each.options), "recompute": texts}
            step = evaluate(model, mesh, each.layout, machine, mtf.Options(**how))
            assert step.memory.peak >= roomy.predicted.peak_memory_bytes
            if step.memory.peak <= limit:
                assert step.cost.step_seconds >= plan.predicted.step_seconds * (1 - SAME)


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", by_day(["1f1b", "gpipe", "zb-h1"], every=3))
def test_some_layers_of_each_stage(schedule: str) -> None:
    model = transformer(layers=6, d_model=32, d_kv=8, heads=4, d_ff=128, vocab=16, batch=16, length=16)
    case = Case(model, "pipe:2;data:2", "h100", "layers:pipe;batch:data", schedule, 4, some=(1, 2))
    priced, some = case.priced(), [frozenset({t} - {""}) for t in ("", "layers:count=1", "layers:count=2")]
    peaks = [priced[each][1] for each in (*some, frozenset({"layers"}))]
    assert sorted(peaks, reverse=True) == peaks and len({*peaks}) == 4
    assert check(case, [float(priced[some[1]][1]), float(priced[some[2]][1])]) == 3


def test_tables_have_no_price_for_splits_that_do_not_divide() -> None:
    """As of a named layout that splits a microbatch over the axis of stages too."""
    model, mesh = transformer(layers=4, batch=16, length=16), mtf.Mesh("pipe:4;data:2")
    asked = SearchSpace(pins={"layers": ("pipe",)}, pipeline=("layers",), schedule=("1f1b",))
    asked = replace(asked, microbatches=(4,))
    problem = next(p for p in subproblems(model, [mesh], asked) if p.key.stages)
    prices = TablePrices(Draft(model, mesh, problem.decided, pricer(load_hardware("h100"), mesh), whole=True))
    options = mtf.Options(microbatches=4, schedule="1f1b")
    assert prices.seconds(mtf.Layout("layers:pipe;batch:data"), options) < math.inf
    assert prices.seconds(mtf.Layout("batch:pipe+data"), options) == math.inf


def test_a_set_of_values_is_one_of_the_layers() -> None:
    """Ticks, and loops that are not stages, make nothing of that name: they refuse no stages for it."""
    model, mesh = transformer(layers=4), mtf.Mesh("pipe:2")
    schedules = ("gpipe", "1f1b")
    asked = SearchSpace(
        pins={"layers": ("pipe",)},
        pipeline=("layers",),
        schedule=schedules,
        recompute=(False, "keep=wi"),
        microbatches=(1,),
    )
    assert {p.key.schedule for p in subproblems(model, [mesh], asked)} == {*schedules}
    why = "^recompute 'layers:keep=none': loops over 'layers' have no values of kind or scope 'none'; known: "
    with pytest.raises(mtf.UserError, match=why):
        [*subproblems(model, [mesh], replace(asked, recompute=(False, "keep=none")))]
    more = replace(asked, pipeline=("layers",), schedule=("interleaved:4", "circular:5"))
    why = "interleaved:4: pipeline over 'layers': 2 stages times 4 .*; circular:5: pipeline over 'layers': 2"
    with pytest.raises(mtf.UserError, match=why):
        [*subproblems(model, [mesh], more)]


# -- random pipelines --


def random_case(seed: int) -> Case:
    """A small pipeline: any schedule, some splits, one storage; one in four may keep values, as many may have
    the optimizer's state on the hosts."""
    rng = random.Random(seed)
    mesh, stages = rng.choice([("pipe:2", 2), ("pipe:2;t:2", 2), ("pipe:4", 4), ("t:2;pipe:2", 2)])
    schedule = rng.choice(["gpipe", "1f1b", "interleaved:2", "circular:2"])
    layers = stages * rng.choice([2, 4] if ":" in schedule else [1, 2, 3])
    rules = ["layers:pipe"]
    if "t" in mtf.Mesh(mesh).names:
        rules += [f"{dim}:t" for dim in rng.choice([("batch",), ("d_ff",), ("heads", "d_ff"), ()])]
    sizes = {
        "layers": layers,
        "d_model": rng.choice([16, 32]),
        "d_kv": 8,
        "heads": rng.choice([2, 4]),
        "d_ff": rng.choice([32, 128]),
        "vocab": rng.choice([16, 64]),
        "batch": 16,
        "length": rng.choice([8, 16]),
        "dtype": rng.choice(["float32", "bfloat16"]),
        "dropout": rng.choice([0.0, 0.0, 0.1]),
    }
    if rng.random() < 0.2:
        model = experts(**sizes, experts=4)
    else:
        model = transformer(**sizes, gated=rng.random() < 0.3, attention=rng.choice(["fused", "plain"]))
    hardware = rng.choice(["tpu-v4", "h100", "a100", "tpu-v5e", "cpu-local"])
    parts = rng.choice([2, 4, 8])
    storage = rng.choice(["layout", "layout", "zero1", "zero3", "zero2"])
    selective = rng.random() < 0.25
    some = (1,) if layers > stages * rounds_of(schedule) and rng.random() < 0.5 else ()
    hosted = hardware != "cpu-local" and rng.random() < 0.25
    return Case(model, mesh, hardware, ";".join(rules), schedule, parts, storage, selective, some, hosted)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, *range(100, 180)])
def test_random_pipelines(seed: int) -> None:
    assert check(random_case(seed)) >= 3
