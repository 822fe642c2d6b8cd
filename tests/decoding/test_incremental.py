"""Position by position with caches gives what whole texts give, for every kind of attention."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import decoding
from mesh_tf_core import layers as nn
from mesh_tf_core.decoding.loop import Prompts, read_prompts
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ops.basic import Constant
from tests.decoding.models import (
    BATCH,
    HEADS,
    KINDS,
    KV,
    D,
    Net,
    decoded,
    feeds,
    log_probabilities,
    whole_logits,
)
from tests.marks import by_day

LENGTH = mtf.Dim("length", 8)


def inputs(g: mtf.Graph) -> tuple[mtf.Tensor, mtf.Tensor]:
    return g.input("prompts", [BATCH, LENGTH]), g.input("lengths", [BATCH])


@pytest.mark.parametrize("start", by_day([0, 3], first=1))
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(4)
def test_logits_of_every_position(kind: str, start: int) -> None:
    g = mtf.Graph()
    net = Net(g, fields=KINDS[kind])
    tokens, lengths = inputs(g)
    cache = read_prompts(net, Prompts(tokens, lengths if start else None))
    found = {}
    for t in range(start, LENGTH.size):
        cache = cache.at(g.apply(Constant(t, "int32")), cache.values)
        with g.again():
            found[f"at {t}"] = net(mtf.dynamic_slice(tokens, cache.position, LENGTH), cache)
    given = {**feeds(), "lengths": np.full(BATCH.size, start + 1, np.int32)}
    got = LockstepEngine(mtf.lower(g, mtf.Mesh("one:1"), mtf.Layout(), found)).step(given)
    want = whole_logits(KINDS[kind], given["prompts"])
    for t in range(start, LENGTH.size):
        np.testing.assert_allclose(got[f"at {t}"], want[:, t], rtol=1e-6, atol=1e-6, err_msg=f"position {t}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(8)
def test_greedy_texts(kind: str) -> None:
    """Token by token the most likely one, prompts of three lengths."""
    given, score = feeds(), np.zeros(BATCH.size)
    tokens = np.where(np.arange(LENGTH.size) < given["lengths"][:, None], given["prompts"], 0)
    for t in range(LENGTH.size - 1):
        log_p = log_probabilities(KINDS[kind], tokens)[:, t]
        chosen, prompt = log_p.argmax(-1), t + 1 < given["lengths"]
        tokens[:, t + 1] = np.where(prompt, tokens[:, t + 1], chosen)
        score += np.where(prompt, 0, log_p[np.arange(BATCH.size), chosen])
    got = decoded(lambda net, prompts, lengths: decoding.greedy(net, prompts, lengths), KINDS[kind])
    np.testing.assert_array_equal(got.tokens, tokens)
    np.testing.assert_allclose(got.scores, score, rtol=1e-5)
    assert len({tuple(row) for row in tokens.tolist()}) == BATCH.size, "equal texts would show nothing"


def test_variables_are_those_of_training() -> None:
    trained, decoding_graph = mtf.Graph(), mtf.Graph()
    for g in (trained, decoding_graph):
        net, (prompts, lengths) = Net(g, fields=KINDS["relative"]), inputs(g)
        if g is trained:
            net(prompts)
        else:
            decoding.greedy(net, prompts, lengths)
    assert {n: v.type for n, v in trained.variables.items()} == {
        n: v.type for n, v in decoding_graph.variables.items()
    }


def test_a_ring_holds_no_more_than_its_window() -> None:
    for kind, held in (("multi-head", 8), ("window", 3), ("local", 4), ("wide window", 8)):
        g = mtf.Graph()
        cache = read_prompts(Net(g, fields=KINDS[kind]), Prompts(*inputs(g)))
        assert [x.dim("memory_length").size for x in cache.values] == [held, held], kind
        assert [x.dim("layers").size for x in cache.values] == [2, 2]


def test_shared_keys_and_what_an_encoder_gives_are_held_once() -> None:
    g = mtf.Graph()
    cache = read_prompts(Net(g, fields=KINDS["shared keys and values"]), Prompts(*inputs(g)))
    assert cache.changing == ["attention/keys"]
    g = mtf.Graph()
    cache = read_prompts(Net(g, fields=KINDS["encoder"]), Prompts(*inputs(g)), (mtf.Dim("beam", 2),))
    assert cache.changing == ["attention/keys", "attention/values"]
    assert all("beam" in x.shape.names for x in cache.values)
    assert "beam" not in cache.states["cross_attention/keys"].value.shape.names


def test_without_prompts_nothing_is_read() -> None:
    """The pass over whole prompts is dead code then, but for an encoder's keys and values."""
    sizes = []
    for whole in (False, True):
        g = mtf.Graph()
        prompts, lengths = inputs(g)
        found = decoding.greedy(Net(g, fields=KINDS["encoder"]), prompts, lengths if whole else None)
        program = mtf.lower(g, mtf.Mesh("one:1"), mtf.Layout(), {"tokens": found.tokens})
        sizes.append(sum(i.name in ("softmax", "attention") for i, _ in program.walk()))
    assert sizes == [2, 4]


def test_an_empty_prompt_has_its_first_token() -> None:
    g = mtf.Graph()
    prompts, lengths = inputs(g)
    found = decoding.greedy(Net(g), prompts, lengths)
    engine = LockstepEngine(mtf.lower(g, mtf.Mesh("one:1"), mtf.Layout(), {"tokens": found.tokens}))
    texts = [engine.step({**feeds(), "lengths": np.full(BATCH.size, n, np.int32)})["tokens"] for n in (0, 1)]
    np.testing.assert_array_equal(*texts)


# -- what cannot be --


@pytest.mark.parametrize(
    ("attention", "options", "match"),
    [
        (nn.Attention(HEADS, KV), {}, "decoding with a cache needs causal=True and neither a mask"),
        (
            nn.Attention(HEADS, KV, causal=True),
            {"mask": True},
            "decoding with a cache needs causal=True and neither a mask",
        ),
        (
            nn.LocalAttention(HEADS, KV, window=4),
            {},
            "decoding with a cache needs causal=True and neither a mask",
        ),
        (
            nn.Synthesizer(HEADS, KV, causal=True),
            {},
            "this layer cannot decode with a cache; use Attention",
        ),
    ],
)
def test_attention_that_cannot_decode(attention: Any, options: dict[str, Any], match: str) -> None:
    g = mtf.Graph()
    prompts, lengths = inputs(g)
    x = g.input("x", [BATCH, LENGTH, D], "float32")
    cache = decoding.Cache(mtf.reduce_min(lengths), LENGTH.size)
    mask = {"mask": mtf.rename(prompts > 0, length="memory_length")} if options else {}
    with pytest.raises(mtf.UserError, match=match):
        attention(x, cache=cache, **mask)


def test_what_is_remembered_has_one_name_and_type() -> None:
    g = mtf.Graph()
    x, lengths = inputs(g)
    cache = decoding.Cache(mtf.reduce_min(lengths), LENGTH.size)
    cache.put("state", x)
    with pytest.raises(mtf.UserError, match="decoding: two layers write the cache entry 'state'; give the"):
        cache.put("state", x)
    later = cache.at(mtf.reduce_min(lengths), cache.values)
    with pytest.raises(
        mtf.UserError,
        match=r"decoding: the cache has no entry 'stat', because no layer wrote.*did you mean 'state'",
    ):
        later.get(g, "stat")
    with pytest.raises(
        mtf.UserError,
        match=r"'state' had type int32\[batch:4 length:8\] .* and now has type int32\[batch:4\]",
    ):
        later.put("state", lengths)


def test_prompts_and_logits_that_do_not_fit() -> None:
    g = mtf.Graph()
    net, (prompts, lengths) = Net(g), inputs(g)
    with pytest.raises(mtf.UserError, match="decoding: prompts must have the dimensions"):
        decoding.greedy(net, lengths)
    with pytest.raises(mtf.UserError, match="decoding: lengths must be one number for each prompt,"):
        decoding.greedy(net, prompts, prompts)
    with pytest.raises(mtf.UserError, match=r"the model must return float logits.*float64\[batch:4\]"):
        decoding.greedy(lambda tokens, cache: mtf.reduce_max(net(tokens, cache), "vocab"), prompts, lengths)
