"""The runtime: named dimensions, graphs of operations, lowering to SPMD programs, engines that run them.

Use it as `import mesh_tf_core as mtf`. Nothing here loads TensorFlow before a program is run.
"""

from mesh_tf_core.dims import Dim, Shape
from mesh_tf_core.errors import InfeasibleError, LayoutError, LimitError, UserError
from mesh_tf_core.gradients import gradients
from mesh_tf_core.graph import Graph
from mesh_tf_core.initializers import ONES, ZEROS, Constant, Initializer, Normal, Uniform
from mesh_tf_core.layout import Layout
from mesh_tf_core.loops import scan
from mesh_tf_core.lower import Options, lower
from mesh_tf_core.mesh import Mesh
from mesh_tf_core.model import Model
from mesh_tf_core.ops.basic import add_n, cast, scale, shift, stop_gradient
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.einsum import broadcast, einsum
from mesh_tf_core.ops.index import gather, mtf_range, one_hot, pick, scatter_add
from mesh_tf_core.ops.math import (
    exp,
    gelu,
    log,
    maximum,
    minimum,
    relu,
    rsqrt,
    sigmoid,
    silu,
    sqrt,
    square,
    tanh,
)
from mesh_tf_core.ops.norm import layer_norm, normalize, rms_norm
from mesh_tf_core.ops.random import dropout, random_uniform
from mesh_tf_core.ops.reduce import reduce_all, reduce_any, reduce_max, reduce_mean, reduce_min, reduce_sum
from mesh_tf_core.ops.shape import concat, pad, rename, reshape, slice_dim, transpose
from mesh_tf_core.ops.softmax import log_softmax, logsumexp, masked_softmax, softmax, softmax_cross_entropy
from mesh_tf_core.optimizers import SGD, Adafactor, Adam, Optimizer
from mesh_tf_core.program import Program
from mesh_tf_core.tensor import Tensor
from mesh_tf_core.trainer import Trainer

__all__ = [
    "ONES",
    "SGD",
    "ZEROS",
    "Adafactor",
    "Adam",
    "Constant",
    "Dim",
    "Graph",
    "InfeasibleError",
    "Initializer",
    "Layout",
    "LayoutError",
    "LimitError",
    "Mesh",
    "Model",
    "Normal",
    "Optimizer",
    "Options",
    "Program",
    "Shape",
    "Tensor",
    "Uniform",
    "UserError",
    "add_n",
    "broadcast",
    "cast",
    "concat",
    "dropout",
    "einsum",
    "exp",
    "gather",
    "gelu",
    "gradients",
    "layer_norm",
    "log",
    "log_softmax",
    "logsumexp",
    "lower",
    "masked_softmax",
    "maximum",
    "minimum",
    "mtf_range",
    "normalize",
    "one_hot",
    "pad",
    "pick",
    "random_uniform",
    "reduce_all",
    "reduce_any",
    "reduce_max",
    "reduce_mean",
    "reduce_min",
    "reduce_sum",
    "relu",
    "rename",
    "reshape",
    "rms_norm",
    "rsqrt",
    "scale",
    "scan",
    "scatter_add",
    "shift",
    "sigmoid",
    "silu",
    "slice_dim",
    "softmax",
    "softmax_cross_entropy",
    "sqrt",
    "square",
    "stop_gradient",
    "tanh",
    "transpose",
    "where",
]
