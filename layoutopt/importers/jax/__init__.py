"""JAX functions as models: a reader in front of `importers.arrays`, and a plan applied behind it.

internals   what is asked of JAX itself
interpreter one walk over a jaxpr, calls inlined, for two visitors: `reader` and `replay`
leaves      the arrays of pytrees: paths, types, names of axes that libraries note
reader      the traced function as the importer's plain data
model       `from_jax`

jax_plan    a plan back in the user's program: `shardings` says where arguments lie, `constrain` and `replay`
            run the function so, and `step` is a training step
written     the layout that a user's own shardings say
"""
