"""Norms of families of Hugging Face multiply and round as transformers' own classes do."""

from __future__ import annotations

import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

from layoutopt.importers.huggingface.form import FORMS  # noqa: E402


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
