"""The pairs that searches, and questions about their plans, cannot combine (`mesh_tf_core.exclusions`)."""

from __future__ import annotations

from collections.abc import Mapping

from layoutopt.space.objective import Objective
from mesh_tf_core.exclusions import REPLICAS, Exclusion
from mesh_tf_core.exclusions import refuse as refuse_pairs

MEMORY, REFINE, CHECK, SENSITIVITY, VERIFY = "memory", "refine", "check", "sensitivity", "verify"
EXCLUDED = (
    Exclusion(REFINE, MEMORY, "it looks for less time"),
    Exclusion(CHECK, MEMORY, "it shows that no layout is faster"),
    Exclusion(SENSITIVITY, MEMORY, "it varies the numbers of a step"),
    Exclusion(VERIFY, REPLICAS, "a step and a synchronisation are two programs, and one is compiled"),
)


def refuse(asked: Mapping[str, str]) -> None:
    """`mesh_tf_core.exclusions.refuse` by this table."""
    refuse_pairs(asked, EXCLUDED)


def memory_words(objective: str) -> str:
    """The user's words for the objective of least memory; "" for another objective."""
    return "--objective memory" if objective == Objective.MEMORY else ""
