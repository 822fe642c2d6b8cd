"""The libraries whose programs are models here: what each is called, and where it is read and applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class FrontEnd:
    """A library whose programs are imported.

    Attributes:
      name: as `ImportedModel.front_end` and `Plan` have it: `plan.jax`.
      title: of the library.
      made: the call that makes such a model.
      own: "module:function" that reads what the user's file says of placements, and what that must return;
        empty if a file cannot say them.
    """

    name: str
    title: str
    made: str
    own: str = ""
    said: str = ""

    def written(self) -> Callable[..., Any]:
        """The function that reads the user's own placements: (model, mesh, what the file says, options)."""
        module, _, function = self.own.partition(":")
        found: Callable[..., Any] = getattr(import_module(module), function)
        return found


FRONT_ENDS: Mapping[str, FrontEnd] = {
    each.name: each
    for each in (
        FrontEnd(
            "jax",
            "JAX",
            "layoutopt.from_jax(loss, params, batch)",
            "layoutopt.importers.jax.written:written",
            "two pytrees of PartitionSpec, (parameters, batch)",
        ),
        FrontEnd("torch", "PyTorch", "layoutopt.from_torch(module, batch)"),
    )
}
