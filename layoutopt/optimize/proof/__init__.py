"""Bounds that rule options and whole subproblems out."""
