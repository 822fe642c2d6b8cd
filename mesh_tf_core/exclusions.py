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
EXCLUDED = (
    Exclusion(REPLICAS, STAGES, "a replica cannot be split into pipeline stages"),
    Exclusion(REPLICAS, SCHEDULE, "a replica cannot be split into pipeline stages"),
    Exclusion(REPLICAS, MEANS, "each replica has its own running means"),
    Exclusion(MEETINGS, REPLICAS, "with meet, every job trains a single replica"),
    Exclusion(MEETINGS, CLUSTER, "with meet, every replica runs in a single process"),
    Exclusion(DECODING, MICROBATCHES, "decoding computes no gradients to accumulate over microbatches"),
    Exclusion(
        DECODING,
        STAGES,
        "when decoding, a token must pass through all layers before the next token can start",
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
