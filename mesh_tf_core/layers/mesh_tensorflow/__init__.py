"""Layers of Mesh-TensorFlow's transformer library that newer models rarely use.

Adaptive embeddings, variants of attention from 2018 to 2020, mixtures of softmaxes, product-key memories.
`mesh_tf_core.layers` has their names, so that models import all layers from one place.
"""
