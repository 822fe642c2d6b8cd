"""A decoding program as a model: the functions that run, price and search models accept it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh_tf_core.decoding.beam import beam_search
from mesh_tf_core.decoding.loop import Decoded, greedy, sample
from mesh_tf_core.errors import UserError
from mesh_tf_core.exclusions import DECODING, MICROBATCHES, STAGES, refuse
from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.schedules import GPIPE
from mesh_tf_core.lower.remat_policy import Policies
from mesh_tf_core.model import NO_STAGES, NOTHING, Model, TrainingStep
from mesh_tf_core.ops.basic import Constant
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.reduce import reduce_mean
from mesh_tf_core.tracing.graph import Graph


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
