"""Functions of PyTorch without rules, or whose shapes depend on values, as others that have rules.

Arrays of packed sequences are rows that a mask selects (`selected`), in an order that nothing depends on.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

from layoutopt.importers.torch.calls import torch_module


@contextmanager
def other_functions(library: Callable[[str], bool]) -> Iterator[None]:
    """Calls the functions of this module in place of PyTorch's.

    Args:
      library: True for files that are not the user's.
    """
    torch, rnn = torch_module(), import_module("torch.nn.utils.rnn")
    flex = import_module("torch.nn.attention.flex_attention").flex_attention
    _operations()
    with ExitStack() as stack:
        # Modules have these under names of their own, some compiled.
        for own, code in ((flex, _flex), (rnn.pack_padded_sequence, _pack), (rnn.pad_packed_sequence, _pad)):
            stack.callback(setattr, own, "__code__", own.__code__)
            own.__code__ = code.__code__
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            stack.enter_context(patch.object(torch._VF, name, _recurrent(name), create=True))
        stack.enter_context(patch.object(torch, "ctc_loss", _ctc_loss))
        for name, of in (("max", "clamp_min"), ("min", "clamp_max")):
            stack.enter_context(patch.object(builtins, name, _extreme(name, of, library)))
        yield


@cache
def _operations() -> Any:
    """Registers operations whose rules are in `recurrent`."""
    own = torch_module().library.Library("layoutopt", "DEF")
    given = "Tensor[] states, Tensor[] weights, bool biases, int layers, float rate, bool train, bool both"
    for schema, made in (
        (
            "ctc_loss(Tensor x, Tensor y, Tensor lengths, Tensor counts, int blank, bool zero) -> Tensor",
            lambda x, y, lengths, *more: x.new_empty(lengths.shape),
        ),
        (f"held(Tensor x, Tensor lengths, int steps, str kind, {given}) -> Tensor[]", _held),
        (
            "padded(Tensor x, Tensor lengths, int steps, float value) -> Tensor",
            lambda x, lengths, steps, value: x.new_empty((steps, *lengths.shape, *x.shape[1:])),
        ),
    ):
        own.define(schema)
        own.impl(schema.partition("(")[0], made, "Meta")
    return own


def _held(
    x: Any, lengths: Any, steps: int, kind: str, states: Any, weights: Any, biases: Any, *more: Any
) -> Any:
    width = states[0].shape[-1] * (1 + more[-1])
    return [x.new_empty((x.shape[0], width)), *(s.new_empty(s.shape) for s in states)]


class SequenceLengths:
    """In place of `PackedSequence.batch_sizes`: the length of each sequence, and the number of steps."""

    device = property(lambda self: torch_module().device("cpu"))

    def __init__(self, lengths: Any, steps: int) -> None:
        self.lengths, self.steps = lengths, steps

    def __getitem__(self, step: int) -> int:
        return int(self.lengths.shape[0])  # sequences at the first step, which no other is asked for


def _pack(input, lengths, batch_first, enforce_sorted):  # type: ignore[no-untyped-def]
    from layoutopt.importers.torch.instead import packed  # this code has the globals of another module

    return packed(input, lengths, batch_first)


def packed(x: Any, lengths: Any, batch_first: bool) -> Any:
    """The rows of all steps that sequences have, [rows, ...], as a PackedSequence."""
    torch = torch_module()
    x = x.transpose(0, 1) if batch_first else x
    lengths = torch.as_tensor(lengths, device=x.device)
    seen = torch.arange(x.shape[0], device=x.device)[:, None] < lengths[None]
    with torch._C.DisableTorchFunction():  # rows of known values are no fewer: all arrays keep all of theirs
        rows = x[seen]
    return import_module("torch.nn.utils.rnn").PackedSequence(rows, SequenceLengths(lengths, x.shape[0]))


def _pad(sequence, batch_first, padding_value, total_length):  # type: ignore[no-untyped-def]
    from layoutopt.importers.torch.instead import unpacked

    return unpacked(sequence, batch_first, padding_value, total_length)


def unpacked(sequence: Any, batch_first: bool, value: float, total: int | None) -> tuple[Any, Any]:
    """Sequences padded to `total` steps, else to the longest of the example batch, and their lengths."""
    torch, of = torch_module(), sequence.batch_sizes
    if total is None:  # a trial without values sees all that were packed
        total = of.steps if type(of.lengths) is torch.Tensor and of.lengths.is_meta else int(of.lengths.max())
    found = torch.ops.layoutopt.padded(sequence.data, of.lengths, of.steps, float(value))[:total]
    if total > of.steps:
        more = [0] * (2 * found.ndim - 1) + [total - of.steps]
        found = torch.nn.functional.pad(found, more, value=value)
    return found.transpose(0, 1) if batch_first else found, of.lengths


def _recurrent(kind: str) -> Callable[..., Any]:
    own = getattr(torch_module()._VF, kind)

    def called(x: Any, of: Any, *given: Any) -> Any:
        if not isinstance(of, SequenceLengths):
            return own(x, of, *given)
        states, *more = given
        states = [*states] if isinstance(states, list | tuple) else [states]
        return tuple(torch_module().ops.layoutopt.held(x, of.lengths, of.steps, kind, states, *more))

    return called


def _ctc_loss(
    x: Any, y: Any, lengths: Any, counts: Any, blank: int = 0, reduction: int = 1, zero: bool = False
) -> Any:
    """In place of `torch.ctc_loss`: lengths as arrays, whatever they are given as."""
    torch = torch_module()
    lengths, counts = (torch.as_tensor(n, device=x.device).reshape(-1) for n in (lengths, counts))
    alone = x.ndim == 2
    x, y = (x[:, None], y.reshape(1, -1)) if alone else (x, y)
    found = torch.ops.layoutopt.ctc_loss(x, y, lengths, counts, blank, zero)
    if reduction == 1:
        return (found / counts.clamp(min=1).to(found.dtype)).mean()
    return found.sum() if reduction == 2 else found[0] if alone else found


def _extreme(name: str, of: str, library: Callable[[str], bool]) -> Callable[..., Any]:
    """`max(n, 1)` of a number that depends on values: the user's code would compare it."""
    torch, own = torch_module(), getattr(builtins, name)
    counted, whole = (torch.Tensor, torch.SymInt), getattr(torch, f"sym_{name}")

    def called(*given: Any, **more: Any) -> Any:
        first = next((x for x in given if isinstance(x, counted)), None) if len(given) == 2 else None
        if first is None or more or library(sys._getframe(1).f_code.co_filename):
            return own(*given, **more)
        if isinstance(first, torch.SymInt):
            return whole(*given)
        (other,) = (x for x in given if x is not first) if given[0] is not given[1] else (first,)
        return getattr(torch, of)(first, other)

    return called


def _flex(  # type: ignore[no-untyped-def]
    query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux
):
    from layoutopt.importers.torch.instead import attended  # this code has the globals of another module

    out, aux = attended(query, key, value, score_mod, block_mask, scale, bool(return_lse or return_aux))
    return (out, aux) if return_aux else (out, aux.lse) if return_lse else out


def attended(
    query: Any, key: Any, value: Any, score_mod: Any, mask: Any, scale: float | None, more: bool
) -> tuple[Any, Any]:
    """The result of attention, and, with `more`, the log-sum-exp and the largest score of each query.

    The function of a mask made by `create_block_mask` is called with the positions of all queries and keys at
    once, as if it made a mask of `scaled_dot_product_attention`.
    """
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
