"""The libraries whose programs are models here: what each is called, and where it is read and applied."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from mesh_tf_core.errors import UserError

if TYPE_CHECKING:
    from mesh_tf_core.ir.mesh import Mesh
    from mesh_tf_core.lower import Options


@dataclass(frozen=True)
class FrontEnd:
    """A library whose programs are imported, in messages.

    Attributes:
      name: as `ImportedModel.front_end` and `Plan` have it: `plan.jax`.
      title: of the library.
      arguments: of the function that imports.
      program: what is imported; `splits`: what says how its arrays are split.
      checkpoint: what recomputes a part of it; half: what multiplies in bfloat16.
      own: "module:function" that reads what the user's file says of placements; said: what that must return.
      ranks: "module:function" of the ranks that the file's own function needs; empty if it needs none.
      even: shards of an array have equal sizes; otherwise any number of devices share it.
    """

    name: str
    title: str
    arguments: str
    program: str
    splits: str
    checkpoint: str
    half: str
    own: str
    said: str
    ranks: str = ""
    even: bool = False

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

    def written(self, model: Any, mesh: Mesh, said: Any, options: Options) -> Any:
        """The `WrittenLayout` of the user's own placements; UserError if what `shardings()` said is none.

        Args:
          options: what else is decided.
        """
        if not isinstance(said, tuple) or len(said) != 2:
            kind = f"a tuple of length {len(said)}" if isinstance(said, tuple) else type(said).__name__
            raise UserError(f"shardings() must return {self.said}, but returned {kind}")
        return _loaded(self.own)(model, mesh, *said, options)

    def on_ranks(self, mesh: Mesh) -> AbstractContextManager[None]:
        """The process group that the user's `shardings()` runs in."""
        found: AbstractContextManager[None] = _loaded(self.ranks)(mesh) if self.ranks else nullcontext()
        return found


def _loaded(place: str) -> Any:
    module, _, function = place.partition(":")
    return getattr(import_module(module), function)


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
    even=True,
)
TORCH = FrontEnd(
    "torch",
    "PyTorch",
    "module, batch",
    "the module",
    "DTensor placements",
    "torch.utils.checkpoint",
    "from_torch(param_dtype=torch.bfloat16)",
    "layoutopt.importers.torch.written:written",
    "the module with its placements and the mesh axes of the batch's rows, (module, axes)",
    "layoutopt.importers.torch.written:fake_ranks",
)
FRONT_ENDS: Mapping[str, FrontEnd] = {each.name: each for each in (JAX, TORCH)}


def front_end_of(model: Any) -> FrontEnd | None:
    """The library whose program a model is; None of a model of our own."""
    return FRONT_ENDS.get(getattr(model, "front_end", ""))


def made_by() -> str:
    """The functions that import programs, as errors name them."""
    return " or ".join(each.made.partition("(")[0] for each in FRONT_ENDS.values())
