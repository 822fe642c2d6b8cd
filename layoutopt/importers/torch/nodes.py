"""Nodes of torch.export: their names and places, and the agreement of a rule with its node, in the arguments
that it reads and in the type of its result. A rule without these checks would take another operation's
arguments in silence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any

from layoutopt.importers.arrays.contract import CapturedArray, Var
from layoutopt.importers.torch.calls import torch_module
from layoutopt.importers.torch.capture import MODULE, own_line
from layoutopt.importers.torch.elementwise import TABLE, Type


def name_of(n: Any) -> str:
    """An operation's name, without its library and overload."""
    target = str(n.target)
    return target.split(".")[1] if "." in target else target


@cache
def place_of(trace: str) -> str:
    """The user's own line of a trace; in a module of PyTorch, that of its code."""
    places = re.findall(r'File "([^"]+)", line (\d+)', trace)
    return own_line((), places) or (":".join(places[-1]) if places else "")


def writes(name: str) -> bool:
    """True for an operation in place."""
    return name.endswith("_") and not name.endswith("__") and name not in TABLE


def is_batch_norm(n: Any) -> bool:
    """True for each of its forms."""
    return "batch_norm" in str(n.target)


def scope_of(path: str) -> str:
    """The path of a module, as scopes have it."""
    path = path.removeprefix("L['self'].").removeprefix("L__self__").lstrip(".")
    return re.sub(r"[^\w./\-]+", "", path.removeprefix(MODULE).lstrip(".").replace(".", "/"))


GIVEN = "given"
"""A rule that takes `*given` reads all of them."""
IN_THE_RESULT = frozenset(
    {
        *("dtype", "device", "layout", "memory_format", "pin_memory", "non_blocking"),
        *("copy", "generator", "other", "size", "sizes", "shape"),
        *("output_size", "scales", "scale_factors", "scales_d", "scales_h", "scales_w"),
        *("start_dim", "end_dim", "dim", "half_to_float", "scale_grad_by_freq"),
        *("cudnn_enable", "cudnn_enabled", "ceil_mode", "sparse", "sorted", "implicit", "path"),
    }
)
"""Arguments that a rule need not read: the type of the result has them, or they change no number."""

PRODUCTS = frozenset(
    ("linear", "addmm", "baddbmm", "matmul", "bmm", "mm", "mv", "dot", "conv1d", "conv2d", "conv3d")
)


def check_read(rule: Callable[..., Any], n: Any, args: Sequence[Any], more: Mapping[str, Any]) -> None:
    """Raises NotImplementedError if an argument that its rule does not read has an effect."""
    schema = getattr(n.target, "_schema", None)
    if schema is None:
        return
    names, in_order = _read(rule)
    in_order = len(args) if GIVEN in names else in_order
    positional = [a for a in schema.arguments if not a.kwarg_only]
    unread = [(a.name, x) for a, x in [*zip(positional, args, strict=False)][in_order:]]
    unread += [(name, x) for name, x in more.items() if name not in names]
    default = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    for name, x in unread:
        if name not in IN_THE_RESULT and (name not in default or x != default[name]):
            raise NotImplementedError(f"it has {name}={x}")


@cache
def _read(rule: Callable[..., Any]) -> tuple[frozenset[str], int]:
    """The arguments that a rule reads, and how many of them in order."""
    known = list(signature(rule).parameters.values())[2:]
    return frozenset(p.name for p in known), sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in known)


def check_operands(name: str, args: Sequence[Any]) -> str:
    """Why PyTorch does not multiply the operands of a product, '' if it does: meta tensors let it pass."""
    types = sorted({x.dtype for x in args if name in PRODUCTS and isinstance(x, Var | CapturedArray)})
    return f"its operands are {' and '.join(types)}; give them one element type" if len(types) > 1 else ""


def check_type(found: Any, v: Any) -> None:
    """Raises NotImplementedError if a result is not of the type that PyTorch says."""
    for x, t in zip(found, v, strict=True) if isinstance(v, list) else [(found, v)]:
        if isinstance(t, Type) and isinstance(x, Var | CapturedArray):
            ours, its = (x.dtype, x.shape), (t.dtype, t.shape)
            if ours != its:
                raise NotImplementedError(f"its rule gives {ours}, PyTorch {its}")


def decomposed(n: Any, known: dict[Any, Any]) -> Any:
    """A graph of the tensors of a node that gives its result; None if PyTorch knows no smaller operations.

    Args:
      known: those of nodes with equal arguments, which are added to.
    """
    torch = torch_module()
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx

    nodes = n.all_input_nodes
    fakes = [x.meta.get("val") for x in nodes]
    if not isinstance(n.target, torch._ops.OpOverload) or not all(map(torch.is_tensor, fakes)):
        return None
    alike = {x: f"{x.meta['val'].dtype}{[*x.meta['val'].shape]}@{i}" for i, x in enumerate(nodes)}
    key = str((n.target, *(torch.fx.node.map_arg(a, alike.get) for a in (n.args, n.kwargs))))
    if key in known:
        return known[key]

    def called(*given: Any) -> Any:
        at = dict(zip(nodes, given, strict=True))
        args, more = (torch.fx.node.map_arg(a, at.get) for a in (n.args, n.kwargs))
        return n.target(*args, **more)

    own = {n.target: decomposition_table[n.target]} if n.target in decomposition_table else {}
    mode = fakes[0].fake_mode if fakes else torch._subclasses.FakeTensorMode()
    every = [*fakes, *torch.utils._pytree.tree_leaves(n.meta["val"])]
    types = {x.dtype for x in filter(torch.is_tensor, every) if x.is_floating_point()}
    try:
        with mode, torch.no_grad():
            # A kernel widens elements in registers: it has no wider arrays. Strides and devices would choose
            # other operations, such as those of mkldnn.
            wide = [torch.float if len(types) == 1 and x.is_floating_point() else x.dtype for x in fakes]
            fakes = [torch.empty(x.shape, dtype=t, device="meta") for x, t in zip(fakes, wide, strict=True)]
            body = make_fx(called, decomposition_table=own)(*fakes)
            for x in body.graph.nodes if len(types) == 1 else ():
                if torch.is_tensor(y := x.meta.get("val")) and y.is_floating_point():
                    x.meta["val"] = y.to(*types)
    except Exception:  # whatever it raises where sizes depend on values
        body = None
    same = body is None or any(x.target == n.target for x in body.graph.nodes)
    known[key] = None if same else body
    return known[key]
