"""The sixteen models of `jax_models.py` at sizes at which numbers are compared: the same classes of the same
libraries, narrow and short, in float32, without dropout (our draws are not those of JAX).

    python benchmarks/jax_models.py benchmarks/jax_models_small.py --check \
        --out benchmarks/results/jax_models_numbers.json

A corpus as `jax_models.py` takes it: `ENTRIES`, and `build(name)`, which returns a loss, its abstract
arguments (parameters, perhaps state, the batch) and a note.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.experimental.xla_metadata as _metadata
import jax.numpy as jnp

import benchmarks.jax_models_written  # noqa: F401  fills ENTRIES
from benchmarks.jax_models_parts import (
    BATCH,
    ENTRIES,
    LENGTH,
    VOCAB,
    S,
    cross_entropy,
    entry,
    next_token,
    tokens,
    types,
)

# MaxText wants a newer JAX's name, transformers' T5 an older one's arguments.
if not hasattr(_metadata, "must_fuse_call"):
    _metadata.must_fuse_call = lambda *_, **__: lambda f: f
_clip = jnp.clip


@functools.wraps(_clip)
def _clip_of_old(x, min=None, max=None, *, a_min=None, a_max=None):
    return _clip(x, a_min if min is None else min, a_max if max is None else max)


jnp.clip = _clip_of_old


def build(name):
    loss, arguments = ENTRIES[name]()
    return loss, arguments, (ENTRIES[name].__doc__ or "").strip()


# -- transformers' Flax models -------------------------------------------------------------------------------


def of_transformers(name, config, shape=None):
    import transformers

    model = getattr(transformers, name)(config, _do_init=False)
    shape = shape or model.input_shape
    return model, types(jax.eval_shape(lambda k: model.init_weights(k, shape), jax.random.PRNGKey(0)))


@entry
def hf_gpt2():
    from transformers import GPT2Config

    sizes = {"n_embd": 64, "n_head": 4, "n_layer": 3, "n_positions": 32, "vocab_size": VOCAB}
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    model, params = of_transformers("FlaxGPT2LMHeadModel", GPT2Config(**sizes, **off))

    def loss(params, batch):
        return next_token(model(batch["x"], params=params).logits, batch["x"])

    return loss, (params, {"x": tokens()})


@entry
def hf_llama():
    from transformers import LlamaConfig

    sizes = {"hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=32)
    model, params = of_transformers("FlaxLlamaForCausalLM", config)

    def loss(params, batch):
        return next_token(model(batch["x"], params=params).logits, batch["x"])

    return loss, (params, {"x": tokens()})


@entry
def hf_t5():
    from transformers import T5Config

    sizes = {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "num_layers": 2, "vocab_size": VOCAB}
    config = T5Config(**sizes, dropout_rate=0.0, decoder_start_token_id=0)
    model, params = of_transformers("FlaxT5ForConditionalGeneration", config, (1, 8))

    def loss(params, batch):
        found = model(batch["x"], decoder_input_ids=batch["y"], params=params)
        return next_token(found.logits, batch["y"])

    return loss, (params, {"x": tokens(), "y": tokens(12)})


@entry
def hf_bert():
    from transformers import BertConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = BertConfig(**sizes, vocab_size=VOCAB, max_position_embeddings=32)
    model, params = of_transformers("FlaxBertForMaskedLM", config, (1, 1))

    def loss(params, batch):
        found = model(batch["x"], attention_mask=batch["mask"], params=params)
        return cross_entropy(found.logits, batch["y"])

    return loss, (params, {"x": tokens(), "y": tokens(), "mask": tokens()})


@entry
def hf_vit():
    from transformers import ViTConfig

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=10)
    model, params = of_transformers("FlaxViTForImageClassification", config, (1, 32, 32, 3))

    def loss(params, batch):
        return cross_entropy(model(batch["im"], params=params).logits, batch["y"])

    return loss, (params, {"im": S((BATCH, 3, 32, 32), jnp.float32), "y": S((BATCH,), jnp.int32)})


# -- Keras and keras-hub -------------------------------------------------------------------------------------


def of_keras(model, call):
    """The loss of a Keras model, whose variables are its parameters and state by path."""
    parts = [model.trainable_variables, model.non_trainable_variables]
    params, state = ({f"{i:03d}/{v.path}": S(v.shape, v.value.dtype) for i, v in enumerate(p)} for p in parts)

    def loss(params, state, batch):
        variables = [list(params.values()), list(state.values())]
        return call(lambda x: model.stateless_call(*variables, x, training=True)[0], batch)

    return loss, params, state


@entry
def keras_resnet50():
    import keras

    options = {"weights": None, "classifier_activation": None, "classes": 10, "input_shape": (64, 64, 3)}
    model = keras.applications.ResNet50(**options)
    loss, params, state = of_keras(model, lambda call, b: cross_entropy(call(b["x"]), b["y"]))
    return loss, (params, state, {"x": S((BATCH, 64, 64, 3), jnp.float32), "y": S((BATCH,), jnp.int32)})


def _squares(call, batch):
    return jnp.mean(jnp.square(call(batch)))


@entry
def kh_llama3():
    import keras_hub

    sizes = {"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 64}
    model = keras_hub.models.Llama3Backbone(vocabulary_size=VOCAB, intermediate_dim=176, **sizes)
    loss, params, state = of_keras(model, _squares)
    return loss, (params, state, {"token_ids": tokens(), "padding_mask": tokens()})


@entry
def kh_mixtral():
    import keras_hub

    sizes = {"num_layers": 2, "num_query_heads": 4, "num_key_value_heads": 2, "hidden_dim": 64}
    experts = {"num_experts": 4, "top_k": 2}
    model = keras_hub.models.MixtralBackbone(vocabulary_size=VOCAB, intermediate_dim=176, **sizes, **experts)
    loss, params, state = of_keras(model, _squares)
    return loss, (params, state, {"token_ids": tokens(), "padding_mask": tokens()})


# -- Flax, and libraries on it -------------------------------------------------------------------------------


@entry
def tunix_llama3():
    from flax import nnx
    from tunix.models.llama3 import model as llama3

    sizes = {"num_layers": 2, "embed_dim": 64, "hidden_dim": 176, "num_heads": 4, "head_dim": 16}
    config = dataclasses.replace(
        llama3.ModelConfig.llama3p1_8b(), **sizes, num_kv_heads=2, vocab_size=VOCAB, **_float32(llama3)
    )
    net = nnx.eval_shape(lambda: llama3.Llama3(config, rngs=nnx.Rngs(0)))
    graph, params, rest = nnx.split(net, nnx.Param, ...)

    def loss(params, state, batch):
        x = batch["x"]
        positions = jnp.broadcast_to(jnp.arange(x.shape[1]), x.shape)
        earlier = jnp.broadcast_to(jnp.tril(jnp.ones((x.shape[1],) * 2, bool)), (*x.shape, x.shape[1]))
        return next_token(nnx.merge(graph, params, state)(x, positions, None, earlier)[0], x)

    return loss, (types(params), types(rest), {"x": tokens()})


def _float32(module):
    names = {f.name for f in dataclasses.fields(module.ModelConfig)}
    return {name: jnp.float32 for name in ("dtype", "param_dtype") if name in names}


@entry
def gemma3():
    from gemma import gm
    from gemma.gm.nn import _transformer

    config = gm.nn.Gemma3_4B(text_only=True).config
    sizes = {"num_embed": VOCAB, "embed_dim": 64, "hidden_dim": 128, "num_heads": 4, "head_dim": 16}
    config = dataclasses.replace(
        config, **sizes, num_kv_heads=2, attention_types=config.attention_types[:6], vision_encoder=None,
        sliding_window_size=8,
    )  # fmt: skip
    model = _transformer.Transformer(config=config, tokens="batch.x", dtype=jnp.float32)
    shapes = jax.eval_shape(lambda k, x: model.init(k, x), jax.random.PRNGKey(0), tokens())

    def loss(params, batch):
        return next_token(model.apply(params, batch["x"]).logits, batch["x"])

    return loss, (types(shapes), {"x": tokens()})


# -- MaxText -------------------------------------------------------------------------------------------------


def of_maxtext(name, **more):
    import maxtext
    from flax import nnx
    from flax.linen import partitioning
    from maxtext.common.common_types import MODEL_MODE_TRAIN
    from maxtext.configs import pyconfig
    from maxtext.utils import maxtext_utils, model_creation_utils

    base = os.path.join(os.path.dirname(maxtext.__file__), "configs", "base.yml")
    sizes = {
        "base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 176,
        "head_dim": 16, "vocab_size": VOCAB, "max_target_length": LENGTH, "per_device_batch_size": BATCH,
    }  # fmt: skip
    options = {"dtype": "float32", "weight_dtype": "float32", "matmul_precision": "highest"}
    run = {"run_name": "t", "enable_checkpointing": False, "skip_jax_distributed_system": True}
    own = {"model_name": name, "attention": "dot_product", "override_model_config": True}
    data = {"dataset_type": "synthetic", "hardware": "cpu"}
    settings = {"base_num_decoder_layers": 2, **sizes, **options, **run, **own, **data, **more}
    config = pyconfig.initialize(["corpus", base], **settings)
    mesh = jax.sharding.Mesh(maxtext_utils.create_device_mesh(config), config.mesh_axes)

    def within(f):
        def run(*args):
            rules = partitioning.axis_rules(config.logical_axis_rules)
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh), mesh, rules:
                return f(*args)

        return run

    make = model_creation_utils.get_nnx_create_model_fn(config, mesh, None, MODEL_MODE_TRAIN, None)
    graph, params, rest = nnx.split(within(lambda: nnx.eval_shape(make))(), nnx.Param, ...)

    def loss(params, state, batch):
        logits = nnx.merge(graph, params, state)(
            decoder_input_tokens=batch["inputs"],
            decoder_positions=batch["inputs_position"],
            decoder_segment_ids=batch["inputs_segmentation"],
            enable_dropout=True,
        )
        return cross_entropy(logits[0] if isinstance(logits, tuple) else logits, batch["targets"])

    batch = dict.fromkeys(("inputs", "inputs_position", "inputs_segmentation", "targets"), tokens())
    return within(loss), (types(params), types(rest), batch)


@entry
def mt_llama3():
    return of_maxtext("llama3-8b", base_num_decoder_layers=4)


@entry
def mt_mixtral_dense():
    return of_maxtext("mixtral-8x7b", sparse_matmul=False, capacity_factor=1.25, base_moe_mlp_dim=176)
