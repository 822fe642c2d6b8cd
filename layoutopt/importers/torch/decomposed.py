"""Operations of ATen as the smaller ones that PyTorch defines them by."""

from __future__ import annotations

from typing import Any

from layoutopt.importers.torch.internals import torch_module


def decomposed(n: Any) -> Any:
    """A graph of the tensors of a node that gives its result; None if PyTorch knows no smaller operations."""
    torch = torch_module()
    from torch._decomp import decomposition_table
    from torch.fx.experimental.proxy_tensor import make_fx

    if not isinstance(n.target, torch._ops.OpOverload):
        return None
    nodes = n.all_input_nodes
    fakes = [x.meta.get("val") for x in nodes]
    if not all(isinstance(x, torch.Tensor) for x in fakes):
        return None

    def called(*given: Any) -> Any:
        at = dict(zip(nodes, given, strict=True))
        args, more = (torch.fx.node.map_arg(a, at.get) for a in (n.args, n.kwargs))
        return n.target(*args, **more)

    own = {n.target: decomposition_table[n.target]} if n.target in decomposition_table else {}
    mode = fakes[0].fake_mode if fakes else torch._subclasses.FakeTensorMode()
    try:
        with mode, torch.no_grad():
            body = make_fx(called, decomposition_table=own)(*fakes)
    except Exception:  # whatever it raises where sizes depend on values
        return None
    inner = [x for x in body.graph.nodes if x.op == "call_function"]
    if any(x.target == n.target for x in inner):
        return None
    for x in inner:
        x.meta.update((k, n.meta[k]) for k in ("stack_trace", "nn_module_stack", "custom") if k in n.meta)
    return body
