"""Jobs of several processes: who takes part, and what happens when one of them does not. No TensorFlow
here; `engines.tf.cluster` runs programs over them."""

from __future__ import annotations

from mesh_tf_core.cluster.cluster import Cluster
from mesh_tf_core.cluster.members import Members

__all__ = ["Cluster", "Members"]
