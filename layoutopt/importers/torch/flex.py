"""`flex_attention` as operations that have rules, on tensors of any device.

The function of a mask made by `create_block_mask` is called with the positions of all queries and keys at
once, as if it made a mask of `scaled_dot_product_attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from layoutopt.importers.torch.internals import torch_module


@contextmanager
def flex_written_out() -> Iterator[None]:
    """Replaces the code of `flex_attention`, which modules have under names of their own, some compiled."""
    own = import_module("torch.nn.attention.flex_attention").flex_attention
    before = own.__code__
    own.__code__ = _in_place.__code__
    try:
        yield
    finally:
        own.__code__ = before


def _in_place(  # type: ignore[no-untyped-def]
    query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux
):
    from layoutopt.importers.torch.flex import attended  # this code has the globals of another module

    out, aux = attended(query, key, value, score_mod, block_mask, scale, bool(return_lse or return_aux))
    return (out, aux) if return_aux else (out, aux.lse) if return_lse else out


def attended(
    query: Any, key: Any, value: Any, score_mod: Any, mask: Any, scale: float | None, more: bool
) -> tuple[Any, Any]:
    """The result of attention, and, with `more`, the log-sum-exp and the largest score of each query."""
    torch = torch_module()
    sizes = (*query.shape[:3], key.shape[2])
    places = (torch.arange(n, device=query.device) for n in sizes)
    at = [place.reshape([-1 if a == i else 1 for i in range(4)]) for a, place in enumerate(places)]
    seen = None if mask is None else mask.mask_mod(*at)
    seen = seen if seen is not None and seen.ndim else None  # that of all keys has no axes
    groups = sizes[1] // key.shape[1]
    if score_mod is None and not more:
        function = torch.nn.functional.scaled_dot_product_attention
        return function(query, key, value, seen, scale=scale, enable_gqa=groups > 1), None
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    scores = (query @ key.transpose(-2, -1)).float() * (scale or query.shape[-1] ** -0.5)
    scores = scores if score_mod is None else score_mod(scores, *at)
    scores = scores if seen is None else scores.masked_fill(seen.logical_not(), float("-inf"))
    aux = import_module("torch.nn.attention.flex_attention").AuxOutput(scores.logsumexp(-1), scores.amax(-1))
    return scores.softmax(-1).to(value.dtype) @ value, aux
