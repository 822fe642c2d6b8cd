"""The functions of examples/recipes.py by name, and what their tests share."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import mesh_tf_core as mtf
from examples import recipes

RNG = np.random.default_rng(0)
X = ("batch:4 length:8 d_model:8", RNG.normal(size=(4, 8, 8)))
D = mtf.Dim("d_model", 8)
CODE = Path(recipes.__file__).read_text(encoding="utf-8")
RECIPES = {name: f for name, f in vars(recipes).items() if getattr(f, "__module__", "") == recipes.__name__}
