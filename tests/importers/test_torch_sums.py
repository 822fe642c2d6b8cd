"""Modules that a plan replaces are called as torch's own are: here by a group of one process."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.tensor import Replicate  # noqa: E402

from layoutopt.importers.torch.sums import split_linear, sync_batch_norms  # noqa: E402
from tests.importers.torch_modules import NormByCall, OwnNorm  # noqa: E402


class Activated(nn.BatchNorm2d):
    """With more in its forward than torch's."""

    def forward(self, x: Any) -> Any:
        return super().forward(x).relu() + 1


NORMS = {
    "1d": (nn.BatchNorm1d(3), (8, 3), "input"),
    "2d": (nn.BatchNorm2d(3), (4, 3, 5, 5), "input"),
    "3d": (nn.BatchNorm3d(3, affine=False, momentum=None), (4, 3, 2, 5, 5), "input"),
    "untracked": (nn.BatchNorm2d(3, track_running_stats=False), (4, 3, 5, 5), "input"),
    "narrow": (nn.BatchNorm2d(3, dtype=torch.bfloat16), (4, 3, 5, 5), "input"),
    "by call": (NormByCall(3), (4, 3, 5, 5), "x"),
    "a user's own forward": (OwnNorm(3), (4, 3, 5, 5), "input"),
    "a user's own": (Activated(3), (4, 3, 5, 5), "x"),
}


@pytest.fixture(scope="module")
def mesh() -> Iterator[Any]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("kind", NORMS)
def test_batch_norms_take_what_torchs_take_and_give_what_they_give(mesh: Any, kind: str) -> None:
    given, shape, name = NORMS[kind]
    own, found = nn.Sequential(copy.deepcopy(given)), nn.Sequential(copy.deepcopy(given))
    sync_batch_norms(found, mesh.get_group(), ["0"])
    x = torch.randn(shape, dtype=next(iter(given.buffers()), torch.empty(())).dtype)
    bound = 2**-7 if x.dtype == torch.bfloat16 else 1e-5
    for training in (True, True, False):
        own.train(training), found.train(training)
        for args, named in (([x.requires_grad_()], {}), ([], {name: x})):
            assert torch.allclose(own[0](*args, **named), found[0](*args, **named), bound, bound)
    for key, value in own.state_dict().items():
        assert torch.allclose(value, found.state_dict()[key], bound, bound), key
    assert not any(b.requires_grad for b in found.buffers())
    assert isinstance(found[0], type(given)) and repr(found) == repr(own)
    found.train()
    if type(given).forward is nn.BatchNorm2d.forward:
        with pytest.raises(ValueError, match="expected"):
            found[0](torch.randn(2, 3, 1, 1, 1, 1))


@pytest.mark.parametrize("output", [None, Replicate()])
def test_linear_maps_are_called_by_keyword(mesh: Any, output: Any) -> None:
    given, x = nn.Linear(4, 6), torch.randn(2, 4)
    expected = given(input=x)
    split_linear(given, mesh, output)
    assert torch.allclose(given(input=x), expected) and torch.allclose(given(x), expected)
