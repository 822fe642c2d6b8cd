"""The search: one subproblem per mesh and number of microbatches, bounds, and the best over all of them."""
