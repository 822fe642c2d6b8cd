"""Functions of other libraries as models: dimensions inferred from plain data, written as a graph.

No file here knows a library, or imports a front end. `front_ends` lists those.

contract    what a front end hands over: equations as plain data, the arguments, a program
build       a program as a graph, from all of these
reroll      equal layers that are written one after the other, as the loop that they are: `layers` says
            whether they are one, `forms` which equations compute the same, `single_layers` why alike ones are
            none
relations   which axes of an operation's operands and results mean the same
indexing    what gathers and scatters do to axes
ranges      what numbers count: experts that a router chose
factors     every axis as a product of factors
classes     which factors are one dimension
logical     which of the names that libraries noted are dimensions, and whose
naming      names for dimensions; `roles` reads them off operations, `names` keeps them
refusals    what cannot be imported, all of it in one error
writer      values and dimensions while a graph is written; elementwise, reductions, shapes, products,
            indexed and loops have what every operation becomes, `narrow` how small whole numbers wrap
arguments   the function's arguments in the graph
origin      the function of a model: its arrays by dimension, the user's lines
model       models that are functions of other libraries
placing     where a plan puts the function's arrays and values, axis by axis
saved       which values a recomputed layer keeps
parts       whether the step may have microbatches
"""
