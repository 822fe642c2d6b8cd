"""Engines: the homes in which a program runs. Names are loaded on first use, as a search runs nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mesh_tf_core.lazy import lazily

if TYPE_CHECKING:
    from mesh_tf_core.engines.jax.cluster import Cluster
    from mesh_tf_core.engines.opening import KINDS, chosen, device_count, open_engine, prepare, running
    from mesh_tf_core.engines.protocol import Engine

__all__ = ["KINDS", "Cluster", "Engine", "chosen", "device_count", "open_engine", "prepare", "running"]

__getattr__, __dir__ = lazily(__name__, __all__)
