"""A decoding program as a model: the functions that run, price and search models accept it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh_tf_core.decoding.loop import Decoded, Logits, Prompts, greedy, next_logits, read_prompts, sample
from mesh_tf_core.errors import UserError
from mesh_tf_core.exclusions import DECODING, MICROBATCHES, STAGES, refuse
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.model import NO_STAGES, NOTHING, Model, TrainingStep
from mesh_tf_core.ops.along import take_along
from mesh_tf_core.ops.basic import Constant, constant_like
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import dynamic_slice, dynamic_update, mtf_range, one_hot
from mesh_tf_core.ops.math import floordiv, logical_and, logical_not
from mesh_tf_core.ops.order import top_k
from mesh_tf_core.ops.reduce import reduce_any, reduce_max, reduce_mean, reduce_min
from mesh_tf_core.ops.shape import concat, rename, reshape
from mesh_tf_core.ops.softmax import log_softmax
from mesh_tf_core.tracing.graph import Graph
from mesh_tf_core.tracing.scan import while_loop

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


@dataclass
class Decoder(Model):
    """A model whose step generates text and trains nothing. `decoder(texts)` makes one.

    Its results are `tokens` and `scores` (see `Decoded`) and `loss`, minus the mean score. A `Trainer` runs
    it with the variables of a trained model's checkpoint:

        trainer = mtf.Trainer(decoder(texts), mesh, layout)
        trainer.restore("ckpt/")
        tokens = trainer.step({"prompts": prompts, "lengths": lengths})["tokens"]
    """

    decoded: Decoded = field(kw_only=True)

    def training_step(
        self,
        microbatches: int = 1,
        stages: Mapping[str, int] = NO_STAGES,
        schedule: str = GPIPE,
        again: Policies = NOTHING,
    ) -> TrainingStep:
        """The step that decodes, without gradients or updates."""
        asked = {
            DECODING: f"decoding with model {self.name!r}",
            STAGES: f"pipeline stages of {' and '.join(stages)}" if stages else "",
            MICROBATCHES: f"{microbatches} microbatches" if microbatches > 1 else "",
        }
        refuse(asked)
        results = {"loss": self.loss, "tokens": self.decoded.tokens, "scores": self.decoded.scores}
        return TrainingStep(self.graph, results, ())


def decoder(decoded: Decoded, name: str = "decoder") -> Decoder:
    """Makes the model whose step generates these texts."""
    return Decoder(-reduce_mean(decoded.scores), name=name, decoded=decoded)


def generate(
    model: Model,
    beams: int = 0,
    alpha: float = 0.6,
    temperature: float = 0.0,
    top: int = 0,
    begin: int | None = None,
    end: int | None = None,
) -> Decoder:
    """Makes a model that decodes with the network of `model`, greedily by default.

    Its inputs are those of the network, `prompts` [batch, length], `lengths` [batch], and the scalar `seed`
    if it samples. Batch and length are those of the model's first input.

    Args:
      beams: number of beams of a beam search, along the dimension `beam`; `alpha`: its length penalty.
      temperature: samples tokens; with `top` only from that many most likely ones (`top` alone: at
        temperature 1).
      begin: id of the token that begins every text, instead of prompts.
      end: id of the token that ends a text.
    """
    if model.network is None:
        raise UserError(
            f"model {model.name!r} cannot generate text, because it was made without a network; pass "
            "network= to mtf.Model"
        )
    if beams < 0 or (beams and (temperature or top)):
        raise UserError(
            f"generate: beams={beams} cannot be combined with temperature={temperature}, top={top}; "
            "choose beam search or sampling"
        )
    texts = [t.shape for t in model.graph.inputs.values() if len(t.shape) == 2]
    if not texts:
        raise UserError(
            f"model {model.name!r} has no input with the two dimensions [batch, length] for prompts; call "
            "decoding.greedy with your own prompts"
        )
    batch, length = texts[0]
    g = Graph(f"{model.name} decoding")
    network, lengths = model.network(g), None
    if begin is None:
        prompts, lengths = g.input("prompts", [batch, length]), g.input("lengths", [batch])
    else:
        prompts = broadcast(g.apply(Constant(begin, "int32")), [batch, length])
    if beams:
        found = beam_search(network, prompts, Dim("beam", beams), lengths, end, alpha)
    elif temperature or top:
        found = sample(network, prompts, g.input("seed", []), lengths, end, temperature or 1.0, top)
    else:
        found = greedy(network, prompts, lengths, end)
    return decoder(found, g.name)
