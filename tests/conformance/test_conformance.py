"""Every operation under every legal layout of its own dimensions: outputs, gradients and bytes against the
dense run."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from typing import Any

import pytest

import mesh_tf_core as mtf
import mesh_tf_core.ops as ops_package
from mesh_tf_core.ir.op import Op
from mesh_tf_core.ir.program import Local
from tests.conformance.helper import (
    BY_NIGHT,
    MESHES,
    Built,
    Sample,
    check_dense,
    conform,
    legal_layouts,
)
from tests.conformance.samples import SAMPLES

Record = Callable[[str, Any], None]
NAMES = [s.name for s in SAMPLES]
SLOW = "x:2;y:4"
RARE = {"x:2;y:2": 8, SLOW: 20}
"""By day every so many samples on these meshes; on the smallest one all."""
TASKS = [
    pytest.param(sample, mesh, numbers, id=f"{sample.name}-{mesh}{when}", marks=marks)
    for place, sample in enumerate(SAMPLES)
    for when, chosen in (("", MESHES), ("-by night", BY_NIGHT))
    for mesh, numbers in chosen.items()
    for marks in [
        [pytest.mark.nightly] if when or place % RARE.get(mesh, 1) else [pytest.mark.slow] * (mesh == SLOW)
    ]
]


@pytest.mark.parametrize("sample", SAMPLES, ids=NAMES)
def test_dense(sample: Sample, record_property: Record) -> None:
    done = check_dense(sample)
    assert done or not Built(sample, "float64").gradients
    record_property("conformance", (sample.family, f"{sample.name}, dense", 0, 0, done))


@pytest.mark.parametrize(("sample", "mesh", "numbers"), TASKS)
def test_layouts(sample: Sample, mesh: str, numbers: tuple[str, ...], record_property: Record) -> None:
    counts = conform(sample, mesh, *numbers)
    assert counts.legal >= 2
    tried = (counts.legal, counts.illegal, counts.comparisons)
    record_property("conformance", (sample.family, f"{sample.name}, {mesh}", *tried))


def test_names_are_unique() -> None:
    assert len(set(NAMES)) == len(NAMES)


def _operations(base: type[Op] = Op) -> set[type[Op]]:
    """Operations of the package that a model can apply."""
    for module in pkgutil.iter_modules(ops_package.__path__, f"{ops_package.__name__}."):
        importlib.import_module(module.name)
    found: set[type[Op]] = set()
    for cls in base.__subclasses__():
        found |= _operations(cls)
        if cls.__module__.startswith(ops_package.__name__) and not cls.__subclasses__():
            found.add(cls)
    return found


def test_every_operation_has_a_sample() -> None:
    used: set[type[Op]] = set()
    for sample in SAMPLES:
        built = Built(sample, "float64")
        used |= {type(node.op) for node, _ in built.graph.walk()}
        for table in legal_layouts(built, mtf.Mesh("x:2")):
            program = built.program(mtf.Mesh("x:2"), mtf.Layout(table))
            used |= {type(instr.op) for instr, _ in program.walk() if isinstance(instr, Local)}
    # A new key comes from the graph's own counters; tests/core/test_random.py has it. The others, lowering
    # makes of pipelines, of messages beside products and of padded shards; tests/core/test_pipelines.py,
    # test_collective_matmul.py, test_padded_storage.py and tests/engines/test_some_layers.py have them. Codes
    # of eight bits mean float32 whatever comes; tests/core/test_optimizers.py has them under every layout.
    stages = {"StageNumbers", "StagePart", "StageStack", "StageTerm"}
    chunks = {"AddProduct", "ChunkAs", "ChunkFirst", "ChunkNumber", "ChunkOf", "ChunkPut"}
    elsewhere = {
        "FoldIn",
        "PadPieces",
        "CutPadding",
        "JoinedParts",
        "PartsInPlace",
        "ToEightBits",
        "FromEightBits",
        *stages,
        *chunks,
    }
    missing = {cls.__name__ for cls in _operations() - used} - elsewhere
    assert not missing
