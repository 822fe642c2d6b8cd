"""Masks of attention: bool tensors that hold where a query may see a key. Join them with `&`."""

from mesh_tf_core.ir.dims import Dim
from mesh_tf_core.ir.tensor import Tensor
from mesh_tf_core.ops.index import mtf_range
from mesh_tf_core.ops.math import not_equal
from mesh_tf_core.ops.shape import rename
from mesh_tf_core.tracing.graph import Graph


def causal_mask(graph: Graph, length: Dim, memory_length: Dim) -> Tensor:
    """[length, memory_length]: keys up to the query's own position."""
    return mtf_range(graph, length) >= mtf_range(graph, memory_length)


def padding_mask(
    ids: Tensor, length: str = "length", memory_length: str = "memory_length", padding: int = 0
) -> Tensor:
    """ids [others, length] -> [others, memory_length]: keys whose token is not padding."""
    return rename(not_equal(ids, padding), **{length: memory_length})


def segment_mask(
    segments: Tensor,
    memory_segments: Tensor | None = None,
    length: str = "length",
    memory_length: str = "memory_length",
) -> Tensor:
    """[others, length, memory_length]: keys of the query's own text, where several are packed into a row
    (Raffel et al. 2020, "T5", section 3.1.2).

    Args:
      segments: the number of the text that every query belongs to, [others, length].
      memory_segments: segments of the keys, [others, memory_length]; None: those of the queries.
    """
    keys = rename(segments, **{length: memory_length}) if memory_segments is None else memory_segments
    return segments.equal(keys)
