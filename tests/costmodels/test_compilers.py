"""Compiler profiles: every one prices every kind of program, and what the search sums is what lines show;
files that say only whether operations fuse name one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any, get_args

import pytest

import mesh_tf_core as mtf
from costmodels.hardware import hardware_names, load_hardware
from costmodels.hardware.model import CompilerName
from costmodels.kernels.fusion import Fuses
from costmodels.pricing.compilers import COMPILERS, compiler_of
from costmodels.pricing.compilers.xla import Joining
from costmodels.pricing.items import Sent
from costmodels.pricing.pricer import price, pricer
from costmodels.pricing.templates import Templates
from examples.transformer_lm import model as transformer
from layoutopt.importers.huggingface import from_huggingface
from tests.layoutopt.models import SMALL


@cache
def program() -> mtf.Program:
    """A step with stages, dropout, weights stored split, recomputed layers and a gradient of a stack."""
    model = transformer(**{**SMALL, "layers": 4, "dropout": 0.1, "dtype": "bfloat16"})
    options = mtf.Options(storage={v.name: "zero3" for v in model.graph.variables.values()}, microbatches=2)
    return model.lower(mtf.Mesh("data:2;model:2"), mtf.Layout("batch:data;heads:model;d_ff:model"), options)


@pytest.mark.parametrize("name", COMPILERS)
def test_a_profile_prices_the_same_by_lines_and_by_templates(name: CompilerName) -> None:
    prices = pricer(replace(load_hardware("h100"), compiler=name), program())
    cost = prices.cost(program())
    assert cost.step_seconds > 0 and cost.flops > 0
    assert prices.total(Templates(prices.itemiser).itemised(program())) == pytest.approx(cost.step_seconds)


def test_files_may_name_every_profile() -> None:
    assert COMPILERS.keys() == {*get_args(CompilerName)}


@pytest.mark.parametrize("name", hardware_names())
def test_a_preset_names_its_profile(name: str) -> None:
    machine = load_hardware(name)
    by_kind = {"tpu": ("xla-tpu",), "gpu": ("xla-gpu", "launched"), "cpu": ("xla-cpu", "local")}
    assert machine.compiler in by_kind.get(machine.kind, ("xla",))
    assert type(compiler_of(machine)) is COMPILERS[machine.compiler]


def test_gradients_are_scattered_layer_by_layer() -> None:
    """As with zero3 also where they are scattered once, after all microbatches, in programs of PyTorch."""
    model = transformer(**{**SMALL, "layers": 4})

    def scattered(stage: str, parts: int) -> Counter[int]:
        every = dict.fromkeys(model.graph.variables, stage)
        options = mtf.Options(storage=every, microbatches=parts)
        program = model.lower(mtf.Mesh("data:2"), mtf.Layout("batch:data"), options)
        lines = price(program, replace(load_hardware("h100"), compiler="eager")).lines
        sent = [x for x in lines if isinstance(x.item, Sent) and x.item.kind == "reduce_scatter"]
        return sum((Counter(x.item.payloads * round(x.times)) for x in sent), Counter[int]())

    each = scattered("zero3", 1)
    assert each
    for stage in ("zero1", "zero3-once"):
        for parts in (1, 2):
            assert scattered(stage, parts) == each, (stage, parts)


def test_eager_kernels_are_those_that_pytorch_launches() -> None:
    """Models keep tables of positions, `add_` casts a gradient on its way into a sum, and RMSNorm is one
    kernel where a model calls one."""
    model = transformer(**{**SMALL, "layers": 4, "positions": "rotary", "norm": "rms", "dtype": "bfloat16"})
    program = model.lower(mtf.Mesh("data:2"), mtf.Layout("batch:data"), mtf.Options(microbatches=2))
    every, eager, norms = (
        price(program, replace(load_hardware("h100"), compiler=profile)).lines
        for profile in ("none", "eager", "eager-norms")
    )
    tables = {"cos", "sin", "range"}
    assert tables <= {x.name for x in every} and not tables & {x.name for x in eager}
    sums = [
        [x.bytes for x in lines if (x.name, x.times, x.origin.scope) == ("add", 8, "")]
        for lines in (every, eager)
    ]
    stacks = [v for v in model.graph.variables.values() if v.trainable and v.shape.names[0] == "layers"]
    ratios = Counter(a / b for a, b in zip(*sums[::-1], strict=True))
    assert ratios == {10 / 12: len(stacks), 1: 2}  # two are of the residual
    for name, steps in (("normalize", 6), ("normalizegrad", 12)):
        runs = [sum(x.times for x in lines if x.name == name) for lines in (eager, norms)]
        assert runs[0] == steps * runs[1] > 0


def test_profiles_differ_as_they_say() -> None:
    """Few kernels where operations fuse, small messages that travel with large ones on GPUs alone."""

    def lines(name: CompilerName) -> list[Any]:
        return [x.item for x in price(program(), replace(load_hardware("h100"), compiler=name)).lines]

    found = {name: lines(name) for name in COMPILERS}  # type: ignore[arg-type]
    count = {name: sum(not isinstance(i, Sent) for i in items) for name, items in found.items()}
    assert all(
        count[name] < count["none"] for name, made in COMPILERS.items() if made.memory.fuses is Fuses.ALL
    )
    joined = {n for n, items in found.items() if any(isinstance(i, Sent) and i.joined for i in items)}
    assert joined == {name for name, made in COMPILERS.items() if issubclass(made, Joining)}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("name", COMPILERS)
def test_libraries_keep_the_chunks_of_a_recurrence_in_registers(name: CompilerName) -> None:
    """Where programs call libraries, its arrays cost no memory time, and backward keeps its inputs alone."""
    machine, found = replace(load_hardware("h100"), compiler=name), []
    sizes = {"hidden_size": 1024, "num_hidden_layers": 4, "linear_num_heads": 8, "num_experts": 0}
    config = {"model_type": "kimi_linear", **sizes, "layer_types": ["linear_attention"] * 4}
    for scans in ("steps", "kernel"):
        model = from_huggingface(config, batch=2, length=2048, dtype="bfloat16", scans=scans)
        program = model.lower(mtf.Mesh("one:1"), mtf.Layout(""))
        lines = [x for x in price(program, machine).lines if "/delta" in x.origin.scope]
        found.append(sum(x.seconds for x in lines))
    calls = COMPILERS[name].calls
    assert (found[1] < 0.5 * found[0]) if calls else (found[0] < found[1] < 2 * found[0])


def test_megatron_sorts_rows_and_bounds_gated_units_apart() -> None:
    """Four times where a device has several experts and messages do not sort; each half of a gated unit."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_local_experts": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_experts_per_tok": 2}
    model = from_huggingface({"model_type": "gpt_oss", **sizes}, batch=16, length=32, dtype="bfloat16")

    def moved(framework: str, devices: int) -> float:
        program = model.lower(mtf.Mesh(f"data:{devices}"), mtf.Layout("batch:data;experts:data"))
        machine = load_hardware("h100", framework)
        lines, fused = (price(program, m).lines for m in (machine, replace(machine, compiler="launched")))
        data = [sum(x.times * x.bytes for x in found if x.kind == "data") for found in (lines, fused)]
        return (data[0] - data[1]) / (16 * 32 * 2 / devices * 2 * 2)  # of bfloat16, for a row and layer

    bounds = 2 * (4 + 5) * 128
    assert moved("megatron", 4) == pytest.approx(bounds + 4 * 2 * 64, rel=0.05)
    for framework, devices in (("megatron", 8), ("megatron:dispatcher=flex", 4)):
        assert moved(framework, devices) == pytest.approx(bounds)
