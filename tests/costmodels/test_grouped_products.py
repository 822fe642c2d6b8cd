"""Products of experts are priced by the rows of a group: small groups do not fill tiles."""

from __future__ import annotations

import json
from pathlib import Path

import layoutopt

DATA = Path(__file__).parents[1] / "data" / "published_configurations.json"


def test_full_recomputation_of_larger_microbatches_ties_with_selective_of_single_sequences() -> None:
    """Qwen3-30B-A3B on 16 H100: four sequences at once are worth a forward pass, all of it."""
    config = json.loads(DATA.read_text(encoding="utf-8"))["models"]["Qwen3-30B-A3B"]["config"]
    model = layoutopt.from_huggingface(config, batch=512, length=4096)
    seconds = [
        layoutopt.cost(
            model,
            "replica:2;data:8",
            "batch:replica+data;expert_batch:replica;experts:data",
            "h100",
            framework="megatron",
            storage="zero1",
            microbatches=32 // sequences,
            recompute=[recompute],
        ).predicted.step_seconds
        for sequences, recompute in ((1, "layers:keep=products"), (4, "layers"))
    ]
    assert seconds[1] < 1.03 * seconds[0]
