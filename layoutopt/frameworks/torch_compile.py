"""PyTorch with torch.compile: it expresses what eager execution does."""

from dataclasses import replace

from layoutopt.frameworks import torch

SAYS = replace(torch.SAYS, name="torch-compile")
