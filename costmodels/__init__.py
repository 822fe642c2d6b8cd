"""Cost models: hardware descriptions and the seconds, bytes and peak memory of a lowered program."""

from costmodels.frameworks import Framework, FrameworkError, framework_names, load_framework
from costmodels.hardware import Hardware, HardwareError, hardware_names, load_hardware
from costmodels.kernels.compute import ComputeCost, Quantity, compute_cost, compute_seconds
from costmodels.network.closed_forms import CollectiveCost
from costmodels.network.collectives import COLLECTIVES, collective_cost, collective_seconds, full_bytes
from costmodels.network.route import Route
from costmodels.network.topology import MeshPlacement, place

__all__ = [
    "COLLECTIVES", "CollectiveCost", "ComputeCost", "Framework", "FrameworkError", "Hardware",
    "HardwareError", "MeshPlacement", "Quantity", "Route", "collective_cost", "collective_seconds",
    "compute_cost", "compute_seconds", "framework_names", "full_bytes", "hardware_names", "load_framework",
    "load_hardware", "place",
]  # fmt: skip
