"""What is computed of a whole batch: rows sorted by expert, losses over pairs of examples, means over counted
tokens."""

from __future__ import annotations

import gc

import numpy as np
import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.nn.functional as F
import transformers
from torch import nn

import layoutopt
import mesh_tf_core as mtf
from layoutopt.importers.torch.calls import PartCall
from layoutopt.importers.torch.capture import captured
from layoutopt.importers.torch.torch_plan import WeightedLoss
from layoutopt.importers.torch.trials import ModuleTrials
from mesh_tf_core.engines.lockstep import LockstepEngine
from mesh_tf_core.ir.instructions import Local
from tests.importers.torch_models import (
    MIXTURES,
    compared,
    llama,
    numpy_of,
    tokens,
)


class Grouped(nn.Module):
    """A mixture written by hand: rows of a token's experts are added up in place; `mixed`: in an order that
    mixes them first."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.router, self.mixed = nn.Linear(8, 4, bias=False), mixed
        self.inner, self.outer = (nn.Parameter(torch.randn(4, 8, 8)) for _ in range(2))

    def forward(self, x):
        tokens = x.reshape(-1, 8)
        gates, chosen = self.router(tokens).softmax(-1).topk(2)
        order = chosen.view(-1).argsort(stable=True)
        rows = tokens[order // 2]
        rows = rows.roll(1, 0) if self.mixed else rows
        ends = torch.bincount(chosen.view(-1), minlength=4).cumsum(0).to(torch.int32)
        rows = torch._grouped_mm(
            torch.relu(torch._grouped_mm(rows, self.inner, offs=ends)), self.outer, offs=ends
        )
        rows = rows * gates.reshape(-1)[order][:, None]
        return torch.zeros_like(tokens).index_add(0, order // 2, rows).square().mean()


@pytest.mark.parametrize("family", MIXTURES)
@pytest.mark.one_in(8)
def test_mixtures_are_products_of_tokens_with_their_experts(family: str) -> None:
    """Trap 9: what is sorted over the whole batch is split by no layout."""
    torch.manual_seed(0)
    module = transformers.AutoModelForCausalLM.from_config(MIXTURES[family]).train()
    model, worst = compared(module, {"input_ids": tokens(), "labels": tokens()})
    assert worst < 1e-5 and model.origin is not None and not model.combines
    prims = [e.prim for e in model.origin.block.walk()]
    assert "expert_product" in prims and "sort" not in prims and "ragged_dot_general" not in prims


def test_lengths_that_a_module_cuts_are_no_tokens() -> None:
    """Mamba 2 sums over pieces of a sequence."""
    sizes = {"num_heads": 4, "head_dim": 16, "vocab_size": 64, "hidden_size": 32, "state_size": 8}
    config = transformers.Mamba2Config(**sizes, num_hidden_layers=3, n_groups=1, expand=2, chunk_size=8)
    module = transformers.AutoModelForCausalLM.from_config(config).train()
    model = layoutopt.from_torch(module, {"input_ids": tokens(), "labels": tokens()})
    assert model.parameters == sum(p.numel() for p in module.parameters()) and not model.token_dims


class Contrastive(nn.Module):
    """Two towers whose loss compares all pairs, as CLIP's."""

    def __init__(self):
        super().__init__()
        self.text, self.image = nn.Linear(6, 8), nn.Linear(10, 8)

    def forward(self, text, image):
        logits = self.text(text) @ self.image(image).t()
        targets = torch.arange(logits.shape[0])
        return F.cross_entropy(logits, targets) + F.cross_entropy(logits.t(), targets)


def test_two_inputs_of_a_loss_over_pairs_have_one_batch() -> None:
    torch.manual_seed(0)
    batch = {"text": torch.randn(4, 6), "image": torch.randn(4, 10)}
    model, worst = compared(Contrastive(), batch, None, "data:2", "batch:data")
    assert worst < 1e-5 and model.batch_dim == "batch" and model.combines
    plan = layoutopt.search(model, mesh="data:4", hardware="h100", framework="torch")
    assert plan.layout.axes("batch") == ("data",) and any("combines examples" in n for n in plan.data.notes)


def test_rows_of_experts_that_mix_stay_sorted() -> None:
    for mixed in (False, True):
        x = torch.randn(4, 6, 8, dtype=torch.bfloat16)
        model = layoutopt.from_torch(Grouped(mixed).bfloat16(), {"x": x})
        said = [note for note in model.origin.notes if "sorted by expert" in note]  # type: ignore[union-attr]
        assert bool(said) == mixed


def test_means_over_counted_tokens_are_those_of_the_whole_batch() -> None:
    """Trap 10: microbatches are not means of means."""
    module, batch = llama()
    for given in (batch, {**batch, "num_items_in_batch": 60}):
        model = layoutopt.from_torch(module, given)
        assert model.lower(mtf.Mesh("data:1"), mtf.Layout(""), mtf.Options(microbatches=2))


MEANS = {
    "ce": lambda x, y, mask: F.cross_entropy(x, y),
    "z": lambda x, y, mask: x.logsumexp(-1).square().mean(),
    "l1": lambda x, y, mask: x.abs().mean(),
    "ignored": lambda x, y, mask: F.cross_entropy(x, y, ignore_index=2),
    "masked": lambda x, y, mask: F.cross_entropy(x[mask], y[mask]),
    "by hand": lambda x, y, mask: (x.abs().sum(-1) * mask).sum() / mask.sum().clamp(1),
}


class Means(nn.Module):
    """A loss that is a sum of means of different counts."""

    def __init__(self, kinds: str) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
        self.kinds = kinds.split("+")

    def forward(self, x, y, mask):
        logits = self.net(x)
        return sum(MEANS[kind](logits, y, mask) for kind in self.kinds)


@pytest.mark.one_in(6)
@pytest.mark.parametrize("kinds", [*MEANS, "ce+z", "ce+l1", "ignored+z+l1", "masked+ce", "z+masked+ignored"])
def test_means_of_different_counts_take_one_forward(kinds: str) -> None:
    """Of any number of microbatches; the results are PyTorch's."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(16, 6), "y": torch.arange(16) // 4, "mask": torch.arange(16) % 5 > 1}
    module = Means(kinds)
    _, worst = compared(module, batch)
    model = layoutopt.from_torch(module, batch, optimizer=mtf.SGD(1.0))

    def step(parts: int) -> tuple[float, list[np.ndarray], float]:
        program = model.lower(mtf.Mesh("data:2"), mtf.Layout("batch:data"), mtf.Options(microbatches=parts))
        computed = [(i, times) for i, times in program.walk() if isinstance(i, Local)]
        flops = sum(times * i.op.flops(*map(program.local, i.inputs)) for i, times in computed)
        engine = LockstepEngine(program)
        fed = {n: numpy_of(batch[n]).reshape(program.values[i].shape.sizes) for n, i in program.feeds.items()}
        return engine.step(fed)["loss"], [engine.read(v) for v in program.variables], flops

    (loss, trained, flops), (loss4, trained4, flops4) = step(1), step(4)
    assert worst < 1e-5 and loss4 == pytest.approx(loss, rel=1e-5) and flops4 == pytest.approx(flops, rel=0.1)
    for one, other in zip(trained, trained4, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


UNEQUAL = {
    "labels and kinds": (lambda x, y, z: F.cross_entropy(x, y) + F.cross_entropy(x, z), True),
    "labels twice": (lambda x, y, z: F.cross_entropy(x, y) + F.nll_loss(x.log_softmax(-1), y), False),
    "pairs": (lambda x, y, z: sum(F.cross_entropy(p, torch.arange(16)) for p in (x @ x.T, x @ x.T)), False),
}


@pytest.mark.parametrize("kind", UNEQUAL)
def test_means_over_several_arrays_of_targets_are_said(kind: str) -> None:
    loss, said = UNEQUAL[kind]
    batch = {"input": torch.randn(16, 6), "y": torch.arange(16) % 5, "z": torch.arange(16) % 3}
    model = layoutopt.from_torch(nn.Linear(6, 6), batch, loss=lambda x, b: loss(x, b["y"], b["z"]))
    assert any("several arrays of targets" in note for note in model.notes(mtf.Options())) == said


def test_targets_that_a_mask_selects_count_by_their_number() -> None:
    """Trap 10: a part may have fewer selected rows than another."""
    torch.manual_seed(0)
    module, batch = nn.Linear(6, 4), {"input": torch.randn(8, 6), "y": torch.tensor([0, 1, 2, 3, 0, 0, 0, 1])}

    def loss(out, given):
        kept = given["y"] > 0
        return F.cross_entropy(out[kept], given["y"][kept])

    parts = [{name: x[at] for name, x in batch.items()} for at in (slice(0, 4), slice(4, 8))]
    found = [WeightedLoss(loss, 2)(module, part) for part in parts]
    mean = sum(value for value, _, _ in found) / sum(weight for _, weight, _ in found)
    assert float(mean.detach()) == pytest.approx(
        float(loss(module(batch["input"]), batch).detach()), rel=1e-6
    )


class Grouped4(nn.Module):
    """Advantages within groups of four answers, as policies are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 1))

    def forward(self, x, rewards):
        grouped = rewards.view(-1, 4)
        spread = (rewards - grouped.mean(1).repeat_interleave(4)) / (
            grouped.std(1).repeat_interleave(4) + 1e-4
        )
        return -(self.net(x)[:, 0] * spread).mean()


def test_groups_of_examples_are_a_batch() -> None:
    torch.manual_seed(0)
    batch = {"x": torch.randn(32, 6), "rewards": torch.rand(32)}
    model, worst = compared(Grouped4(), batch, None, "data:2", "batch:data")
    assert worst < 1e-5 and model.batch_dim == "batch" and not model.combines
    assert model.graph.dims()["batch"] == {8}
    with pytest.raises(mtf.UserError, match=r"the first axis of 'x' is batch x .*not the batch dimension"):
        model.training_step(2)
    plan = layoutopt.search(model, mesh="data:4", hardware="h100", framework="torch")
    assert not any("combines" in note for note in plan.data.notes)


def test_what_a_module_keeps_of_a_call_is_not_that_of_the_trace() -> None:
    class Keeps(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            self.last = (y > 0).float()
            torch.where(y > 0)  # nothing reads them, so nothing is said of them
            return y.square().mean()

    module = Keeps(4, 4)
    module.last = None
    for _ in range(2):
        model = layoutopt.from_torch(module, {"x": torch.randn(8, 4)})
        assert module.last is None and not model.origin.notes


def test_a_backward_of_its_own_is_said() -> None:
    class Through(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.square()

        @staticmethod
        def backward(context, slope):
            return slope

    class Estimator(nn.Linear):
        def forward(self, x):
            return (Through.apply(super().forward(x)) + Through.apply(x)).mean()

    model = layoutopt.from_torch(Estimator(4, 4), {"x": torch.randn(8, 4)})
    (note,) = model.origin.notes
    assert "test_torch_batches.py:" in note and "Through has a backward of its own" in note


class Averages(nn.Linear):
    """With running values of the batch."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.register_buffer("codes", torch.zeros(4))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        y = super().forward(x)
        with torch.no_grad():
            self.codes.mul_(0.9).add_(0.1 * y.mean(0))
            self.steps += 1
        return y.square().mean()


def test_buffers_that_a_batch_changes_are_said() -> None:
    """Each data rank has its own; a count of steps is the same everywhere."""
    model = layoutopt.from_torch(Averages(), {"x": torch.randn(8, 4)})
    (note,) = model.notes(mtf.Options())
    assert note.startswith("the forward changes codes by examples of the batch; each data rank")
    with pytest.raises(mtf.UserError, match=r"change codes by the examples of each microbatch; use one"):
        model.lower(mtf.Mesh("data:1"), mtf.Layout(""), mtf.Options(microbatches=2))


class NormedByCall(nn.Module):
    """Of a class with nothing of BatchNorm's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = x + F.batch_norm(layer(x), None, None, training=True)
        return x.square().mean()


def test_statistics_by_call_are_those_of_the_whole_batch_or_said() -> None:
    model = layoutopt.from_torch(NormedByCall(), {"x": torch.randn(8, 4)})
    assert model.styles.norms == {""} and not model.notes(mtf.Options())
    assert model.limits["microbatches"][0] == (1,) and model.limits["recompute"][0] == (False,)
    frozen = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4).eval())
    frozen[1].eval()
    model = layoutopt.from_torch(frozen, torch.randn(8, 4), loss=lambda out, batch: out.square().mean())
    assert not model.styles.norms and "microbatches" not in model.limits

    def outside(out, batch):
        return F.batch_norm(out, None, None, training=True).square().mean()

    model = layoutopt.from_torch(nn.Linear(4, 4), torch.randn(8, 4), loss=outside)
    assert not model.styles.norms and any("combines examples" in x for x in model.notes(mtf.Options()))


class Changing(nn.Module):
    """Changes what its part returned, and has parameters of layers in a list of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.out = Halves(), nn.Linear(8, 4)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x):
        found = self.part(x)
        found["y"] = self.out(found["y"])
        for layer, scale in zip(self.part.layers, self.scales, strict=True):
            x = x + layer(x) * scale
        return (found["y"] + x).square().mean()


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 16), nn.Linear(16, 8)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x):
        return {"y": self.down(self.up(x).relu())}


def test_what_a_part_returned_is_remembered_before_it_is_changed() -> None:
    model = layoutopt.from_torch(Changing(), {"x": torch.randn(8, 4)})
    assert not any("does not run" in why for why in model.styles.without.values())
    trials = ModuleTrials(Changing(), {"x": torch.randn(8, 4)}, {}, _calls(Changing()))
    assert trials.run() == trials.run(parts=["out"]) == ""


def _calls(module: nn.Module) -> list[PartCall]:
    return list(captured(module, {"x": torch.randn(8, 4)}, None).calls)


def test_an_import_leaves_no_young_objects() -> None:
    """The first allocation after it would look through all of them."""
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    layoutopt.from_torch(NormedByCall(), {"x": torch.randn(8, 4)})
    assert len(gc.get_objects(0)) < 1000 and gc.isenabled() and not gc.get_freeze_count()
    if frozen:
        gc.freeze()
        layoutopt.from_torch(NormedByCall(), {"x": torch.randn(8, 4)})
        assert gc.get_freeze_count()
