"""How far predictions for a piece of hardware are from what others published and what its compiler says."""

from __future__ import annotations

from collections.abc import Iterator

from layoutopt.plan.fields import Data, Whole
from layoutopt.plan.units import percent, plural


class Steps(Data):
    """Steps that were published for the hardware.

    Attributes:
      fitted: of these, how many had a part in a fitted constant.
      mean, worst: error of a predicted step, as a share of the published one.
    """

    rows: Whole
    fitted: Whole = 0
    mean: float
    worst: float


class Compiled(Data):
    """Programs that the hardware's compiler compiled.

    Attributes:
      compute, memory: error of the prediction against the compiler's own estimate, the median.
    """

    rows: Whole
    compute: float
    memory: float


class Known(Data):
    """Both; what there is none of is None."""

    steps: Steps | None = None
    compiler: Compiled | None = None

    @property
    def words(self) -> str:
        """All that is known, in a sentence."""
        return "; ".join(self._parts())

    def barely(self, peak: float, limit: float) -> str:
        """What a peak that fits leaves of the limit, where predictions of memory are off by more; '' if they
        are not, or it does not fit."""
        off = 0.0 if self.compiler is None else self.compiler.memory
        if not limit * (1 - off) < peak <= limit:
            return ""
        return (
            f"{percent(1 - peak / limit)} of the memory is left, less than predictions are off: it may not "
            "fit, which `layoutopt verify` asks the compiler"
        )

    def _parts(self) -> Iterator[str]:
        if (s := self.steps) is not None:
            fitted = f", {s.fitted} of them part of the fit" if s.fitted else ""
            yield (
                f"{plural(s.rows, 'published step')} on this hardware: {percent(s.mean)} off in the mean, "
                f"{percent(s.worst)} at most{fitted}"
            )
        if (c := self.compiler) is not None:
            yield (
                f"against its compiler, {plural(c.rows, 'program')}: compute {percent(c.compute)} and memory "
                f"{percent(c.memory)} off in the median"
            )
