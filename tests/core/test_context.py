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
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import Loop, Permute
from mesh_tf_core.ops.ring_pieces import turns_of
from tests.examples.helper import SMALL, check_same, train
from tests.examples.hunt import Hunt, Legal, options
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
@pytest.mark.one_in(3)
def test_the_numbers_of_one_device(name: str, seed: int) -> None:
    HUNTS[name].check(name, seed)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("form", ["ring", "zigzag"])
def test_the_same_weights_are_dropped(form: str) -> None:
    """Forward and, made again, backward."""
    hparams = {**LANGUAGE, "dropout": 0.3}
    given = options(transformer_lm.model(**hparams), {"context": form, "recompute": True})
    split = "batch:y;length:x;memory_length:x"
    found = train(transformer_lm, hparams, "x:2;y:2", split, 2, **given)
    check_same(found, train(transformer_lm, hparams, steps=2))


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(0, 200, 20))
@pytest.mark.parametrize("name", HUNTS)
def test_many_layouts(name: str, first: int) -> None:
    for seed in range(first, first + 20):
        HUNTS[name].check(name, 1000 + seed)


def round_of(
    form: str, devices: int, window: int = 0, length: int = 32, causal: bool = True
) -> tuple[mtf.Program, mtf.Graph]:
    """Attention and its gradients; with a form, positions split over so many devices."""
    graph, (n, m) = mtf.Graph(), (mtf.Dim("n", length), mtf.Dim("m", length))
    heads, width = mtf.Dim("heads", 2), mtf.Dim("width", 4)
    query = graph.input("query", [n, heads, width], "float32")
    key, value = (graph.input(name, [m, width], "float32") for name in ("key", "value"))
    out = mtf.attention(query, key, value, n, m, width, causal=causal, window=window)
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
    same(program, round_of("", 1, window)[0])


def same(program: mtf.Program, alone: mtf.Program) -> None:
    """The numbers of one device."""
    rng = np.random.default_rng(0)
    batch = {
        n: rng.normal(size=[d.size for d in program.values[i].shape]).astype(np.float32)
        for n, i in program.feeds.items()
    }
    want = LockstepEngine(alone).step(batch)
    for name, found in LockstepEngine(program).step(batch).items():
        np.testing.assert_allclose(found, want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("devices", "window", "loops", "keys"), [(8, 30, [5], 7), (16, 11, [4, 4], 10), (8, 4, [], 2)]
)
def test_windows_to_both_sides(devices: int, window: int, loops: list[int], keys: int) -> None:
    """Keys come from before and from behind, those that a window hides no part of in loops; those of a
    device to all that see any of them, once, and the gradients home from either side."""
    length = devices * 4 if devices < 16 else devices * 2
    program, _ = round_of("ring", devices, window, length, causal=False)
    found = [instr.dim.size for instr, _ in program.walk() if isinstance(instr, Loop)]
    assert found == 2 * loops
    sent = [(i, n) for i, n in program.walk() if isinstance(i, Permute)]
    forward = sum(n for i, n in sent if i.origin.phase == Phase.FORWARD)
    assert forward == 2 * keys
    # Gradients travel as often as keys; where loops begin, as a window hides no neighbour, once more.
    assert sum(n for _, n in sent) == 2 * forward + 2 * (keys + len(loops) * (window == 11))
    same(program, round_of("", 1, window, length, causal=False)[0])


@pytest.mark.parametrize("causal", [True, False])
def test_turns_bring_what_is_seen_and_no_more(causal: bool) -> None:
    """Every pair of a device and a piece of which its queries see any, once; no turn that nobody needs."""
    tried = 0
    for count, size in ((2, 3), (3, 1), (5, 2), (8, 4)):
        for window in range(count * size + 2):
            positions = np.arange(count * size)
            apart = positions[:, None] - positions
            seen = (apart >= 0) if causal else np.full(apart.shape, True)
            seen &= (np.abs(apart) < window) if window else True
            pieces = seen.reshape(count, size, count, size).transpose(0, 2, 1, 3)
            want = {(i, j) for i, j in np.argwhere(pieces.any((2, 3))) if i != j}
            got = list[tuple[int, int]]()
            for turn in turns_of(count, size, causal, window):
                for step in range(turn.step, turn.step + turn.times):
                    came = [(i, i - turn.way * step) for i in range(count)]
                    counts = [(i, j % count) for i, j in came if turn.both or 0 <= j < count]
                    assert not turn.whole or all(causal or pieces[pair].all() for pair in counts)
                    assert {*counts} & want
                    got += counts
            assert len(got) == len({*got}) and {*got} >= want
            tried += len(want)
    assert tried > 500


def test_keys_have_one_form() -> None:
    with pytest.raises(mtf.UserError, match="context m=ring, m=zigzag: several forms are given for the same"):
        mtf.Options(context=frozenset({("m", "zigzag"), ("m", "ring")}))
