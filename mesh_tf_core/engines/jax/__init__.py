"""The same program as one JAX function, for the TPU compiler and for JAX's devices."""
