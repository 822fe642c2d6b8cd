"""Layouts with rules of paths: as text, refused, and run to the numbers of one device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples import moe_lm, resnet, transformer_lm
from layoutopt.space.decisions import SearchSpace
from mesh_tf_core.ir.program import AllGather, AllReduce, AllToAll, Local, Program, ReduceScatter
from mesh_tf_core.training.trainer import Trainer
from tests.core import test_replicas as replicas
from tests.core.places import places
from tests.examples.helper import SMALL
from tests.examples.hunt import MESH, Hunt, Legal
from tests.marks import by_day

IMAGE = {"batch": 4, "size": 8, "channels": 4, "groups": 2, "optimizer": "sgd"}
MODELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "language model": (transformer_lm, {**SMALL, "gated": True, "clip_norm": 1.0}),
    "mixture of experts": (moe_lm, {**SMALL, "experts": 4, "gated": True}),
}
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"microbatches": 2},
    {"recompute": True},
    {"storage": 3},
    {"storage": 2, "microbatches": 2},
    {"storage": 1, "recompute": True},
)


def test_rules_of_paths_are_read_and_written() -> None:
    text = "batch:data;heads:model;batch@a/b:data+model;heads@a/b:none;batch@a:none"
    layout = mtf.Layout(text)
    assert mtf.Layout(str(layout)) == layout and hash(mtf.Layout(str(layout))) == hash(layout)
    assert dict(layout) == {"batch": ("data",), "heads": ("model",)} and layout != layout.plain
    assert layout == mtf.Layout(
        dict(layout), {"a": {"batch": ()}, "a/b": {"batch": ("data", "model"), "heads": ()}}
    )
    assert dict(layout.at("a/b/einsum")) == {"batch": ("data", "model")}
    assert dict(layout.at("a/bc")) == {"heads": ("model",)}
    assert layout.at("other") == layout.plain
    assert str(layout.renamed({"data": "x"}).at("a/b")) == "batch:x+model"


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (
            "d_ff@feed_forwardd:model",
            "no operation, variable or scope 'feed_forwardd'; did you mean 'feed_forward'",
        ),
        ("d_f@feed_forward:model", "no operation has a dimension 'd_f'; did you mean 'd_ff'"),
        ("d_ff@feed_forward:modle", "has no axis 'modle'; did you mean 'model'"),
        ("batch:model;d_ff@feed_forward:model", "both 'batch' and 'd_ff' split over mesh axis 'model'"),
        ("d_ff@:model", "is not a rule DIM:AXIS"),
        ("d_ff@a:model;d_ff@a:data", "dimension 'd_ff@a' has two rules"),
    ],
)
def test_mistakes_are_named(layout: str, said: str) -> None:
    with pytest.raises(mtf.UserError) as refused:
        transformer_lm.model(**SMALL).lower(mtf.Mesh("data:2;model:2"), mtf.Layout(layout))
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_backward_and_variables_follow() -> None:
    program = lowered("batch:data;d_ff@feed_forward:model;batch@feed_forward:none")
    for instr, _ in program.walk():
        if isinstance(instr, Local) and instr.origin.scope == "feed_forward":
            for out in map(program.values.__getitem__, instr.outputs):
                splits = dict(zip(out.shape.names, out.splits, strict=True))
                assert splits.get("batch", ()) == () and splits.get("d_ff", ("model",)) == ("model",)
    stored = {n: s.splits for n, s in program.variables.items() if n.startswith("feed_forward/")}
    assert stored and all(("model",) in splits for splits in stored.values())


def test_sums_are_scattered_to_who_reads_them() -> None:
    """A sum that is read split is scattered, as where names say so."""
    rules = "batch:data;d_ff:model;heads:model"
    places_ = ("attention_norm", "feed_forward_norm", "add", "add_2", "add_3", "scan")
    split = lowered(";".join([rules, *(f"length@{path}:model" for path in places_)]))
    kinds = {kind: count(split, kind) for kind in (ReduceScatter, AllGather)}
    inside = [
        i for i, times in split.walk() if isinstance(i, AllReduce) and times > 1 and i.axes == ("model",)
    ]
    assert kinds[ReduceScatter] >= 4 and kinds[AllGather] >= 4 and not count(split, AllToAll)
    assert not [i for i in inside if "length" in split.values[i.outputs[0]].shape.names]


def lowered(layout: str) -> Program:
    return transformer_lm.model(**SMALL).lower(mtf.Mesh("data:2;model:2"), mtf.Layout(layout))


def count(program: Program, kind: type) -> int:
    return sum(isinstance(instr, kind) for instr, _ in program.walk())


def grown(rng: random.Random, graph: mtf.Graph, legal: Legal) -> mtf.Layout:
    """Random rules of some random paths."""
    found, mesh, layout = places(graph), mtf.Mesh(MESH), mtf.Layout()
    if rng.random() < 0.5:
        whole = mtf.Layout({rng.choice(["batch", "d_ff"]): "x"})
        layout = whole if all(n in graph.dims() for n in whole) else layout
    moves = list(found.moves(mesh))
    for _ in range(rng.randint(2, 8)):
        move = rng.choice(moves)
        more = move.of(found.by_path[move.path], layout, mesh, SearchSpace(microbatches=(1,)))
        if more is not None and legal(more):
            layout = more
    return layout


IMAGES = {"residual network": (resnet, {**IMAGE, "stages": 2, "blocks": 2})}
HUNTS = {
    **dict.fromkeys(MODELS, Hunt(MODELS, WAYS, grown)),
    **dict.fromkeys(IMAGES, Hunt(IMAGES, ({},), grown)),
}


@pytest.mark.parametrize("seed", by_day(range(6)))
@pytest.mark.parametrize("name", HUNTS)
@pytest.mark.one_in(9)
def test_the_numbers_of_one_device(name: str, seed: int) -> None:
    HUNTS[name].check(name, seed)


STAGED, REPLICATED = "pipe:2;data:2;model:2", "sites:2;data:2;model:2"
BESIDE: tuple[tuple[str, str, mtf.Options], ...] = (
    (STAGED, "layers:pipe;batch:data", mtf.Options(microbatches=2)),
    (STAGED, "layers:pipe", mtf.Options(microbatches=4, schedule="zb-h1")),
    (STAGED, "layers:pipe;batch:data", mtf.Options({"wi": 3}, {"layers"}, 2, schedule="1f1b")),
    (REPLICATED, "batch:data", mtf.Options({"wi": 1, "wo": 3}, diloco=mtf.DiLoCo("sites", 2))),
)


def learned(mesh: str, layout: str | mtf.Layout, options: mtf.Options) -> tuple[Any, dict[str, Any]]:
    """Losses of some steps, and the variables after them."""
    trained = Trainer(replicas.model(mtf.Adam(1e-2)), mesh, layout, options, engine="lockstep")
    losses = [step["loss"] for step in trained.fit(replicas.data(), 3)]
    return losses, {n: np.asarray(trained.engine.read(n)) for n in trained.engine.program.variables}


@pytest.mark.parametrize(("mesh", "layout", "options"), BESIDE)
@pytest.mark.one_in(4)
def test_stages_and_replicas_have_rules_of_paths(mesh: str, layout: str, options: mtf.Options) -> None:
    """The numbers are those of the same stages or replicas without such rules."""
    graph, rng = replicas.model(mtf.Adam(1e-2)).training_step(options.microbatches).graph, random.Random(1)
    found, on, seen = places(graph), mtf.Mesh(mesh), set[mtf.Layout]()
    losses, variables = learned(mesh, layout, options)
    while len(seen) < 4:
        refined = mtf.Layout(layout)
        for move in rng.choices([*found.moves(on)], k=3):
            refined = move.of(found.by_path[move.path], refined, on, SearchSpace()) or refined
        if not refined.refined or refined in seen:
            continue
        try:
            ours = learned(mesh, refined, options)
        except mtf.LayoutError:
            continue
        seen.add(refined)
        np.testing.assert_allclose(ours[0], losses, rtol=1e-9)
        for name, value in variables.items():
            np.testing.assert_allclose(ours[1][name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 400, 20))
@pytest.mark.parametrize("name", HUNTS)
def test_many_layouts(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        HUNTS[name].check(name, 1000 + seed)
