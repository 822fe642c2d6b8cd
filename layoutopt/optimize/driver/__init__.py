"""The order in which subproblems are opened, on one core or two."""
