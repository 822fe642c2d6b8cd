"""Beam search against all texts, one by one, in NumPy; sampling against the distribution."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from mesh_tf_core import decoding
from mesh_tf_core.engines.lockstep import LockstepEngine
from tests.decoding.models import BATCH, Net, decoded, feeds, log_probabilities

VOCAB, LENGTH = mtf.Dim("vocab", 4), 5


def all_texts(row: int, alpha: float, end: int | None) -> list[tuple[float, tuple[int, ...]]]:
    """Every text that a prompt may become with its score, best first."""
    given = feeds(LENGTH, vocab=VOCAB.size)
    first = given["lengths"][row]
    rest = list(itertools.product(range(VOCAB.size), repeat=int(LENGTH - first)))
    tokens = np.array([[*given["prompts"][row, :first], *more] for more in rest], np.int32)
    batch = mtf.Dim("batch", len(tokens))
    log_p = log_probabilities({}, tokens, LENGTH, vocab=VOCAB, batch=batch)
    found: dict[tuple[int, ...], float] = {}
    for text, p in zip(tokens, log_p, strict=True):
        stop = next((t + 1 for t in range(first, LENGTH) if text[t] == end), LENGTH)
        score = sum(p[t - 1, text[t]] for t in range(first, stop)) / ((5 + stop - first) / 6) ** alpha
        filled = [*text[:stop].tolist(), *[end or 0] * (LENGTH - stop)]
        found[tuple(filled)] = float(score)
    return sorted(((s, t) for t, s in found.items()), reverse=True)


def search(beams: int, alpha: float, end: int | None, **where: Any) -> Any:
    def decode(net: Net, prompts: mtf.Tensor, lengths: mtf.Tensor) -> decoding.Decoded:
        return decoding.beam_search(net, prompts, mtf.Dim("beam", beams), lengths, end, alpha)

    return decoded(decode, {}, length=LENGTH, vocab=VOCAB, **where)


@pytest.mark.parametrize("end", [0, None])
@pytest.mark.parametrize("alpha", [0.0, 0.6, 2.0])
@pytest.mark.one_in(4)
def test_with_beams_enough_it_finds_the_best_texts(alpha: float, end: int | None) -> None:
    got = search(64, alpha, end)
    for row in range(BATCH.size):
        want = all_texts(row, alpha, end)[:20]
        assert [tuple(t) for t in got.tokens[row, : len(want)].tolist()] == [t for _, t in want]
        np.testing.assert_allclose(got.scores[row, : len(want)], [s for s, _ in want], rtol=1e-5, atol=1e-6)


def test_the_penalty_favours_longer_texts() -> None:
    def longest(alpha: float) -> float:
        return float((search(8, alpha, 0).tokens[:, 0] != 0).sum())

    assert longest(0.0) < longest(3.0)


def test_places_without_a_text() -> None:
    got = search(128, 0.0, 0)
    row = 2  # a prompt of three tokens, so that there are 1 + 3 * 4 texts
    assert feeds()["lengths"][row] == 3
    texts = {tuple(t) for t in got.tokens[row, :13].tolist()}
    assert len(texts) == 13
    assert (got.scores[row, :13] > -100).all()
    assert (got.scores[row, 13:] < -1e8).all()


def test_one_beam_is_greedy() -> None:
    greedy = decoded(
        lambda net, prompts, lengths: decoding.greedy(net, prompts, lengths), {}, length=LENGTH, vocab=VOCAB
    )
    one = search(1, 0.0, None)
    np.testing.assert_array_equal(one.tokens[:, 0], greedy.tokens)
    np.testing.assert_allclose(one.scores[:, 0], greedy.scores, rtol=1e-5)


def equal_texts(mesh: str, layout: str) -> Any:
    """Every token is as likely as every other."""

    def decode(net: Net, prompts: mtf.Tensor, lengths: mtf.Tensor) -> decoding.Decoded:
        return decoding.beam_search(
            lambda tokens, cache: net(tokens, cache) * 0.0, prompts, mtf.Dim("beam", 4), lengths, None
        )

    return decoded(decode, {}, mesh, layout, length=LENGTH, vocab=VOCAB)


@pytest.mark.parametrize(
    ("mesh", "layout"), [("one:1", ""), ("x:2", "vocab:x"), ("x:2", "beam:x"), ("x:2;y:2", "batch:x;vocab:y")]
)
def test_ties_come_in_the_order_of_beams_and_tokens(mesh: str, layout: str) -> None:
    got = equal_texts(mesh, layout)
    first = feeds(LENGTH, vocab=VOCAB.size)["prompts"][0, 0]
    assert got.tokens[0].tolist() == [[first, 0, 0, 0, last] for last in range(4)]
    np.testing.assert_allclose(got.scores[0], 4 * np.log(1 / 4) / (9 / 6) ** 0.6, rtol=1e-5)


def test_what_cannot_be_searched() -> None:
    g = mtf.Graph()
    net, prompts = Net(g), g.input("prompts", [BATCH, mtf.Dim("length", LENGTH)])
    with pytest.raises(mtf.UserError, match="it must be at least 0"):
        decoding.beam_search(net, prompts, mtf.Dim("beam", 2), alpha=-1)
    with pytest.raises(mtf.UserError, match="already have a dimension 'batch'; rename the beams dimension"):
        decoding.beam_search(net, prompts, mtf.Dim("batch", 2))


# -- sampling --


def drawn(seed: int, temperature: float, top: int, rows: int = 2000) -> Any:
    """The next token of many equal prompts, drawn from softmax([0, 1, 2, 3] / temperature)."""
    g, batch, length = mtf.Graph(), mtf.Dim("batch", rows), mtf.Dim("length", 2)
    prompts = g.input("prompts", [batch, length])

    def logits(tokens: mtf.Tensor, cache: decoding.Cache | None) -> mtf.Tensor:
        return mtf.broadcast(mtf.mtf_range(tokens.graph, VOCAB).cast("float32"), [*tokens.shape, VOCAB])

    found = decoding.sample(logits, prompts, g.input("seed", []), None, None, temperature, top)
    program = mtf.lower(g, mtf.Mesh("one:1"), mtf.Layout(), {"tokens": found.tokens})
    engine = LockstepEngine(program)
    given = {"prompts": np.zeros((rows, 2), np.int32), "seed": np.int32(seed)}
    return engine.step(given)["tokens"][:, 1]


@pytest.mark.parametrize(("temperature", "top"), [(1.0, 0), (2.0, 0), (1.0, 2)])
def test_draws_follow_the_distribution(temperature: float, top: int) -> None:
    p = np.exp(np.arange(4) / temperature) * (np.arange(4) >= 4 - (top or 4))
    counts = np.bincount(drawn(3, temperature, top), minlength=4) / 2000
    np.testing.assert_allclose(counts, p / p.sum(), atol=0.04)


def test_seeds_and_the_limits_of_sampling() -> None:
    assert (drawn(1, 1.0, 0) != drawn(2, 1.0, 0)).any()
    assert (drawn(1, 1.0, 0) == drawn(1, 1.0, 0)).all()
    assert (drawn(1, 1.0, 1, 8) == 3).all()
    assert (drawn(1, 0.0, 0, 8) == 3).all()
    with pytest.raises(mtf.UserError, match=r"sample: temperature=-1.0 and top=0 must both be at least 0"):
        drawn(1, -1.0, 0, 8)
