"""JAX functions as models: traced once, dimensions inferred, written as a graph.

internals   what is asked of JAX itself
equations   the traced function as plain data, calls inlined
relations   which axes of an operation's operands and results mean the same
indexing    what gathers and scatters do to axes
factors     every axis as a product of factors, and which factors are one dimension
naming      names for dimensions
emit, ...   every primitive as our operations
"""
