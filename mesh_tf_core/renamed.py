"""Names of Mesh-TensorFlow that are others here, for errors; docs/guides/mesh_tensorflow.md lists all."""

from __future__ import annotations

RENAMED = {
    "Dimension": "Dim",
    "LayoutRules": "Layout",
    "Lowering": "lower",
    "VariableDType": "Graph.variable",
    "get_variable": "Graph.variable",
    "StackedVariable": "scan",
    "import_tf_tensor": "Graph.input",
    "import_fully_replicated": "Graph.input",
    "convert_to_shape": "Shape",
    "convert_to_layout_rules": "Layout",
    "matmul": "einsum",
    "mtf_pow": "pow",
    "mtf_abs": "abs",
    "mtf_slice": "slice_dim",
    "to_float": "cast",
    "to_bfloat16": "cast",
    "to_int32": "cast",
    "sub": "subtract",
    "reduce_logsumexp": "logsumexp",
    "replace_dimensions": "rename_dimension",
    "nth_largest_element": "nth_largest",
    "nth_smallest_element": "nth_smallest",
    "recompute_grad": "recomputable",
    "serialize_training_step": "Options",
    "MtfCheckpointSaverListener": "Trainer",
    "MtfRestoreHook": "Trainer",
    "SgdOptimizer": "SGD",
    "MomentumOptimizer": "SGD",
    "AdamWeightDecayOptimizer": "Adam",
    "AdafactorOptimizer": "Adafactor",
}
"""Mesh-TensorFlow's name -> name in this library, both after `mtf.`."""
