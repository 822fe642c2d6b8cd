"""Functions of other libraries as models: dimensions inferred from plain data, written as a graph.

No file here knows a library, or imports a front end; `front_ends` lists those. `contract` is what a front end
hands over, and `build` makes a graph of it.
"""
