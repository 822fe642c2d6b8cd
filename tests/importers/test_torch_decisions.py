"""Which decisions a search has of a module, and what `plan.torch` makes of them, without processes."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest

import layoutopt
from layoutopt.frameworks import says
from layoutopt.frameworks.torch import StartedSchedules
from layoutopt.space.decisions import SearchSpace
from layoutopt.space.microbatches import Microbatches
from layoutopt.space.restriction import NO_ROLES, DimRoles, Role
from layoutopt.space.schedule import ScheduleDecision
from layoutopt.space.splits import domains
from layoutopt.space.stages import StageSplit, ways
from layoutopt.space.undivided import storage_of, undivided
from mesh_tf_core import Layout, Mesh, Options
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.schedules import layer_order

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM  # noqa: E402

from layoutopt.importers.torch.calls import copied  # noqa: E402
from layoutopt.importers.torch.parallelize import _wrapped  # noqa: E402
from layoutopt.importers.torch.pipeline import Pipeline, part_of, stage_numbers  # noqa: E402
from layoutopt.importers.torch.torch_plan import WeightedLoss  # noqa: E402
from tests.importers.torch_models import MIXTURES, t5  # noqa: E402
from tests.importers.torch_modules import MODULES, Literal, imported, layered, literal, perceptron  # noqa: E402

TENSORS = "heads:model;d_ff:model;vocab:model"


def test_any_number_of_ranks_shares_parameters() -> None:
    """`fully_shard` pads the first axis, so 3 ranks share what 3 does not divide; shardings of JAX do not."""
    module, batch = perceptron()
    model = layoutopt.from_torch(module, {name: t[:15] for name, t in batch.items()})
    split, stages = Layout("batch:data"), dict.fromkeys(model.graph.variables, "zero3")
    ranks = model.under(Mesh("data:3"), split, Options(stages)).ranks
    own, held = storage_of(model.step_graph, Mesh("data:3"), split, stages), dict[str, int]()
    for array in ranks.parameters.values():
        held[array.variable] = held.get(array.variable, 0) + ranks.elements(array)
    for name, elements in held.items():
        view, shape = own.view(name), own.variables[name].shape
        if not name.startswith("out"):  # of 4 rows, half of what FSDP2 holds is padding
            assert not own.further(name)[1]
            sizes = [d.size // own.mesh.group_size(view.axes(d.name)) for d in view.held(shape)]
            assert math.prod(sizes) == pytest.approx(elements, rel=0.07), name
    assert undivided(own) == []


def test_dimensions_that_no_style_splits_are_left_out_of_the_search() -> None:
    """A norm of d_ff would be that of a piece; a literal number of heads fails on a piece."""
    for given, dim, why in (
        (perceptron(normed=True), "blocks", "is neither of a linear map nor of an embedding"),
        (literal(), "heads", "does not run on a part of it"),
        (literal(rest=-1), "heads", "attention would have heads of 4 elements, not of [8]"),
        (MODULES["qwen3"](), "group", "combines it with values that all ranks have alike"),
    ):
        model = layoutopt.from_torch(*given)
        assert why in model.graph.unsplit[dim], model.graph.unsplit
        # Code that can be written otherwise is said without being asked, with its line.
        said = [note for note in model.notes(Options()) if note.startswith(f"{dim} stays whole")]
        assert bool(said) == ("does not run on a part" in model.graph.unsplit[dim])
        assert all("torch_modules.py:" in note for note in said)
        with pytest.raises(UserError):
            layoutopt.search(model, mesh="data:2;model:2", hardware="h100", pins=f"{dim}:model")


def test_a_search_has_no_decision_that_is_not_applied() -> None:
    """What is refused has a reason: a limit of PyTorch (trap 12: ranks of context parallelism may go
    different ways, and hang), or what of the module prevents it."""
    every: dict[str, list[tuple[dict[str, Any], str]]] = {
        "llama": [
            ({"context": "ring"}, "context_parallel is experimental"),
            ({"offload": "optimizer"}, "updates on the CPU"),
        ],
        # A tied weight would be on two stages, and linear maps of another class have no pieces.
        "gpt2": [
            ({"pipeline": "layers"}, "reads values or weights from before them"),
            ({"elsewhere": ("length",)}, "are modules of their own"),
        ],
        "convolutions": [
            ({"pipeline": "layers"}, "BatchNorm has statistics"),
            ({"recompute": "always"}, "BatchNorm has statistics"),
        ],
        "encoder": [({"pipeline": "layers"}, "the module's lists are 'layers'")],
    }
    for name, several in every.items():
        for asked, why in several:
            with pytest.raises(UserError, match=f"torch cannot express this: .*{why}"):
                model, _ = imported(name)
                layoutopt.search(model, mesh="data:2;model:2", hardware="h100", framework="torch", **asked)
    mixed, _ = imported("mixer")
    with pytest.raises(UserError, match="torch cannot express this"):  # its blocks have no forward
        layoutopt.search(mixed, mesh="data:4", hardware="h100", framework="torch", recompute="always")


@pytest.mark.parametrize("asked", [{"pipeline": "layers", "pins": "layers:model"}])
@pytest.mark.one_in(2)
def test_a_plan_with_other_decisions_is_refused(asked: dict[str, Any]) -> None:
    model, _ = imported("tied")
    plain = {"microbatches": (2,), "recompute": "never", "storage": "layout", "alternatives": False}
    asked = {"framework": "layoutopt", **plain, **asked}
    plan = layoutopt.search(model, mesh="data:2;model:2", hardware="h100", **asked)
    with pytest.raises(UserError, match="does not apply this plan"):
        plan.torch.placements()


class Combining(torch.nn.Module):
    """Layers before a loss; `kept`: with running values of the batch."""

    def __init__(self, found: Any, kept: bool = False) -> None:
        super().__init__()
        self.layers, self.found = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(4)), found
        self.register_buffer("codes", torch.zeros(8) if kept else None)

    def forward(self, x: Any, y: Any) -> Any:
        for layer in self.layers:
            x = x + torch.relu(layer(x))
        if self.codes is not None:
            self.codes.lerp_(x.detach().mean(0), 0.1)
        return self.found(x, y)


COMBINING = {
    "sub": lambda h, y: torch.nn.functional.mse_loss(h - h.mean(0), y),
    "div": lambda h, y: (h * y).mean() / y.sum(),  # of parts, neither means nor sums of the whole
    "range": lambda h, y: torch.nn.functional.cross_entropy(h @ h.t(), torch.arange(len(h))) + (h * y).mean(),
}


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.nightly] * (name != "mixtral")) for name in MIXTURES]
)
@pytest.mark.one_in(2)
@pytest.mark.nightly
def test_a_mixture_is_that_of_its_configuration(family: str, tmp_path: Path) -> None:
    """Its layout, and its time within the forms of single operations, which at this size is that of their
    launches: a module makes tables of positions once, the described model in each layer."""
    config = MIXTURES[family]
    module = AutoModelForCausalLM.from_config(config).train()
    ids = torch.zeros((8, 32), dtype=torch.int64)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(module.config.to_dict(), default=str), encoding="utf-8")
    described = layoutopt.from_huggingface(str(file), batch=8, length=32, dtype="float32")
    traced = layoutopt.from_torch(module, {"input_ids": ids, "labels": ids.clone()})
    assert described.parameters == traced.parameters
    asked = {"mesh": "data:4", "hardware": "h100", "framework": "torch", "alternatives": False}
    first, second = (layoutopt.search(model, **asked) for model in (described, traced))
    assert first.layout == second.layout
    assert first.predicted.step_seconds == pytest.approx(second.predicted.step_seconds, rel=0.25)


@pytest.mark.parametrize("what", COMBINING)
def test_operations_that_combine_examples_are_said(what: str) -> None:
    """A data rank combines its own examples alone."""
    batch = {"x": torch.randn(4, 8), "y": torch.randn(4, 8)}
    model = layoutopt.from_torch(Combining(COMBINING[what]), batch)
    (note,) = (note for note in model.notes(Options()) if "combines examples" in note)
    assert note.startswith(f"{what}(")
    for name in ("llama", "convolutions"):
        assert not imported(name)[0].combines


def test_microbatches_of_a_pipeline_are_refused_as_those_of_a_step_are() -> None:
    batch = {"x": torch.randn(4, 8), "y": torch.rand(4, 8)}
    kinds = {**COMBINING, "masked": LOSSES["masked"][0], "kept": LOSSES["mean"][0]}
    for name, loss in kinds.items():
        model = layoutopt.from_torch(Combining(loss, name == "kept"), batch)
        for layout, more in (("", {}), ("layers:x", {"schedule": "1f1b"})):
            given = Mesh("x:2"), Layout(layout), Options(microbatches=2, **more)
            if name == "masked":
                assert model.lower(*given).feeds
                continue
            with pytest.raises(UserError, match=r"combines examples|would change codes"):
                model.lower(*given)


class Added(torch.nn.Sequential):
    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))

    def forward(self, x: Any) -> Any:
        return x + super().forward(x)


class Fused(Literal):
    """An MLP before attention whose heads stay whole."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Added()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return super().forward(self.mlp(x), y)


def test_what_stays_whole_with_other_dimensions_is_said() -> None:
    """Every weight of a layer is split, or none."""
    notes = layoutopt.from_torch(Fused(), literal()[1]).notes(Options())
    said = [note for note in notes if "splits all weights of a layer or none, and heads stays" in note]
    assert len(said) == 1 and "d_ff" in said[0].partition(" cannot be split")[0], notes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("cut", "more"),
    [
        (True, {}),
        (True, {"places": "embedding"}),
        (False, {"places": "embedding", "length": 8}),  # 8 rows: which axis is the batch?
        (False, {"places": "own"}),
        (False, {"kept": True}),
    ],
)
def test_modules_that_stages_would_compute_otherwise_have_none(cut: bool, more: dict[str, Any]) -> None:
    """Tables that may be those of the batch, a parameter beside the layers, and results of all layers."""
    styles = layoutopt.from_torch(*layered(Added, **more)).styles
    assert (styles.outline is not None) == cut
    assert cut or styles.limits["pipeline"][0] == ()


def test_dimensions_of_parameters_that_nothing_reads_stay_whole() -> None:
    """Else two could be split over one axis, which no operation rules out. Pipelines are not asked for
    of modules that have none."""
    model = layoutopt.from_torch(*layered(Added, places="own"))
    assert {dim: domains(model.graph, Mesh("x:2"), SearchSpace())[dim] for dim in ("at", "at_2")} == {
        "at": ((),),
        "at_2": ((),),
    }
    assert list(ways(model, Mesh("x:2"), SearchSpace(schedule=("1f1b",)).but(given=frozenset())))


def test_stages_have_the_layers_that_their_schedule_says() -> None:
    for schedule in ("1f1b", "1f1b:first=1", "gpipe:layers=1+3", "interleaved:2:layers=1+2+0+1"):
        found = stage_numbers(4, 2, schedule)
        counts = [[end - begin for begin, end in spans] for spans in found]
        assert counts == layer_order(schedule, 2).of_stages(4).tolist()
    assert stage_numbers(4, 2, "1f1b:first=1") == [[(0, 1)], [(1, 4)]]


def test_the_parts_of_a_pipeline_take_the_state_of_the_whole_module() -> None:
    model, (module, _) = imported("four layers")
    parts = {n: part_of(copied(module), model.styles.outline, n, n + 2) for n in (0, 2)}
    pipeline = Pipeline({n: copy.deepcopy(part) for n, part in parts.items()}, "1f1b", 2, None, "cpu").eval()
    whole = {name: x + 1 for name, x in module.state_dict().items()}
    pipeline.load_state_dict(whole)
    found = pipeline.state_dict()
    assert found.keys() == whole.keys() and all(torch.equal(x, whole[name]) for name, x in found.items())
    assert not any(part.module.training for part in pipeline.parts.values())
    with pytest.raises(RuntimeError, match="Missing key"):
        pipeline.load_state_dict({})
    wrong = {**whole, "model.layer.0.weight": torch.zeros(1)}
    with pytest.raises(UserError, match=r"the module has no 'model\.layer\.0\.weight'"):
        pipeline.load_state_dict(wrong)
    name = next(iter(whole))
    left = {k: v for k, v in wrong.items() if k != name}
    assert pipeline.load_state_dict(left, strict=False) == ([name], ["model.layer.0.weight"])


@pytest.mark.parametrize("framework", ["torch", "torchtitan"])
def test_schedules_that_do_not_start_are_left_out(framework: str) -> None:
    """`Schedule1F1B` raises for fewer microbatches than stages, and interleaved rounds are equally long."""
    numbers = tuple((str(n),) for n in (1, 2, 4, 5, 6, 8))
    for schedule, stages, left in (
        ("1f1b", 4, "4 5 6 8"),
        ("gpipe", 4, "1 2 4 5 6 8"),
        ("interleaved:2", 2, "1 2 4 6 8"),
        ("interleaved:2", 4, "1 2 4 5 6 8"),
        ("dualpipev", 2, "4 5 6 8"),
    ):
        every = {
            "parts": Microbatches("parts", numbers),
            "layers": StageSplit("layers", (("stage",),)),
            "schedule": ScheduleDecision("schedule", ((schedule,) if schedule != "gpipe" else (),)),
        }
        limits = says(framework)
        for own in (limits, *limits.applied.values()):
            (relation,) = (r for r in own.relations if isinstance(r, StartedSchedules))
            found = [*relation.couplings(every, NO_ROLES, Mesh(f"stage:{stages}"))]
            rows = {number for coupling in found for (number,) in coupling.rows} or {*numbers}
            assert rows == {(n,) for n in left.split()}, (schedule, stages)


FUNCTIONS = torch.nn.functional
LOSSES: dict[str, tuple[Any, bool]] = {
    "mean": (lambda h, y: FUNCTIONS.mse_loss(h, y), False),
    "mean of examples": (lambda h, y: (h - y).square().sum() / len(y), False),
    "sum": (lambda h, y: FUNCTIONS.mse_loss(h, y, reduction="sum"), False),
    "sum of cross entropies": (lambda h, y: FUNCTIONS.cross_entropy(h, y, reduction="sum"), False),
    "divided": (lambda h, y: FUNCTIONS.cross_entropy(h, y, reduction="sum") / len(y), True),
    "plain sum": (lambda h, y: (h - y).square().sum(), True),
    "masked": (lambda h, y: ((h - y).square() * (y > 0.1)).sum() / (y > 0.1).sum().clamp(min=1), False),
    "then scaled": (lambda h, y: 2 * ((h * y).sum() / y.sum()), True),
}


@pytest.mark.parametrize("what", LOSSES)
def test_losses_of_parts_add_up_or_are_refused(what: str) -> None:
    loss, refused = LOSSES[what]
    module, x, y = torch.nn.Linear(8, 8), torch.randn(4, 8), torch.rand(4, 8).softmax(-1)
    whole = loss(module(x), y)
    alone, _, _ = WeightedLoss(lambda out, part: loss(out, part[1]), 1)(OnFirst(module), (x, y))
    assert torch.allclose(alone, whole)
    parts = [*zip(x.chunk(2), y.chunk(2), strict=True)]
    divided = what in ("masked", "then scaled")
    weighted = WeightedLoss(lambda out, part: loss(out, part[1]), 2, divided=divided)
    if refused:
        with pytest.raises(UserError, match="what the division gives" if divided else "cannot be told"):
            weighted(OnFirst(module), parts[0])
        return
    found = [weighted(OnFirst(module), part) for part in parts]
    total = 1.0 if found[0][2] else sum(weight for _, weight, _ in found)
    assert torch.allclose(sum(value for value, _, _ in found) / total, whole)


class OnFirst(torch.nn.Module):
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any, y: Any) -> Any:
        return self.inner(x)


def test_a_layer_is_what_a_loop_repeats() -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(8, 8)

        def forward(self, x: Any) -> Any:
            return x + torch.relu(self.linear(x))

    class Stages(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            made = (torch.nn.Sequential(*(Block() for _ in range(n))) for n in (1, 4))
            self.stages = torch.nn.ModuleList(made)

        def forward(self, x: Any) -> Any:
            for stage in self.stages:
                x = stage(x).roll(1, 1)
            return x.square().mean()

    model = layoutopt.from_torch(Stages(), {"x": torch.randn(4, 8)})
    assert [*model.styles.layers] == [f"stages.1.{n}" for n in range(4)]


def test_batch_norm_has_neither_microbatches_nor_recomputation() -> None:
    model, _ = imported("convolutions")
    plan = layoutopt.search(model, mesh="data:4", hardware="h100", alternatives=False)
    assert plan.options.microbatches == 1 and not plan.options.recompute
    with pytest.raises(UserError, match="torch cannot express this"):
        layoutopt.search(model, mesh="data:4", hardware="h100", framework="torch", microbatches="2")


class Pooled(torch.nn.Module):
    """Attention over all places for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(16, 2, batch_first=True)
        self.head = torch.nn.Linear(16, 8)

    def forward(self, x, y):
        found = self.attention(x[:, :1], x, x, need_weights=False)[0]
        return torch.nn.functional.cross_entropy(self.head(found[:, 0]), y)


def test_what_is_inside_of_a_module_is_sharded_first() -> None:
    """`fully_shard` refuses a module inside of one that is sharded: ViT's patches lie beside a table."""
    module, _ = MODULES["images"]()
    wrapped = [*_wrapped(module, [], {})]
    inner, outer = "vit.embeddings.patch_embeddings.projection", "vit.embeddings"
    assert wrapped.index(inner) < wrapped.index(outer)
    module, _ = t5()
    # Blocks that are no loop, as the first of T5, are wrapped like the others; other matrices only if asked.
    blocks = {f"{part}.block.{n}" for part in ("encoder", "decoder") for n in range(3)}
    assert {*_wrapped(module, [], {}, None, False)} == blocks
    # Nothing calls a projection whose weight `nn.MultiheadAttention` reads itself.
    pooled = Pooled()
    images = {"x": torch.randn(8, 4, 16), "y": torch.arange(8)}
    flow = layoutopt.from_torch(pooled, images).styles
    assert {*_wrapped(pooled, [], flow.reads, flow.called)} == {"attention", "head"}
    # A table that code around it reads would be split again by then, and is no DTensor of tensor ranks.
    model, (tied, _) = imported("rereading")
    assert {*_wrapped(tied, [], model.styles.reads, model.styles.called)} == {"inner"}
    assert "vocab" in model.styles.without
    found = [*_wrapped(module, [f"{part}.block.{n}" for part in ("encoder", "decoder") for n in (1, 2)], {})]
    assert {f"{part}.block.{n}" for part in ("encoder", "decoder") for n in range(3)} < {*found}
    assert not any(".block.0." in path for path in found)


def test_placements_name_the_axes_of_the_mesh(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.tensor import Replicate, Shard

    model, (module, _) = imported("llama")
    asked = {"pins": "heads:model;d_ff:model", "storage": "layout", "alternatives": False}
    plan = layoutopt.search(model, mesh="data:2;model:2", hardware="h100", **asked)
    placements = plan.torch.placements()
    assert set(placements) == {path for path, _ in module.named_parameters()}
    assert placements["model.layers.1.self_attn.q_proj.weight"] == [Replicate(), Shard(0)]
    assert placements["model.layers.1.mlp.down_proj.weight"] == [Replicate(), Shard(1)]
    with pytest.raises(UserError, match="not parallelized"):
        plan.torch.train_step(module, torch.optim.SGD(module.parameters()))
    with pytest.raises(UserError, match="the module has no parameter 'model"):
        plan.torch.parallelize(MODULES["mixer"]()[0])
    told = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for env, found in (
        ({}, "as one, without torchrun"),
        ({"WORLD_SIZE": "4"}, "without torchrun"),
        (told, "2 run"),
    ):
        for name in told:
            monkeypatch.delenv(name, raising=False)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match=f"4 devices .* {found}; .*torchrun --nproc-per-node 4"):
            plan.torch.parallelize(module)


class Keeper(torch.nn.Module):
    """A layer that calls its parts by a function of its own, and makes an array where torch makes them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mlp = torch.nn.LayerNorm(8), torch.nn.ModuleDict()
        self.mlp["up"], self.mlp["down"] = torch.nn.Linear(8, 32), torch.nn.Linear(32, 8)
        parts = self.mlp
        self.run = lambda x: parts["down"](parts["up"](x).relu())

    def forward(self, x: Any) -> Any:
        return (x + self.run(self.norm(x)) + torch.zeros(8)).square().mean()


def test_parts_that_a_function_keeps_are_cut_with_the_module() -> None:
    module = Keeper()
    assert layoutopt.from_torch(module, torch.ones(4, 8)).styles.without.keys() == {"dim"}
    own = copied(module)
    own.mlp["up"] = torch.nn.Linear(8, 16)
    own.mlp["down"] = torch.nn.Linear(16, 8)
    assert own(torch.ones(4, 8)).ndim == 0 and module.mlp["up"].out_features == 32


class Conditioned(torch.nn.Module):
    """Layers that are given a condition, as those of a diffusion transformer, and a result that is cut."""

    def __init__(self) -> None:
        super().__init__()
        linear = torch.nn.Linear
        self.first, self.second = linear(6, 20), linear(20, 12)
        self.blocks = torch.nn.ModuleList(
            torch.nn.ModuleList((linear(12, 16), linear(16, 32), linear(32, 16))) for _ in range(3)
        )
        self.last = linear(12, 32)

    def forward(self, x: Any, given: Any) -> Any:
        given = self.second(self.first(given).relu())
        for shift, up, down in self.blocks:
            x = x + down(up(x + shift(given)[:, None]).relu())
        shift, scale = self.last(given).chunk(2, -1)
        return (x * scale[:, None] + shift[:, None]).square().mean()


def test_widths_that_layers_are_given_are_those_of_no_layer() -> None:
    """They stay whole beside split layers, as d_model does; and so does what code cuts by another name."""
    batch = {"x": torch.randn(8, 4, 16), "given": torch.randn(8, 6)}
    model = layoutopt.from_torch(Conditioned(), batch)
    (own,) = model.origin.parameters["blocks/0/1/weight"].axes[0]
    (given,) = model.origin.parameters["second/weight"].axes[0]
    parts = model.origin.parameters["last/weight"].axes[0][0]
    about = DimRoles.of(model)
    assert own in about.named[Role.INNER] and given not in about.named[Role.INNER]
    asked = {"mesh": "data:2;model:2", "hardware": "h100", "pins": f"{own}:model", "alternatives": False}
    found = layoutopt.search(model, **asked)
    assert found.layout.axes(own) == ("model",) and not found.layout.axes(given)
    assert not found.layout.axes(parts)
