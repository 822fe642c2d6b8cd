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
from mesh_tf_core.ops.activations import clip, elu, leaky_relu, logical_xor, selu
from mesh_tf_core.ops.along import put_along, take_along
from mesh_tf_core.ops.basic import add_n, cast, scale, stop_gradient
from mesh_tf_core.ops.binary import where
from mesh_tf_core.ops.conv import conv, conv_transpose
from mesh_tf_core.ops.cumulative import cumsum
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
from mesh_tf_core.ops.neighbours import shift
from mesh_tf_core.ops.norm import layer_norm, normalize, rms_norm
from mesh_tf_core.ops.order import argmax, argmin, argsort, nth_largest, nth_smallest, sort, top_1, top_k
from mesh_tf_core.ops.pool import avg_pool, max_pool, sum_pool
from mesh_tf_core.ops.random import dropout, random_normal, random_uniform
from mesh_tf_core.ops.reduce import reduce_all, reduce_any, reduce_max, reduce_mean, reduce_min, reduce_sum
from mesh_tf_core.ops.sampling import random_categorical, sample_with_temperature
from mesh_tf_core.ops.shape import concat, pad, rename, reshape, slice_dim, transpose
from mesh_tf_core.ops.softmax import log_softmax, logsumexp, masked_softmax, softmax, softmax_cross_entropy
from mesh_tf_core.ops.stacking import split, squeeze, stack, unstack
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
    "Trainer",
    "Uniform",
    "UserError",
    "add_n",
    "argmax",
    "argmin",
    "argsort",
    "avg_pool",
    "broadcast",
    "cast",
    "clip",
    "concat",
    "conv",
    "conv_transpose",
    "cumsum",
    "dropout",
    "einsum",
    "elu",
    "exp",
    "gather",
    "gelu",
    "gradients",
    "layer_norm",
    "leaky_relu",
    "log",
    "log_softmax",
    "logical_xor",
    "logsumexp",
    "lower",
    "masked_softmax",
    "max_pool",
    "maximum",
    "minimum",
    "mtf_range",
    "normalize",
    "nth_largest",
    "nth_smallest",
    "one_hot",
    "pad",
    "pick",
    "put_along",
    "random_categorical",
    "random_normal",
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
    "sample_with_temperature",
    "scale",
    "scan",
    "scatter_add",
    "selu",
    "shift",
    "sigmoid",
    "silu",
    "slice_dim",
    "softmax",
    "softmax_cross_entropy",
    "sort",
    "split",
    "sqrt",
    "square",
    "squeeze",
    "stack",
    "stop_gradient",
    "sum_pool",
    "take_along",
    "tanh",
    "top_1",
    "top_k",
    "transpose",
    "unstack",
    "where",
]
