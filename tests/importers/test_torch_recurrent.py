"""Recurrent layers of PyTorch: loops over time with equal numbers, searched and placed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402

import layoutopt  # noqa: E402
from tests.importers.torch_models import compared  # noqa: E402

KINDS: dict[str, Any] = {
    "LSTM": lambda: nn.LSTM(6, 4, 2, batch_first=True),
    "LSTM, length first": lambda: nn.LSTM(6, 4),
    "LSTM, both ways": lambda: nn.LSTM(6, 4, 2, batch_first=True, bidirectional=True, bias=False),
    "LSTM with projections": lambda: nn.LSTM(6, 4, batch_first=True, proj_size=3),
    "GRU, both ways": lambda: nn.GRU(6, 4, 2, batch_first=True, bidirectional=True),
    "RNN": lambda: nn.RNN(6, 4, 2, batch_first=True),
    "RNN of relu": lambda: nn.RNN(6, 4, nonlinearity="relu", bias=False, batch_first=True),
}


class Sequences(nn.Module):
    """Predicts the class of every place."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.layer = layer
        width = (layer.proj_size or layer.hidden_size) * (1 + layer.bidirectional)
        self.out = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        found, last = self.layer(x)
        state = last[1] if isinstance(last, tuple) else last
        loss = nn.functional.cross_entropy(self.out(found).flatten(0, 1), y.flatten())
        return loss + state.square().mean()


def made(name: str, rows: int = 4) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    return Sequences(KINDS[name]()), {"x": torch.randn(rows, 7, 6), "y": torch.randint(0, 5, (rows, 7))}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", KINDS)
def test_numbers_equal_those_of_pytorch(name: str) -> None:
    assert compared(*made(name))[1] < 1e-5


@pytest.mark.parametrize("name", ["LSTM", "GRU, both ways"])
def test_numbers_of_a_split_batch(name: str) -> None:
    module, batch = made(name)
    model, off = compared(module, batch, None, "data:2", "batch:data")
    assert off < 1e-5
    # One loop for each layer and direction, and its backward: the steps are not written out.
    assert len([n for n, _ in model.graph.walk() if n.body is not None]) == (4 if name == "LSTM" else 8)


@pytest.mark.nightly
def test_a_plan_says_where_its_weights_lie() -> None:
    module, batch = made("LSTM", 16)
    model = layoutopt.from_torch(module, batch)
    plan = layoutopt.search(model, devices=2, hardware="h100", framework="torch", time_limit=20)
    assert plan.torch.placements().keys() == dict(module.named_parameters()).keys()
    assert any("step by step" in note for note in plan.to_json()["notes"])
