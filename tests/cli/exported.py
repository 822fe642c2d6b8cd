"""Plans made by hand, as exports take them."""

from __future__ import annotations

from typing import Any

import mesh_tf_core as mtf
from layoutopt.plan.decided import Decided
from layoutopt.plan.exported import Exported, ExportedTensor


def matrices(*stages: str, layout: str = "batch:a+b;d_ff:c", recompute: Any = (), parts: int = 1) -> Exported:
    """Two matrices of a plan, which are stored so."""
    weights = (
        ExportedTensor("wi", ("d_model", "d_ff"), ((), ()), (8, 16), True),
        ExportedTensor("wo", ("d_ff", "d_model"), ((), ()), (16, 8), True),
    )
    tokens = ExportedTensor("tokens", ("microbatch", "batch"), ((), ("a", "b")), (parts, 64 // parts))
    storage = {name: stage for name, stage in zip(("wi", "wo"), stages, strict=True) if stage}
    decided = Decided(storage=storage, recompute=list(recompute), microbatches=parts)
    return Exported("title", mtf.Mesh("a:2;b:4;c:2"), mtf.Layout(layout), weights, (tokens,), decided)


def two_axes(**layout: tuple[str, ...]) -> Exported:
    weight = ExportedTensor("w", tuple(layout), tuple(layout.values()), tuple(8 for _ in layout))
    return Exported("title", mtf.Mesh("a:2;b:2"), mtf.Layout(layout), (weight,), ())
