"""What is decided beside a layout, as files say it: one field for each kind of decision, and its words.

Plans, their alternatives and the results of commands have these fields; terminal and reports say them in
these words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer

from layoutopt.plan.fields import Data, Names, Size
from layoutopt.plan.units import some

ELSEWHERE = "elsewhere"
"""The path of rules for elsewhere (`mesh_tf_core.ir.layout`)."""
NAMED = 2
"""Places that a short text names."""


class Refined(Data):
    """The rest of a layout. What most plans lack is written only where there is some.

    Attributes:
      refined: operation, variable or scope to the dimensions that are placed otherwise there, as if they had
        other names (`search --refine`), each with its axes; `elsewhere` to those that are split further where
        the axes split nothing else (sequence parallelism).
    """

    refined: dict[str, dict[str, Names]] = Field(default_factory=dict)

    @model_serializer(mode="wrap")
    def _what_is_said(self, made: SerializerFunctionWrapHandler) -> dict[str, Any]:
        found: dict[str, Any] = made(self)
        for name in ("refined", "context", "pipeline", "schedule", "diloco", "offload", "collective_matmul"):
            if not found.get(name):
                found.pop(name, None)
        return found


class Decided(Refined):
    """Each kind of decision at its plain value where nothing is said.

    Attributes:
      storage: variable to its stage (ZeRO), for those that are not stored as the layout says.
      recompute: the loops that are recomputed in backward (activation checkpointing), by their dimension, and
        what they keep: "layers:keep=products".
      microbatches: parts of the batch, one after the other.
      context: dimension of keys to the form of attention to them (`search --context`), of those that are not
        gathered.
      pipeline: dimension of layers to the number of stages that the layout splits it into; microbatches go
        through them.
      schedule: when they go backward, if not after all microbatches: "1f1b"; how often they go round:
        "circular:2"; both: "interleaved:2".
      diloco: the axis that synchronises rarely, and how: "sites:period=30,rate=0.7,momentum=0.9".
      offload: what lies in the hosts' memory ("optimizer": its state; "weights": they themselves), to the
        variables that it is of; "activations", to the dimensions of loops.
      collective_matmul: dimensions: what products with one of them gather, and what is scattered of them,
        goes in chunks beside the products.
    """

    storage: dict[str, str] = Field(default_factory=dict)
    recompute: Names = Field(default_factory=list)
    microbatches: Size = 1
    context: dict[str, str] = Field(default_factory=dict)
    pipeline: dict[str, Size] = Field(default_factory=dict)
    schedule: str = ""
    diloco: str = ""
    offload: dict[str, Names] = Field(default_factory=dict)
    collective_matmul: Names = Field(default_factory=list)

    def listed(self) -> dict[str, str]:
        """Name of a kind -> its whole decision in words, '' if plain."""
        return {
            "storage": "; ".join(f"{stage} of {', '.join(names)}" for stage, names in self.stages().items()),
            "recompute": ", ".join(self.recompute),
            "microbatches": str(self.microbatches) if self.microbatches > 1 else "",
            "context": ", ".join(f"{form} of {dim}" for dim, form in self.context.items()),
            "offload": "; ".join(f"{kind} of {', '.join(names)}" for kind, names in self.offload.items()),
            "collective matmul": ", ".join(self.collective_matmul),
            "pipeline": " and ".join(self._pipelines()),
            "replicas": f"train alone, and meet rarely ({self.diloco})" if self.diloco else "",
            ELSEWHERE: rules_in(self.refined.get(ELSEWHERE, {})),
            "refined": "; ".join(f"{rules_in(rules)} in {path}" for path, rules in self.places().items()),
        }

    def in_short(self) -> str:
        """All that is not plain, in a few words: 'zero3 ×4; recompute layers; 2 microbatches'."""
        found = [f"{stage} ×{len(names)}" for stage, names in sorted(self.stages().items())]
        found += [f"recompute {dim}" for dim in self.recompute]
        found += [f"{kind} ×{len(names)} on hosts" for kind, names in self.offload.items()]
        found += [f"{form} of {dim}" for dim, form in self.context.items()]
        found += (
            [f"collective matmul of {', '.join(self.collective_matmul)}"] if self.collective_matmul else []
        )
        found += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        found += self._pipelines()
        found += [f"replicas of {self.diloco.partition(':')[0]}"] if self.diloco else []
        found += [f"{rules_in(rules)} {ELSEWHERE}" for p, rules in self.refined.items() if p == ELSEWHERE]
        found += [f"refined in {some([*places], NAMED)}"] if (places := self.places()) else []
        return "; ".join(found)

    def _pipelines(self) -> list[str]:
        order = f" in {self.schedule}" if self.schedule else ""
        return [f"{n} stages of {dim}{order}" for dim, n in self.pipeline.items()]

    def places(self) -> dict[str, dict[str, Names]]:
        """What is `refined` at single places."""
        return {path: rules for path, rules in self.refined.items() if path != ELSEWHERE}

    def stages(self) -> dict[str, list[str]]:
        """Stages of storage with their variables, in the order of the plan."""
        found: dict[str, list[str]] = {}
        for name, stage in self.storage.items():
            found.setdefault(stage, []).append(name)
        return found


def rules_in(rules: Mapping[str, Sequence[str]]) -> str:
    """The placements of some dimensions in one place: 'batch:data+model, heads:none'."""
    return ", ".join(f"{dim}:{'+'.join(axes) or 'none'}" for dim, axes in rules.items())
