"""The pairs that searches, and questions about their plans, cannot combine (`mesh_tf_core.exclusions`)."""

from __future__ import annotations

from collections.abc import Mapping

from layoutopt.space.objective import Objective
from mesh_tf_core.exclusions import REPLICAS, Exclusion
from mesh_tf_core.exclusions import refuse as refuse_pairs

MEMORY, CHECK, SENSITIVITY, VERIFY = "memory", "check", "sensitivity", "verify"
EXCLUDED = (
    Exclusion(CHECK, MEMORY, "the check proves that no layout is faster"),
    Exclusion(SENSITIVITY, MEMORY, "the sensitivity analysis compares step times"),
    Exclusion(VERIFY, REPLICAS, "`verify` compiles one program, but steps and synchronisations are two"),
)


def refuse(asked: Mapping[str, str]) -> None:
    """`mesh_tf_core.exclusions.refuse` by this table."""
    refuse_pairs(asked, EXCLUDED)


def memory_words(objective: str) -> str:
    """The user's words for the objective of least memory; "" for another objective."""
    return "--objective memory" if objective == Objective.MEMORY else ""
