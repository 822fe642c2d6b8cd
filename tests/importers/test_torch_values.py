"""Values that modules read: packed sequences and grids of images, of which the shapes depend on the batch."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

import layoutopt  # noqa: E402
from mesh_tf_core.errors import UserError  # noqa: E402
from tests.importers.torch_models import compared  # noqa: E402


class Packed(nn.Module):
    """Attention inside of each of several texts that lie behind each other in one row."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read, self.q, self.out = read, nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        if self.read == "lengths":
            lengths = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
            found = torch.cat([self.attention(each) for each in q.split(lengths)])
        elif self.read == "branches":
            found = self.attention(q[: int(ends[0])]).sum() * q if ends[-1] > 3 else q
        else:
            texts = torch.repeat_interleave(torch.arange(3), torch.diff(ends, prepend=ends.new_zeros(1)))
            found = F.scaled_dot_product_attention(q, q, q, texts[:, None] == texts)
        return self.out(found).square().mean()

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(x, x, x)


def batch(device: str = "cpu") -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(12, 8, device=device), "ends": torch.tensor([5, 8, 12], device=device)}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("read", ["lengths", "branches", "texts"])
def test_packed_texts_are_those_of_the_batch(read: str) -> None:
    """Trap 12: such code takes another way for other positions, so what it read is said."""
    model, off = compared(Packed(read), batch())
    assert off < 1e-5
    notes: Any = model.origin.notes
    assert any("test_torch_values.py" in n and "those of this batch" in n for n in notes)


def test_values_that_the_batch_does_not_have_are_asked_for() -> None:
    with pytest.raises(UserError, match=r"test_torch_values\.py:\d+: .*with their values"):
        layoutopt.from_torch(Packed("lengths").to("meta"), batch("meta"))
