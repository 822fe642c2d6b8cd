"""What couples many operations is cut before its table is made: tables stay exact, and the proof holds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from layoutopt.formulation import shared
from layoutopt.formulation.cuts import most_cells
from layoutopt.formulation.makers import OpCluster
from layoutopt.formulation.shared import SharedContext
from layoutopt.formulation.tables import Table, Tabler, legal
from layoutopt.space.decisions import Decisions, SearchSpace, decisions
from mesh_tf_core import layers as nn
from tests.layoutopt.models import EXAMPLES, random_model
from tests.layoutopt.test_tables import compare
from tests.marks import by_day
from tests.searching import search


def dense(clip_norm: float) -> mtf.Model:
    """Five layers of different sizes."""
    g = mtf.Graph("dense")
    batch, *sizes = mtf.Dim("batch", 64), *(mtf.Dim(f"d{i}", 32 * (1 + i)) for i in range(6))
    x = g.input("x", [batch, sizes[0]], "float32")
    for before, after in itertools.pairwise(sizes):
        w = g.variable(f"{after.name}/w", [before, after], mtf.Normal(0.1))
        x = mtf.relu(mtf.einsum([x, w], [batch, after]) + g.variable(f"{after.name}/b", [after], mtf.ZEROS))
    return mtf.Model(mtf.reduce_mean(mtf.square(x)), mtf.Adam(0.01, clip_norm=clip_norm), name="dense")


def llama(clip_norm: float) -> mtf.Model:
    """A Llama in small, its layers written out."""
    b, s, d = mtf.Dim("batch", 8), mtf.Dim("length", 32), mtf.Dim("d_model", 64)
    g, vocab = mtf.Graph("llama"), mtf.Dim("vocab", 128)
    tokens, targets = g.input("tokens", [b, s]), g.input("targets", [b, s])
    embedding = nn.Embedding(vocab, d, "float32")
    x = embedding(embedding.table(g), tokens)
    for i in range(2):
        with g.scope(f"layer_{i}"):
            heads, d_kv = mtf.Dim("heads", 4), mtf.Dim("d_kv", 16)
            attend = nn.Attention(heads, d_kv, 2, causal=True, rotary=nn.Rotary())
            x = x + attend(nn.LayerNorm(name="attention_norm")(x))
            feed_forward = nn.FeedForward(mtf.Dim("d_ff", 128), "silu", True)
            x = x + feed_forward(nn.LayerNorm(name="feed_forward_norm")(x))
    logits = embedding.logits(nn.LayerNorm(name="final_norm")(x))
    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits, targets, vocab))
    return mtf.Model(loss, mtf.Adam(0.01, clip_norm=clip_norm), name="llama")


@pytest.mark.parametrize("build", by_day([dense, llama]))
def test_clipping_joins_no_variables(build: Callable[[float], mtf.Model]) -> None:
    plain, clipped = (SharedContext(build(limit)).clusters for limit in (0.0, 1.0))
    assert max(len(c.decisions) for c in clipped) == max(len(c.decisions) for c in plain)
    plan = search(build(1.0), mesh="data:2;model:4", hardware="h100")
    assert plan.solver.status == "OPTIMAL" and plan.solver.gap == 0


def summed(count: int, size: int, chained: bool = False) -> mtf.Model:
    """The sum of products over dimensions of their own, by one addition or by one after the other."""
    g = mtf.Graph("summed")
    batch, out = mtf.Dim("batch", 16), mtf.Dim("out", 32)
    parts = []
    for i in range(count):
        d = mtf.Dim(f"d{i}", size * (1 + i % 3))
        x, w = g.input(f"x{i}", [batch, d], "float32"), g.variable(f"w{i}", [d, out], mtf.Normal(0.1))
        parts.append(mtf.einsum([x, w], [batch, out]))
    y = functools.reduce(lambda a, b: a + b, parts) if chained else mtf.add_n(parts)
    return mtf.Model(mtf.reduce_mean(mtf.square(mtf.relu(y))), mtf.SGD(0.1), name="summed")


def tied(count: int) -> mtf.Model:
    """One weight at many places, each with a dimension of its own: the sum of its gradients."""
    g = mtf.Graph("tied")
    b, d, e = mtf.Dim("b", 8), mtf.Dim("d", 16), mtf.Dim("e", 16)
    w, losses = g.variable("w", [d, e], mtf.Normal(0.1)), []
    for i in range(count):
        f = mtf.Dim(f"f{i}", 8 * (1 + i % 2))
        x, u = g.input(f"x{i}", [b, f, d], "float32"), g.variable(f"u{i}", [f, e], mtf.ONES)
        losses.append(mtf.reduce_mean(mtf.square(mtf.tanh(mtf.einsum([x, w], [b, f, e])) * u)))
    return mtf.Model(mtf.add_n(losses), mtf.SGD(0.1), name="tied")


SUMS = {"sum": lambda: summed(4, 8), "chain": lambda: summed(4, 8, True), "tied": lambda: tied(3)}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name, hardware", [("sum", "tpu-v3"), ("chain", "h100"), ("tied", "tpu-v3")])
def test_cut_tables_add_up(name: str, hardware: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared, "LOWERED", 0)
    model, mesh = SUMS[name](), mtf.Mesh("x:2;y:2")
    whole = SharedContext(model)
    cut = whole.bounded(decisions(whole.graph, mesh))
    assert cut.cut and max(len(c.dims) for c in cut.clusters) < max(len(c.dims) for c in whole.clusters)
    compare(model, mesh, 1, load_hardware(hardware), seed=2, count=5)


def test_a_cut_finds_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = search(summed(4, 1024), mesh="x:2;y:2", hardware="tpu-v4")
    monkeypatch.setattr(shared, "LOWERED", 0)
    other = search(summed(4, 1024), mesh="x:2;y:2", hardware="tpu-v4")
    assert (other.solver.status, other.layout) == ("OPTIMAL", plan.layout) and plan.layout
    assert other.predicted.step_seconds == plan.predicted.step_seconds


@pytest.mark.parametrize("chained", [False, True])
@pytest.mark.one_in(2)
def test_a_sum_of_many_tensors(chained: bool) -> None:
    """Twenty dimensions that nothing keeps apart: 3 ** 20 layouts of one cluster."""
    plan = search(summed(20, 65536, chained), mesh="data:2;model:4", hardware="tpu-v4")
    assert plan.solver.status == "OPTIMAL" and plan.solver.gap == 0
    assert all(plan.layout.axes(f"d{i}") == ("data", "model") for i in range(20))


@pytest.mark.parametrize("orders", ["mesh", "all"])
@pytest.mark.parametrize("seed", range(4))
def test_the_size_of_a_table_is_known_before(seed: int, orders: str) -> None:
    context, mesh = SharedContext(random_model(seed)), mtf.Mesh("x:2;y:2;z:2")
    decided = decisions(context.graph, mesh, SearchSpace(orders=orders, microbatches=(1,)))
    for cluster in context.clusters:
        most = most_cells(cluster.dims, cluster.switches, cluster.shapes, decided.options)
        assert len(legal(cluster, decided).entries) <= most, cluster.name


def summed_in_layers(count: int) -> mtf.Model:
    """A scan over layers, each the sum of products over dimensions of their own."""
    g = mtf.Graph("layers")
    batch, d = mtf.Dim("batch", 64), mtf.Dim("d", 256)
    x = g.input("x", [batch, d], "float32")

    def layer(h: mtf.Tensor) -> mtf.Tensor:
        parts = [h]
        for i in range(count):
            f = mtf.Dim(f"f{i}", 256 * (1 + i % 3))
            up, down = (g.variable(f"{n}{i}", [d, f], mtf.Normal(0.1)) for n in ("up", "down"))
            parts.append(mtf.einsum([mtf.relu(mtf.einsum([h, up], [batch, f])), down], [batch, d]))
        return mtf.add_n(parts)

    y = mtf.scan(layer, x, mtf.Dim("layers", 4))
    return mtf.Model(mtf.reduce_mean(mtf.square(y)), mtf.SGD(0.1), name="layers")


def test_no_table_is_made_that_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Additions in loops are not cut: the smallest dimensions stay whole, and nothing is claimed."""
    on = {"mesh": "data:2;model:2", "hardware": "tpu-v3", "microbatches": (1,), "recompute": (False,)}
    proven = search(summed_in_layers(3), **on)
    assert proven.solver.status == "OPTIMAL" and not any(
        "too many dimensions" in n for n in proven.data.notes or ()
    )
    made: list[int] = []
    table = Tabler.table

    def counted(self: Tabler, cluster: OpCluster, decided: Decisions, *only: Any) -> Table:
        made.append(len(legal(cluster, decided).entries) * len(cluster.subgraph.nodes))
        return table(self, cluster, decided, *only)

    monkeypatch.setattr(Tabler, "table", counted)
    monkeypatch.setattr("layoutopt.formulation.extract.MOST_LOWERED", 60)
    for objective in ("time", "memory"):
        found = search(summed_in_layers(3), objective=objective, **on)
        assert max(made) <= 60
        assert found.solver.status == "FEASIBLE"
        assert any("some operations have too many dimensions" in n for n in found.data.notes or ())
        if objective == "time":
            assert found.solver.bound <= proven.solver.objective <= found.solver.objective


@pytest.mark.nightly
def test_tables_are_counted_where_few_kinds_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters know of kinds that a question does not allow; whatever stays whole, no bound is too high."""
    on: dict[str, Any] = {
        "mesh": "data:2;model:2",
        "hardware": "tpu-v3",
        "microbatches": (1,),
        "allow": "usual",
    }
    best = search(EXAMPLES["mlp"](), **on).predicted.step_seconds
    for most in (100, 1000):
        monkeypatch.setattr("layoutopt.formulation.extract.MOST_LOWERED", most)
        found = search(EXAMPLES["mlp"](), **on)
        assert found.solver.status == ("FEASIBLE" if most == 100 else "OPTIMAL")
        assert found.solver.bound is not None and found.solver.bound <= best * (1 + 1e-9)
        assert best <= found.predicted.step_seconds * (1 + 1e-9)
