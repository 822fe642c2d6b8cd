"""Greedy decoding and sampling: a loop over positions on the devices, with the states of layers as its state.

The loop begins at the last token of the shortest prompt; where a prompt is longer, its own tokens are taken
instead of the model's. It ends early when every text has its end.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mesh_tf_core.decoding.cache import Cache
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.index import dynamic_slice, dynamic_update, mtf_range, need_ints, pick
from mesh_tf_core.ops.math import logical_and, logical_not, logical_or, maximum
from mesh_tf_core.ops.order import argmax, top_k
from mesh_tf_core.ops.random import FoldIn
from mesh_tf_core.ops.reduce import reduce_all, reduce_min
from mesh_tf_core.ops.sampling import sample_with_temperature
from mesh_tf_core.ops.softmax import log_softmax
from mesh_tf_core.tracing.scan import while_loop

Logits = Callable[[Tensor, Cache | None], Tensor]
"""logits(tokens [.., length], cache) -> [.., length, vocab]; at a position, [..] -> [.., vocab]."""


@dataclass(frozen=True)
class Decoded:
    """Generated texts.

    Attributes:
      tokens: int32 [batch, length], for beam search [batch, beam, length]: the prompt, the generated tokens,
        the end token, and end tokens from there on (0 without an end token).
      scores: float32 [batch], for beam search [batch, beam]: log-probability of the generated tokens, for
        beam search divided by the length penalty.
    """

    tokens: Tensor
    scores: Tensor


@dataclass(frozen=True)
class Prompts:
    """The texts to continue.

    Attributes:
      tokens: int32 [batch dimensions, length]; length is the room for prompt and text.
      lengths: int32 [batch dimensions], at least 1: tokens of each prompt. None: 1, and positions before the
        loop are not computed.
    """

    tokens: Tensor
    lengths: Tensor | None = None
    end: int | None = None

    def __post_init__(self) -> None:
        need_ints("decoding", self.tokens.type)
        if len(self.tokens.shape) < 2 or self.length.size < 2:
            raise UserError(
                "decoding: prompts must have the dimensions [batch, length] with a length of at least "
                f"2, found {self.tokens!r}"
            )
        if self.lengths is not None and self.lengths.shape != self.batch:
            raise UserError(
                f"decoding: lengths must be one number for each prompt, [{self.batch}] for prompts "
                f"[{self.tokens.shape}]; found {self.lengths!r}"
            )

    @property
    def length(self) -> Dim:
        return self.tokens.shape.dims[-1]

    @property
    def batch(self) -> Shape:
        return Shape(self.tokens.shape.dims[:-1])

    @property
    def own(self) -> Tensor:
        """The number of tokens of each prompt: the first is always its own."""
        one = constant_like(self.tokens, 1)
        return one if self.lengths is None else maximum(self.lengths, one)

    @property
    def start(self) -> Tensor:
        """The position that the loop begins with."""
        return reduce_min(self.own) - 1

    def given(self, position: Tensor) -> Tensor:
        """Bool: whether the prompt has a token at this position."""
        return position < self.own

    def texts(self) -> Tensor:
        """The prompts, filled up with ends."""
        positions = mtf_range(self.tokens.graph, self.length)
        return where(self.given(positions), self.tokens, self.end or 0)


def read_prompts(logits: Logits, prompts: Prompts, beams: tuple[Dim, ...] = ()) -> Cache:
    """Runs the model on whole prompts; returns the states of its layers at the start of the loop.

    Args:
      beams: a dimension that changing states get, after those of the batch.
    """
    cache = Cache(prompts.start, prompts.length.size)
    logits(prompts.tokens, cache)
    for name in cache.changing:
        state = cache.states[name]
        cache.states[name] = state.with_value(_begun(state.value, prompts, beams))
    return cache


def _begun(x: Tensor, prompts: Prompts, beams: tuple[Dim, ...]) -> Tensor:
    at = max((i for i, d in enumerate(x.shape) if d in prompts.batch.dims), default=-1) + 1
    dims = [*x.shape.dims[:at], *beams, *x.shape.dims[at:]]
    # Before the first position there is nothing to remember: what the prompts gave is dead code.
    return broadcast(constant_like(x, 0.0) if prompts.lengths is None else x, dims)


def next_logits(logits: Logits, tokens: Tensor, cache: Cache) -> tuple[Tensor, Dim]:
    """float32 logits [.., vocab] of the tokens after [..] at the cache's position; the vocabulary."""
    with tokens.graph.again():
        found = logits(tokens, cache)
    more = [d for d in found.shape if d not in tokens.shape.dims]
    if len(more) != 1 or len(found.shape) != len(tokens.shape) + 1 or not is_float(found.dtype):
        raise UserError(
            f"decoding: for tokens [{tokens.shape}] the model must return float logits [{tokens.shape}, "
            f"vocabulary], found {found!r}"
        )
    return found.cast("float32"), more[0]


Choose = Callable[[Tensor, Dim, Tensor], Tensor]
"""choose(logits [.., vocab], vocabulary, position) -> token ids [..]."""


def grow(logits: Logits, prompts: Prompts, choose: Choose) -> Decoded:
    """One text per prompt, every next token chosen from the model's logits."""
    first, last = read_prompts(logits, prompts), prompts.length.size - 1
    length, end = prompts.length.name, prompts.end
    score = broadcast(constant_like(prompts.tokens, 0).cast("float32"), prompts.batch)
    ended = score > 0.0

    def going(position: Tensor, ended: Tensor, *_: Tensor) -> Tensor:
        return logical_and(position < last, logical_not(reduce_all(ended, list(prompts.batch))))

    def body(position: Tensor, ended: Tensor, score: Tensor, tokens: Tensor, *states: Tensor) -> list[Tensor]:
        cache = first.at(position, states)
        found, vocab = next_logits(logits, dynamic_slice(tokens, position, length), cache)
        chosen = choose(found, vocab, position)
        sure = pick(log_softmax(found, vocab), chosen, vocab)
        given = prompts.given(position + 1)
        fixed = logical_or(given, ended)
        token = where(fixed, dynamic_slice(tokens, position + 1, length), chosen)
        if end is not None:
            ended = logical_or(ended, logical_and(logical_not(given), token.equal(end)))
        tokens = dynamic_update(tokens, token, position + 1, length)
        return [position + 1, ended, where(fixed, score, score + sure), tokens, *cache.values]

    state = [first.start, ended, score, prompts.texts(), *first.values]
    _, _, score, tokens, *_ = while_loop(going, body, state, last)
    return Decoded(tokens, score)


def greedy(logits: Logits, prompts: Tensor, lengths: Tensor | None = None, end: int | None = None) -> Decoded:
    """Appends the most likely next token repeatedly; of equally likely tokens the first.

    Args:
      logits: the model, see `Logits`; it is read twice, with the same variables.
      prompts: int32 [batch, length]; length is the room for prompt and text.
      lengths: int32 [batch]: number of tokens of every prompt, at least 1; None: every prompt is one token.
      end: id of the token that ends a text.
    """
    return grow(logits, Prompts(prompts, lengths, end), lambda found, vocab, position: argmax(found, vocab))


def sample(
    logits: Logits,
    prompts: Tensor,
    seed: Tensor,
    lengths: Tensor | None = None,
    end: int | None = None,
    temperature: float = 1.0,
    top: int = 0,
) -> Decoded:
    """Draws every next token from softmax(logits / temperature); the tokens are the same under every layout.

    Args:
      seed: int32 scalar, an input of the model.
      top: draw only from this many most likely tokens (Fan et al. 2018, section 5.4); 0: from all.
      logits, prompts, lengths, end: as of `greedy`.
    """
    if temperature < 0 or top < 0:
        raise UserError(f"sample: temperature={temperature} and top={top} must both be at least 0")

    def choose(found: Tensor, vocab: Dim, position: Tensor) -> Tensor:
        key = seed.graph.apply(FoldIn(1), seed, position)
        if not top:
            return sample_with_temperature(found, vocab, temperature, key)
        few = Dim("likely", min(top, vocab.size))
        best, ids = top_k(found, vocab, few)
        return pick(ids, sample_with_temperature(best, few, temperature, key), few)

    return grow(logits, Prompts(prompts, lengths, end), choose)
