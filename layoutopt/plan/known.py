"""The errors of predictions for a piece of hardware against published steps and its compiler, and the memory
that a plan should leave free."""

from __future__ import annotations

from collections.abc import Iterator

from layoutopt.plan.fields import Data, WholeNumber
from layoutopt.plan.units import percent, plural


class PublishedSteps(Data):
    """Steps that were published for the hardware.

    Attributes:
      fitted: number of those that helped to fit a constant.
      mean, worst: error of a predicted step, as a share of the published one.
    """

    rows: WholeNumber
    fitted: WholeNumber = 0
    mean: float
    worst: float


class Compiled(Data):
    """Programs that the hardware's compiler compiled.

    Attributes:
      compute, memory: error of the prediction against the compiler's own estimate, the median.
    """

    rows: WholeNumber
    compute: float
    memory: float


class Margin(Data):
    """The memory that a step may need beyond its predicted peak.

    Attributes:
      share: of the usable memory.
      source: where that is from.
    """

    share: float
    source: str = ""


LEAST_MARGIN = 0.05
"""The least margin of any machine: vllm-project/compressed-tensors pull request 587 (2026-02-17) leaves 5 %
for fragmentation alone, after GPUs ran out of memory with less."""


class Known(Data):
    """All known errors; None for unknown ones."""

    steps: PublishedSteps | None = None
    compiler: Compiled | None = None
    memory: Margin | None = None

    @property
    def words(self) -> str:
        """All that is known of times, in a sentence, and of the compiler's peaks."""
        return "; ".join(self._parts())

    @property
    def margin(self) -> float:
        """Share of the memory that a step may need beyond its prediction, at the most that is known."""
        compiled = self.compiler.memory if self.compiler else 0.0
        return max(LEAST_MARGIN, compiled, self.memory.share if self.memory else 0.0)

    def fits(self, peak: float, limit: float) -> str:
        """The fit of a peak in the limit: 'yes', 'no', or 'barely' if it leaves less than the margin."""
        if peak > limit:
            return "no"
        return "yes" if peak <= limit * (1 - self.margin) else "barely"

    def barely(self, peak: float, limit: float) -> str:
        """A warning where a peak barely fits the limit, with the reason; '' if the margin is enough, or if
        the peak does not fit."""
        if self.fits(peak, limit) != "barely":
            return ""
        asks = "" if self.compiler is None else "; check with the compiler: `layoutopt verify`"
        return (
            f"{percent(1 - peak / limit)} of the memory is free, but a step may need "
            f"{percent(self.margin)} more than predicted (fragmentation, libraries, prediction error) "
            f"and may not fit{asks}"
        )

    def _parts(self) -> Iterator[str]:
        if (s := self.steps) is not None:
            fitted = f", {s.fitted} of them used in the fit" if s.fitted else ""
            yield (
                f"{plural(s.rows, 'published step')} on this hardware: mean error {percent(s.mean)}, worst "
                f"{percent(s.worst)}{fitted}"
            )
        if (c := self.compiler) is not None:
            yield (
                f"against the compiler's estimates, {plural(c.rows, 'program')}: median error "
                f"{percent(c.compute)} in compute time, {percent(c.memory)} in memory"
            )
