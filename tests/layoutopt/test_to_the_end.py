"""What checkpoints run again: all of a module, or up to the last value that backward reads."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import layoutopt
import mesh_tf_core as mtf
from costmodels import framework_names
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.ir.program import AllReduce, Local, Program
from tests.layoutopt.models import transformer

LAYERS = 4
WHOLE = {"megatron", "deepspeed", "torch:checkpoint=whole"}
"""Checkpoints that are autograd functions, or do not stop early."""


def second(program: Program, kind: str) -> float:
    """How many products, or all-reduces, a step runs a second time."""
    found = Counter[str]()
    for instr, times in program.walk():
        if instr.origin.phase == Phase.RECOMPUTE:
            found["product"] += times * (
                isinstance(instr, Local) and instr.op.kind in ("matmul", "attention")
            )
            found["sum"] += times * isinstance(instr, AllReduce)
    return found[kind]


def program(framework: str, **asked: Any) -> Program:
    model = transformer(layers=LAYERS, batch=8, length=16)
    chip = "tpu-v5e" if framework == "mesh-tensorflow" else "h100"
    said: dict[str, Any] = {"mesh": "model:2", "layout": "heads:model;d_ff:model"} | asked
    mesh, layout = said.pop("mesh"), said.pop("layout")
    return layoutopt.cost(model, mesh, layout, chip, framework=framework, **said).evaluation.program


@pytest.mark.one_in(3)
@pytest.mark.parametrize("framework", [*framework_names(), "torch:checkpoint=whole"])
def test_products_of_every_framework(framework: str) -> None:
    """A layer's last product, and the sum over devices behind it, belong to no value that backward reads."""
    whole = framework in WHOLE
    found = program(framework, recompute=["layers"])
    first = second(program("layoutopt", recompute=["layers"]), "product") / LAYERS
    assert second(found, "product") == LAYERS * (first + whole)
    assert second(found, "sum") == LAYERS * (1 + whole)


@pytest.mark.parametrize(
    "asked",
    [
        {"mesh": "pipe:2", "layout": "layers:pipe", "schedule": "1f1b", "microbatches": 4},
        {"mesh": "data:2", "layout": "batch:data", "microbatches": 2},
    ],
)
@pytest.mark.parametrize(
    ("again", "products"),
    [("layers", 6), ("layers:count=1", 6), ("layers:keep=products-feed_forward+attention", 1)],
)
@pytest.mark.one_in(2)
def test_one_product_more_of_each_layer(asked: dict[str, Any], again: str, products: int) -> None:
    """Also where stages or microbatches run again, some layers of each, or a module of each layer."""
    ours, whole = (second(program(f, recompute=[again], **asked), "product") for f in ("torch", "megatron"))
    assert ours > 0 and ours % products == 0
    assert whole == ours / products * (products + 1)


def test_what_torch_runs() -> None:
    """Of three products of a layer: all, or the first two."""
    width, layers = 8, 3
    weights = [torch.randn(width, width, requires_grad=True) for _ in range(3)]

    class Products(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += "mm" in str(func)
            return func(*args, **(kwargs or {}))

    def layer(h: torch.Tensor) -> torch.Tensor:
        return h + torch.nn.functional.silu(h @ weights[0]) * (h @ weights[1]) @ weights[2]

    def again(**how: bool) -> int:
        h = torch.randn(4, width, requires_grad=True)
        with Products() as products:
            for _ in range(layers):
                h = checkpoint(layer, h, **how)
            h.sum().backward()
        return products.count - 9 * layers  # forward, and two for each in backward

    assert again(use_reentrant=False) == 2 * layers
    assert again(use_reentrant=True) == again(use_reentrant=False, early_stop=False) == 3 * layers


def test_the_model_stays_as_it_is() -> None:
    """A plan's model, which an engine trains, drops what is dead."""
    model = transformer(layers=LAYERS)
    other = model.second_runs(to_the_end=True)
    assert other is model.second_runs(True) is other.second_runs(True)
    assert model.second_runs(False) is other.second_runs(False) is model
    how = mtf.Options(recompute={"layers"})
    ours, theirs = (m.lower(mtf.Mesh("x:1"), mtf.Layout(), how) for m in (model, other))
    assert second(theirs, "product") > second(ours, "product")
    asked: dict[str, Any] = {"recompute": [True], "microbatches": [1], "alternatives": False}
    asked["framework"] = "megatron"
    assert layoutopt.search(model, mesh="data:2", hardware="h100", **asked).model is model
