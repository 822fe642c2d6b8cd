"""Beam search: the most likely texts, several at a time (Wu et al. 2016, "Google's neural machine translation
system", section 7).

Every position does, for each prompt:

(1) candidates    the 2 beams most likely continuations of the beams' texts: at least `beams` of them go on,
                  since a text ends in one way only
(2) ended         the `beams` best of the texts that have ended before and the candidates that end now, by
                  score(text) = log p(text) / penalty(tokens after the prompt)
(3) going on      the `beams` most likely candidates that do not end; what layers remember moves with them

and the loop ends once no unfinished text can enter the set of ended ones: log p only falls, and the penalty
is largest at the greatest length. Texts that reach the end of the room count as they are. Equal candidates
are in the order of beams, then tokens, so a result does not depend on the layout.

The beams are a dimension like any other: split, each device grows its own and the candidates are exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tf_core.decoding.loop import Decoded, Logits, Prompts, next_logits, read_prompts
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.along import take_along
from mesh_tf_core.ops.basic import constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.dynamic import dynamic_slice, dynamic_update
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import mtf_range, one_hot
from mesh_tf_core.ops.math import floordiv, logical_and, logical_not
from mesh_tf_core.ops.order import top_k
from mesh_tf_core.ops.reduce import reduce_any, reduce_max, reduce_min
from mesh_tf_core.ops.shape import concat, rename, reshape
from mesh_tf_core.ops.softmax import log_softmax
from mesh_tf_core.tracing.branches import while_loop

NONE = -1e9
"""Score of an unused place among the beams; sums of log-probabilities never come near it."""


def length_penalty(tokens: Tensor, alpha: float) -> Tensor:
    """float32 ((5 + tokens) / 6) ** alpha (Wu et al. 2016, equation 14)."""
    return ((tokens.cast("float32") + 5.0) * (1.0 / 6.0)) ** alpha


def beam_search(
    logits: Logits,
    prompts: Tensor,
    beams: Dim,
    lengths: Tensor | None = None,
    end: int | None = None,
    alpha: float = 0.6,
) -> Decoded:
    """Finds the `beams.size` texts with the best scores, best first.

    Args:
      beams: a new dimension, which may be split; no tensor of the model may have its name.
      alpha: exponent of the length penalty; 0 does not favour longer texts.
      logits, prompts, lengths, end: as of `greedy`.

    Returns:
      The texts; scores below -1e8 mark missing texts.
    """
    if alpha < 0:
        raise UserError(f"beam_search: alpha is {alpha}; it must be at least 0")
    if beams.name in prompts.shape.names:
        raise UserError(
            f"beam_search: the prompts [{prompts.shape}] already have a dimension {beams.name!r}; rename the "
            "beams dimension"
        )
    return _BeamSearch(logits, Prompts(prompts, lengths, end), beams, alpha).run()


@dataclass(frozen=True)
class _Texts:
    """Texts [batch, places, length] and a number each [batch, places]."""

    tokens: Tensor
    scores: Tensor


@dataclass(frozen=True)
class _BeamSearch:
    logits: Logits
    prompts: Prompts
    beams: Dim
    alpha: float

    @property
    def batch(self) -> Shape:
        return self.prompts.batch

    def run(self) -> Decoded:
        first = read_prompts(self.logits, self.prompts, (self.beams,))
        last = self.prompts.length.size - 1
        texts = broadcast(self.prompts.texts(), [*self.batch, self.beams, self.prompts.length])
        none = broadcast(constant_like(texts, NONE).cast("float32"), [*self.batch, self.beams])
        place = mtf_range(texts.graph, self.beams)
        alive = where(place.equal(0), none * 0.0, none)

        def going(
            position: Tensor, _: Tensor, alive: Tensor, __: Tensor, ended: Tensor, *___: Tensor
        ) -> Tensor:
            return logical_and(position < last, self.hopes(alive, ended))

        def body(position: Tensor, *state: Tensor) -> list[Tensor]:
            cache = first.at(position, state[4:])
            token = dynamic_slice(state[0], position, self.prompts.length)
            found, vocab = next_logits(self.logits, token, cache)
            alive, ended = _Texts(*state[:2]), _Texts(*state[2:4])
            candidates, parents = self.candidates(position, alive, found, vocab)
            given = self.prompts.given(position + 1)
            ended = self.ended(position, ended, candidates, given)
            on, parents = self.going_on(position, alive, candidates, parents, given)
            states = [self.select(x, parents) for x in cache.values]
            return [position + 1, on.tokens, on.scores, ended.tokens, ended.scores, *states]

        state = [first.start, texts, alive, texts, none, *first.values]
        position, tokens, log_p, *found = while_loop(going, body, state, last)[:5]
        best = self.best(_Texts(*found), _Texts(tokens, self.score(log_p, position)))
        return Decoded(best.tokens, best.scores)

    # -- scores ----------------------------------------------------------------------------------------------

    def grown(self, position: Tensor) -> Tensor:
        """Tokens behind each prompt [batch] if the last one is at this position."""
        return position + 1 - self.prompts.own

    def score(self, log_p: Tensor, position: Tensor) -> Tensor:
        """Of texts whose last token is at a position."""
        divided = log_p / length_penalty(self.grown(position), self.alpha)
        return where(log_p > NONE / 2, divided, NONE)

    def hopes(self, alive: Tensor, ended: Tensor) -> Tensor:
        """Whether a text that goes on may still come among those that have ended."""
        if self.prompts.end is None:
            return constant_like(alive, 1.0).cast("bool")
        last = constant_like(self.prompts.tokens, self.prompts.length.size - 1)
        bound = self.score(reduce_max(alive, self.beams), last)
        return reduce_any(bound > reduce_min(ended, self.beams))

    # -- one position ----------------------------------------------------------------------------------------

    def candidates(self, position: Tensor, alive: _Texts, found: Tensor, vocab: Dim) -> tuple[_Texts, Tensor]:
        """(1): texts with their log p along `candidate`, and the beams that they come from."""
        own = Dim("own_candidate", min(2 * self.beams.size, vocab.size))
        every = Dim("every_candidate", self.beams.size * own.size)
        few = Dim("candidate", min(2 * self.beams.size, every.size))
        log_p, tokens = top_k(log_softmax(found, vocab) + alive.scores, vocab, own)
        log_p, tokens = (reshape(x, [*self.batch, every]) for x in (log_p, tokens))
        log_p, which = top_k(log_p, every, few)
        token, parents = take_along(tokens, which, every), floordiv(which, own.size)
        texts = self.taken(alive.tokens, parents, self.beams)
        return _Texts(dynamic_update(texts, token, position + 1, self.prompts.length), log_p), parents

    def ends(self, position: Tensor, candidates: _Texts) -> Tensor:
        """Bool [batch, candidate]."""
        token = dynamic_slice(candidates.tokens, position + 1, self.prompts.length)
        return token.equal(-1 if self.prompts.end is None else self.prompts.end)

    def ended(self, position: Tensor, ended: _Texts, candidates: _Texts, given: Tensor) -> _Texts:
        """(2)."""
        if self.prompts.end is None:
            return ended
        now = logical_and(self.ends(position, candidates), logical_not(given))
        scores = where(now, self.score(candidates.scores, position + 1), NONE)
        return self.best(ended, _Texts(candidates.tokens, scores))

    def going_on(
        self, position: Tensor, alive: _Texts, candidates: _Texts, parents: Tensor, given: Tensor
    ) -> tuple[_Texts, Tensor]:
        """(3), with the beams that they come from; within a prompt every beam goes on as it is."""
        log_p = where(self.ends(position, candidates), NONE, candidates.scores)
        log_p, which = top_k(log_p, "candidate", self.beams)
        which, next_place = self.renamed(which)
        texts = rename(
            self.taken(candidates.tokens, which, "candidate"), **{next_place.name: self.beams.name}
        )
        parents = take_along(parents, which, "candidate")
        parents = where(given, mtf_range(parents.graph, next_place), parents)
        return _Texts(where(given, alive.tokens, texts), where(given, alive.scores, log_p)), parents

    # -- moving ----------------------------------------------------------------------------------------------

    def best(self, first: _Texts, second: _Texts) -> _Texts:
        """The best of both; of equal ones those of the first."""
        pool = "pool"
        scores = self.joined(first.scores, second.scores, pool)
        scores, which = top_k(scores, pool, self.beams)
        which, next_place = self.renamed(which)
        texts = self.taken(self.joined(first.tokens, second.tokens, pool), which, pool)
        return _Texts(rename(texts, **{next_place.name: self.beams.name}), scores)

    def joined(self, first: Tensor, second: Tensor, pool: str) -> Tensor:
        """Texts, or their scores, behind each other."""
        at = len(self.batch)
        return concat([rename(x, **{x.shape.names[at]: pool}) for x in (first, second)], pool)

    def renamed(self, which: Tensor) -> tuple[Tensor, Dim]:
        """Indices [batch, beams] along another dimension, as what they pick from may have beams itself."""
        next_place = Dim(f"next_{self.beams.name}", self.beams.size)
        return rename(which, **{self.beams.name: next_place.name}), next_place

    def taken(self, texts: Tensor, which: Tensor, dim: Dim | str) -> Tensor:
        """Texts [batch, dim, length] by indices [batch, places]: [batch, places, length]."""
        return take_along(texts, broadcast(which, [*which.shape, self.prompts.length]), dim)

    def select(self, x: Tensor, parents: Tensor) -> Tensor:
        """Moves the cache [.., batch, beams, ..] to the successors of the beams.

        A product with ones and zeros is exact, and leaves a sum over split beams that becomes one exchange.
        """
        place = parents.shape.dims[-1]
        dims = [place if d == self.beams else d for d in x.shape]
        if is_float(x.dtype):
            moved = einsum([one_hot(parents, self.beams, x.dtype), x], dims)
        else:
            moved = take_along(x, broadcast(parents, dims), self.beams)
        return rename(moved, **{place.name: self.beams.name})
