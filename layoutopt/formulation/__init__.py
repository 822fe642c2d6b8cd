"""From a model and a mesh to an integer program: clusters, tables, memory constraints."""
