"""What eager PyTorch keeps for backward: predicted, and as autograd saves it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")

import torch
import torch.nn.functional as F
from torch import nn

import layoutopt
from mesh_tf_core.ir.phase import Phase


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        q, k, v = (
            own(y).view(*y.shape[:2], self.heads, -1).transpose(1, 2) for own in (self.q, self.k, self.v)
        )
        x = x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


def attention() -> tuple[nn.Module, torch.Tensor]:
    return nn.Sequential(*(Block(64, 4) for _ in range(4))), torch.empty(8, 32, 64)


def narrow() -> tuple[nn.Module, torch.Tensor]:
    """In a type that kernels compute in a wider one."""
    module, x = attention()
    return module.bfloat16(), x.bfloat16()


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """Of different widths, so that no loop is made of them."""
    widths = (3, 8, 16, 24)
    layers = [
        part
        for a, b in pairwise(widths)
        for part in (nn.Conv2d(a, b, 3, padding=1, bias=False), nn.BatchNorm2d(b), nn.ReLU())
    ]
    return nn.Sequential(*layers), torch.empty(4, 3, 16, 16)


def saved(module: nn.Module, x: torch.Tensor) -> int:
    """Bytes that autograd saves for backward, of which several views are one array; without parameters."""
    own, found = {p.untyped_storage().data_ptr() for p in module.parameters()}, dict[int, int]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = module(x).sum()
    assert loss.requires_grad  # what it keeps is there until here, so no address is of two arrays
    return sum(found.values())


@pytest.mark.parametrize("build", [attention, narrow, convolutions])
def test_eager_pytorch_keeps_what_autograd_saves(
    build: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    """Each call's operands, once under all their names, in layers that became a loop and in others."""
    module, x = build()
    model = layoutopt.from_torch(module, x, loss=lambda out, batch: out.sum())
    found = layoutopt.cost(model, "data:1", hardware="h100", framework="torch").evaluation.memory
    *_, last = (p for p in found.points if p.origin.phase == Phase.FORWARD and p.depth == 0)
    assert (last.bytes - found.variables) / saved(module, x) == pytest.approx(1.0, abs=0.06)


def test_a_loss_makes_arrays_in_the_type_of_its_logits() -> None:
    """PyTorch's cross entropy computes in float32 within its kernels; a cast before it is an array."""
    rows, classes = 4096, 512

    def peak(cast: Callable[[Any], Any]) -> float:
        module = nn.Linear(8, classes).bfloat16()
        batch = {"input": torch.empty(rows, 8, dtype=torch.bfloat16)}

        def loss(out: Any, batch: Any) -> Any:
            return F.cross_entropy(cast(out), torch.zeros(rows, dtype=torch.long))

        model = layoutopt.from_torch(module, batch, loss=loss)
        return layoutopt.cost(model, "data:1", hardware="h100", framework="torch").predicted.peak_memory_bytes

    own, wide = peak(lambda out: out), peak(lambda out: out.float())
    assert wide - own >= 3 * 2 * rows * classes * 0.99
