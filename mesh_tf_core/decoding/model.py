"""A decoding program as a model: what runs, prices and searches models takes it as it is."""

from __future__ import annotations

from dataclasses import dataclass, field

from mesh_tf_core.decoding.loop import Decoded
from mesh_tf_core.errors import UserError
from mesh_tf_core.model import Model, TrainingStep
from mesh_tf_core.ops.reduce import reduce_mean


@dataclass
class Decoder(Model):
    """A model whose step decodes: nothing is trained. `decoder(texts)` makes one.

    Its results are `tokens` and `scores` (see `Decoded`) and `loss`, minus the mean score. A `Trainer` runs
    it, on the variables of a checkpoint of the model that was trained:

        trainer = mtf.Trainer(decoder(texts), mesh, layout)
        trainer.restore("ckpt/")
        tokens = trainer.step({"prompts": prompts, "lengths": lengths})["tokens"]
    """

    decoded: Decoded = field(kw_only=True)

    def training_step(self, microbatches: int = 1) -> TrainingStep:
        """The step that decodes, without gradients or updates."""
        if microbatches > 1:
            raise UserError(f"model {self.name!r} decodes: it has no {microbatches} microbatches")
        results = {"loss": self.loss, "tokens": self.decoded.tokens, "scores": self.decoded.scores}
        return TrainingStep(self.graph, results, ())


def decoder(decoded: Decoded, name: str = "decoder") -> Decoder:
    """The model whose step gives these texts."""
    return Decoder(-reduce_mean(decoded.scores), name=name, decoded=decoded)
