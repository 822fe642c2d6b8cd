"""What is remembered of a graph's parts gives the tables that lowering every assignment anew gives."""

from __future__ import annotations

import gc
import itertools
import random
import weakref
from collections.abc import Callable

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import Hardware, load_hardware
from costmodels.pricing.pricer import Pricer, pricer
from layoutopt.formulation.clusters import clusters
from layoutopt.formulation.dependencies import Dependencies
from layoutopt.formulation.lowering_cache import Namings, lowering_cache
from layoutopt.formulation.makers import OpCluster
from layoutopt.formulation.tables import Entry, Tabler
from layoutopt.space.collective_matmul import CollectiveMatmul
from layoutopt.space.decisions import Decisions, SearchSpace, decisions
from layoutopt.space.kind import Choice
from mesh_tf_core.ir.program import AllReduce, Program
from mesh_tf_core.lower import Options, Subgraph
from mesh_tf_core.lower.collective_matmul import decompose
from mesh_tf_core.lower.messages import BucketKey, start_and_done, together, waiting
from mesh_tf_core.lower.oracle import Oracle
from mesh_tf_core.lower.pipeline import begin_part
from mesh_tf_core.lower.placement import placement
from tests.layoutopt.models import EXAMPLES, HARDWARE, crossed, random_model
from tests.marks import by_day

PRICE = 1e-9


def lowered(graph: mtf.Graph, part: Subgraph, oracle: Oracle, options: Options) -> Program:
    begun = begin_part(graph, part, oracle, options)
    return start_and_done(decompose(begun, options.collective_matmul, oracle))


def anew(
    model: mtf.Model,
    mesh: mtf.Mesh,
    decided: Decisions,
    prices: Pricer,
    cluster: OpCluster,
    chosen: dict[str, Choice],
) -> Entry | None:
    """The price of a cluster, lowered by itself on this mesh with its own axes."""
    graph = model.training_step(decided.microbatches).graph
    layout, options = decided.read(chosen)
    oracle = Oracle(placement(graph, mesh, layout, options))
    try:
        program = lowered(graph, cluster.subgraph, oracle, options)
    except mtf.LayoutError:
        return None
    seconds, small = prices.seconds(program), {}
    for key, sums in ({} if prices.itemiser.compiler.apart else together(waiting(program), mesh)).items():
        small[key] = tuple(w.value.local_bytes(mesh) for w in sums)
        seconds -= sum(prices.message_seconds(key.axes, payload) for payload in small[key])
    for instr in program.code:
        if isinstance(instr, AllReduce) and program.values[instr.outputs[0]].tensor in cluster.totalled:
            seconds -= prices.message_seconds(instr.axes, 4, late=True)
            small.update({BucketKey((a,), "float32", late=True): () for a in instr.axes})
    for second in cluster.second_runs(options.recompute):
        again = lowered(graph, second, oracle, options)
        seconds += prices.seconds(again)
    return Entry(max(seconds, 0.0), small)


def compare(
    model: mtf.Model,
    shapes: list[str],
    parts: int,
    hardware: Hardware,
    seed: int,
    count: int,
    **allowed: tuple[str, ...],
) -> None:
    """Makes all tables on one mesh after the other, and `count` entries of each table anew.

    Args:
      allowed: more of the space; then only clusters are compared whose products may go in chunks.
    """
    step, rng = model.training_step(parts), random.Random(seed)
    for mesh in map(mtf.Mesh, shapes):
        prices = pricer(hardware, mesh)
        decided = decisions(step.graph, mesh, SearchSpace(microbatches=(parts,), **allowed))
        program = model.lower(mesh, mtf.Layout(), Options(microbatches=parts))
        tabler, results = Tabler(step.graph, mesh, prices), [t.id for t in step.results.values()]
        for cluster in clusters(Dependencies(step.graph, program, decided.structure(mesh), results)):
            if allowed and not any(n.startswith(CollectiveMatmul.prefix) for n in cluster.switches):
                continue
            table = tabler.table(cluster, decided)
            for assignment in rng.sample(sorted(table.entries), min(count, len(table.entries))):
                found, chosen = table.entries[assignment], dict(zip(table.names, assignment, strict=True))
                wanted = anew(model, mesh, decided, pricer(hardware, mesh), cluster, chosen)
                where = f"{model.name} on {mesh}: {cluster.name} under {chosen}"
                assert wanted is not None, where
                assert found.seconds == pytest.approx(wanted.seconds, rel=PRICE, abs=1e-18), where
                assert {k: sorted(v) for k, v in found.small.items()} == {
                    k: sorted(v) for k, v in wanted.small.items()
                }, where


@pytest.mark.parametrize(
    "name, shapes, hardware",
    by_day(
        [
            ("transformer in bfloat16", ["x:2;y:4"], "tpu-v3"),
            ("mlp", ["b:2;a:2;c:2", "x:4;y:2", "z:2;y:4"], "tpu-v4"),
        ]
    ),
)
def test_every_mesh_has_its_own_prices(name: str, shapes: list[str], hardware: str) -> None:
    compare(EXAMPLES[name](), shapes, 1, load_hardware(hardware), seed=1, count=3)


def test_products_in_chunks() -> None:
    """A part is lowered once for all choices of them; what these change has its own price."""
    model, machine = EXAMPLES["transformer in bfloat16"](), load_hardware("tpu-v4")
    allowed = {"collective_matmul": ("d_ff",), "elsewhere": ("length",)}
    compare(model, ["x:2;y:2"], 1, machine, seed=2, count=40, **allowed)


@pytest.mark.parametrize("seed", by_day(range(12), every=12))
def test_random_models(seed: int) -> None:
    hardware = load_hardware(HARDWARE[seed % len(HARDWARE)])
    compare(random_model(seed), ["y:2;x:2", "x:4", "x:2;y:4"], 1 + seed % 2, hardware, seed, count=6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, where",
    crossed(
        [
            ("a100", 2, ["x:2;y:4", "y:2;x:4"]),
            ("tpu-v4", 1, ["b:2;a:2;c:2", "x:4;y:2"]),  # three axes: nine tenths of the time are their tables
            ("cpu-local", 2, ["x:4;y:2", "z:4", "y:2;x:2"]),
        ],
        every=8,
    ),
)
@pytest.mark.one_in(2)
def test_all_examples(name: str, where: tuple[str, int, list[str]]) -> None:
    hardware, parts, shapes = where
    compare(EXAMPLES[name](), shapes, parts, load_hardware(hardware), seed=5, count=4)


@pytest.mark.parametrize(
    "hardware, mesh, pricers",
    [
        ("tpu-v4", "b:8;a:8;c:8", 1),  # a ring of the torus each
        ("tpu-v4", "b:8;a:8;c:4", 3),
        ("h100", "b:2;a:8;c:2", 6),
        ("h100", "b:2;a:2;c:2", 1),  # in one node
    ],
)
def test_axes_on_equal_links_share_their_prices(hardware: str, mesh: str, pricers: int) -> None:
    prices = pricer(load_hardware(hardware), mtf.Mesh(mesh))
    namings = Namings(prices)
    orders = [*itertools.permutations("abc")]
    found = [namings.of([axes]) for axes in orders]
    assert len({id(naming.pricer) for naming in found}) == pricers
    for axes, naming in zip(orders, found, strict=True):
        for n in (1, 2, 3):
            named = tuple(naming.number[a] for a in axes[:n])
            assert naming.pricer.message_seconds(named, 1 << 20) == prices.message_seconds(axes[:n], 1 << 20)


def with_its_own_gradient() -> mtf.Model:
    """A model whose gradient function reads a tensor of its graph."""
    g, d = mtf.Graph("own"), mtf.Dim("d", 8)
    x, w = g.input("x", [mtf.Dim("batch", 4), d], "float32"), g.variable("w", [d], mtf.ONES)
    y = mtf.custom_gradient(lambda a: a * 2.0, lambda dys, xs, ys: [mtf.reduce_sum(x, "batch") * 2.0], [w])
    assert isinstance(y, mtf.Tensor)
    return mtf.Model(mtf.reduce_mean(x * y), name="own")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("make", [lambda: random_model(0), with_its_own_gradient])
@pytest.mark.parametrize("hardware", ["tpu-v4", "cpu-local"])
def test_nothing_is_remembered_of_a_graph_that_is_gone(make: Callable[[], mtf.Model], hardware: str) -> None:
    model = make()
    compare(model, ["x:2"], 1, load_hardware(hardware), seed=0, count=1)
    graph = weakref.ref(model.graph)
    del model
    gc.collect()
    assert graph() is None


def test_what_is_remembered_ends_with_an_assignment() -> None:
    g = mtf.Graph("m")
    w = g.variable("w", [mtf.Dim("d", 8)], mtf.ONES)
    y = w * 2.0
    prices = pricer(load_hardware("tpu-v4"), mtf.Mesh("x:2"))
    before = lowering_cache(g, prices)
    assert lowering_cache(g, prices) is before
    g.assign(g.lookup("w"), y)
    assert lowering_cache(g, prices) is not before
