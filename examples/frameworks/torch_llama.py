"""A PyTorch module: torchax's `extract_jax` returns its arrays and a JAX function of them."""

# ruff: noqa: E402

import jax
import jax.numpy as jnp
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import layoutopt

# torchax 0.0.13 names operations of named tensors, which torch 2.13 does not have: take others of their kind.
packet = type(torch.ops.aten.add)
asked = packet.__getattr__


def lenient(op, name):
    known = name.startswith("_") or name in (*op.overloads(), "default")
    return asked(op, name if known else op.overloads()[0])


packet.__getattr__ = lenient
import torchax

torchax.enable_accuracy_mode()  # float32 products, as torch has them on a CPU
config = LlamaConfig(
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=2,
    num_attention_heads=8,
    num_key_value_heads=4,
    vocab_size=512,
    attn_implementation="eager",
    use_cache=False,
)
net = LlamaForCausalLM(config)
arrays, function = torchax.extract_jax(net)
learned = {name for name, _ in net.named_parameters()}
# Dots to slashes: a path, whose last parts name dimensions.
params = {name.replace(".", "/"): x for name, x in arrays.items() if name in learned}
buffers = {name.replace(".", "/"): x for name, x in arrays.items() if name not in learned}


def loss(params, buffers, batch):
    states = {name.replace("/", "."): x for name, x in {**params, **buffers}.items()}
    logits = function(states, (), {"input_ids": batch["tokens"]}).logits
    log = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.take_along_axis(log, batch["tokens"][:, 1:, None], -1).mean()


def model(batch=8, length=128):
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    return layoutopt.from_jax(loss, params, {"tokens": tokens}, state=buffers)
