"""A Keras 3 model on JAX: `stateless_call` is a function of the variables, whose paths name dimensions."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import keras

import layoutopt

options = {"weights": None, "classes": 100, "classifier_activation": None, "input_shape": (96, 96, 3)}
net = keras.applications.MobileNetV2(**options)


def split(variables):
    return {v.path: v.value for v in variables}


def loss(params, state, batch):
    trained = [params[v.path] for v in net.trainable_variables]
    kept = [state[v.path] for v in net.non_trainable_variables]
    logits, kept = net.stateless_call(trained, kept, batch["image"], training=True)
    log = jax.nn.log_softmax(logits)
    new = {v.path: x for v, x in zip(net.non_trainable_variables, kept, strict=True)}
    return -jnp.take_along_axis(log, batch["label"][:, None], -1).mean(), new


def model(batch=64):
    S = jax.ShapeDtypeStruct
    given = {"image": S((batch, 96, 96, 3), jnp.float32), "label": S((batch,), jnp.int32)}
    kept = split(net.non_trainable_variables)
    return layoutopt.from_jax(loss, split(net.trainable_variables), given, state=kept)
