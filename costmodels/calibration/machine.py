"""The machine of a calibration, and the conditions that its numbers depend on."""

import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from mesh_tf_core.cores import cores
from mesh_tf_core.reading import read_text


def machine() -> dict[str, Any]:
    """Describes this machine."""
    return {
        "processor": _processor(),
        "cores": cores(),
        "system": platform.platform(),
        "memory_bytes": memory_bytes(),
    }


def together(machines: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Several machines as one: the first one's description, the cores and memory of all."""
    sums = {name: sum(m[name] for m in machines) for name in ("cores", "memory_bytes")}
    return {**machines[0], **sums, **({"machines": len(machines)} if len(machines) > 1 else {})}


def versions(engine: str = "local") -> dict[str, str]:
    """The versions of the software that an engine's measurements depend on."""
    packages = ({"jax": "jaxlib", "lockstep": "numpy"}.get(engine, "tensorflow"), "numpy", "layoutopt")
    return {"python": platform.python_version(), **{name: version_of(name) for name in packages}}


def version_of(package: str) -> str:
    """The installed version, or that there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed as a package"


def memory_bytes() -> int:
    """Physical memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def accelerator_memory_bytes() -> int:
    """Memory that JAX takes of this machine's smallest accelerator."""
    import jax

    return min(int(d.memory_stats()["bytes_limit"]) for d in jax.local_devices())


def _processor() -> str:
    try:
        lines = read_text("/proc/cpuinfo").splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.processor() or platform.machine()
