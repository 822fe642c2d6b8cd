"""Features that exclude each other: a row of a table each, and one sentence for all.

Conditions that a program can check itself (an axis that splits twice, a dimension that does not divide, a
loop without a backward) need no row. A row is for conditions that no rule of lowering covers, or that would
need new code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from mesh_tf_core.errors import UserError


class Exclusion(NamedTuple):
    """Two features that nothing has both of, and why."""

    first: str
    second: str
    why: str


REPLICAS, STAGES, SCHEDULE, MEANS = "replicas", "stages", "schedule", "running means"
MEETINGS, CLUSTER, DECODING, MICROBATCHES = "meetings", "cluster", "decoding", "microbatches"
ALTERNATING, SEVERAL_STAGES = "alternating schedule", "several dimensions of stages"
SPLIT_BACKWARD, STAGE_AGAIN = "split backward", "recomputed stages"
EXCLUDED = (
    Exclusion(REPLICAS, STAGES, "separate replicas are not split into stages"),
    Exclusion(REPLICAS, SCHEDULE, "separate replicas are not split into stages"),
    Exclusion(REPLICAS, MEANS, "each replica has its own running means"),
    Exclusion(MEETINGS, REPLICAS, "each replica is a separate job there"),
    Exclusion(MEETINGS, CLUSTER, "each replica is one process there"),
    Exclusion(DECODING, MICROBATCHES, "no gradients are added up over them"),
    Exclusion(DECODING, STAGES, "each token passes through all layers before the next one"),
    Exclusion(ALTERNATING, SEVERAL_STAGES, "its ticks run over one dimension of layers"),
    Exclusion(
        SPLIT_BACKWARD, STAGE_AGAIN, "weight gradients have no ticks where whole stages are recomputed"
    ),
)
"""The pairs that the runtime cannot combine."""


def refuse(
    asked: Mapping[str, str], excluded: Iterable[Exclusion] = EXCLUDED, error: type[UserError] = UserError
) -> None:
    """Raises an error if the request has features that exclude each other.

    Args:
      asked: feature -> its text in the user's request; "" if it was not requested.
    """
    for each in excluded:
        one, other = asked.get(each.first), asked.get(each.second)
        if one and other:
            raise error(f"{one} cannot be combined with {other}: {each.why}; remove one of them")
