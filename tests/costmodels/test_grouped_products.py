"""Products of experts are priced by the rows of a group: small groups do not fill tiles."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

import layoutopt
import mesh_tf_core as mtf
from costmodels import Quantity, load_hardware
from costmodels.kernels.compute import compute_cost
from costmodels.kernels.quantities import of_local
from mesh_tf_core.ir.op import Work
from mesh_tf_core.ir.program import Local

DATA = Path(__file__).parents[1] / "data" / "published_configurations.json"


def test_they_keep_a_part_of_the_rate_of_other_products() -> None:
    product = Quantity(2.0 * 4096**3, 3 * 2.0 * 4096**2, "matmul", "bfloat16", (4096, 4096, 4096, 1))
    machine = load_hardware("tpu-v5p", "maxtext")
    share = machine.chip.grouped_efficiency
    assert share is not None and load_hardware("tpu-v5p").chip.grouped_efficiency is None
    seconds = [
        compute_cost(machine, replace(product, work=Work(grouped=each))).flop_seconds
        for each in (False, True)
    ]
    assert seconds[0] / seconds[1] == pytest.approx(share.value)
    config = json.loads(DATA.read_text(encoding="utf-8"))["models"]["Qwen3-30B-A3B"]["config"]
    model = layoutopt.from_huggingface(config, batch=8, length=512, num_hidden_layers=1)
    program = model.lower(mtf.Mesh("x:1"), mtf.Layout(""))
    found = Counter(
        i.op.kind
        for i, _ in program.walk()
        if isinstance(i, Local) and of_local(i, program.local).work.grouped
    )
    assert found == {"matmul": 3 * 3}, "three products of experts, and two for the gradients of each"


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
    assert seconds[1] < 1.04 * seconds[0]  # recomputed layers exchange rows again, too
