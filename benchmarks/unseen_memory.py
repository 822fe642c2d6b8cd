"""Memory as nanotron holds it: what its source says where one program for all stages holds something else.

The rules are applied one after the other to the program of a row, so that each shows its share. No number is
fitted: sizes follow from the row and from nanotron's source (huggingface/nanotron @f1adf520, 2024-07-08;
gathered inputs could be gathered again from 2024-07-17 on). The rules were read from there beside these rows.
The log's peaks are those of rank 0, on the first stage (`logging.py`, `log_memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from costmodels.kernels.fused import fused
from costmodels.liveness import MemoryRules, memory
from layoutopt.optimize.evaluation import Evaluation
from mesh_tf_core.ir.dims import Dim, Shape
from mesh_tf_core.ir.program import Program

STAGES, TENSOR = "pipe", "model"
FUSED = MemoryRules(fuses=True)


@dataclass(frozen=True)
class NanotronRun:
    """A row as a program, and what it says of sizes.

    Attributes:
      sizes: of the model, as `examples/transformer_lm.py` takes them.
    """

    of: Evaluation
    sizes: Mapping[str, Any]

    @property
    def program(self) -> Program:
        return self.of.program

    def ways(self, axis: str) -> int:
        """Devices of a mesh axis; 1 if there is none."""
        mesh = self.program.mesh
        return mesh.size(axis) if axis in mesh.names else 1

    @property
    def state(self) -> int:
        """Bytes of one layer's state of a microbatch, whole."""
        data = self.ways("data") * self.of.options.microbatches
        return int(self.sizes["batch"]) // data * int(self.sizes["length"]) * int(self.sizes["d_model"]) * 2

    @cached_property
    def first_stage(self) -> int:
        """Layers of the first stage: it takes blocks until their cost passes its share; a layer costs its
        weights, the head its own, the embedding nothing (`models/base.py`, `build_model`; `models/llama.py`,
        `get_block_compute_costs`)."""
        layers, width, inner = (int(self.sizes[n]) for n in ("layers", "d_model", "d_ff"))
        one, head = 4 * width * width + 3 * inner * width, int(self.sizes["vocab"]) * width
        share = (layers * one + head) / self.ways(STAGES)
        return min(int(share // one) + 1, layers)


@dataclass(frozen=True)
class NanotronHeld:
    """What is held otherwise than in the program.

    Attributes:
      sizes: dimensions that are longer or shorter: name and size -> size.
      nowhere: values that take no memory.
      more: bytes besides.
      rules: of memory.
    """

    sizes: Mapping[tuple[str, int], int] = field(default_factory=dict)
    nowhere: frozenset[int] = frozenset()
    more: int = 0
    rules: MemoryRules = FUSED

    def peak(self, run: NanotronRun) -> int:
        """Bytes of the fullest moment on the first stage."""

        def resized(shape: Shape) -> Shape:
            return Shape([Dim(d.name, self.sizes.get((d.name, d.size), d.size)) for d in shape])

        program = run.program
        values = tuple(replace(v, shape=resized(v.shape)) for v in program.values)
        variables = {
            name: replace(stored, variable=replace(stored.variable, shape=resized(stored.variable.shape)))
            for name, stored in program.variables.items()
        }
        kernels = fused(program)
        kernels = replace(kernels, inner=kernels.inner | self.nowhere)
        resized_program = replace(program, values=values, variables=variables)
        return memory(resized_program, self.rules, kernels).peak + self.more


def own_programs(run: NanotronRun, held: NanotronHeld) -> NanotronHeld:
    """Each stage is a program of its own, as layoutopt predicts for PyTorch (`costmodels.liveness`, rule 8):
    the first stage has P microbatches in flight, which lie where autograd keeps them, and no head
    (`pipeline_parallel/engine.py`; Narayanan et al. 2021, section 2.2.1)."""
    return replace(held, rules=replace(FUSED, stage_programs=True))


def head_and_loss(run: NanotronRun, held: NanotronHeld) -> NanotronHeld:
    """Logits are cast to float32, and these and their softmax lie on the last stage at once
    (`models/llama.py`, `cast_to_fp32`; `tensor_parallel/functional.py`, `_ShardedCrossEntropy`)."""
    logits = {v.id for v in run.program.values if {"vocab", "length"} <= set(v.shape.names)}
    one = run.state // 2 // int(run.sizes["d_model"]) * int(run.sizes["vocab"]) // run.ways(TENSOR)
    more = 2 * 4 * one if run.ways(STAGES) == 1 else 0
    return replace(held, nowhere=held.nowhere | logits, more=held.more + more)


def unequal_stages(run: NanotronRun, held: NanotronHeld) -> NanotronHeld:
    """Stages have blocks of about equal cost, the head among them, so that the first has more layers."""
    stages, layers = run.ways(STAGES), int(run.sizes["layers"])
    if stages == 1:
        return held
    each, first = -(-layers // stages), run.first_stage
    stacks = dict.fromkeys([("layers", layers), ("layers", each * stages)], first * stages)
    return replace(held, sizes={**held.sizes, ("layers_of_stage", each): first, **stacks})


def gathered_inputs(run: NanotronRun, held: NanotronHeld) -> NanotronHeld:
    """Products that are split by columns keep the whole sequence that they gathered, for backward
    (`tensor_parallel/functional.py`, `column_linear`); two in a layer, and the head."""
    tensor, stages = run.ways(TENSOR), run.ways(STAGES)
    layers = stages * run.first_stage if stages > 1 else int(run.sizes["layers"])
    products = 2 * layers + (stages == 1)
    return replace(held, more=held.more + products * run.state * (tensor - 1) // tensor)


RULES: dict[str, Callable[[NanotronRun, NanotronHeld], NanotronHeld]] = {
    "each stage a program of its own": own_programs,
    "logits and softmax in float32": head_and_loss,
    "stages of blocks of equal cost, the head among them": unequal_stages,
    "gathered inputs of products kept": gathered_inputs,
}
"""In words, and in order."""


def by_rule(of: Evaluation, sizes: Mapping[str, Any]) -> dict[str, float]:
    """GiB on the first stage after each rule, one after the other."""
    run, held, found = NanotronRun(of, sizes), NanotronHeld(), dict[str, float]()
    for words, rule in RULES.items():
        held = rule(run, held)
        found[words] = held.peak(run) / 2**30
    return found
