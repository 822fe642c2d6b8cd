"""Good answers at any time, and bounds, for problems of unary and pair costs: prices, elimination, repair."""
