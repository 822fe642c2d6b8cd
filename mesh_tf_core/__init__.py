"""The runtime: named dimensions, graphs of operations, lowering to SPMD programs, engines that run them.

Use it as `import mesh_tf_core as mtf`. Nothing here loads TensorFlow before a program is run.
"""

from typing import TYPE_CHECKING, Any

from mesh_tf_core.lazy import load

# A function and a package of one name: whichever is loaded last has it.
from mesh_tf_core.lower import Options, lower
from mesh_tf_core.renamed import RENAMED

if TYPE_CHECKING:
    from mesh_tf_core import decoding, layers
    from mesh_tf_core.eager import Eager
    from mesh_tf_core.engines import Cluster
    from mesh_tf_core.errors import ClusterError, InfeasibleError, LayoutError, LimitError, UserError
    from mesh_tf_core.ir.dims import Dim, Shape
    from mesh_tf_core.ir.initializers import ONES, ZEROS, Constant, FromFunction, Initializer, Normal, Uniform
    from mesh_tf_core.ir.layout import Layout
    from mesh_tf_core.ir.mesh import Mesh
    from mesh_tf_core.ir.op import Op, Roles, TensorType
    from mesh_tf_core.ir.program import Program
    from mesh_tf_core.ir.tensor import Tensor
    from mesh_tf_core.model import Model, minimize
    from mesh_tf_core.ops.activations import clip, elu, leaky_relu, logical_xor, selu
    from mesh_tf_core.ops.along import put_along, take_along
    from mesh_tf_core.ops.attention import AttentionOptions, attention
    from mesh_tf_core.ops.basic import add_n, cast, scale, stop_gradient
    from mesh_tf_core.ops.binary import where
    from mesh_tf_core.ops.conv import conv, conv_transpose
    from mesh_tf_core.ops.cumulative import cumsum, reduce_prod
    from mesh_tf_core.ops.custom import clip_activation_gradient, custom_gradient
    from mesh_tf_core.ops.einsum import broadcast, einsum
    from mesh_tf_core.ops.filled import constant, ones, ones_like, zeros, zeros_like
    from mesh_tf_core.ops.float8 import float8_einsum
    from mesh_tf_core.ops.grouped import grouped_product
    from mesh_tf_core.ops.index import (
        dynamic_slice,
        dynamic_update,
        gather,
        mtf_range,
        one_hot,
        pick,
        scatter_add,
    )
    from mesh_tf_core.ops.math import (
        abs,
        add,
        atan,
        cos,
        divide,
        equal,
        erf,
        erfc,
        exp,
        expm1,
        floor,
        floordiv,
        gelu,
        greater,
        greater_equal,
        is_finite,
        less,
        less_equal,
        log,
        log1p,
        logical_and,
        logical_not,
        logical_or,
        maximum,
        minimum,
        mod,
        multiply,
        negative,
        not_equal,
        pow,
        reciprocal,
        relu,
        rsqrt,
        sigmoid,
        sign,
        silu,
        sin,
        softplus,
        sqrt,
        square,
        subtract,
        swish,
        tanh,
    )
    from mesh_tf_core.ops.neighbours import dynamic_shift, halo_exchange, shift
    from mesh_tf_core.ops.norm import layer_norm, normalize, rms_norm
    from mesh_tf_core.ops.order import (
        argmax,
        argmin,
        argsort,
        nth_largest,
        nth_smallest,
        reduce_first,
        sort,
        top_1,
        top_k,
    )
    from mesh_tf_core.ops.pool import avg_pool, max_pool, sum_pool
    from mesh_tf_core.ops.random import dropout, random_normal, random_uniform
    from mesh_tf_core.ops.reduce import (
        reduce_all,
        reduce_any,
        reduce_max,
        reduce_mean,
        reduce_min,
        reduce_sum,
    )
    from mesh_tf_core.ops.sampling import random_categorical, sample_with_temperature
    from mesh_tf_core.ops.shape import (
        anonymize,
        concat,
        pad,
        rename,
        rename_dimension,
        reshape,
        slice_dim,
        transpose,
    )
    from mesh_tf_core.ops.softmax import (
        log_softmax,
        logsumexp,
        masked_softmax,
        softmax,
        softmax_cross_entropy,
    )
    from mesh_tf_core.ops.stacking import split, squeeze, stack, strided, unstack
    from mesh_tf_core.optimizers import (
        SGD,
        Adafactor,
        Adam,
        LinearDecay,
        LinearWarmup,
        LossScale,
        Optimizer,
        RsqrtDecay,
        Schedule,
        WarmupCosine,
        WarmupLinear,
        WarmupRsqrt,
    )
    from mesh_tf_core.tracing.assigning import assign_add, assign_slice, assign_sub
    from mesh_tf_core.tracing.diloco import DiLoCo
    from mesh_tf_core.tracing.gradients import gradients
    from mesh_tf_core.tracing.graph import Graph
    from mesh_tf_core.tracing.scan import cond, recomputable, reversible_scan, scan, while_loop
    from mesh_tf_core.training import Decoupled, Source, Trainer

# fmt: off
__all__ = [
    "ONES", "SGD", "ZEROS", "Adafactor", "Adam", "AttentionOptions", "Cluster", "ClusterError", "Constant",
    "Decoupled", "DiLoCo", "Dim", "Eager", "FromFunction", "Graph", "InfeasibleError", "Initializer",
    "Layout", "LayoutError", "LimitError", "LinearDecay", "LinearWarmup", "LossScale", "Mesh", "Model",
    "Normal", "Op", "Optimizer", "Options", "Program", "Roles", "RsqrtDecay", "Schedule", "Shape", "Source",
    "Tensor", "TensorType", "Trainer", "Uniform", "UserError", "WarmupCosine", "WarmupLinear",
    "WarmupRsqrt", "abs", "add", "add_n", "anonymize", "argmax", "argmin", "argsort", "assign_add",
    "assign_slice", "assign_sub", "atan", "attention", "avg_pool", "broadcast", "cast", "clip",
    "clip_activation_gradient", "concat", "cond", "constant", "conv", "conv_transpose", "cos", "cumsum",
    "custom_gradient", "decoding", "divide", "dropout", "dynamic_shift", "dynamic_slice", "dynamic_update",
    "einsum", "elu", "equal", "erf", "erfc", "exp", "expm1", "float8_einsum", "floor", "floordiv", "gather",
    "gelu", "gradients", "greater", "greater_equal", "grouped_product", "halo_exchange", "is_finite",
    "layer_norm", "layers", "leaky_relu", "less", "less_equal", "log", "log1p", "log_softmax",
    "logical_and", "logical_not", "logical_or", "logical_xor", "logsumexp", "lower", "masked_softmax",
    "max_pool", "maximum", "minimize", "minimum", "mod", "mtf_range", "multiply", "negative", "normalize",
    "not_equal", "nth_largest", "nth_smallest", "one_hot", "ones", "ones_like", "pad", "pick", "pow",
    "put_along", "random_categorical", "random_normal", "random_uniform", "reciprocal", "recomputable",
    "reduce_all", "reduce_any", "reduce_first", "reduce_max", "reduce_mean", "reduce_min", "reduce_prod",
    "reduce_sum", "relu", "rename", "rename_dimension", "reshape", "reversible_scan", "rms_norm", "rsqrt",
    "sample_with_temperature", "scale", "scan", "scatter_add", "selu", "shift", "sigmoid", "sign", "silu",
    "sin", "slice_dim", "softmax", "softmax_cross_entropy", "softplus", "sort", "split", "sqrt", "square",
    "squeeze", "stack", "stop_gradient", "strided", "subtract", "sum_pool", "swish", "take_along", "tanh",
    "top_1", "top_k", "transpose", "unstack", "where", "while_loop", "zeros", "zeros_like",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name in RENAMED:
        ours = f"use mtf.{RENAMED[name]} instead of Mesh-TensorFlow's mtf.{name}"
        # With a name Python would add a suggestion of its own.
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; {ours}", name="")
    return load(__name__, name)


def __dir__() -> list[str]:
    return __all__
