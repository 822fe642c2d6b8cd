"""A JAX program with the shardings of `plan.jax`: splits and storage of arrays, recomputed loops."""

from layoutopt.space.restriction import ANY, Even, Restriction

SAYS = Restriction(
    "jax",
    says={"storage": ANY, "elsewhere": ANY, "recompute": ANY, "microbatches": ANY},
    relations=(Even(),),
)
