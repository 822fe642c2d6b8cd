"""Slopes where operands or elements are equal, and at corners, are those of PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.importers.torch_models import differences  # noqa: E402

EQUAL = torch.tensor(
    [[0.0, 0.5, -0.5, 0.5], [0.0, 0.5, -0.5, -0.5], [0.5, 0.5, -0.5, 0.0], [-0.5, 0.25, -0.5, 0.5]],
    dtype=torch.float64,
)
"""Each operation below has two of these equal, or one at its corner."""
ONES = torch.ones(4, dtype=torch.float64)
TIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "maximum": lambda x: torch.maximum(x[0], x[1]),
    "maximum with a constant": lambda x: torch.maximum(x, ONES * 0.5),
    "minimum": lambda x: torch.minimum(x[0], x[1]),
    "max of two": lambda x: torch.max(x[0], x[1]) + torch.min(x[0], x[2]),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp in place": lambda x: (x * 1).clamp_(min=0.5),
    "clamp from above": lambda x: x.clamp(max=0.5),
    "clamp_min": lambda x: x.clamp_min(0.5) + x.clamp_max(-0.5),
    "clamp between arrays": lambda x: x[0].clamp(x[1], x[2]) + x[3].clamp(ONES * -0.5, ONES * 0.5),
    "clamp to an array": lambda x: x[0].clamp(min=x[1]) + x[2].clamp(max=x[1]),
    "clamp between crossed ends": lambda x: x.clamp(0.5, -0.5),
    "relu": F.relu,
    "relu6": lambda x: F.relu6(12 * x),
    "hardtanh": lambda x: F.hardtanh(x * 2) + F.hardtanh(x, -0.5, 0.25),
    "hardsigmoid": lambda x: F.hardsigmoid(x * 6),
    "hardswish": lambda x: F.hardswish(x * 6),
    "leaky_relu": lambda x: F.leaky_relu(x, 0.1) + F.prelu(x, ONES[:1] * 0.3),
    "elu": lambda x: F.elu(x, 0.7) + F.celu(x, 2.0) + F.selu(x),
    "threshold": lambda x: F.threshold(x, 0.5, 0.1),
    "shrinking": lambda x: F.hardshrink(x) + F.softshrink(x),
    "softplus": lambda x: F.softplus(x) + F.softplus(x * 40) + F.logsigmoid(x),
    "abs": lambda x: x.abs() + x.sign() * x + F.softsign(x),
    "l1_loss": lambda x: F.l1_loss(x[0], x[1], reduction="none") + F.smooth_l1_loss(x[2], x[1], beta=0.0),
    "huber_loss": lambda x: F.huber_loss(x[0], x[3], delta=0.5, reduction="none"),
    "margins": lambda x: F.margin_ranking_loss(x[0], x[1], ONES) + F.hinge_embedding_loss(x, -ONES, 0.5),
    "amax": lambda x: x.amax(0) + x.amin(1),
    "amax of all": lambda x: x.amax((0, 1)) + x.max() + x.min(),
    "max along an axis": lambda x: x.max(0)[0] + x.max(1, keepdim=True)[0],
    "min along an axis": lambda x: x.min(0)[0] + x.min(-1)[0],
    "aminmax": lambda x: x.aminmax(dim=0)[0] + x.aminmax()[1],
    "max_pool": lambda x: F.max_pool1d(x.reshape(1, 1, -1), 2) + F.adaptive_max_pool2d(x[None], 2).sum(),
    "max_pool that overlaps": lambda x: F.max_pool2d(x[None, None], 3, 1, 1),
    "norms": lambda x: x.norm(1, 0) + x.norm(float("inf")) + torch.linalg.vector_norm(x, -float("inf"), 0),
    "norm at 0": lambda x: (x * 0).norm(dim=0) + x.relu().norm(3, 1) + (x[0] * 0).norm(),
    "std at 0": lambda x: x.std(0) + torch.std_mean(x[:, 2])[0] + F.pairwise_distance(x, x.flip(0), eps=0.0),
    "normalize": lambda x: F.normalize(x, dim=0, eps=0.5),
    "orders": lambda x: x.sort(0)[0] * ONES.cumsum(0)[:, None] + x.topk(2)[0].sum(),
    "rests": lambda x: torch.fmod(x, 0.5) + torch.remainder(x, 0.5),
    "powers": lambda x: x.pow(0.0) + x.relu().pow(1.5) + x.prod(0) + x.cumprod(0),
    "extremes of sums": lambda x: x.logsumexp(0) + torch.logaddexp(x[0], x[1]) + x.softmax(0).square(),
    "edges of probabilities": lambda x: F.binary_cross_entropy(x.clamp(0, 1) * 0.9 + 0.05, x * 0 + 0.3),
}


class Ties(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.given = nn.ParameterList(nn.Parameter(EQUAL.clone()) for _ in TIES)

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        loss = 1 + scale.sum()
        for x, made in zip(self.given, TIES.values(), strict=True):
            y = made(x)
            different = torch.linspace(1, 2, y.numel(), dtype=y.dtype).reshape(y.shape)
            loss = loss + (y * different).sum() + x.sum()
        return loss


@pytest.mark.nightly
def test_slopes_at_ties_are_those_of_pytorch() -> None:
    _, off = differences(Ties(), {"scale": ONES})
    names = {f"given/{i}": name for i, name in enumerate(TIES)}
    assert set(off) == {"loss", *names}
    assert {names.get(path, path): by for path, by in off.items() if not by < 1e-7} == {}
