"""Numbers of parameters of the Mesh-TensorFlow paper, and graphs that do not grow with depth."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import mesh_tf_core as mtf
from examples import bert, moe_lm, reformer_lm, transformer_lm, transformer_seq2seq
from mesh_tf_core.ir.program import Done

PAPER = Path(__file__).parents[1] / "data" / "mesh_tf_param_counts.csv"


def paper_rows(task: str) -> list[dict[str, str]]:
    lines = [line for line in PAPER.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    return [row for row in csv.DictReader(lines) if row["task"] == task]


def sizes(row: dict[str, str]) -> dict[str, int]:
    names = ("d_model", "d_kv", "heads", "d_ff", "vocab")
    return {
        **{n: int(row[n]) for n in names},
        "batch": int(row["batch_sequences"]),
        "length": int(row["seq_len"]),
    }


@pytest.mark.parametrize("row", paper_rows("translation_encdec"), ids=lambda row: row["published_B"])
def test_translation_models_of_the_paper(row: dict[str, str]) -> None:
    encoder, decoder = map(int, row["layers"].split("+"))
    built = transformer_seq2seq.model(**sizes(row), encoder_layers=encoder, decoder_layers=decoder)
    assert built.parameters == int(row["computed_params"])
    mesh, _ = built.layouts["Mesh-TensorFlow paper"]
    assert mesh == row["mesh_shape"]


@pytest.mark.parametrize("row", paper_rows("lm_decoder"), ids=lambda row: row["published_B"])
def test_language_models_of_the_paper(row: dict[str, str]) -> None:
    built = transformer_lm.model(**sizes(row), layers=int(row["layers"]))
    assert built.parameters == int(row["computed_params"])


def test_all_thirteen_models_of_the_paper() -> None:
    assert len(paper_rows("translation_encdec")) == 6
    assert len(paper_rows("lm_decoder")) == 7


def parameters_of_a_mixture(experts: int, chosen: int) -> int:
    return moe_lm.model(experts=experts, chosen=chosen, layers=3, d_model=64, d_ff=128).parameters


def test_experts_add_parameters_and_their_router() -> None:
    assert parameters_of_a_mixture(8, 2) - parameters_of_a_mixture(4, 2) == 3 * 4 * (2 * 64 * 128 + 64)
    assert parameters_of_a_mixture(8, 2) == parameters_of_a_mixture(8, 1)


def shape_of(example: ModuleType, layers: int, **more: Any) -> tuple[Counter[str], Counter[str]]:
    """How many operations of each kind the training step's graph has, and values each kind of its program's
    instructions makes or waits for (small all-reduces travel together, and with depth more is small)."""
    model = example.model(
        layers=layers, d_model=16, d_kv=4, heads=4, d_ff=32, vocab=32, batch=8, length=8, **more
    )
    program = model.lower(mtf.Mesh("x:2;y:2"), mtf.Layout("batch:x;d_ff:y;heads:y;vocab:y"))
    nodes = Counter(node.op.name for node, _ in model.step_graph.walk())
    made: Counter[str] = Counter()
    for instr, _ in program.walk():
        made[type(instr).__name__] += max(1, len(instr.inputs if isinstance(instr, Done) else instr.outputs))
    return nodes, made


DEEP: dict[str, tuple[ModuleType, dict[str, Any]]] = {
    "lm": (transformer_lm, {}),
    "lm, adafactor": (transformer_lm, {"optimizer": "adafactor", "dropout": 0.1}),
    "seq2seq": (transformer_seq2seq, {"positions": "relative"}),
    "moe": (moe_lm, {"experts": 4}),
    "bert": (bert, {}),
    "reformer": (reformer_lm, {"chunk": 4, "ff_chunks": 2}),
}


@pytest.mark.parametrize("name", DEEP)
def test_depth_adds_nothing_to_graph_and_program(name: str) -> None:
    """Layers are scanned: 96 of them are traced, differentiated and lowered as 6 are."""
    example, more = DEEP[name]
    shallow, deep = (shape_of(example, layers, **more) for layers in (6, 96))
    assert deep == shallow
    assert shallow[0].total() > 100
    assert shallow[1].total() > 100


@pytest.mark.parametrize("example", [transformer_lm, transformer_seq2seq, reformer_lm, moe_lm])
@pytest.mark.parametrize("positions", ["rope", "0", "-3", "²"])
def test_positions_that_nobody_knows(example: ModuleType, positions: str) -> None:
    with pytest.raises(
        mtf.UserError, match=f"positions='{positions}': write learned, .*the number of learned positions"
    ):
        example.model(positions=positions)
