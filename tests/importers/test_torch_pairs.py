"""Losses that compare all pairs of examples: each tower's rows are the batch, up to the comparison."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import layoutopt
from layoutopt.importers.torch.model import TorchModel
from layoutopt.space.parallelism import parallelism
from mesh_tf_core.errors import UserError

torch = pytest.importorskip("torch")

import torch.nn.functional as F  # noqa: E402
from torch import nn  # noqa: E402

from tests.importers.torch_models import compared  # noqa: E402

LENGTH, PIXELS, JOINT = 12, 28, 16


def entropy(logits: Any) -> Any:
    return F.cross_entropy(logits, torch.arange(logits.shape[0]))


def both(logits: Any) -> Any:
    return (entropy(logits) + entropy(logits.T)) / 2


def joined(t: Any, i: Any) -> Any:
    """NT-Xent."""
    z, n = torch.cat([t, i]), len(t)
    logits = (z @ z.T).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(logits, (torch.arange(2 * n) + n) % (2 * n))


def sigmoid(t: Any, i: Any) -> Any:
    return -F.logsigmoid((2 * torch.eye(len(i)) - 1) * (i @ t.T)).sum(-1).mean()


def noise(t: Any, i: Any) -> Any:
    return (torch.logsumexp(i @ t.T, 1) - (i * t).sum(-1)).mean()


def margins(t: Any, i: Any) -> Any:
    """A triplet loss with all others as negatives."""
    off = (i[:, None] - t[None]).pow(2).sum(-1)
    return F.relu((i - t).pow(2).sum(-1)[:, None] - off + 0.2).mean()


def barlow(t: Any, i: Any) -> Any:
    t, i = ((z - z.mean(0)) / (z.var(0) + 1e-3).sqrt() for z in (t, i))
    return (t.T @ i / len(t) - torch.eye(JOINT)).pow(2).mean()


LOSSES: dict[str, Callable[[Any, Any], Any]] = {
    "image by text": lambda t, i: both(i @ t.T),
    "text by image": lambda t, i: both(2.0 * t @ i.T),
    "einsum": lambda t, i: both(torch.einsum("id,jd->ij", i, t)),
    "one direction": lambda t, i: -F.log_softmax(i @ t.T, -1).diagonal().mean(),
    "rows counted": lambda t, i: F.cross_entropy(i @ t.T, torch.arange(len(t))),
    "SigLIP": sigmoid,
    "InfoNCE": noise,
    "NT-Xent": joined,
    "triplet": margins,
    "distances": lambda t, i: F.relu((i - t).norm(dim=-1)[:, None] - torch.cdist(i, t) + 0.2).mean(),
    "Barlow twins": barlow,
}


class Towers(nn.Module):
    """A tower of texts that is deeper than that of images."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.loss = loss
        self.table, self.picture = nn.Embedding(50, 20), nn.Linear(PIXELS, 24)
        self.texts = nn.Sequential(nn.Linear(20, 99), nn.Tanh(), nn.Linear(99, 20), nn.Tanh())
        self.one, self.other = nn.Linear(20, JOINT), nn.Linear(24, JOINT)

    def forward(self, ids: Any, pixels: Any) -> Any:
        kept = (ids != 0).float()[..., None]
        texts = (self.texts(self.table(ids)) * kept).sum(1) / kept.sum(1).clamp(min=1)
        pair = self.one(texts), self.other(self.picture(pixels))
        return self.loss(*(F.normalize(x, dim=-1) for x in pair))


class Views(nn.Module):
    """One encoder of two views of each example, which are one batch of twice as many rows."""

    def __init__(self, loss: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 300), nn.Tanh(), nn.Linear(300, JOINT))
        self.loss = loss

    def forward(self, one: Any, other: Any) -> Any:
        return self.loss(*F.normalize(self.encoder(torch.cat([one, other])), dim=-1).chunk(2))


def towers(name: str, rows: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    ids, pixels = torch.randint(0, 50, (rows, LENGTH)), torch.randn(rows, PIXELS)
    return Towers(LOSSES[name]), {"ids": ids, "pixels": pixels}


def views(rows: int) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    return Views(joined), {"one": torch.randn(rows, PIXELS), "other": torch.randn(rows, PIXELS)}


def work(model: TorchModel, ways: int, layout: str) -> float:
    """FLOPs of a device."""
    found = layoutopt.cost(model, mesh=f"data:{ways}", layout=layout, hardware="a100")
    return float(found.predicted.flops_per_device)


@pytest.mark.parametrize(
    "name, rows", [*((name, 16) for name in (*LOSSES, "views")), ("text by image", 12), ("text by image", 40)]
)
@pytest.mark.one_in(18)
def test_data_ranks_have_rows_of_both_towers(name: str, rows: int) -> None:
    """Also where there are as many examples as positions, or as features that are compared."""
    made = views if name == "views" else lambda rows: towers(name, rows)
    model, off = compared(*made(rows), mesh="data:4", layout="batch:data")
    assert off < 1e-4
    assert model.origin is not None
    assert {array.axes[0] for array in model.origin.batch.values()} == {("batch",)}
    assert model.combines
    assert not parallelism(model).experts
    alone = work(layoutopt.from_torch(*made(rows // 4)), 1, "")
    assert work(model, 4, "batch:data") == pytest.approx(alone, rel=0.15)


def test_one_side_of_pairs_is_the_batch_and_the_other_stays_whole() -> None:
    module, batch = towers("image by text", 40)
    model = layoutopt.from_torch(module, batch)
    assert {name for name, sizes in model.graph.dims().items() if 40 in sizes} == {"batch", "other_batch"}
    asked: dict[str, Any] = {"mesh": "data:4", "hardware": "a100", "alternatives": False}
    assert str(layoutopt.search(model, **asked).layout) == "batch:data"
    with pytest.raises(UserError, match="other_batch:data: a data rank compares its own rows alone"):
        layoutopt.search(model, pins="other_batch:data", **asked)
    with pytest.raises(UserError, match="already the name of another dimension"):
        layoutopt.from_torch(module, batch, names={"other_batch": "batch"})


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["CLIP", "Siglip"])
def test_towers_of_transformers(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    shared = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = shared | {"vocab_size": 99, "max_position_embeddings": LENGTH, "eos_token_id": 98}
    config = getattr(transformers, f"{kind}Config")(
        text_config=text, vision_config=shared | {"image_size": 32, "patch_size": 8}, projection_dim=JOINT
    )
    module = getattr(transformers, f"{kind}Model")(config).train()

    def model(rows: int) -> TorchModel:
        ids, pixels = torch.zeros((rows, LENGTH), dtype=torch.int64), torch.zeros(rows, 3, 32, 32)
        return layoutopt.from_torch(module, {"input_ids": ids, "pixel_values": pixels, "return_loss": True})

    assert work(model(24), 4, "batch:data") == pytest.approx(work(model(6), 1, ""), rel=0.02)
