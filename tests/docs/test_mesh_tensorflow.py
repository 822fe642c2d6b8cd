"""The page for those who come from Mesh-TensorFlow: its program runs, and a checkpoint by names is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "mesh_tensorflow.md"


@pytest.mark.slow
def test_the_ported_model_reads_a_checkpoint_of_tensorflow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf = pytest.importorskip("tensorflow")
    monkeypatch.chdir(tmp_path)
    kernel = np.arange(512, dtype=np.float32).reshape(32, 16)
    tf.raw_ops.SaveV2(
        prefix="model.ckpt-1000", tensor_names=["dense/kernel"], shape_and_slices=[""], tensors=[kernel]
    )
    (program,) = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)
    (reading,) = re.findall(
        r"^```\n(import tensorflow.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S
    )
    names: dict[str, Any] = {}
    exec(compile(program + reading, str(PAGE), "exec"), names)
    names["trainer"].save_weights("out.npz")
    assert np.array_equal(np.load("out.npz")["w"], kernel)
