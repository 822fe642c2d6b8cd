"""Calls of PyTorch itself: the module, element types, values."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from inspect import signature
from typing import Any

from mesh_tf_core.errors import UserError, not_installed

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Element types with fractions, as the contract names them."""


def torch_module() -> Any:
    """PyTorch; UserError if it is not installed."""
    try:
        return import_module("torch")
    except ImportError:
        raise not_installed("torch", "torch", "a model of a PyTorch module") from None


@cache
def _dtypes() -> dict[Any, str]:
    torch = torch_module()
    # Indices and counts are 64-bit by habit; no array of a model has more elements than 32 bits count.
    names = {"int64": "int32"} | {n: n for n in (*FLOATS, "bool", "int32", "int16", "int8", "uint8")}
    return {getattr(torch, of): name for of, name in names.items()}


def dtype_of(dtype: Any) -> str:
    """The contract's name of an element type."""
    found = _dtypes().get(dtype)
    if found is None:
        raise UserError(f"{str(dtype).removeprefix('torch.')} is not an element type that layoutopt has")
    return found


def array_of(tensor: Any) -> Any:
    """A tensor's values as a NumPy array; None if it has none (a meta or fake tensor)."""
    torch = torch_module()
    if tensor is None or tensor.is_meta or isinstance(tensor, torch._subclasses.FakeTensor):
        return None
    own = tensor.detach().cpu()
    return (own.float() if own.dtype == torch.bfloat16 else own).numpy()


def copied(module: Any) -> Any:
    """A copy of a module with the same parameters and buffers.

    Modules have a dozen empty tables of hooks each, which `copy.deepcopy` alone takes long to copy.
    """
    whole, tensor = torch_module().nn.Module, torch_module().Tensor
    memo: dict[int, Any] = {id(t): t for t in (*module.parameters(), *module.buffers())}
    compiled = "_compiled_call_impl"  # which Module's own copies leave out, too

    def value(x: Any) -> Any:
        kind: Any = type(x)
        if id(x) in memo:
            return memo[id(x)]
        if isinstance(x, tensor) and not x.is_leaf:  # of a call before, which none may copy
            return x.detach()
        if kind in (dict, OrderedDict):
            made = memo[id(x)] = kind()
            made.update((k, value(y)) for k, y in x.items())
            return made
        plain = isinstance(x, whole) and not hasattr(kind, "__deepcopy__")
        if not plain or kind.__getstate__ is not whole.__getstate__ or "__reduce__" in vars(kind):
            return copy.deepcopy(x, memo)
        made = memo[id(x)] = object.__new__(kind)
        made.__dict__.update((k, value(y)) for k, y in x.__dict__.items() if k != compiled)
        return made

    return value(module)


def called(module: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a module: a tuple in order, or by name those that it takes; the rest of a batch is for
    its loss."""
    if not isinstance(batch, Mapping):
        return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}
    known = signature(module.forward).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return (), {name: x for name, x in batch.items() if every or name in known}


def batch_path(keys: Any) -> str:
    """The name of an array of the batch."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)
