"""The code of docs/guides/recipes.md, as it stands there, and what its tests share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np

import mesh_tf_core as mtf

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
D = mtf.Dim("d_model", 8)
TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "recipes.md").read_text(encoding="utf-8")


def recipes() -> dict[str, Any]:
    space: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/guides/recipes.md", "exec"), space)
    return space


RECIPES = recipes()
