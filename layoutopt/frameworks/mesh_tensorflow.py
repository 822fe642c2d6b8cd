"""Mesh-TensorFlow: a layout of dimensions, each over one axis (`mtf.convert_to_layout_rules`)."""

from layoutopt.space.kind import Choice, Decision
from layoutopt.space.restriction import ANY, Only, Restriction
from layoutopt.space.splits import Split


def _one_axis(decision: Decision, choice: Choice) -> bool:
    return not isinstance(decision, Split) or len(choice) < 2


SAYS = Restriction(
    "mesh-tensorflow", says={"recompute": (False, True), "microbatches": ANY}, relations=(Only(_one_axis),)
)
