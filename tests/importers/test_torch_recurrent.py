"""Recurrent layers of PyTorch: loops over time with equal numbers, searched and placed."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence  # noqa: E402

import layoutopt  # noqa: E402
from mesh_tf_core.errors import UserError  # noqa: E402
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


@pytest.mark.one_in(6)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", KINDS)
def test_numbers_equal_those_of_pytorch(name: str) -> None:
    assert compared(*made(name))[1] < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["LSTM", "GRU, both ways"])
def test_numbers_of_a_split_batch(name: str) -> None:
    module, batch = made(name)
    model, off = compared(module, batch, None, "data:2", "batch:data")
    assert off < 1e-5
    # One loop for each layer and direction, and its backward: the steps are not written out.
    assert len([n for n, _ in model.graph.walk() if n.body is not None]) == (4 if name == "LSTM" else 8)


class Packed(Sequences):
    """The same of texts of different lengths: what a layer returns, its last states, and packed rows."""

    def __init__(self, layer: Any, total: int | None = None) -> None:
        super().__init__(layer)
        self.total = total

    def forward(self, x: torch.Tensor, y: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        first = self.layer.batch_first
        given = x if first else x.transpose(0, 1)
        packed = pack_padded_sequence(given, lengths.cpu(), batch_first=first, enforce_sorted=False)
        made, last = self.layer(packed)
        found, sizes = pad_packed_sequence(made, first, padding_value=0.5, total_length=self.total)
        found = found if first else found.transpose(0, 1)
        state = last[1] if isinstance(last, tuple) else last
        weight = torch.arange(1.0, 5.0)[:, None]  # of each row: they keep their order
        loss = (
            (state * weight).square().mean() + (found * weight[:, None]).square().mean() + 0.0 * sizes.sum()
        )
        classes = pack_padded_sequence(y, lengths, batch_first=True, enforce_sorted=False).data
        return loss + nn.functional.cross_entropy(self.out(made.data), classes)


@pytest.mark.parametrize("total", [None, 9])
@pytest.mark.parametrize("name", [n for n in KINDS if "projections" not in n])
@pytest.mark.one_in(18)
def test_packed_sequences_are_those_of_pytorch(name: str, total: int | None) -> None:
    module, batch = made(name)
    batch["lengths"] = torch.tensor([5, 7, 1, 4])
    module = Packed(module.layer, total)
    assert compared(module, batch)[1] < 1e-5
    assert compared(module, batch, None, "data:2", "batch:data")[1] < 1e-5
    packed = pack_padded_sequence(batch["x"], torch.tensor([5, 7, 1, 4]), True, False)
    assert packed.data.shape == (17, 6) and packed.sorted_indices is not None  # PyTorch's own again


@pytest.mark.one_in(2)
@pytest.mark.parametrize("total", [None, 6])
def test_sequences_are_padded_to_the_longest(total: int | None) -> None:
    """Or to what the code asks for, though the packed array is longer: losses divide by it."""
    module, batch = made("LSTM, length first")
    packed = Packed(module.layer, total)
    model, off = compared(packed, {**batch, "lengths": torch.tensor([5, 4, 1, 3])})
    assert off < 1e-5
    assert any("reads values" in note for note in model.origin.notes) == (total is None)
    if total is None:
        with pytest.raises(UserError, match="pad_packed_sequence its total_length"):
            layoutopt.from_torch(packed, {**batch, "lengths": torch.ones(4).long().to("meta")})


@pytest.mark.one_in(6)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("form", ["padded", "one line"])
def test_the_ctc_loss_is_that_of_pytorch(reduction: str, form: str) -> None:
    """Also of a text without classes, of one that its steps cannot have, and of one class twice."""

    class Recognizer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.out = nn.Linear(6, 5)

        def forward(self, x: torch.Tensor, y: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
            mask = y >= 0
            logits = self.out(x).log_softmax(-1).transpose(0, 1)
            classes = y.masked_select(mask) if form == "one line" else y.clamp(min=0)
            given = logits, classes, steps, mask.sum(-1)
            return nn.functional.ctc_loss(*given, blank=4, reduction=reduction, zero_infinity=True).sum()

    torch.manual_seed(0)
    y = torch.tensor([[0, 1, 1, 3], [2, 2, 2, -100], [1, -100, -100, -100], [-100] * 4])
    batch = {"x": torch.randn(4, 7, 6), "y": y, "steps": torch.tensor([7, 3, 6, 5])}
    model, off = compared(Recognizer(), batch)
    assert off < 1e-5
    assert compared(Recognizer(), batch, None, "data:2", "batch:data")[1] < 1e-5
    assert any("came before its padding" in note for note in model.origin.notes) == (form == "one line")


@pytest.mark.nightly
def test_a_plan_says_where_its_weights_lie() -> None:
    module, batch = made("LSTM", 16)
    model = layoutopt.from_torch(module, batch)
    plan = layoutopt.search(model, devices=2, hardware="h100", framework="torch", time_limit=20)
    assert plan.torch.placements().keys() == dict(module.named_parameters()).keys()
    assert any("step by step" in note for note in plan.to_json()["notes"])
