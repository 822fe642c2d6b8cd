"""Context parallelism in whole models: beside other splits, storage, recomputation and microbatches, the
numbers of one device."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples import bert, transformer_lm
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.program import Loop
from tests.examples.helper import SMALL
from tests.examples.hunt import Hunt, Legal
from tests.marks import by_day

LANGUAGE = {**SMALL, "kv_heads": 2, "positions": "rotary", "clip_norm": 1.0}
CAUSAL: dict[str, tuple[Any, dict[str, Any]]] = {"language model": (transformer_lm, LANGUAGE)}
BOTH_SIDES: dict[str, tuple[Any, dict[str, Any]]] = {"bert": (bert, {**SMALL, "optimizer": "sgd"})}
WAYS: tuple[dict[str, Any], ...] = (
    {"context": "ring"},
    {"context": "zigzag", "storage": "zero3@x"},
    {"context": "all_to_all", "microbatches": 2},
    {"context": "ring", "recompute": True, "storage": "zero3"},
    {"context": "zigzag", "microbatches": 2, "storage": "zero2@y"},
    {"context": "all_to_all", "recompute": True, "storage": "zero1"},
    {"context": "zigzag", "recompute": True},
)
KEYS = ("length", "memory_length")


def grown(rng: random.Random, graph: mtf.Graph, legal: Legal) -> mtf.Layout:
    """Positions of queries and keys over the same axes, other rules at random, at times one for elsewhere."""
    axes, dims = rng.choice([("x",), ("y",), ("x", "y"), ("y", "x")]), sorted(graph.dims())
    layout = mtf.Layout(dict.fromkeys(KEYS, axes))
    for _ in range(rng.randint(2, 16)):
        rule = rng.choice([d for d in [*dims, "length@elsewhere", "d_model@elsewhere"] if d not in KEYS])
        more = mtf.Layout({**layout.written, rule: rng.choice([("x",), ("y",)])})
        layout = more if legal(more) else layout
    return layout


HUNTS = {
    **dict.fromkeys(CAUSAL, Hunt(CAUSAL, WAYS, grown)),
    **dict.fromkeys(BOTH_SIDES, Hunt(BOTH_SIDES, [w for w in WAYS if w["context"] != "zigzag"], grown)),
}


@pytest.mark.parametrize(
    ("name", "seed"), by_day([*(("language model", s) for s in range(1, 5)), ("bert", 1)])
)
def test_the_numbers_of_one_device(name: str, seed: int) -> None:
    HUNTS[name].check(name, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("name", HUNTS)
def test_many_layouts(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        HUNTS[name].check(name, 1000 + seed)


def round_of(form: str, devices: int, window: int = 0, length: int = 32) -> tuple[mtf.Program, mtf.Graph]:
    """Causal attention and its gradients; with a form, positions split over so many devices."""
    graph, (n, m) = mtf.Graph(), (mtf.Dim("n", length), mtf.Dim("m", length))
    heads, width = mtf.Dim("heads", 2), mtf.Dim("width", 4)
    query = graph.input("query", [n, heads, width], "float32")
    key, value = (graph.input(name, [m, width], "float32") for name in ("key", "value"))
    out = mtf.attention(query, key, value, n, m, width, causal=True, window=window)
    grads = dict(zip("qkv", mtf.gradients(mtf.reduce_sum(out * out), [query, key, value]), strict=True))
    mesh, options = (
        mtf.Mesh(f"x:{devices};y:2"),
        mtf.Options(context=frozenset({("m", form)} if form else ())),
    )
    layout = mtf.Layout("n:x;m:x;heads:y" if form else "")
    return mtf.lower(graph, mesh, layout, {"out": out, **grads}, options), graph


@pytest.mark.parametrize("form, window", [("ring", 0), ("zigzag", 0), ("ring", 23)])
def test_turns_are_a_loop(form: str, window: int) -> None:
    """Two loops, forward and backward, whose bodies do not grow with the devices; a window's last turns, of
    which some positions see a part, come after."""
    program, _ = round_of(form, 8, window)
    loops = [instr for instr, _ in program.walk() if isinstance(instr, Loop)]
    turns = 6 if not window else 23 // 4 - 1
    assert [loop.dim.size for loop in loops] == [turns] * 2
    assert len([*round_of(form, 16, 2 * window, 64)[0].walk()]) == len([*program.walk()])
    rng = np.random.default_rng(0)
    batch = {
        n: rng.normal(size=[d.size for d in program.values[i].shape]).astype(np.float32)
        for n, i in program.feeds.items()
    }
    alone = LockstepEngine(round_of("", 1, window)[0]).step(batch)
    for name, found in LockstepEngine(program).step(batch).items():
        np.testing.assert_allclose(found, alone[name], rtol=1e-4, atol=1e-5)


def test_keys_have_one_form() -> None:
    with pytest.raises(
        mtf.UserError, match="more than one form for the same keys: m=ring, m=zigzag; name one"
    ):
        mtf.Options(context=frozenset({("m", "zigzag"), ("m", "ring")}))
