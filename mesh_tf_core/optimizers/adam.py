"""Adam with decoupled weight decay."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

from mesh_tf_core.errors import UserError, known_names
from mesh_tf_core.ir.dtypes import FLOATS
from mesh_tf_core.ir.initializers import Variable
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.eight_bits import NO_SIGN, FromEightBits, ToEightBits, largest, row_of
from mesh_tf_core.ops.math import exp, sqrt
from mesh_tf_core.optimizers.base import LearningRate, Optimizer, Updates, slot, times
from mesh_tf_core.tracing.graph import Graph


@dataclass(frozen=True)
class Adam(Optimizer):
    """Adam (Kingma & Ba 2015, algorithm 1) with bias correction; weight decay as in Loshchilov & Hutter
    2019.

    Attributes:
      undecayed: regular expressions; weight decay is not applied to variables whose names contain a match,
        such as norms and biases.
      moments: element type of the two averages, such as bfloat16 (DeepSeek-V3 2024, section 3.3.3); "int8":
        codes with a scale for each row (`ops.eight_bits`), of the second average those of its root, as small
        ones would be 0 beside large ones; "own": a variable's own, as in PyTorch.

    Example:
      >>> import mesh_tf_core as mtf
      >>> mtf.Adam(3e-4, clip_norm=1.0).clip_norm
      1.0
    """

    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    undecayed: tuple[str, ...] = ()
    moments: str = "float32"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moments not in (known := (*FLOATS, "int8", "own")):
            raise UserError(f"Adam: moments={self.moments!r} is unknown; {known_names(self.moments, known)}")

    def update(self, graph: Graph, variable: Variable, gradient: Tensor, rate: LearningRate) -> Updates:
        kind = self._kept_in(variable)

        def kernel(name: str, made: Callable[..., Tensor], *operands: Tensor) -> Tensor:
            """What one kernel of PyTorch's optimizer makes, rounded once."""
            with graph.in_call(name):
                found: Tensor = made(*(x.cast("float32") for x in operands))
                return found.cast(kind)

        g = gradient.cast(kind)
        m_before, m_after = self._average(graph, variable, "adam_m", True)
        v_before, v_after = self._average(graph, variable, "adam_v", False)
        m = kernel("lerp", lambda m, g: m * self.beta1 + g * (1 - self.beta1), m_before, g)
        v = kernel("mul", lambda v: v * self.beta2, v_before)
        v = kernel("addcmul", lambda v, g: v + g * g * (1 - self.beta2), v, g)
        yield from m_after(m)
        yield from v_after(v)
        t = (graph.step() + 1).cast("float32")
        unbias1 = 1.0 - _power(self.beta1, t)
        unbias2 = 1.0 - _power(self.beta2, t)
        decay = 0.0 if any(re.search(p, variable.name) for p in self.undecayed) else self.weight_decay
        root = kernel("div", lambda v: v / unbias2, v)
        root = kernel("sqrt", sqrt, root)
        root = kernel("add", lambda root: root + self.epsilon, root)

        def stepped(w: Tensor, m: Tensor, root: Tensor) -> Tensor:
            step = (m / unbias1) / root
            return w - times(step + w * decay if decay else step, rate)

        yield (
            variable,
            kernel("addcdiv", stepped, graph.read(variable).cast(kind), m, root).cast(variable.dtype),
        )

    def _kept_in(self, variable: Variable) -> str:
        """Element type of what kernels write."""
        return variable.dtype if self.moments == "own" else "float32"

    def _average(
        self, graph: Graph, variable: Variable, name: str, signed: bool
    ) -> tuple[Tensor, Callable[[Tensor], Updates]]:
        """An average before the step, and what stores a new one."""
        row = row_of(variable) if self.moments == "int8" else ""
        kind = self._kept_in(variable)
        dtype = {"own": kind, "int8": "float32"}.get(self.moments, self.moments)
        if not row:
            state, old = slot(graph, variable, name, variable.shape, dtype=dtype)
            return old.cast(kind), lambda new: [(state, new.cast(dtype))]
        state, codes = slot(graph, variable, name, variable.shape, 0.0 if signed else -NO_SIGN, "int8")
        most_state, most = slot(graph, variable, f"{name}_largest", variable.shape.without(row))

        def stored(new: Tensor) -> Updates:
            new = new if signed else sqrt(new)
            its = largest(new, row)
            return [(state, graph.apply(ToEightBits(signed), new, its)), (most_state, its)]

        old = graph.apply(FromEightBits(signed), codes, most)
        return old if signed else old * old, stored


def _power(base: float, exponent: Tensor) -> Tensor:
    """base to the power exponent, which is positive."""
    return exp(exponent * math.log(base)) if base else exponent * 0.0
