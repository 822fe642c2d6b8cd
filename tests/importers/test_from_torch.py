"""PyTorch modules as models: loss and gradients as PyTorch's, parameters, loops, names, what traces drop."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import layoutopt
import mesh_tf_core as mtf
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.errors import UserError
from tests.importers.torch_models import (
    MODULES,
    classified,
    compared,
    llama,
    numpy_of,
)
from tests.marks import by_day


@pytest.mark.parametrize("name", by_day(MODULES))
@pytest.mark.one_in(8)
def test_loss_and_gradients_are_those_of_pytorch(name: str) -> None:
    torch.manual_seed(0)
    make, loops = MODULES[name]
    module, batch = make()
    model, worst = compared(module, batch, classified if "y" in batch else None)
    assert worst < 1e-5
    assert model.origin is not None and model.framework == "torch"
    assert model.parameters == sum(p.numel() for p in module.parameters() if p.requires_grad)
    assert sorted(len(run.layers) for run in model.origin.rerolled.runs) == sorted(loops)


def test_a_layout_changes_no_number() -> None:
    torch.manual_seed(0)
    module, batch = llama()
    _, worst = compared(
        module, batch, None, "data:2;model:2", "batch:data;heads:model;d_ff:model;vocab:model"
    )
    assert worst < 1e-5


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(8))
def test_three_steps_under_random_layouts_learn_the_same(seed: int) -> None:
    """The losses before and after each of three steps."""
    rng, names = random.Random(seed), sorted(MODULES)
    torch.manual_seed(0)
    module, batch = MODULES[names[seed % len(names)]][0]()
    loss = classified if "y" in batch else None
    model = layoutopt.from_torch(module, dict(batch), loss=loss, optimizer=mtf.SGD(0.02))
    dims = [name for name, sizes in model.step_graph.dims().items() if all(n % 2 == 0 for n in sizes)]
    program = None
    while program is None:
        layout = mtf.Layout(";".join(f"{rng.choice(dims)}:{axis}" for axis in ("x", "y")))
        with contextlib.suppress(UserError):
            program = model.lower(mtf.Mesh("x:2;y:2"), layout)
    engine = LockstepEngine(program)
    engine.initialize()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.02)
    given = {k: v for k, v in batch.items() if loss is None or k != "y"}
    for _ in range(4):
        found = engine.step({path: numpy_of(batch[path]) for path in program.feeds})["loss"]
        outputs = module(**given)
        own = loss(outputs, batch) if loss is not None else getattr(outputs, "loss", outputs)
        assert float(found) == pytest.approx(float(own.detach()), rel=1e-5), layout
        own.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_dimensions_are_called_as_the_field_calls_them() -> None:
    module, batch = llama()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None and model.token_dims == ("batch", "length")
    named = {path: " ".join(a.named) for path, a in model.origin.parameters.items() if "/1/" not in path}
    layer = "model/layers/0"
    assert named["model/embed_tokens/weight"] == named["lm_head/weight"] == "vocab d_model"
    assert named[f"{layer}/self_attn/q_proj/weight"] == "(heads group d_kv_parts d_kv) d_model"
    assert named[f"{layer}/self_attn/v_proj/weight"] == "(heads d_v) d_model"
    assert named[f"{layer}/self_attn/o_proj/weight"] == "d_model (heads group d_v)"
    assert named[f"{layer}/mlp/gate_proj/weight"] == "d_ff d_model"
    assert model.origin.parameters[f"{layer}/mlp/gate_proj/weight"].layer == 0
    renamed = layoutopt.from_torch(module, batch, names={"d_ff": "hidden"})
    assert "hidden" in renamed.graph.dims() and "d_ff" not in renamed.graph.dims()


def test_a_search_takes_the_module() -> None:
    module, batch = llama()
    plan = layoutopt.search(layoutopt.from_torch(module, batch), devices=4, hardware="h100")
    assert plan.data.framework == "torch" and plan.solver.status == "OPTIMAL"


DOORS = ("llama", "bert")


@pytest.mark.parametrize("family", by_day(DOORS))
def test_a_configuration_is_the_same_model(family: str, tmp_path: Path) -> None:
    """Parameters, and the layout that is found for them; its storage costs the module as much as its own."""
    module, batch = MODULES[family][0]()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(module.config.to_dict(), default=str), encoding="utf-8")
    described = layoutopt.from_huggingface(str(file), batch=4, length=16)
    traced = layoutopt.from_torch(module, batch)
    assert described.parameters == traced.parameters
    plans = [
        layoutopt.search(model, devices=2, hardware="h100", framework="torch", alternatives=False)
        for model in (described, traced)
    ]
    first, second = plans
    assert (first.mesh, first.layout) == (second.mesh, second.layout)
    storage = {*first.data.storage.values()} - {"whole"}
    asked = {"hardware": "h100", "framework": "torch", "storage": storage.pop() if storage else None}
    other = layoutopt.cost(traced, second.mesh, second.layout, **asked)
    assert other.predicted.step_seconds == pytest.approx(second.predicted.step_seconds, rel=0.01)


def test_meta_tensors_are_enough() -> None:
    config = llama()[0].config
    with torch.device("meta"):
        module = transformers.AutoModelForCausalLM.from_config(config).train()
    ids = torch.empty(4, 16, dtype=torch.int64, device="meta")
    model = layoutopt.from_torch(module, {"input_ids": ids, "labels": ids})
    assert model.parameters == sum(p.numel() for p in module.parameters())


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Layers(nn.Module):
    """Equal layers, each in a checkpoint."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.blocks, self.reentrant = nn.ModuleList(Block() for _ in range(3)), reentrant

    def forward(self, x):
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self.reentrant)
        return x.square().mean()


class Turned(nn.Module):
    """Rotary positions as complex numbers, looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.register_buffer("turns", torch.polar(torch.ones(4, 3), torch.arange(12.0).reshape(4, 3)))

    def forward(self, x, at):
        z = torch.view_as_complex(self.linear(x).unflatten(-1, (3, 2)))
        z = z * torch.gather(self.turns, 0, at[:, None].expand(-1, 3))
        return torch.view_as_real(z).pow(3).sum()


def test_complex_buffers_are_looked_up_and_need_no_values() -> None:
    batch = {"x": torch.randn(4, 6), "at": torch.tensor([2, 0, 1, 1])}
    assert compared(Turned(), batch)[1] < 1e-5
    model = layoutopt.from_torch(Turned().to("meta"), {name: x.to("meta") for name, x in batch.items()})
    held = {name: tuple(v.shape.sizes) for name, v in model.graph.variables.items() if "turns" in name}
    assert [*held.values()] == [(4, 3)] * 2 and model.parameters == 42


def test_tied_weights_are_one() -> None:
    """Trap 3."""
    model, worst = compared(*MODULES["gpt2"][0]())
    assert worst < 1e-5 and "lm_head/weight" not in model.origin.parameters  # type: ignore[union-attr]


def test_a_tensor_given_twice_is_two_inputs() -> None:
    """Trap 4."""
    x = torch.randn(4, 8)

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x, y):
            return F.mse_loss(self.linear(x), y)

    model = layoutopt.from_torch(Difference(), {"x": x, "y": x})
    program = model.lower(mtf.Mesh("data:1"), mtf.Layout(""))
    assert {*program.feeds} == {"x", "y"}


def test_frozen_parameters_are_not_trained() -> None:
    """Trap 5: adapters (LoRA) beside weights with requires_grad=False."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    module, batch = llama()
    frozen = sum(p.numel() for p in module.parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft's own
        adapted = peft.get_peft_model(module, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    model, worst = compared(adapted, batch)
    assert model.parameters == sum(p.numel() for p in adapted.parameters() if p.requires_grad)
    assert model.frozen >= frozen and worst < 1e-5


class Written(nn.Module):
    """Writes in place: to a value, to views of it, and at indices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = self.linear(x)
        whole = torch.zeros_like(y)
        whole[:, 1:] = y[:, :-1]
        whole[:, 0] = 0.5
        whole.view(-1)[:8].mul_(2.0)
        half = whole.transpose(0, 1)
        half[2:4].add_(y.t()[2:4])
        whole.masked_fill_(y > 1, 0.0)
        whole[torch.tensor([1, 2])] = y[torch.tensor([0, 3])]
        return (whole * half.t()).square().mean() + whole.sum()


def test_writes_in_place_are_followed() -> None:
    """Trap 6."""
    assert compared(Written(), {"x": torch.randn(4, 8)})[1] < 1e-5


def test_statistics_of_batch_norm_are_state() -> None:
    """Trap 6 and 11."""
    module, batch = MODULES["convolutions"][0]()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None
    assert {"norm/running_mean", "norm/running_var", "norm/num_batches_tracked"} <= {*model.origin.state}
    engine = mtf.Trainer(model, mtf.Mesh("data:1"), mtf.Layout(""), engine="lockstep")
    engine.step({"image": batch["image"].numpy(), "label": batch["label"].numpy().astype("int32")})
    module(**batch)
    found = engine.engine.read("state/norm/running_var")
    assert abs(found - module.norm.running_var.numpy()).max() < 1e-5


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_module_are_kept(reentrant: bool) -> None:
    """Trap 7."""
    model = layoutopt.from_torch(Layers(reentrant), {"x": torch.randn(4, 8)})
    assert model.origin is not None and model.origin.recomputed == {"layers"}
    note = "the plan does not recompute the loop over layers: this torch.utils.checkpoint of the function"
    assert any(note in text for text in model.notes(mtf.Options()))


def test_transformers_checkpoints_are_kept() -> None:
    module, batch = llama()
    module.activation_checkpointing_enable()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None and model.origin.recomputed == {"layers"}


class Dropped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.linear(x)).square().mean()


def test_switches_are_said() -> None:
    """Trap 12: evaluation mode, dropout, caches."""
    module = Dropped()
    drawn = layoutopt.from_torch(module.eval(), {"x": torch.randn(4, 8)})
    assert drawn.origin is not None and any(e.prim == "random_uniform" for e in drawn.origin.block.walk())
    assert any("evaluation mode" in note for note in drawn.origin.notes) and not module.training
    module.train()
    module.drop.eval()
    fixed = layoutopt.from_torch(module, {"x": torch.randn(4, 8)})
    assert not any(e.prim == "random_uniform" for e in fixed.origin.block.walk())  # type: ignore[union-attr]
    decoder, batch = llama()
    model = layoutopt.from_torch(decoder, batch)
    assert any("use_cache" in note for note in model.origin.notes)  # type: ignore[union-attr]
    assert decoder.config.use_cache


def test_numbers_are_drawn_in_their_own_type() -> None:
    """Rounded from a wider one, some would be 1."""
    for dtype in (torch.float32, torch.bfloat16):
        module = nn.Linear(8, 8, dtype=dtype)
        module.register_forward_hook(lambda own, given, y: (y * torch.rand_like(y)).mean())
        model = layoutopt.from_torch(module, {"input": torch.randn(4, 8, dtype=dtype)})
        (drawn,) = (e for e in model.origin.block.walk() if e.prim == "random_uniform")
        assert str(dtype).endswith(drawn.out.dtype)


def test_importing_needs_no_jax() -> None:
    code = (
        "import sys, layoutopt.importers.torch.model as m\n"
        "print('torch' in sys.modules, 'jax' in sys.modules)\n"
        "m.torch_module()\nprint('jax' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False", "False"]
