"""The same program as one JAX function: for the TPU compiler, and run on what JAX has."""
