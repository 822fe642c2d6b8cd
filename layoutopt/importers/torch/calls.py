"""Calls of PyTorch itself; copies of a module, and the calls of its parts while it is traced."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from inspect import signature
from itertools import accumulate
from types import CellType, FunctionType
from typing import Any

from mesh_tf_core.errors import UserError, not_installed

FLOATS = ("float64", "float32", "float16", "bfloat16")
"""Element types with fractions, as the contract names them."""

_PLAIN = frozenset((bool, int, float, str, type(None)))


@cache
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
    whole = ("bool", "int32", "int16", "int8", "uint8", "uint16")
    names = {"int64": "int32"} | {n: n for n in (*FLOATS, *whole)}
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


def _on_ranks(x: Any) -> bool:
    """True of PyTorch's own objects for several ranks: a hook of a style, the state of FSDP."""
    module = isinstance(x, torch_module().nn.Module)
    return not module and (getattr(x, "__module__", None) or "").startswith("torch.distributed.")


def undistributed(module: Any) -> Any:
    """A module before its parameters became DTensors, with these on the device meta; itself without any."""
    torch = torch_module()
    own = [p for p in module.parameters() if hasattr(p, "placements")]
    if not own:
        return module
    whole = {id(t): t for t in (*module.parameters(), *module.buffers())}
    for p in own:
        values = torch.empty(p.shape, dtype=p.dtype, device="meta")
        whole[id(p)] = torch.nn.Parameter(values, p.requires_grad)
    return copied(module, whole)


def copied(module: Any, instead: Mapping[int, Any] | None = None) -> Any:
    """A copy of a module with the same parameters and buffers, without what places it on ranks.

    Modules have a dozen tables of hooks and of names each, which `copy.deepcopy` alone takes long to copy.

    Args:
      instead: number of each parameter and buffer (`id`) -> the tensor that the copy has in its place.
    """
    whole, tensor = torch_module().nn.Module, torch_module().Tensor
    memo = {id(t): t for t in (*module.parameters(), *module.buffers())} if instead is None else {**instead}
    compiled = "_compiled_call_impl"  # which Module's own copies leave out, too
    tables = {k for k, y in vars(whole()).items() if isinstance(y, dict)}

    def value(x: Any) -> Any:
        kind: Any = type(x)
        if kind in _PLAIN:
            return x
        if id(x) in memo:
            return memo[id(x)]
        if kind in (dict, OrderedDict):
            made = memo[id(x)] = kind()
            if x:
                made.update((k, value(y)) for k, y in x.items() if id(y) in memo or not _on_ranks(y))
            return made
        if kind is set and all(isinstance(y, str) for y in x):
            return set(x)
        if kind is FunctionType and any(isinstance(c.cell_contents, whole) for c in x.__closure__ or ()):
            cells = tuple(CellType(value(c.cell_contents)) for c in x.__closure__)
            return FunctionType(x.__code__, x.__globals__, x.__name__, x.__defaults__, cells)
        if isinstance(x, tensor) and not x.is_leaf:  # of a call before, which none may copy
            return x.detach()
        if isinstance(x, whole) and _on_ranks(kind):
            kind = kind.__bases__[1]  # `fully_shard` makes a class of its own and the user's
        plain = isinstance(x, whole) and not hasattr(kind, "__deepcopy__")
        if not plain or kind.__getstate__ is not whole.__getstate__ or "__reduce__" in vars(kind):
            return copy.deepcopy(x, memo)
        made = memo[id(x)] = object.__new__(kind)
        for k, y in x.__dict__.items():
            if k != compiled:
                empty = k in tables and not y
                made.__dict__[k] = type(y)() if empty else y if type(y) in _PLAIN else value(y)
        return made

    return value(module)


def called(module: Any, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A module's arguments: in order, or by name those that it takes; the rest of a batch is for its loss."""
    if not isinstance(batch, Mapping):
        return (tuple(batch) if isinstance(batch, list | tuple) else (batch,)), {}
    known = signature(module.forward).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in known.values())
    return (), {name: x for name, x in batch.items() if every or name in known}


def batch_path(keys: Any) -> str:
    """The name of an array of the batch."""
    return "/".join(str(getattr(k, "key", getattr(k, "idx", k))) for k in keys)


@dataclass(frozen=True, eq=False)
class PartCall:
    """A call of a part: its arguments in order and by name, and what it returned, before hooks."""

    path: str
    given: tuple[Any, Any]
    out: Any


@contextmanager
def recorded(module: Any, calls: list[PartCall]) -> Iterator[None]:
    """Appends the calls of a module, each as it ends."""
    paths = {id(own): path for path, own in module.named_modules()}

    def ended(own: Any, args: Any, kwargs: Any, out: Any) -> None:
        if id(own) in paths:
            same = torch_module().utils._pytree.tree_map(lambda x: x, out)  # what is around may change it
            calls.append(PartCall(paths[id(own)], (args, kwargs), same))

    with torch_module().nn.modules.module.register_module_forward_hook(ended, with_kwargs=True):
        yield


def known_calls(calls: Collection[PartCall]) -> dict[str, list[tuple[Any, Any]]]:
    """Path -> (what tells a call of a part, its result)."""
    found: dict[str, list[tuple[Any, Any]]] = {}
    for call in calls:
        found.setdefault(call.path, []).append((_told(call.given), call.out))
    return found


def replay(known: Mapping[str, list[tuple[Any, Any]]], module: Any, run: Collection[str]) -> None:
    """Makes the parts of a module return what they did where they are given the same shapes and types.

    Args:
      run: paths of parts that run nevertheless, with the parts around them.
    """
    around = {part for path in run for part in outward(path)} | {""}
    for path, calls in known.items():
        if next((p for p in outward(path) if p in known and p not in around), None) == path:
            own = module.get_submodule(path)
            own.forward = _remembered(own.forward, [*calls])


def run_once(parts: Collection[Any]) -> None:
    """Lets parts that are alike share their results: each shape is run by the first that meets it."""
    calls: list[tuple[Any, Any]] = []
    for own in parts:
        own.forward = _remembered(own.forward, calls)


def _remembered(function: Callable[..., Any], calls: list[tuple[Any, Any]]) -> Callable[..., Any]:
    def again(*args: Any, **kwargs: Any) -> Any:
        told = _told((args, kwargs))
        found = next((out for known, out in calls if known == told), None)
        if found is None:
            calls.append((told, found := function(*args, **kwargs)))
            return found
        return on_meta(found)

    return again


def outward(path: str, between: str = ".") -> Iterator[str]:
    """The paths of the parts that one is in, outermost first, and its own."""
    return accumulate(path.split(between), "{}.{}".format)


def on_meta(tree: Any) -> Any:
    """The same with tensors of its shapes on the device meta."""
    torch = torch_module()

    def empty(x: Any) -> Any:
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return torch.utils._pytree.tree_map(lambda x: empty(x) if torch.is_tensor(x) else x, tree)


def _told(given: tuple[Any, Any]) -> Any:
    """Shapes and types of tensors, and plain values; other objects, which may hold tensors, equal none."""
    torch = torch_module()
    leaves, tree = torch.utils._pytree.tree_flatten(given)

    def one(x: Any) -> Any:
        if torch.is_tensor(x):  # in no trial, a size depends on values
            return (*(n if isinstance(n, int) else object() for n in x.shape), x.dtype)
        return x if type(x) in _PLAIN or isinstance(x, torch.dtype) else (id(x), x)

    return [one(x) for x in leaves], tree
