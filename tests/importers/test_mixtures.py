"""Mixtures of experts written by hand: sorts that are left out, and experts that ranks have parts of."""

from __future__ import annotations

from typing import Any

import pytest

import layoutopt

torch = pytest.importorskip("torch")

EXPERTS, CHOICES = 4, 2


class Experts(torch.nn.Module):
    """`changed`: the part that is not as it should be."""

    def __init__(self, changed: str) -> None:
        super().__init__()
        self.changed, self.E, self.num_experts = changed, EXPERTS, EXPERTS
        self.inner, self.outer = (torch.nn.Parameter(torch.randn(EXPERTS, 8, 8)) for _ in range(2))
        self.bias = torch.nn.Parameter(torch.randn(EXPERTS, 8)) if changed in ("bias", "mirrored") else None

    def forward(self, x: Any, ids: Any, weights: Any) -> Any:
        changed = self.changed
        if changed == "shares":
            weights = weights / weights.sum(-1, keepdim=True)
        flat = ids.reshape(-1)
        numbers, order = flat.sort(stable=True)
        if changed == "gathered numbers":
            numbers = flat[order]
        rows = x[order // CHOICES]
        bins = self.E if changed == "another name" else self.num_experts
        counts = torch.histc(numbers.float(), bins=bins, min=0, max=bins - 1)
        counts = {"most": counts.clamp(max=3), "backwards": counts.flip(0)}.get(changed, counts)
        ends = counts.cumsum(0).to(torch.int32)
        made = torch._grouped_mm(rows, self.inner, offs=ends)
        if self.bias is not None:
            made = made + self.bias[self.num_experts - 1 - numbers if changed == "mirrored" else numbers]
        made = torch._grouped_mm(torch.relu(made), self.outer, offs=ends)
        made = made * weights.reshape(-1)[order][:, None]
        out = torch.zeros_like(x).index_add(0, order // CHOICES, made)
        return out + x if changed == "residual" else out


class Mixture(torch.nn.Module):
    def __init__(self, changed: str) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Linear(8, EXPERTS, bias=False), Experts(changed)

    def forward(self, x: Any) -> Any:
        tokens = x.reshape(-1, 8)
        weights, ids = self.router(tokens).softmax(-1).topk(CHOICES)
        return self.experts(tokens, ids, weights).square().mean()


def imported(changed: str) -> Any:
    x = torch.randn(4, 6, 8, dtype=torch.bfloat16)
    return layoutopt.from_torch(Mixture(changed).bfloat16(), {"x": x})


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changed", ["", "bias", "gathered numbers", "most", "backwards", "mirrored"])
def test_a_sort_is_left_out_where_rows_meet_their_own_experts(changed: str) -> None:
    said = [note for note in imported(changed).origin.notes if "sorted by expert" in note]
    assert bool(said) == (changed in ("most", "backwards", "mirrored"))


class First(Mixture):
    """Each token goes to its best expert alone; the numbers lie by row and token."""

    def forward(self, x: Any) -> Any:
        flat = self.router(x).argmax(-1).reshape(-1)
        numbers, order = flat.sort(stable=True)
        counts = torch.histc(numbers.float(), bins=EXPERTS, min=0, max=EXPERTS - 1)
        made = torch._grouped_mm(
            x.reshape(-1, 8)[order], self.experts.inner, offs=counts.cumsum(0).to(torch.int32)
        )
        return made[order.argsort()].square().mean()


def test_a_token_has_no_more_choices_than_the_module_chooses() -> None:
    """As many as the sequence is long would be more than there are experts."""
    x = torch.randn(4, 6, 8, dtype=torch.bfloat16)
    model = layoutopt.from_torch(First("").bfloat16(), {"x": x})
    assert any("sorted by expert" in note for note in model.origin.notes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("changed", ["", "shares", "residual", "another name"])
def test_ranks_have_parts_of_experts_that_add_up_single_rows(changed: str) -> None:
    model = imported(changed)
    (name,) = {n for path, a in model.styles.parameters.items() if path.endswith("inner") for n in a.axes[0]}
    why = {"": "", "another name": "groups of rows"}.get(changed, "single rows")
    assert why in model.styles.without.get(name, "") and bool(why) == (name in model.styles.without)
