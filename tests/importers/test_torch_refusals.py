"""PyTorch modules that cannot be imported, or whose step could train nothing."""

from __future__ import annotations

import copy
import re
import warnings
from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import transformers
from torch import nn

import layoutopt
from mesh_tf_core.errors import UserError
from tests.importers.torch_models import MODULES, compared, llama


def test_experts_chosen_by_python_are_refused_with_what_to_do() -> None:
    """Trap 9."""
    module, batch = MODULES["mixtral"][0]()
    config = module.config
    config._experts_implementation = "eager"
    with pytest.raises(UserError, match='experts_implementation="grouped_mm"'):
        layoutopt.from_torch(transformers.AutoModelForCausalLM.from_config(config).train(), batch)


class Picked(nn.Linear):
    def forward(self, x):
        found = super().forward(x)
        return found[found > 0][1:].mean()


class Mean(nn.Linear):
    def forward(self, x):
        return super().forward(x).mean()


def test_sizes_that_are_not_known_or_nothing_are_refused() -> None:
    with pytest.raises(UserError, match=r"test_torch_refusals\.py:\d+: a size depends on values of a batch"):
        layoutopt.from_torch(Picked(8, 8), {"x": torch.ones(4, 8)})
    with pytest.raises(UserError, match=r"'x' of the batch has shape \(0, 8\), which has no elements"):
        layoutopt.from_torch(Mean(8, 8), {"x": torch.ones(0, 8)})


class Dropped(Mean):
    """A layer that LayerDrop skips."""

    def forward(self, x):
        return x.mean() if torch.rand([]) < 0.1 else super().forward(x)


def test_layers_that_are_skipped_at_random_are_refused_with_what_to_do() -> None:
    with pytest.raises(UserError, match=r"of the batch, parameters or a draw, .* rate of LayerDrop to 0,"):
        layoutopt.from_torch(Dropped(8, 8), {"x": torch.ones(4, 8)})


def test_all_parameters_that_are_not_reached_are_one_note() -> None:
    module = Mean(8, 8)
    module.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(18))
    (note,) = layoutopt.from_torch(module, {"x": torch.ones(4, 8)}).origin.notes
    assert note.startswith("others/0/weight, others/0/bias, others/1/weight and 33 more: the loss does not")
    module.others = nn.ModuleList([nn.Identity(), nn.Linear(8, 8, bias=False)])
    (note,) = layoutopt.from_torch(module, {"x": torch.ones(4, 8)}).origin.notes
    assert note.startswith("others/1/weight: the loss does not depend on this parameter; the model stores")


@pytest.mark.parametrize("of_module", ["meta", "cpu"])
def test_a_module_or_its_batch_may_be_on_meta(of_module: str) -> None:
    other = "cpu" if of_module == "meta" else "meta"
    model = layoutopt.from_torch(Mean(8, 8, device=of_module), {"x": torch.ones(4, 8, device=other)})
    assert model.batch_dim == "batch" and model.parameters == 72


def test_buffers_on_meta_are_read_as_those_with_values() -> None:
    """Trap 12: a table of frequencies (`inv_freq`) is made of numbers that the device meta does not have."""
    given, batch = llama()
    found = layoutopt.from_torch(given, batch)
    bare = layoutopt.from_torch(copy.deepcopy(given).to("meta"), batch)
    assert any("inv_freq" in path for path in bare.origin.state)
    assert bare.parameters == found.parameters and bare.limits == found.limits
    assert bare.styles.layers == found.styles.layers and not bare.combines


class Drawing(nn.Module):
    def __init__(self, high: int) -> None:
        super().__init__()
        self.linear, self.high = nn.Linear(8, 8), high

    def forward(self, x):
        drawn = torch.randint(0, self.high, x.shape, device=x.device)
        return (self.linear(x) * drawn).mean()


def test_whole_numbers_are_drawn_from_as_many_as_a_draw_has() -> None:
    """One of 24 bits never has the lowest bit of more."""
    x = {"x": torch.randn(4, 8)}
    layoutopt.from_torch(Drawing(2**24), x)
    with pytest.raises(UserError, match=r"it draws from 16777217 numbers, more than 2\*\*24"):
        layoutopt.from_torch(Drawing(2**24 + 1), x)


class Unsupported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.linalg.inv(self.linear(x))
        z = torch.cummax(y, 0)[0]
        return torch.linalg.qr(z)[1].mean() + torch.poisson(y.abs()).mean()


def test_all_that_cannot_be_imported_is_listed_with_its_lines() -> None:
    with pytest.raises(UserError) as error:
        layoutopt.from_torch(Unsupported(), {"x": torch.randn(8, 8)})
    text = str(error.value)
    assert text.startswith("from_torch: (1) ")
    for what in ("torch.linalg_inv", "torch.cummax", "torch.linalg_qr", "torch.poisson"):
        assert re.search(rf"test_torch_refusals\.py:\d+: cannot import {re.escape(what)}\b", text)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:
            y = y * 2
        return y.mean()


class Checking(Branching):
    """Raises for values that would be wrong, and warns of odd ones."""

    def forward(self, x):
        y = self.linear(x)
        if x is not None and x.max() >= 9:
            raise ValueError("too large")
        if not (torch.isfinite(x).all() and (x > -9).all()):
            raise ValueError("too small")
        assert torch.all(x <= 1).item(), "more than 1"
        if x.sum() > 3:
            warnings.warn("many", stacklevel=1)
        return y.mean()


def test_checks_of_values_are_passed() -> None:
    assert layoutopt.from_torch(Checking(), {"x": torch.zeros(8, 8)}).parameters == 72


class Applied(nn.Module):
    """A linear map, and a loss of the module and what it is given."""

    def __init__(self, loss: Any) -> None:
        super().__init__()
        self.linear, self.loss = nn.Linear(8, 8), loss

    def forward(self, x):
        return self.loss(self, x)


def changed(module: Applied, x: Any) -> Any:
    with torch.no_grad():
        module.linear.weight[0].add_(1)
    return module.linear(x).mean()


def through(between: Any) -> Applied:
    return Applied(lambda own, x: between(own.linear(x)).mean())


WITHOUT = "the loss depends on no parameter to train"
"""Steps that PyTorch would refuse, or that would train nothing, are no models."""
REFUSED = {
    "a number": (Applied(lambda own, x: torch.tensor(1.0)), torch.zeros(8, 8), WITHOUT),
    "detached": (through(lambda y: y.detach()), torch.zeros(8, 8), WITHOUT),
    "without gradients": (through(torch.no_grad()(lambda y: y * 2)), torch.zeros(8, 8), WITHOUT),
    "the largest": (through(lambda y: y.argmax(-1).float()), torch.zeros(8, 8), WITHOUT),
    "python's number": (through(lambda y: torch.tensor(y.mean().item())), torch.zeros(8, 8), WITHOUT),
    "no parameters, a loss": (nn.MSELoss(), (torch.zeros(8), torch.ones(8)), "module has no parameters"),
    "frozen": (through(lambda y: y).requires_grad_(False), torch.zeros(8, 8), "requires_grad=False"),
    "a parameter is changed": (Applied(changed), torch.zeros(8, 8), "add_.*changes a parameter"),
    "whole numbers": (through(lambda y: y), torch.ones(8, 8).int(), r"refusals\.py.*float32 and int32"),
    "an array of NumPy": (
        through(lambda y: y),
        {"x": torch.ones(8, 8).numpy()},
        "does not run on this batch",
    ),
    "another shape": (
        through(lambda y: y),
        torch.ones(8, 7),
        r"not run on this batch: .*\[8, 7\] X \[8, 8\]",
    ),
    "data": (Branching(), {"x": torch.zeros(8, 8)}, r"test_torch_refusals\.py:\d+: .* depends on values"),
    "no loss": (nn.Linear(8, 8), torch.zeros(8, 8), r"returns a tensor of shape \(8, 8\)"),
    "no module": (3, {}, "3 is not a torch.nn.Module"),
    "arguments": (nn.Linear(8, 8), {"y": torch.zeros(2)}, "cannot be called with this batch"),
}


def test_a_number_of_python_has_no_gradient() -> None:
    """As `detach()`."""
    module = through(lambda y: y * y.abs().max().item())
    assert compared(module, {"x": torch.randn(4, 8)})[1] < 1e-5


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", REFUSED)
def test_refusals_say_what_to_do(name: str) -> None:
    module, batch, message = REFUSED[name]
    with pytest.raises(UserError, match=message) as error:
        layoutopt.from_torch(module, batch)
    assert str(error.value).startswith("from_torch: ")


def test_a_loss_that_no_trace_has_is_refused_with_another() -> None:
    class Made(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y[y.detach().numpy().argmax(0)].sum()

    with pytest.raises(UserError, match=r"NumPy reads values.*plan with loss="):
        layoutopt.from_torch(Made(8, 8), {"x": torch.ones(4, 8)})
