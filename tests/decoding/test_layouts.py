"""Texts do not depend on the layout: greedy, sampled, beam search; on NumPy's engine and TensorFlow's."""

from __future__ import annotations

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import decoding
from mesh_tf_core.engines import open_engine
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.engines.tf.local import TfLocalEngine
from mesh_tf_core.engines.tf.trace import StepTrace
from mesh_tf_core.ir.program import Program
from tests.decoding.models import BATCH, KINDS, VOCAB, D, Net, Run, decoded
from tests.marks import by_day

METHODS = {
    "greedy": lambda net, prompts, lengths: decoding.greedy(net, prompts, lengths),
    "sample": lambda net, prompts, lengths: decoding.sample(
        net, prompts, prompts.graph.input("seed", []), lengths, 0, 0.8, 3
    ),
    "beam search": lambda net, prompts, lengths: decoding.beam_search(
        net, prompts, mtf.Dim("beam", 4), lengths, 0
    ),
}
LAYOUTS = [
    ("x:2", "batch:x"),
    ("x:2", "heads:x"),
    ("x:2", "vocab:x"),
    ("x:2", "memory_length:x"),
    ("x:2", "length:x"),
    ("x:2;y:4", "batch:x;heads:y"),
    ("x:2;y:4", "batch:x;vocab:y"),
    ("x:2;y:2", "memory_length:x;heads:y"),
    ("x:2;y:2", "memory_length:x+y"),
    ("x:2;y:2", "d_model:x;d_ff:y"),
    ("x:2;y:2", "batch:y+x"),
]
BEAMS = [
    ("x:2", "beam:x"),
    ("x:2;y:2", "beam:x;vocab:y"),
    ("x:2;y:2", "d_kv:x;beam:y"),
    ("x:2", "candidate:x"),
]
DENSE: dict[tuple[str, str], Run] = {}


def check(kind: str, method: str, mesh: str, layout: str) -> Run:
    if (kind, method) not in DENSE:
        DENSE[kind, method] = decoded(METHODS[method], KINDS[kind])
    want, got = DENSE[kind, method], decoded(METHODS[method], KINDS[kind], mesh, layout)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)
    return got


@pytest.mark.parametrize(
    ("method", "mesh", "layout"), by_day((method, *where) for method in METHODS for where in LAYOUTS)
)
@pytest.mark.one_in(4)
def test_every_layout(method: str, mesh: str, layout: str) -> None:
    check("multi-head", method, mesh, layout)


@pytest.mark.parametrize(
    ("kind", "mesh", "layout"),
    by_day((kind, *where) for kind in ("multi-head", "encoder") for where in BEAMS),
)
def test_split_beams(kind: str, mesh: str, layout: str) -> None:
    check(kind, "beam search", mesh, layout)


@pytest.mark.parametrize(
    ("kind", "mesh", "layout"),
    [
        ("multi-query", "x:2;y:4", "batch:x;heads:y"),
        ("grouped-query", "x:2;y:2", "group:x;heads:y"),
        ("rotary", "x:2;y:2", "d_kv:x;memory_length:y"),
        ("sinusoids", "x:2;y:2", "d_model:x;batch:y"),
        ("window, rotary, relative", "x:2;y:4", "batch:x;heads:y"),
        ("local, relative", "x:2;y:2", "memory_length:x;heads:y"),
        ("local", "x:2;y:2", "blocks:x;memory_length:y"),
        ("encoder", "x:2;y:2", "memory_length:x;heads:y"),
    ],
)
@pytest.mark.parametrize("method", by_day(["greedy", "beam search"], first=1))
@pytest.mark.one_in(4)
def test_every_kind(kind: str, method: str, mesh: str, layout: str) -> None:
    check(kind, method, mesh, layout)


def test_a_split_cache_is_written_where_it_lies() -> None:
    """Nothing of the size of the cache is sent for a token: 7 positions x 2 layers share one vector of
    queries each. The pass over whole prompts gathers its keys and values, once for each of 2 layers."""
    got = check("multi-head", "greedy", "x:2", "memory_length:x")
    names = {(i.name, i.origin.scope, times > 2) for i, times in got.program.walk()}
    assert ("dynamicupdate", "attention", True) in names
    assert not any(name in ("all_gather", "all_to_all") and often for name, _, often in names)


def test_ended_texts_end_the_loop() -> None:
    """What follows every prompt is an end, so the loop ends behind the longest prompt, of three tokens."""

    def decode(net: Net, prompts: mtf.Tensor, lengths: mtf.Tensor) -> decoding.Decoded:
        def ends(tokens: mtf.Tensor, cache: decoding.Cache | None) -> mtf.Tensor:
            y = net(tokens, cache)
            return mtf.where(mtf.mtf_range(y.graph, VOCAB).equal(0), 1e3, y)

        return decoding.greedy(ends, prompts, lengths, 0)

    early = decoded(decode, {}, "x:2", "heads:x")
    assert (early.tokens[:, 3:] == 0).all()
    assert (early.tokens[:, 0] != 0).all()
    # Of seven positions four are not run; in each, two layers send a vector [batch, d_model].
    bytes_of_a_position = 2 * BATCH.size * D.size * 8
    assert early.program.communication_bytes()["x"] - early.sent["x"] == 4 * bytes_of_a_position


def test_a_ring_that_a_layout_does_not_divide() -> None:
    with pytest.raises(mtf.LayoutError, match="dimension 'memory_length' has size 3, which is not divisible"):
        decoded(METHODS["greedy"], KINDS["window"], "x:2", "memory_length:x")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("method", "kind", "mesh", "layout"),
    [
        ("greedy", "local", "x:2", "memory_length:x"),
        ("beam search", "encoder", "x:2;y:2", "batch:x;beam:y"),
    ],
)
def test_tensorflow(method: str, kind: str, mesh: str, layout: str) -> None:
    want = decoded(METHODS[method], KINDS[kind])
    got = decoded(METHODS[method], KINDS[kind], mesh, layout, engine=lambda p: open_engine(p, "local"))
    np.testing.assert_array_equal(got.tokens, want.tokens)
    np.testing.assert_allclose(got.scores, want.scores, rtol=1e-5)


def nodes(length: int) -> int:
    """Of the TensorFlow graph that decodes texts of a length."""
    found: list[int] = []

    def engine(program: Program) -> LockstepEngine:
        running = open_engine(program, "local")
        assert isinstance(running, TfLocalEngine)
        returned = [(0,)] * len(program.results)
        trace = StepTrace(program, running.devices, running.variables, lambda *_: None, returned)
        trace.step()
        found.append(sum(len(f.node_def) for f in trace.writer.library.library.function))
        return LockstepEngine(program)

    decoded(METHODS["greedy"], {}, "x:2", "heads:x", length, engine)
    return found[0]


def test_a_longer_text_is_no_larger_graph() -> None:
    assert nodes(16) == nodes(
        12
    )  # neither is the size of something else, with which it would share constants
