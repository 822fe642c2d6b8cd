"""Public functions: a command parses its options, calls the function of its name, and renders the result."""

from __future__ import annotations

TYPE_CHECKING = False  # typing's own takes longer to import than everything else here
if TYPE_CHECKING:
    from typing import Any

    from layoutopt.api.comparing import candidates
    from layoutopt.api.explaining import explain
    from layoutopt.api.learning import learn
    from layoutopt.api.pricing import cost, lint
    from layoutopt.api.replicas import choose_replicas
    from layoutopt.api.running import validate, verify
    from layoutopt.importers.huggingface import from_huggingface
    from layoutopt.importers.jax.model import from_jax
    from layoutopt.importers.torch.model import from_torch
    from layoutopt.optimize.entry import AUTO, Limits, search
    from layoutopt.plan.build import Plan, load_plan
    from layoutopt.sizing.sizing import size
    from layoutopt.space.decisions import SearchSpace

# fmt: off
__all__ = [
    "AUTO", "Limits", "Plan", "SearchSpace", "candidates", "choose_replicas", "cost", "explain",
    "from_huggingface", "from_jax", "from_torch", "learn", "lint", "load_plan", "search", "size",
    "validate", "verify",
]
# fmt: on


def __getattr__(name: str) -> Any:
    """Loads what is asked for when it is first used."""
    from mesh_tf_core.lazy import load

    return load(__name__, name)
