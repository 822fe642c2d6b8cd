"""Interactive parts of a page: sliders over results of searches."""

from __future__ import annotations

import math

from layoutopt.plan.schema import PlanFile
from layoutopt.plan.units import against, seconds_text, shorten
from reports.page.cells import LONGEST, Control
from reports.views.curves import FACTORS, factor_value, layout_letters


def controls(plan: PlanFile, name: str) -> tuple[Control, ...]:
    """A slider for every factor that was searched: the best step and its layout at each value."""
    letters, now = layout_letters(plan), plan.predicted.step_seconds
    found = []
    for n, one in enumerate(plan.details.sensitivity):
        said = []
        for t in one.trials:
            words = "nothing fits" if t.proven else "unknown"
            if t.step_seconds is not None:
                words = f"{seconds_text(t.step_seconds)} per step ({against(t.step_seconds, now)})"
                if t.layout:
                    shown = shorten(t.layout.replace(";", "; "), LONGEST)
                    words += f", with layout {letters[t.layout]}: {shown}"
            said.append(f"{factor_value(one.factor, t.value)}: {words}")
        far = [abs((t.step_seconds or math.inf) - now) for t in one.trials]
        start = far.index(min(far)) if far else 0  # where the step is the plan's own
        if len(said) > 1:
            words = FACTORS.get(one.factor, shorten(one.factor, 30))
            found.append(Control(f"{name}-if{n}", f"If {words} were", tuple(said), start))
    return tuple(found)
