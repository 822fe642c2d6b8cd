"""The transform of recomputation makes a plain graph: what a body reads is there, copies equal what they
copy, and loops save what their backward reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

import mesh_tf_core as mtf
from examples import moe_lm, transformer_lm
from layoutopt.importers.huggingface import from_huggingface
from mesh_tf_core.ir.blocks import Block, KnownTensor, Node, reads
from mesh_tf_core.ir.phase import Phase
from mesh_tf_core.lower.recomputed import RecomputedStep, recomputed
from mesh_tf_core.lower.remat_policy import policies
from tests.core.test_recompute import CHOSEN, model

SMALL = {"layers": 4, "d_model": 8, "heads": 4, "d_ff": 16, "vocab": 16, "batch": 4, "length": 8}
MODELS = {"loops in loops": model, "layers": lambda: transformer_lm.model(**SMALL, d_kv=2)}
MODELS["experts"] = lambda: moe_lm.model(**SMALL)
FLOAT8 = {"d_kv": 2, "gated": True, "float8": "blocks", "dtype": "bfloat16"}
MODELS["float8"] = lambda: transformer_lm.model(**SMALL, **FLOAT8)
SAID = [("loops in loops", each) for each in CHOSEN]
SAID += [("loops in loops", ("groups:keep=others", "rows:keep=products"))]
KEPT = ("", ":keep=products", ":keep=attention+others", ":count=1", ":keep=attention:count=3")
SAID += [(name, (f"layers{kept}",)) for name in ("layers", "experts", "float8") for kept in KEPT]


def step(name: str, said: tuple[str, ...], to_the_end: bool) -> RecomputedStep:
    return recomputed(MODELS[name]().second_runs(to_the_end).step_graph, policies(said))


def bodies(block: Block) -> Iterator[Block]:
    """A block and those inside, in parts where these differ."""
    yield block
    for node in block.nodes:
        for body in (node.body.parts or (node.body,)) if node.body is not None else ():
            yield from bodies(body)


def missing(block: Block, known: set[int]) -> Iterator[int]:
    """What nodes read, or loops hand out, that nothing has made before; `known`: what is there, grows."""
    for node in block.nodes:
        yield from {*node.inputs} - known
        for body in (node.body.parts or (node.body,)) if node.body is not None else ():
            yield from {outer for outer, _ in body.sliced} - known
            assert body.index is not None
            inside = {*known, body.index, *body.carry_in, *(inner for _, inner in body.sliced)}
            yield from {i for i in (body.runs, body.first) if i is not None} - inside
            yield from missing(body, inside)
            made = (*body.stacked, *body.summed, *body.saved.items())
            yield from {*body.carry_out, *(i for i, _ in made)} - inside
            known |= {o for _, o in made}
        known |= {*node.outputs}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("to_the_end", [False, True])
@pytest.mark.parametrize(("name", "said"), SAID, ids=str)
def test_it_is_a_plain_graph(name: str, said: tuple[str, ...], to_the_end: bool) -> None:
    made = step(name, said, to_the_end)
    assert not [*missing(made.root, set())]
    every = [*bodies(made.root)]
    nodes = [node for body in every for node in body.nodes if not isinstance(node.op, KnownTensor)]
    own = {node.index: node for node, _ in made.graph.walk()}
    copies = [node for node in nodes if node.phase == Phase.RECOMPUTE]
    assert bool(copies) == bool(said)
    assert {node.index for node in nodes} == own.keys(), "a node is lost"
    for node in nodes:
        phase, inputs = own[node.index].phase, own[node.index].inputs
        if node in copies:
            phase, inputs = Phase.RECOMPUTE, tuple(node.op.operands(inputs))
        assert replace(node, body=None) == replace(own[node.index], body=None, phase=phase, inputs=inputs)
    read = {outer for body in every for outer, _ in body.sliced}
    read |= {i for body in every for node in body.nodes for i in reads(node)}
    new = {o for body in every for o in body.saved.values() if o < 0}
    assert new <= read, "a loop keeps what no backward reads"
    assert bool(new) == bool(said)


def test_what_is_not_there_is_found() -> None:
    """Planted faults: a copy, or a stack of its backward, is missing."""
    made = step("layers", ("layers",), False)

    def without(node: Node) -> Iterator[Block]:
        assert node.body is not None
        body = node.body
        first = next(n for n, each in enumerate(body.nodes) if each.phase == Phase.RECOMPUTE)
        yield replace(body, nodes=[*body.nodes[:first], *body.nodes[first + 1 :]])
        yield replace(body, sliced=[pair for pair in body.sliced if pair[0] >= 0])

    back = next(n for n in made.root.nodes if n.body is not None and n.body.forward is not None)
    for body in without(back):
        nodes = [replace(n, body=body) if n is back else n for n in made.root.nodes]
        assert [*missing(replace(made.root, nodes=nodes), set())]


@pytest.mark.one_in(8)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved:2"])
@pytest.mark.parametrize("form", ["float8", "scans"])
def test_stages_make_again_what_has_gradients_of_its_own(schedule: str, form: str) -> None:
    """Operands that only such a gradient reads are no operands of a second run."""
    sizes = {"batch": 4, "length": 8, "learning_rate": 0.1, "optimizer": "sgd"}
    if form == "float8":
        made = transformer_lm.model(**{**SMALL, **FLOAT8, **sizes})
    else:
        layers = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 4, "num_experts": 0}
        heads = {"linear_num_heads": 2, "linear_head_dim": 8, "num_attention_heads": 2}
        width = {"hidden_size": 16, "intermediate_size": 32, "vocab_size": 32}
        config = {"model_type": "kimi_linear", **layers, **heads, **width}
        made = from_huggingface(config, scans="kernel", dtype="float32", **sizes)
    ids = np.random.default_rng(0).integers(0, 16, (2, 4, 8)).astype(np.int32)
    losses = []
    for again in ([], ["layers"]):
        options = mtf.Options(microbatches=2, schedule=schedule, recompute=frozenset(again))
        run = mtf.Trainer(made, "pipe:2", "layers:pipe", options=options, engine="lockstep")
        losses.append([run.step({"tokens": ids[0], "targets": ids[1]})["loss"] for _ in range(2)])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-6)
