"""Messages that start before they are waited for: by which rule, where the program waits, and that nothing
else of it changes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

import mesh_tf_core as mtf
from costmodels.hardware import load_hardware
from costmodels.kernels.fusion import Fuses
from costmodels.liveness import MemoryRules, memory
from costmodels.pricing.overlap import overlapped
from costmodels.pricing.pricer import price
from examples import transformer_lm
from mesh_tf_core.engines import open_engine
from mesh_tf_core.ir.instructions import GRADIENT, HOST, PARAMETER, STEP
from mesh_tf_core.ir.program import Done, Instr, Local, Loop, Message, Program, text
from mesh_tf_core.lower.options import offload_of
from tests.examples.helper import SMALL, batches

SPLIT = "heads:model;d_ff:model;length@elsewhere:model"
RULES: dict[str, tuple[str, dict[str, Any], bool]] = {
    GRADIENT: ("batch:data", {}, False),
    PARAMETER: ("batch:data", {"storage": 3}, True),
    STEP: (f"batch:data;{SPLIT}", {"collective_matmul": frozenset({"d_ff", "heads"})}, False),
    HOST: ("batch:data", {"offload": ("weights",), "recompute": frozenset({"layers"})}, True),
}
"""Rule -> a layout and options under which messages have it, and whether these are pipelined."""


@lru_cache
def lowered(rule: str) -> Program:
    layout, options, _ = RULES[rule]
    net = transformer_lm.model(**SMALL)
    variables = net.training_step(1).graph.variables
    made = dict(options)
    if "storage" in made:
        made["storage"] = {n: made["storage"] for n, v in variables.items() if v.trainable and len(v.shape)}
    if "offload" in made:
        made["offload"] = offload_of(made["offload"], variables, made["recompute"])
    return net.lower(mtf.Mesh("data:2;model:2"), mtf.Layout(layout), mtf.Options(**made))


def blocks(code: Sequence[Instr]) -> Iterator[Sequence[Instr]]:
    yield code
    for instr in code:
        if isinstance(instr, Loop):
            yield from blocks(instr.body)


def waiting(program: Program) -> Program:
    """The same where the device waits for every message."""

    def block(code: Sequence[Instr]) -> tuple[Instr, ...]:
        return tuple(plain(i) for i in code if not isinstance(i, Done))

    def plain(instr: Instr) -> Instr:
        if isinstance(instr, Loop):
            return replace(instr, body=block(instr.body))
        return replace(instr, rule="", pipelined=False) if isinstance(instr, Message) else instr

    return replace(program, code=block(program.code))


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_starts_messages_and_the_program_waits_for_each_once(rule: str) -> None:
    program = lowered(rule)
    found = [i for i, _ in program.walk() if isinstance(i, Message) and i.rule == rule]
    assert found and {i.pipelined for i in found} == {RULES[rule][2]}
    for code in blocks(program.code):
        started = [o for i in code if isinstance(i, Message) and i.rule for o in i.outputs]
        done = [o for i in code if isinstance(i, Done) for o in i.inputs]
        assert sorted(started) == sorted(done)
        for at, instr in enumerate(code):
            if isinstance(instr, Message) and instr.rule not in ("", STEP):
                (wait,) = (n for n, i in enumerate(code) if isinstance(i, Done) and i.inputs == instr.outputs)
                assert at < wait
                readers = [
                    n
                    for n, i in enumerate(code)
                    if not isinstance(i, Done) and set(i.inputs) & set(instr.outputs)
                ]
                behind = [i for i in code[wait : readers[0] if readers else None] if not isinstance(i, Done)]
                assert not behind, "it waits sooner than it must"
    assert f"{found[0].name}_done" in text(program) and f"; {rule}" in text(program).replace("(", "; ")


def test_a_step_runs_under_products() -> None:
    program = lowered(STEP)
    found = overlapped(program, lambda _: 0.0).values()
    assert found and all(each.between for each in found)
    for each in found:
        assert all(isinstance(i, Local) and 0 < part <= 1 for i, part in each.between)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.one_in(2)
def test_to_wait_at_once_changes_neither_numbers_nor_memory(rule: str) -> None:
    """On hardware that runs nothing at once, not even seconds, but for kernels that wait for a step's
    message: with what does not, they would be one."""
    program = lowered(rule)
    plain = waiting(program)
    assert text(plain).count("_start(") == 0 < text(program).count("_start(")
    assert (
        memory(plain, MemoryRules(fuses=Fuses.ALL)).peak == memory(program, MemoryRules(fuses=Fuses.ALL)).peak
    )
    machine = replace(load_hardware("tpu-v5e"), overlap=())
    seconds = [price(each, machine).step_seconds for each in (plain, program)]
    assert seconds[0] == seconds[1] or (rule == STEP and seconds[0] < seconds[1])
    results = []
    for each in (program, plain):
        engine = open_engine(each, "lockstep")
        results.append([engine.step(batch)["loss"] for batch in batches(transformer_lm, SMALL, 2)])
        assert engine.communication_bytes == each.communication_bytes()
        assert engine.transfer_bytes == each.transfer_bytes()
        engine.close()
    np.testing.assert_array_equal(*results)
