"""The errors of predictions of a plan's kind against real steps and the hardware's compiler, and the memory
that a plan should leave free."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from statistics import fmean
from typing import Any

from layoutopt.plan.fields import Data, Flag, WholeNumber
from layoutopt.plan.units import percent, plural


class Runs(Data):
    """Runs that were predicted.

    Attributes:
      fitted: those of the user, each predicted by a fit without it; if not, none had a part in a fit.
      mean, worst: error of a predicted step, as a share of the real one.
    """

    rows: WholeNumber
    mean: float
    worst: float
    fitted: Flag = False

    def __str__(self) -> str:
        return f"mean error {percent(self.mean)}, worst {percent(self.worst)}"


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
      runs: number of the measured peaks of the plan's kind that say it; 0: it is assumed.
    """

    share: float
    source: str = ""
    runs: WholeNumber = 0


LEAST_MARGIN = 0.05
"""The least margin of any machine: vllm-project/compressed-tensors pull request 587 (2026-02-17) leaves 5 %
for fragmentation alone, after GPUs ran out of memory with less."""


class Known(Data):
    """The known errors of a plan's predictions; None for unknown ones.

    Attributes:
      kind: of the plan: dense or a mixture of experts, pipeline stages, framework.
      runs: of this kind.
      memory: the memory that runs of this kind needed beyond their predicted peak, or that is assumed.
    """

    kind: str = ""
    runs: Runs | None = None
    compiler: Compiled | None = None
    memory: Margin | None = None

    @classmethod
    def of(
        cls,
        kinds: Iterable[Mapping[str, Any]],
        framework: str,
        *,
        stages: bool,
        mixture: bool,
        compiler: Compiled | None = None,
        doubt: Margin | None = None,
    ) -> Known:
        """The errors that rows of known kinds give for a plan.

        Args:
          kinds: those of the plan's hardware and framework (`costmodels.hardware.known.known_kinds`).
          framework: what the plan is priced for.
          doubt: the memory margin that is assumed.
        """
        words = f"{kind_words(mixture, stages)}, {framework}"
        alike = [k for k in kinds if (k["stages"], k["mixture"], k["fitted"]) == (stages, mixture, False)]
        names = dict.fromkeys(k["framework"] for k in alike if k["seconds"])
        base, _, asked = framework.partition(":")
        if names and not any(
            name.partition(":")[0] in base and {*asked.split(",")} <= {"", *name.partition(":")[2].split(",")}
            for name in names
        ):
            words += f" as {' and '.join(names)}"  # frameworks with equal numbers share what is known
        seconds, held = ([error for k in alike for error in k[name]] for name in ("seconds", "memory"))
        sizes = [abs(e) for e in seconds]
        runs = Runs(rows=len(sizes), mean=fmean(sizes), worst=max(sizes)) if sizes else None
        margins = [] if doubt is None else [doubt]
        if held:  # what runs needed beyond their predicted peak, on average, as a share of what they needed
            beyond = fmean(max(0.0, -e) for e in held)
            margins.append(Margin(share=beyond, source="benchmarks/known.py", runs=len(held)))
        memory = max(margins, key=lambda m: m.share, default=None)
        return cls(kind=words, runs=runs, compiler=compiler, memory=memory)

    @property
    def words(self) -> str:
        """All that is known of times, in a sentence, and of the compiler's peaks; '' where no hardware is."""
        return "; ".join(self._parts())

    @property
    def margin(self) -> float:
        """Share of the memory that a step may need beyond its prediction, at the most that is known."""
        compiled = self.compiler.memory if self.compiler else 0.0
        return max(LEAST_MARGIN, compiled, self.memory.share if self.memory else 0.0)

    def room(self, limit: float, usable: float | None = None) -> float:
        """The largest peak within a limit that leaves the margin free.

        Args:
          usable: bytes of the device: a lower limit leaves some of them free by itself. None: the limit.
        """
        return min(limit, max(limit, usable or 0.0) * (1 - self.margin))

    def fits(self, peak: float, limit: float, usable: float | None = None) -> str:
        """The fit of a peak in the limit: 'yes', 'no', or 'barely' if it leaves less than the margin of the
        device's usable bytes."""
        if peak > limit:
            return "no"
        return "yes" if peak <= self.room(limit, usable) else "barely"

    def barely(self, peak: float, limit: float, usable: float | None = None) -> str:
        """A warning where a peak barely fits the limit, with the reason; '' if the margin is enough, or if
        the peak does not fit."""
        if self.fits(peak, limit, usable) != "barely":
            return ""
        asks = "" if self.compiler is None else "; check with the compiler: `layoutopt verify`"
        why = (
            f"a step may need {percent(self.margin)} more than predicted (fragmentation, libraries, "
            "prediction error) and"
        )
        if self.memory is not None and self.memory.runs and self.memory.share == self.margin:
            measured = f"{plural(self.memory.runs, 'measured peak')} of this kind"
            why = f"predictions were {percent(self.margin)} below {measured} on average, so the step"
        free = percent(1 - peak / max(limit, usable or 0.0))
        return f"{free} of the memory is free, but {why} may not fit{asks}"

    def _parts(self) -> Iterator[str]:
        if self.runs is not None:
            count = plural(self.runs.rows, "run")
            whose, part = "this kind", "none used in a fit"
            if self.runs.fitted:
                whose, part = "yours", "fitted; each predicted by a fit without it"
            yield f"{count} of {whose} ({self.kind}), {part}: {self.runs}"
        elif self.kind:
            yield f"no published run of this kind ({self.kind})"
        if (c := self.compiler) is not None:
            yield (
                f"against the compiler's estimates, {plural(c.rows, 'program')}: median error "
                f"{percent(c.compute)} in compute time, {percent(c.memory)} in memory"
            )


def kind_words(mixture: bool, stages: bool) -> str:
    """A kind of run: its model and pipeline."""
    model = "mixture of experts" if mixture else "dense"
    return f"{model}, {'pipeline' if stages else 'no pipeline'}"
