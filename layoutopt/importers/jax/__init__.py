"""JAX functions as models: traced once, dimensions inferred, written as a graph.

internals   what is asked of JAX itself
interpreter one walk over a jaxpr, calls inlined, for two visitors: `reader` and `replay`
leaves      the arrays of pytrees: paths, types, names of axes that libraries note
equations   the traced function as plain data, calls inlined, which `reader` makes
reroll      equal layers that are written one after the other, as the loop that they are: `layers` says
            whether they are one, `forms` which equations compute the same, `single_layers` why alike ones are
            none
relations   which axes of an operation's operands and results mean the same
indexing    what gathers and scatters do to axes
ranges      what numbers count: experts that a router chose
factors     every axis as a product of factors
classes     which factors are one dimension
logical     which of the names that were noted are dimensions, and whose
naming      names for dimensions; `roles` reads them off operations, `names` keeps them
refusals    what cannot be imported, all of it in one error
writer      values and dimensions while a graph is written; elementwise, reductions, shapes, products,
            indexed and loops have what every primitive becomes, `narrow` how small whole numbers wrap
model       `from_jax`, from all of these

jax_plan    a plan back in the user's program: `placing` says where values lie, `shardings` where
            arguments do, `constrain` and `replay` run the function so, `step` is a training step, and
            `parts` says whether it may have microbatches
written     the layout that a user's own shardings say
"""
