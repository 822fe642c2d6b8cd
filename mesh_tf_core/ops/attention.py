"""Attention as one operation: softmax(scale query key + bias) value, without all logits in memory.

For a row (a query of one head), with the weights p_j over the keys that it may see,

    s_j = scale q · k_j + bias_j    lse = log sum_j exp(s_j)    p_j = exp(s_j - lse)    o = sum_j p_j v_j

Forward writes o and lse. Backward computes s and p again, with delta = do · o - dlse:

    dv_j += p_j do    dbias_j = p_j (do · v_j - delta)    dq += scale dbias_j k_j    dk_j += scale dbias_j q

(Dao et al. 2022, "FlashAttention", section 3; Rabe & Staats 2021). Dropout acts on p after lse is taken; its
mask is made again from its key. A device holds the queries that the layout gives it, and all keys: a split
dimension of keys is gathered, a split one of queries leaves partial sums of dk and dv.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypedDict, Unpack

from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.dtypes import is_float
from mesh_tf_core.ir.kernel import At, Kernel
from mesh_tf_core.ir.op import Op, Roles, TensorType
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops import blockwise
from mesh_tf_core.ops.attending import DRAWN, AnyAttention, Sides, back, ordered
from mesh_tf_core.ops.basic import cast, constant_like
from mesh_tf_core.ops.context import Spread
from mesh_tf_core.ops.einsum import broadcast
from mesh_tf_core.ops.index import need_ints
from mesh_tf_core.ops.kinds import FirstDerivative, dim_name, listing
from mesh_tf_core.ops.math import sigmoid


@dataclass(frozen=True)
class FusedAttention(Spread):
    """Result [query with the values' width] and log-sum-exp [rows] from (query, key, value, extras)."""

    @property
    def name(self) -> str:
        return "attention"

    def untrained(self) -> tuple[Op, int] | None:
        """The same without dropout, and so without the last operands, by which it is drawn."""
        extras = tuple(name for name in self.extras if name not in DRAWN)
        return (replace(self, rate=0.0, rows=None, extras=extras), 3 + len(extras)) if self.rate else None

    def roles(self, *inputs: TensorType) -> Roles:
        sides = self.sides(*inputs[:3])
        return Roles(sides.rows.names, whole=self.whole(sides))

    def infer(self, *inputs: TensorType) -> tuple[TensorType, TensorType]:
        self._check(inputs)
        query, sides = inputs[0], self.sides(*inputs[:3])
        out = Shape(sides.width if d.name == self.d_kv else d for d in query.shape)
        statistic = "float64" if query.dtype == "float64" else "float32"
        return TensorType(out, query.dtype), TensorType(query.shape.without(self.d_kv), statistic)

    def _check(self, inputs: Sequence[TensorType]) -> None:
        query, key, value = (t.shape for t in inputs[:3])

        def need(holds: bool, what: str) -> None:
            if not holds:
                raise UserError(f"attention of {listing(inputs)}: {what}")

        dtypes = {t.dtype for t in inputs[:3]}
        need(
            len(dtypes) == 1 and is_float(inputs[0].dtype),
            "query, key and value must have the same float dtype",
        )
        need(self.d_kv in query.names, f"the query must have the dimension {self.d_kv!r}")
        need(
            query.dim(self.d_kv) in key.dims,
            f"the key must have the query's dimension {query.dim(self.d_kv)}",
        )
        need(self.length in query.dims, f"the query must have the dimension of its positions, {self.length}")
        need(
            self.memory in key.dims and self.memory in value.dims,
            f"key and value must have the dimension of their positions, {self.memory}",
        )
        apart = self.memory.name not in query.names and self.length.name not in (*key.names, *value.names)
        need(
            apart,
            "the positions of queries and keys must have different names; rename one dimension with "
            "mtf.rename",
        )
        common = key.without(self.d_kv).dims
        own = [d for d in value if d not in common]
        alike = len(own) == 1 and len(value) == len(key) and own[0].name not in query.without(self.d_kv).names
        need(
            alike,
            f"the value must have the key's dimensions, with another dimension in place of {self.d_kv!r}",
        )
        lacking = [d for d in common if d != self.memory and d not in query.dims]
        need(not lacking, f"the query lacks the keys' dimensions {', '.join(map(str, lacking))}")
        logits = self.sides(*inputs[:3]).logits
        for name, t in zip(self.extras, inputs[3:], strict=True):
            strange = [d for d in t.shape if d not in logits.dims]
            need(
                not strange,
                f"the {name} has dimensions {', '.join(map(str, strange))}, which the logits [{logits}] "
                "lack; remove them",
            )
            if name not in ("bias", "mask"):
                need_ints(f"attention, {name}", t)

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        a, sides = self.attending(k, at, slices), self.sides(*at.inputs[:3])
        result, lse = k.attention(a) or blockwise.forward(k, a)
        rows, width = sides.rows.names, sides.width.name
        return back(k, result, (*rows, width), at.outputs[0]), back(k, lse, rows, at.outputs[1])

    def gradient(self, dy: Any, inputs: Sequence[Tensor], output: Any) -> Sequence[Tensor | None]:
        dresult, dlse = dy
        given = [f.name for f in fields(AnyAttention)]
        same = {name: getattr(self, name) for name in given}
        if dresult is None:
            dresult = broadcast(constant_like(output[0], 0.0), output[0].shape)
        more = [] if dlse is None else [dlse]
        held = [*inputs, *output, dresult, *more]
        graph = dresult.graph
        found: list[Tensor | None] = [*graph.apply(FusedAttentionGrad(**same), *held)]
        for name in self.extras:
            bias = graph.apply(FusedAttentionBiasGrad(**same), *held) if name == "bias" else None
            found.append(bias)
        return found


@dataclass(frozen=True)
class _Backward(FirstDerivative, AnyAttention, abstract=True):
    """From (query, key, value, extras, result, lse, dresult, and dlse if there is one)."""

    of: ClassVar[str] = "attention"

    def derived(self, k: Kernel, at: At, slices: Sequence[Any], sides: Sides) -> tuple[Any, ...]:
        """Result, lse, dresult and dlse (or None) in the order of kernels."""
        rows, n = sides.rows.names, 3 + len(self.extras)
        orders = ((*rows, sides.width.name), rows, (*rows, sides.width.name), rows)
        made = [ordered(k, *xto) for xto in zip(slices[n:], at.inputs[n:], orders, strict=False)]
        return (*made, None)[:4]


@dataclass(frozen=True)
class FusedAttentionGrad(Spread, _Backward):
    """Gradients of query, key and value."""

    products: ClassVar[tuple[int, int]] = (3, 2)
    again: ClassVar[tuple[int, int]] = (1, 0)
    twice: ClassVar[tuple[int, int]] = (1, 1)
    softmax: ClassVar[tuple[int, int]] = (13, 2)
    handed: ClassVar[tuple[int, int]] = (4, 4)

    @property
    def name(self) -> str:
        return "attentiongrad"

    def roles(self, *inputs: TensorType) -> Roles:
        sides = self.sides(*inputs[:3])
        lacking = (*sides.group.names, self.length.name)
        return Roles(sides.shared.names, lacking, whole=self.whole(sides))

    def infer(self, *inputs: TensorType) -> tuple[TensorType, ...]:
        return inputs[:3]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        a, sides = self.attending(k, at, slices), self.sides(*at.inputs[:3])
        result, lse, dresult, dlse = self.derived(k, at, slices, sides)
        made = k.attention_gradient(a, result, lse, dresult) if dlse is None else None
        dq, dk, dv = made or blockwise.backward(k, a, result, lse, dresult, dlse)
        keys = (*sides.shared.names, self.memory.name)
        return (
            back(k, dq, (*sides.rows.names, self.d_kv), at.outputs[0]),
            back(k, dk, (*keys, self.d_kv), at.outputs[1]),
            back(k, dv, (*keys, sides.width.name), at.outputs[2]),
        )


@dataclass(frozen=True)
class FusedAttentionBiasGrad(_Backward):
    """Gradient of the bias, which is the first of the extras."""

    products: ClassVar[tuple[int, int]] = (1, 1)
    again: ClassVar[tuple[int, int]] = (1, 1)

    @property
    def name(self) -> str:
        return "attentionbiasgrad"

    def roles(self, *inputs: TensorType) -> Roles:
        sides, bias = self.sides(*inputs[:3]), inputs[3].shape.names
        kept = tuple(n for n in sides.rows.names if n in bias)
        lacking = tuple(n for n in sides.rows.names if n not in bias)
        return Roles(kept, lacking, whole=self.whole(sides))

    def infer(self, *inputs: TensorType) -> TensorType:
        return inputs[3]

    def kernel(self, k: Kernel, at: At, *slices: Any) -> Any:
        a, sides = self.attending(k, at, slices), self.sides(*at.inputs[:3])
        made = blockwise.bias_gradient(k, a, *self.derived(k, at, slices, sides))
        kept = [n for n in sides.logits.names if n in at.outputs[0].shape.names]
        sizes = [at.outputs[0].shape.dim(n).size for n in kept]
        return back(k, k.reshape(made, sizes), kept, at.outputs[0])


class AttentionOptions(TypedDict, total=False):
    """Options of `attention`: which keys a query sees, and their weights.

    Attributes:
      bias: added to the logits, with any of their dimensions [others, group, length, memory_length].
      mask: bool, with any of these dimensions; False hides a key.
      segments: integer ids of the text of each query and key; a query sees keys of its own text.
      causal: a query sees keys up to its own position.
      window: a query sees fewer than this many positions back (without `causal`: and ahead); 0: all.
      scale: factor of the logits; None: d_kv ** -0.5.
      extra_logit: logit of an additional key without a value, so that weights may sum to less than 1; None:
        no such key. A tensor with any of the rows' dimensions is learned (an attention sink): the result is
        multiplied by the share of the keys with values, sigmoid(lse - extra_logit).
      dropout: rate on the weights, drawn with `random_key` (None: a new key of the graph).
    """

    bias: Tensor | None
    mask: Tensor | None
    segments: tuple[Tensor, Tensor] | None
    causal: bool
    window: int
    scale: float | None
    extra_logit: float | Tensor | None
    dropout: float
    random_key: Tensor | None


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    length: Dim | str,
    memory_length: Dim | str,
    d_kv: Dim | str,
    **options: Unpack[AttentionOptions],
) -> Tensor:
    """Weights values by the softmax of queries times keys, in one operation that never stores all logits.

    Args:
      query: [others, group, length, d_kv], in any order.
      key, value: [others, memory_length, d_kv]; the value may have another dimension than d_kv. Queries that
        differ only in dimensions that keys lack share a key.
      options: `AttentionOptions`, such as `causal=True`.

    Returns:
      The query's dimensions with the value's last dimension instead of d_kv. A query that sees no key gets an
      unspecified mean of the values.

    Example:
      >>> import mesh_tf_core as mtf
      >>> batch, length, d_kv = mtf.Dim("batch", 2), mtf.Dim("length", 8), mtf.Dim("d_kv", 4)
      >>> graph, memory = mtf.Graph("attention"), mtf.Dim("memory_length", 8)
      >>> query = graph.input("query", [batch, length, d_kv], "float32")
      >>> key, value = (graph.input(name, [batch, memory, d_kv], "float32") for name in ("key", "value"))
      >>> print(mtf.attention(query, key, value, length, memory, d_kv, causal=True).shape)
      batch:2 length:8 d_kv:4
    """
    if unknown := options.keys() - AttentionOptions.__annotations__.keys():
        known = ", ".join(AttentionOptions.__annotations__)
        raise UserError(f"attention: unknown option {min(unknown)!r}; known: {known}")
    bias, segments, scale = options.get("bias"), options.get("segments"), options.get("scale")
    dropout, random_key = options.get("dropout", 0.0), options.get("random_key")
    extra = options.get("extra_logit")
    size = query.dim(dim_name(d_kv)).size
    lacking = [d for d in key.shape if d.name not in (*query.shape.names, dim_name(memory_length))]
    query = broadcast(query, [*lacking, *query.shape]) if lacking else query
    if dropout and random_key is None:
        random_key = query.graph.random_key()
    extras = {
        "bias": bias if bias is None or bias.dtype == query.dtype else cast(bias, query.dtype),
        "mask": options.get("mask"),
        "segments": segments and segments[0],
        "memory_segments": segments and segments[1],
        "key": random_key if dropout else None,
    }
    given = {name: x for name, x in extras.items() if x is not None}
    op = FusedAttention(
        dim_name(d_kv),
        query.dim(dim_name(length)),
        key.dim(dim_name(memory_length)),
        size**-0.5 if scale is None else scale,
        options.get("causal", False),
        options.get("window", 0),
        None if isinstance(extra, Tensor) else extra,
        dropout,
        extras=tuple(given),
    )
    out: Tensor
    out, lse = query.graph.apply(op, query, key, value, *given.values())
    return out * sigmoid(lse - cast(extra, lse.dtype)).cast(out.dtype) if isinstance(extra, Tensor) else out
