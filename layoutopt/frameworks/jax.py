"""A JAX program with the shardings of `plan.jax`: splits and storage of arrays, recomputed loops."""

from layoutopt.space.kind import STORED
from layoutopt.space.recompute import SELECTIVE
from layoutopt.space.restriction import ANY, Even, Restriction

SAYS = Restriction(
    "jax",
    says={"storage": STORED, "elsewhere": ANY, "recompute": (False, True, SELECTIVE), "microbatches": ANY},
    relations=(Even(),),
)
