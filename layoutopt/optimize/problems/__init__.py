"""The question, its subproblems (a mesh, a schedule and a number of microbatches each), and their bounds."""
