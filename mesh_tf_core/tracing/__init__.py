"""Graphs as model code writes them: tensors, variables, loops, branches, gradients, microbatches."""
