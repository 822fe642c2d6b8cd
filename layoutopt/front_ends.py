"""The libraries whose programs are models here: what each is called, and where it is read and applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class FrontEnd:
    """A library whose programs are imported, in messages.

    Attributes:
      name: as `ImportedModel.front_end` and `Plan` have it: `plan.jax`.
      title: of the library.
      arguments: of the function that imports.
      program: what is imported; `splits`: what says how its arrays are split.
      checkpoint: what recomputes a part of it; half: what multiplies in bfloat16.
      own: "module:function" that reads what the user's file says of placements, and what that must return;
        empty if a file cannot say them.
    """

    name: str
    title: str
    arguments: str
    program: str
    splits: str
    checkpoint: str
    half: str
    own: str = ""
    said: str = ""

    @property
    def call(self) -> str:
        """The function that imports."""
        return f"from_{self.name}"

    @property
    def made(self) -> str:
        """The call that makes such a model."""
        return f"layoutopt.{self.call}({self.arguments})"

    @property
    def plan(self) -> str:
        """The object that applies a plan."""
        return f"plan.{self.name}"

    def written(self) -> Callable[..., Any]:
        """The function that reads the user's own placements: (model, mesh, what the file says, options)."""
        module, _, function = self.own.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), function)
        return found


JAX = FrontEnd(
    "jax",
    "JAX",
    "loss, params, batch",
    "the JAX function",
    "JAX shardings",
    "jax.checkpoint",
    "parameters that the loss casts",
    "layoutopt.importers.jax.written:written",
    "two pytrees of PartitionSpec, (parameters, batch)",
)
TORCH = FrontEnd(
    "torch",
    "PyTorch",
    "module, batch",
    "the module",
    "DTensor placements",
    "torch.utils.checkpoint",
    "from_torch(param_dtype=torch.bfloat16)",
)
FRONT_ENDS: Mapping[str, FrontEnd] = {each.name: each for each in (JAX, TORCH)}
