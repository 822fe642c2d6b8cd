"""Kernels: what one device computes, in NumPy (the oracle of tests), TensorFlow or JAX."""
