"""Model code that runs at once, operation by operation, on a mesh under a layout; or staged into one program.

The idea is TensorFlow Eager's (Agrawal et al. 2019, "TensorFlow Eager: a multi-stage, Python-embedded DSL for
machine learning"). An eager operation equals a staged one: it is lowered alone by the same rules, and its
instructions run on the shards at once.
"""

from mesh_tf_core.eager.context import Eager
from mesh_tf_core.eager.staged import Staged
from mesh_tf_core.eager.step import EagerStep
from mesh_tf_core.eager.tensor import EagerTensor

__all__ = ["Eager", "EagerStep", "EagerTensor", "Staged"]
