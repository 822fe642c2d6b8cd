"""Frozen values that everything reads: dimensions, meshes, layouts, operations, instructions, programs."""
