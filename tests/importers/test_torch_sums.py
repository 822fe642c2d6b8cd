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
from torch.utils.checkpoint import checkpoint  # noqa: E402

import layoutopt  # noqa: E402
from layoutopt.importers.torch.sums import split_linear, sync_batch_norms  # noqa: E402
from mesh_tf_core import Layout, Mesh, Options  # noqa: E402
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
    bound = 2**-6 if x.dtype == torch.bfloat16 else 1e-5
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


class Checkpointed(nn.Module):
    """A layer that recomputes a part of itself."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.up, self.down, self.reentrant, self.calls = nn.Linear(4, 8), nn.Linear(8, 4), reentrant, 0

    def part(self, x: Any) -> Any:
        self.calls += 1
        return self.down(self.up(x).tanh())

    def forward(self, x: Any) -> Any:
        return x + checkpoint(self.part, x, use_reentrant=self.reentrant)


class CheckpointedLayers(nn.Module):
    """The same around each layer."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.reentrant = nn.Linear(4, 4), reentrant
        self.layers = nn.ModuleList(Checkpointed(reentrant) for _ in range(3))

    def forward(self, x: Any, whole: bool) -> Any:
        x = self.first(x)
        for own in self.layers:
            x = checkpoint(own, x, use_reentrant=self.reentrant) if whole else own(x)
        return x.square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_plan_recomputes_and_not_the_modules_checkpoints(mesh: Any, whole: bool, reentrant: bool) -> None:
    given, x = CheckpointedLayers(reentrant), torch.randn(6, 4)
    given(x, whole).backward()
    for layers in ((), ("layers",)):
        module = copy.deepcopy(given)
        model = layoutopt.from_torch(module, (x, whole))
        plan = model.under(Mesh("data:1"), Layout(""), Options(recompute=layers))
        found = plan.parallelize(module, init_device_mesh("cpu", (1,), mesh_dim_names=("data",)))
        for own in module.layers:
            own.calls = 0
        found.zero_grad()
        found(x, whole).backward()
        assert [own.calls for own in module.layers] == [1 + len(layers)] * 3
        for p, q in zip(found.parameters(), given.parameters(), strict=True):
            assert torch.allclose(p.grad, q.grad)


@pytest.mark.parametrize("output", [None, Replicate()])
def test_linear_maps_are_called_by_keyword(mesh: Any, output: Any) -> None:
    given, x = nn.Linear(4, 6), torch.randn(2, 4)
    expected = given(input=x)
    split_linear(given, mesh, output)
    assert torch.allclose(given(input=x), expected) and torch.allclose(given(x), expected)
