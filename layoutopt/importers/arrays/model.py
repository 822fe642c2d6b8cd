"""Models that are functions of other libraries."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import mesh_tf_core as mtf
from layoutopt.importers.arrays.origin import ImportedFunction
from layoutopt.importers.arrays.parts import why_whole
from layoutopt.importers.arrays.placing import ArrayPlacing
from layoutopt.plan.build import Plan, check_plan_model
from layoutopt.plan.exported import ExportedTensor
from mesh_tf_core.errors import UserError
from mesh_tf_core.model import TrainingStep

KEEPS = "choose the values that recomputed layers keep with --recompute DIM:keep=KIND"


@dataclass
class ImportedModel(mtf.Model):
    """A model that a function of another library is.

    Attributes:
      front_end: its name in `front_ends`.
    """

    origin: ImportedFunction | None = field(default=None, repr=False, compare=False)
    front_end: ClassVar[str] = ""

    def applied(self, plan: Plan) -> Any:
        """The plan in the user's own function."""
        raise NotImplementedError

    def arrays(self, plan: Plan) -> dict[str, tuple[ExportedTensor, ...]]:
        """The user's own arrays as the plan stores them; UserError as `applied` has it."""
        check_plan_model(plan, self)
        origin = self.origin
        assert origin is not None
        lies = ArrayPlacing(plan.mesh, plan.layout, origin, self.lower(plan.mesh, plan.layout, plan.options))
        found = {
            "PARAMETERS": [(a, lies.stored(a)) for a in origin.parameters.values()],
            "OPTIMIZER": [(a, lies.stored(a, slot=True)) for a in origin.parameters.values()],
            "STATE": [(a, lies.stored(a)) for a in origin.state.values()],
            "INPUTS": [(a, lies.argument(a)) for a in origin.batch.values()],
        }
        return {
            name: tuple(
                ExportedTensor(a.path, a.named, tuple(axes or () for axes in spec), a.shape)
                for a, spec in listed
            )
            for name, listed in found.items()
            if listed
        }

    def notes(self, options: mtf.Options) -> tuple[str, ...]:
        """Notes on parts of the function that are not in the graph, and on options that differ from the
        function's own."""
        assert self.origin is not None
        front_end = self.origin.front_end
        parts = [
            f"{w}: this {front_end.checkpoint} covers only part of a layer and is ignored; {KEEPS}"
            for w in self.origin.parts_recomputed
        ]
        own = sorted(self.origin.recomputed - {each.dim for each in options.recompute})
        left = [
            f"the function applies {front_end.checkpoint} to the loop over {', '.join(own)}, but the plan "
            f"does not recompute this loop, so this {front_end.checkpoint} is not applied"
        ]
        return (*super().notes(options), *self.origin.notes, *parts, *(left if own else ()))

    def _in_parts(self, microbatches: int) -> TrainingStep:
        """Only where the user's own step can be run so too: no search finds what `applied` would refuse."""
        origin, batch = self.origin, self.batch_dim
        if origin is None or batch is None:
            return super()._in_parts(microbatches)
        if why := self.graph.remembered("why_whole", lambda: why_whole(self.loss, origin, batch)):
            raise UserError(f"microbatches={microbatches}: {why}; use one microbatch")
        return super()._in_parts(microbatches)
