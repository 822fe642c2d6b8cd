"""What is decided beside a layout, as files say it: one field for each kind of decision, and its words.

Plans, their alternatives and the results of commands have these fields; terminal and reports say them in
these words.
"""

from __future__ import annotations

from pydantic import Field

from layoutopt.plan.fields import Data, Names, Size


class Decided(Data):
    """Each kind of decision at its plain value where nothing is said.

    Attributes:
      storage: variable to its stage (ZeRO), for those that are not stored as the layout says.
      recompute: dimensions of the loops that are recomputed in backward (activation checkpointing).
      microbatches: parts of the batch, one after the other.
    """

    storage: dict[str, str] = Field(default_factory=dict)
    recompute: Names = Field(default_factory=list)
    microbatches: Size = 1

    def listed(self) -> dict[str, str]:
        """Name of a kind -> its whole decision in words, '' if plain."""
        return {
            "storage": "; ".join(f"{stage} of {', '.join(names)}" for stage, names in self.stages().items()),
            "recompute": ", ".join(self.recompute),
            "microbatches": str(self.microbatches) if self.microbatches > 1 else "",
        }

    def in_short(self) -> str:
        """All that is not plain, in a few words: 'zero3 ×4; recompute layers; 2 microbatches'."""
        found = [f"{stage} ×{len(names)}" for stage, names in sorted(self.stages().items())]
        found += [f"recompute {dim}" for dim in self.recompute]
        found += [f"{self.microbatches} microbatches"] if self.microbatches > 1 else []
        return "; ".join(found)

    def stages(self) -> dict[str, list[str]]:
        """Stages of storage with their variables, in the order of the plan."""
        found: dict[str, list[str]] = {}
        for name, stage in self.storage.items():
            found.setdefault(stage, []).append(name)
        return found
