"""Decoding: texts that a model continues, token by token, on any mesh under any layout.

    def logits(tokens, cache=None):                      # the model, as it is trained
        x = embedding(table, tokens)
        x = decoding.scan_layers(lambda x: x + attention(x, cache=cache), x, layers, cache)
        return embedding.logits(x, table)

    loss = mtf.reduce_mean(mtf.softmax_cross_entropy(logits(tokens), targets, vocab))     # to train it
    texts = decoding.greedy(logits, prompts, lengths, end=0)                               # to decode

Layers with attention store earlier positions in a `Cache`, which is passed to them explicitly. A step
therefore costs one position, not the whole text, and gives the same result as the whole text.
"""

from typing import TYPE_CHECKING

from mesh_tf_core.lazy import lazily

if TYPE_CHECKING:
    from mesh_tf_core.decoding.cache import Cache, CachedState, scan_layers
    from mesh_tf_core.decoding.loop import Decoded, Logits, greedy, sample
    from mesh_tf_core.decoding.model import Decoder, beam_search, decoder, generate, length_penalty

# fmt: off
__all__ = [
    "Cache", "CachedState", "Decoded", "Decoder", "Logits", "beam_search", "decoder", "generate", "greedy",
    "length_penalty", "sample", "scan_layers",
]
# fmt: on

__getattr__, __dir__ = lazily(__name__, __all__)
