"""Lowering: a graph, a mesh and a layout to one SPMD program."""

from mesh_tf_core.lower.base import lower_base
from mesh_tf_core.lower.options import Options
from mesh_tf_core.lower.pipeline import lower
from mesh_tf_core.lower.subgraph import Subgraph

__all__ = ["Options", "Subgraph", "lower", "lower_base"]
