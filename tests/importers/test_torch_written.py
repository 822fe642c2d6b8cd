"""A module's own placements, read as DTensor has them: what each rank holds, findings, and refusals."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.torch.written import fake_ranks, written
from mesh_tf_core.lower import Options

torch = pytest.importorskip("torch")

from torch import nn  # noqa: E402
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: E402
from torch.distributed.tensor import Replicate, Shard, distribute_tensor  # noqa: E402
from torch.distributed.tensor.parallel import (  # noqa: E402
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Any) -> Any:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, words: int = 48, kind: type[Any] = Layer, tied: bool = False) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, 16), nn.ModuleList(kind(16) for _ in range(3))
        self.head = nn.Linear(16, words, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def net(**more: Any) -> Net:
    with torch.device("meta"):
        return Net(**more)


def read(module: Any, **more: Any) -> Any:
    ids = torch.empty((8, 6), dtype=torch.int64, device="meta")
    return layoutopt.from_torch(module, {"ids": ids, "labels": ids.clone()}, **more)


@pytest.fixture
def ranks() -> Iterator[None]:
    """Eight ranks, of which this process is the first."""
    with fake_ranks(mtf.Mesh("all:8")):
        yield


def hold(model: Any, mesh: mtf.Mesh, module: Any, found: Any) -> None:
    """Every parameter as long on a device as DTensor's own part of it."""
    program = model.lower(mesh, found.layout, found.options)
    held: dict[str, int] = {}
    for path, p in module.named_parameters():
        name = model.styles.parameters[path].variable
        held[name] = held.get(name, 0) + (p.to_local() if hasattr(p, "to_local") else p).numel()
    assert held == {n: s.value.local_bytes(mesh) // 4 for n, s in program.variables.items() if n in held}


def drawn(rng: random.Random, module: Any, mesh: Any) -> None:
    """Places each parameter at random; layers alike."""
    said: dict[str, list[Any]] = {}
    for path, p in [*module.named_parameters()]:
        owner, _, name = path.rpartition(".")
        kinds: list[Any] = [Replicate(), *(Shard(a) for a in range(p.ndim))]
        key = ".".join(x for x in path.split(".") if not x.isdigit())
        placements = said.setdefault(key, [rng.choice(kinds) for _ in mesh.shape])
        placed = nn.Parameter(distribute_tensor(p.detach(), mesh, placements, src_data_rank=None))
        module.get_submodule(owner).register_parameter(name, placed)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("axes", ["data:2;model:4", "dp:2;fsdp:2;mp:2", "all:8"])
def test_random_placements_are_held_as_dtensor_holds_them(axes: str) -> None:
    rng, model, mesh = random.Random(axes), read(net()), mtf.Mesh(axes)
    sizes = tuple(size for _, size in mesh.axes)
    seen = 0
    for _ in range(8):
        module = net()
        drawn(rng, module, init_device_mesh("cpu", sizes, mesh_dim_names=mesh.names))
        try:
            found = written(model, mesh, module, mesh.names[0], Options())
        except mtf.UserError as error:
            assert "no rule of a layout places them so" in str(error)
            continue
        seen += 1
        hold(model, mesh, module, found)
        for each in found.unlike:  # what to do is not what is there
            assert not (said := re.match(r".*: placed (\[.*?\]),", each.message)) or said[1] not in each.mend
    assert seen > 4


def sharded(over: str = "fsdp", again: bool | None = None, **more: Any) -> Any:
    """Tensor parallelism of layers, and `fully_shard` of each and of the whole."""
    mesh, module = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "fsdp", "mp")), net(**more)
    data = {"fsdp": mesh["fsdp"], "hsdp": mesh["dp", "fsdp"], "flat": mesh["dp", "fsdp"]._flatten("all")}[
        over
    ]
    for layer in module.layers:
        parallelize_module(layer, mesh["mp"], STYLES)
        fully_shard(layer, mesh=data, reshard_after_forward=again)
    return fully_shard(module, mesh=data, reshard_after_forward=again)


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize(
    "over, rows, stored",
    [("fsdp", ["fsdp"], "@fsdp"), ("hsdp", ["dp", "fsdp"], "@fsdp"), ("flat", ["dp", "fsdp"], "@dp+fsdp")],
)
@pytest.mark.parametrize("again", [True, False])
def test_groups_of_fully_shard_are_storage(over: str, rows: list[str], stored: str, again: bool) -> None:
    mesh, model, module = mtf.Mesh("dp:2;fsdp:2;mp:2"), read(net()), sharded(over, again)
    found = written(model, mesh, module, None, Options())
    assert found.layout.axes("batch") == tuple(rows) and found.layout.axes("d_ff") == ("mp",)
    stage = "zero3" if again else "zero2"
    assert {str(s) for s in found.options.storage.values()} == {stage + stored}
    assert not found.unlike
    if again:
        hold(model, mesh, module, found)


@pytest.mark.usefixtures("ranks")
def test_a_placed_module_is_imported_whole_and_read_by_lint() -> None:
    module = sharded()
    model = read(module)
    assert model.parameters == read(net()).parameters
    found = layoutopt.lint(model, "dp:2;fsdp:2;mp:2", hardware="h100", time_limit=5)
    assert str(found.priced.evaluation.layout) == "batch:fsdp;d_ff:mp"
    assert "wasted axis" in {f.kind for f in found.findings}  # nothing is over dp
    asked = {"hardware": "h100", "time_limit": 5}
    other = layoutopt.lint(read(net()), "dp:2;fsdp:2;mp:2", shardings=(module, "fsdp"), **asked)
    assert other.priced.predicted == found.priced.predicted
    renamed = layoutopt.lint(read(net()), "a:2;b:2;c:2", shardings=(module, "fsdp"), **asked)
    assert str(renamed.priced.evaluation.layout) == "batch:b;d_ff:c"
    assert not layoutopt.lint(model, "dp:2;fsdp:2;mp:2", "", **asked).priced.evaluation.layout.rules


LIVE = """
import torch
import layoutopt
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from tests.importers.test_torch_written import STYLES, Net, fully_shard, net, parallelize_module, read

mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
module = Net()
for layer in module.layers:
    parallelize_module(layer, mesh["model"], STYLES)
    fully_shard(layer, mesh=mesh["data"])
fully_shard(module, mesh=mesh["data"])
found = layoutopt.lint(read(net()), "data:2;model:2", hardware="h100", time_limit=5, shardings=(module, None))
of = found.priced.evaluation
print("found", of.layout, sorted({*map(str, of.options.storage.values())}))
assert module.head.weight.to_local().abs().sum() > 0
distributed.destroy_process_group()
"""


@pytest.mark.nightly
def test_a_program_that_torchrun_started_reads_its_own_module(tmp_path: Path) -> None:
    (tmp_path / "live.py").write_text(LIVE, encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "live.py"]
    where = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=where, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if line.startswith("found")]
    assert said == ["found batch:data;d_ff:model ['zero2@data', 'zero3@data']"] * 4


@pytest.mark.usefixtures("ranks")
def test_what_trains_apart_or_is_padded_is_found() -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("mp",))
    tied = net(tied=True)
    model = read(net(tied=True))
    parallelize_module(tied, mesh, {"embed": RowwiseParallel(), "head": ColwiseParallel()})
    (found,) = written(model, mtf.Mesh("mp:8"), tied, (), Options()).unlike
    assert "'head.weight': a tied parameter that became one of its own" in found.message
    odd = net(words=50)
    parallelize_module(odd, mesh, {"head": ColwiseParallel()})
    (found,) = written(read(net(words=50)), mtf.Mesh("mp:8"), odd, (), Options()).unlike
    assert "'head.weight': its ranks do not divide the axis, so DTensor pads it" in found.message


@pytest.mark.usefixtures("ranks")
def test_a_weight_that_its_readers_want_elsewhere_is_found() -> None:
    mesh, module = init_device_mesh("cpu", (8,), mesh_dim_names=("mp",)), net()
    for layer in module.layers:
        parallelize_module(layer, mesh, STYLES)
        whole = torch.empty(16, 64, device="meta")
        layer.down.weight = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    (found,) = written(read(net()), mtf.Mesh("mp:8"), module, (), Options()).unlike
    assert "placed [Shard(0)], but test_torch_written.py:" in found.message
    assert found.mend == "place it [Shard(1)]"


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Any) -> Any:
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return x + self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


@pytest.mark.usefixtures("ranks")
def test_fully_shard_may_cut_heads_of_tensor_parallel_attention() -> None:
    """Storage is gathered before it is read: four ranks of the two heads that two ranks have."""
    mesh, module = init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model")), net(kind=Attention)
    styles = {**dict.fromkeys("qkv", ColwiseParallel()), "o": RowwiseParallel()}
    for layer in module.layers:
        parallelize_module(layer, mesh["model"], styles)
        fully_shard(layer, mesh=mesh["data"], reshard_after_forward=True)
    fully_shard(module, mesh=mesh["data"], reshard_after_forward=True)
    model = read(net(kind=Attention))
    found = written(model, mtf.Mesh("data:4;model:2"), module, None, Options())
    hold(model, mtf.Mesh("data:4;model:2"), module, found)
    assert found.layout.axes("heads") == ("model",) and not found.unlike


def partial(mesh: Any) -> Any:
    from torch.distributed.tensor import DTensor, Partial

    module = net()
    local = torch.empty(48, 16, device="meta")
    module.head.weight = nn.Parameter(DTensor.from_local(local, mesh, [Partial(), Replicate()]))
    return module


def gathered_in_bfloat16(mesh: Any) -> Any:
    return fully_shard(net(), mesh=mesh["data"], mp_policy=MixedPrecisionPolicy(torch.bfloat16))


REFUSED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "partial": (partial, "data", "'head.weight' is placed [Partial(sum), Replicate()]"),
    "axis": (lambda mesh: net(), "dat", "over 'dat', which is no axis of mesh data:4;model:2"),
    "type": (gathered_in_bfloat16, None, "give from_torch(param_dtype=torch.bfloat16)"),
    "module": (lambda mesh: 7, None, "7 is not a torch.nn.Module"),
    "another": (lambda mesh: nn.Linear(2, 2), None, "the module has no parameter 'embed.weight'"),
    "ranks": (
        lambda mesh: fully_shard(net(), mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))["a"]),
        None,
        "ranks 0 and 4, which are no axes of mesh data:4;model:2; give the mesh of the module, as in --mesh",
    ),
}


@pytest.mark.one_in(6)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_mapped_is_said(name: str) -> None:
    made, rows, said = REFUSED[name]
    module = made(init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model")))
    with pytest.raises(mtf.UserError, match=re.escape(said)):
        written(read(net()), mtf.Mesh("data:4;model:2"), module, rows, Options())


class Block(nn.Module):
    """A layer whose tensor-parallel block is a module of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 64), nn.Linear(64, width))

    def forward(self, x: Any) -> Any:
        return x + self.mlp(self.norm(x))


@pytest.mark.one_in(2)
@pytest.mark.usefixtures("ranks")
@pytest.mark.parametrize("kind", [Layer, Block])
def test_norms_that_are_dtensors_are_sequence_parallel(kind: type[Any]) -> None:
    styles = STYLES if kind is Layer else {"mlp.0": ColwiseParallel(), "mlp.1": RowwiseParallel()}
    module, mesh = net(kind=kind), init_device_mesh("cpu", (4, 2), mesh_dim_names=("data", "model"))
    model = read(net(kind=kind))
    for layer in module.layers:
        parallelize_module(layer, mesh["model"], {**styles, "norm": SequenceParallel()})
    found = written(model, mtf.Mesh("data:4;model:2"), module, "data", Options())
    names, why = model.styles.limits["elsewhere"]
    assert len(names) == (kind is Block)
    if names:
        assert str(found.layout).endswith(f"{names[0]}@elsewhere:model") and not found.unlike
    else:
        assert found.unlike[-1].message == f"sequence parallelism is not in the prediction: {why}"
