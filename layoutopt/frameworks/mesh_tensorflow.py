"""Mesh-TensorFlow: a layout of dimensions, each over one axis (`mtf.convert_to_layout_rules`)."""

from layoutopt.space.restriction import ANY, Only, Restriction
from layoutopt.space.splits import Split

SAYS = Restriction(
    "mesh-tensorflow",
    says={"recompute": (False, True), "microbatches": ANY},
    relations=(Only(lambda of, axes: not isinstance(of, Split) or len(axes) < 2),),
)
