"""Operations of ATen as the smaller ones that PyTorch defines them by."""

from __future__ import annotations

from typing import Any

from layoutopt.importers.torch.internals import torch_module


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
