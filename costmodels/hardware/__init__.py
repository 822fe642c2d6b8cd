"""Hardware descriptions: data files whose numbers carry source and date, read into frozen values."""

from costmodels.hardware.curve import Curve, monotone
from costmodels.hardware.links import GpuCluster, Protocol, SharedMemory, SwitchReduce, Torus, Wraparound
from costmodels.hardware.load import (
    HardwareError,
    check_framework,
    load_hardware,
    machine_of,
    numbers_of,
    preset_content,
    profile_of,
    read_hardware,
    split_name,
    with_settings,
    write_profile,
)
from costmodels.hardware.measured import CollectiveCurve, ComputeCurve, Efficiency
from costmodels.hardware.model import Calibration, Chip, Hardware, MatrixUnit, Registers
from costmodels.hardware.numbers import Number
from costmodels.hardware.vary import drawn, varied, with_bandwidth
from costmodels.presets import hardware_names

# fmt: off
__all__ = [
    "Calibration", "Chip", "CollectiveCurve", "ComputeCurve", "Curve", "Efficiency",
    "GpuCluster", "Hardware", "HardwareError", "MatrixUnit", "Number", "Protocol", "Registers",
    "SharedMemory", "SwitchReduce", "Torus", "Wraparound", "check_framework", "drawn", "hardware_names",
    "load_hardware", "machine_of", "monotone", "numbers_of", "preset_content", "profile_of", "read_hardware",
    "split_name", "varied", "with_bandwidth", "with_settings", "write_profile",
]
# fmt: on
