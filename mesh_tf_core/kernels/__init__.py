"""Kernels: the computation of one device, in NumPy (the reference of tests), TensorFlow or JAX."""
