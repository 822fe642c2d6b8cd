"""Finds, proves, explains and applies the best layout of a model over a mesh of devices."""
