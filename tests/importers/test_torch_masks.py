"""Masks in PyTorch modules: those of attention by positions alone are no arrays; those of image tokens."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="PyTorch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import layoutopt
from layoutopt.importers.torch import masks
from layoutopt.importers.torch.capture import library
from layoutopt.importers.torch.instead import other_functions
from tests.importers.torch_models import (
    MODULES,
    VOCAB,
    compared,
    tokens,
)


class Attention(nn.Module):
    """Attention under a mask of positions: `seen` of a query's and a key's."""

    def __init__(self, seen: Any, additive: bool = False) -> None:
        super().__init__()
        self.project, self.seen, self.additive = nn.Linear(8, 24), seen, additive

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        place = torch.arange(x.shape[1])
        mask = self.seen(place[:, None], place[None, :])[None, None].expand(x.shape[0], 1, -1, -1)
        if self.additive:
            mask = torch.where(mask, 0.0, torch.finfo(x.dtype).min)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).square().mean()


MASKS = {
    "causal": (lambda i, j: j <= i, (True, 0)),
    "strictly": (lambda i, j: ~(j > i), (True, 0)),
    "window": (lambda i, j: (j <= i) & (j > i - 4), (True, 4)),
    "both ways": (lambda i, j: ((i - j) < 4) & ((j - i) < 4), (False, 4)),
    "none": (lambda i, j: j >= 0 * i, (False, 0)),
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", MASKS)
def test_masks_of_positions_are_no_arrays(name: str) -> None:
    """Trap 1 and 2: an exported program has whole masks where the model says causal or a window."""
    seen, wanted = MASKS[name]
    for additive in (False, True):
        model, worst = compared(Attention(seen, additive), {"x": torch.randn(2, 12, 8)})
        (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
        assert ((found.params["causal"], found.params["window"]), found.params["extra"]) == (wanted, "")
        assert worst < 1e-5


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "gemma3"])
@pytest.mark.one_in(4)
def test_masks_of_long_texts_are_no_arrays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those too long for a mask to be computed, as that of 4096 tokens is."""
    monkeypatch.setattr(masks, "LARGEST", 100)
    module, batch = MODULES[name][0]()
    model = layoutopt.from_torch(module, batch)
    assert model.origin is not None and not model.combines
    found = [e.params for e in model.origin.block.walk() if e.prim == "attention"]
    assert found and all(each["causal"] and not each["extra"] for each in found)


class Flexed(Attention):
    """The same by `flex_attention`; `cap` bounds the scores."""

    cap: Any = None

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        sizes = x.shape[1], x.shape[1]
        mask = create_block_mask(lambda b, h, i, j: self.seen(i, j), None, None, *sizes, device=x.device)
        return self.attend(q, k, v, self.cap, mask).square().mean()

    attend = staticmethod(flex_attention)


UNFUSED = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


@UNFUSED
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.one_in(6)
def test_flexible_attention_is_attention(name: str) -> None:
    seen, wanted = MASKS[name]
    batch = {"x": torch.randn(2, 12, 8)}
    module = Flexed(seen)
    with other_functions(library):  # PyTorch has no gradients of it on CPUs
        model, worst = compared(module, batch)
    (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
    assert ((found.params["causal"], found.params["window"]), found.params["extra"]) == (wanted, "")
    plain = Attention(seen)
    plain.load_state_dict(module.state_dict())
    with torch.no_grad():
        assert torch.allclose(module(batch["x"]), plain(batch["x"]))
    assert worst < 1e-5


@UNFUSED
def test_scores_that_a_module_changes_are_written_out() -> None:
    module, batch = Flexed(MASKS["causal"][0]), {"x": torch.randn(2, 12, 8)}
    module.cap = lambda score, b, h, i, j: torch.tanh(score) + h * (i - j)
    with other_functions(library):
        assert compared(module, batch)[1] < 1e-5
        written = module(batch["x"]).detach()
    with torch.no_grad():
        assert torch.allclose(module(batch["x"]), written)


def test_other_masks_stay() -> None:
    model, worst = compared(Attention(lambda i, j: (j <= i) | (j == 3)), {"x": torch.randn(2, 12, 8)})
    (found,) = (e for e in model.origin.block.walk() if e.prim == "attention")  # type: ignore[union-attr]
    assert found.params["extra"] == "mask" and worst < 1e-5


class Decoded(nn.Module):
    """PyTorch's own layers with a causal mask, whose values they look at."""

    def __init__(self):
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)

    def forward(self, x, y):
        mask = nn.Transformer.generate_square_subsequent_mask(y.shape[1], device=y.device)
        return self.transformer(x, y, tgt_mask=mask).square().mean()


def test_the_masks_of_pytorchs_own_transformer_are_causal() -> None:
    torch.manual_seed(0)
    model, worst = compared(Decoded(), {"x": torch.randn(2, 6, 8), "y": torch.randn(2, 4, 8)})
    assert worst < 1e-5 and model.origin is not None
    found = [e.params["causal"] for e in model.origin.block.walk() if e.prim == "attention"]
    assert sorted(found) == [False, False, True]


class Scattered(nn.Module):
    """Features of images in the places of image tokens, as models of images and text have them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.sight = nn.Embedding(VOCAB, 8), nn.Linear(5, 8)
        self.head = nn.Linear(8, VOCAB)

    def forward(self, ids, image, labels):
        x = self.words(ids)
        x = x.masked_scatter((ids == 1).unsqueeze(-1), self.sight(image).flatten(0, 1))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.one_in(2)
@pytest.mark.parametrize("layout", ["", "batch:data"])
def test_image_features_stay_with_their_examples(layout: str) -> None:
    torch.manual_seed(0)
    ids = tokens().clamp(2)
    ids[0, :3], ids[1, 4:7], ids[2:, 5:10:2] = 1, 1, 1
    batch = {"ids": ids, "image": torch.randn(4, 3, 5), "labels": tokens()}
    model, worst = compared(Scattered(), batch, None, "data:2", layout)
    assert worst < 1e-5 and not model.combines
    assert any("as many tokens of images" in note for note in model.origin.notes)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_mask_of_tokens_combines_no_examples(name: str) -> None:
    """transformers reads it at arrays that count examples and keys; as a lookup that joined both."""
    module, batch = MODULES[name][0]()
    batch["attention_mask"] = (torch.arange(batch["input_ids"].shape[1]) < 5).repeat(
        len(batch["input_ids"]), 1
    )
    batch["attention_mask"][0] = True
    model, worst = compared(
        module, {name: x.long() for name, x in batch.items()}, layout="batch:data", mesh="data:2"
    )
    assert model.combines == "" and worst < 1e-5


PLACES = {
    "turned": lambda w, i, j: w[i[None, :], j[:, None]],
    "of all queries": lambda w, i, j: w[i[:, None, None], j[None, None, :]],
    "some": lambda w, i, j: w[i[:3, None], j],
    "later": lambda w, i, j: w[i[:, None], j - 1],
    "rows": lambda w, i, j: w[i[:, None]],
    "diagonal": lambda w, i, j: w[i, j[:4]],
    "in a line": lambda w, i, j: w[torch.arange(24) // 6, torch.arange(24) % 6],
    "in two lines": lambda w, i, j: w[i.reshape(2, 2)[:, :, None], j],
    "nothing but zero": lambda w, i, j: w[i[:, None] * 0, j + 0],
}


class Looked(nn.Module):
    """Elements of a matrix at places."""

    def __init__(self, at: Any) -> None:
        super().__init__()
        self.weights, self.at = nn.Parameter(torch.randn(4, 6)), at

    def forward(self, x):
        found = self.at(self.weights, torch.arange(4), torch.arange(6))
        return (found * torch.linspace(1, 2, found.numel()).reshape(found.shape) + x.sum()).square().mean()


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", PLACES)
def test_places_that_are_counted_are_the_right_ones(name: str) -> None:
    assert compared(Looked(PLACES[name]), {"x": torch.randn(2, 3)})[1] < 1e-5
