"""Layers: frozen descriptions that are called on tensors and make their variables in the current scope.

A layer is built from operations alone, so it is laid out, lowered, priced and differentiated as they are. Its
variables are stored in float32 and used in the dtype of its input.
"""

from typing import TYPE_CHECKING

from mesh_tf_core.lazy import lazily

if TYPE_CHECKING:
    from mesh_tf_core.layers.attention import Attention
    from mesh_tf_core.layers.base import ACTIVATIONS
    from mesh_tf_core.layers.conv import Conv, DepthwiseConv, GroupNorm, SeparableConv
    from mesh_tf_core.layers.delta import GatedDeltaNet
    from mesh_tf_core.layers.dense import Dense, DenseProduct, FeedForward, unit_einsum
    from mesh_tf_core.layers.embedding import Embedding, LearnedPositions
    from mesh_tf_core.layers.encoder import EncoderLayer, ImageTokens
    from mesh_tf_core.layers.latent_attention import LatentAttention
    from mesh_tf_core.layers.local_attention import ChunkedAttention, LocalAttention
    from mesh_tf_core.layers.loss import CrossEntropy, sigmoid_cross_entropy
    from mesh_tf_core.layers.lsh import LSHAttention
    from mesh_tf_core.layers.masks import causal_mask, padding_mask, segment_mask
    from mesh_tf_core.layers.mesh_tensorflow.attention_kinds import (
        BilinearAttention,
        BranchedAttention,
        CompressedAttention,
        DoublyNormalizedAttention,
        RelativeAttention,
        Synthesizer,
        TalkingHeadsAttention,
    )
    from mesh_tf_core.layers.mesh_tensorflow.experts import ExpertsAttention, MixtureOfExperts2D
    from mesh_tf_core.layers.mesh_tensorflow.light_conv import LightConv
    from mesh_tf_core.layers.mesh_tensorflow.local_2d import LocalAttention2D
    from mesh_tf_core.layers.mesh_tensorflow.memory import ProductKeyMemory
    from mesh_tf_core.layers.mesh_tensorflow.vocabularies import (
        AdaptiveEmbedding,
        AdaptiveSoftmax,
        Mixtape,
        MixtureOfSoftmaxes,
        VocabularyCluster,
    )
    from mesh_tf_core.layers.moe import MixtureOfExperts
    from mesh_tf_core.layers.norm import BatchNorm, LayerNorm, ReZero, RMSNorm, ScaleNorm
    from mesh_tf_core.layers.positions import RelativeBias, Rotary, Sinusoids
    from mesh_tf_core.layers.recurrent import LightningAttention, Mamba2, SelectiveStateSpace
    from mesh_tf_core.layers.routing import AnnealedDropout, ExpertChoice, Jitter, Router, TokenChoice
    from mesh_tf_core.layers.top_experts import TopExperts

# fmt: off
__all__ = [
    "ACTIVATIONS", "AdaptiveEmbedding", "AdaptiveSoftmax", "AnnealedDropout", "Attention", "BatchNorm",
    "BilinearAttention", "BranchedAttention", "ChunkedAttention", "CompressedAttention", "Conv",
    "CrossEntropy", "Dense", "DenseProduct", "DepthwiseConv", "DoublyNormalizedAttention", "Embedding",
    "EncoderLayer", "ExpertChoice", "ExpertsAttention", "FeedForward", "GatedDeltaNet", "GroupNorm",
    "ImageTokens", "Jitter", "LSHAttention", "LatentAttention", "LayerNorm", "LearnedPositions",
    "LightConv", "LightningAttention", "LocalAttention", "LocalAttention2D", "Mamba2", "Mixtape",
    "MixtureOfExperts", "MixtureOfExperts2D", "MixtureOfSoftmaxes", "ProductKeyMemory", "RMSNorm", "ReZero",
    "RelativeAttention", "RelativeBias", "Rotary", "Router", "ScaleNorm", "SelectiveStateSpace",
    "SeparableConv", "Sinusoids", "Synthesizer", "TalkingHeadsAttention", "TokenChoice", "TopExperts",
    "VocabularyCluster", "causal_mask", "padding_mask", "segment_mask", "sigmoid_cross_entropy",
    "unit_einsum",
]
# fmt: on

__getattr__, __dir__ = lazily(__name__, __all__)
