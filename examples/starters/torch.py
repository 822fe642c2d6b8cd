"""A PyTorch model to start from: put your own module in its place, then

layoutopt search model.py --mesh "data:2;model:4"        find the best layout
layoutopt train model.py --layout auto --mesh "data:2;model:4" --steps 100
layoutopt search model.py --devices 64 --hardware h100 --set hidden=8192
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

import layoutopt
import mesh_tf_core as mtf


# Your own module. It is traced once and not changed; those of transformers are called here as anywhere else.
class Classifier(nn.Module):
    """Two dense layers that classify points."""

    def __init__(self, features: int, hidden: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, hidden), nn.Linear(hidden, classes, bias=False)

    def forward(self, x: Any, label: Any) -> Any:
        """The loss; or return outputs, and give from_torch loss=function(outputs, batch)."""
        return nn.functional.cross_entropy(self.second(torch.relu(self.first(x))), label)


# Every hyperparameter has a default; `--set name=value` changes it. On the device "meta" parameters have no
# values and need no memory, whatever their size.
def model(
    batch: int = 64, features: int = 32, hidden: int = 256, classes: int = 8, learning_rate: float = 0.003
) -> mtf.Model:
    """The module as a model; its dimensions are inferred."""
    with torch.device("meta"):
        module = Classifier(features, hidden, classes)
        given = {"x": torch.empty(batch, features), "label": torch.empty(batch, dtype=torch.int64)}
    # The names of dimensions say what they do; this one would be called by the path of its parameter.
    names = {"first/weight": ("hidden", "features")}
    return layoutopt.from_torch(module, given, optimizer=mtf.Adam(learning_rate), names=names)


# Optional, for `train` and `measure`: batches, by the names of the inputs. It takes those hyperparameters
# that it needs, and `split`, which is "train" or "held-out".
def data(batch: int, features: int, classes: int, split: str = "train") -> Iterator[dict[str, np.ndarray]]:
    """Points around one centre per class."""
    centres = np.random.default_rng(0).normal(size=(classes, features))
    rng = np.random.default_rng(1 if split == "train" else 2)
    while True:
        label = rng.integers(0, classes, batch)
        points = centres[label] + rng.normal(size=(batch, features))
        yield {"x": points.astype(np.float32), "label": label.astype(np.int32)}
