"""Norms and routers of families of Hugging Face multiply and round as transformers' own classes do."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

from layoutopt.importers.huggingface.form import FORMS  # noqa: E402

LOSSES = Path(__file__).parents[1] / "data" / "huggingface_losses.json"


def own_norms(architecture: str) -> list[Any]:
    """The classes of root mean squares in the file of an architecture, but for those with gates."""
    made = getattr(transformers, architecture, None)
    of = vars(sys.modules[made.__module__]) if made is not None else {}
    return [kind for name, kind in of.items() if name.endswith("RMSNorm")]


@pytest.mark.nightly
def test_scales_multiply_before_or_after_rounding_as_in_transformers() -> None:
    """What autograd keeps depends on it: a float32 array more or one of the layer's own type."""
    torch.manual_seed(0)
    x, w = torch.randn(64, 32).bfloat16(), torch.randn(32).bfloat16()
    unit = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6)
    wrong, seen = [], set()
    for family, (architecture, form) in FORMS.items():
        for kind in [] if form.norm.get("center") else own_norms(architecture):
            norm = kind(32, 1e-6).bfloat16()
            if not hasattr(norm, "weight"):
                continue
            norm.weight.data = w.clone()
            scale = w.float() + 1 if form.norm.get("around_one") else w
            ways = {True: (unit * scale).bfloat16(), False: unit.bfloat16() * scale.bfloat16()}
            off = {wide: int((norm(x) != y).sum()) for wide, y in ways.items()}
            found = min(off, key=lambda wide: off[wide])
            assert off[found] < 20 < 200 < off[not found], (family, off)
            seen.add(found)
            if found != form.norm.get("wide", False):
                wrong.append(family)
    assert not wrong and seen == {True, False}


@pytest.mark.nightly
def test_routers_multiply_in_the_type_that_transformers_multiplies_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In bfloat16 models: some in float32, others not."""
    linear, found, wrong = torch.nn.functional.linear, {}, []
    counts = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    for case in json.loads(LOSSES.read_text(encoding="utf-8"))["models"].values():
        family = case["config"]["model_type"]
        architecture, form = FORMS.get(family, ("", None))
        made = getattr(transformers, architecture, None)
        if form is None or form.mixture is None or made is None or family in found:
            continue
        own = {n: v for n, v in case["config"].items() if n not in ("model_type", "architectures")}
        config = made.config_class(**own, pad_token_id=None)
        model = made(config).bfloat16().eval()
        sizes = {getattr(part, n, 0) for part in (config, getattr(config, "ffn_config", 0)) for n in counts}
        asked: list[Any] = []

        def seen(x: Any, w: Any, b: Any = None, sizes: Any = sizes, asked: Any = asked) -> Any:
            asked.extend([x.dtype] * (w.shape[0] in sizes))
            return linear(x, w, b)

        monkeypatch.setattr(torch.nn.functional, "linear", seen)
        try:
            model(torch.randint(0, 8, (1, 8)))
        except RuntimeError as error:  # a grouped product of too small experts, behind the router
            assert "strides" in str(error), family
        monkeypatch.undo()
        if asked:
            found[family] = torch.float32 in asked
            wrong += [family] * (found[family] != form.mixture.exact)
    assert not wrong and len(found) > 35 and {*found.values()} == {True, False}
