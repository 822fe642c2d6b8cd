"""Devices of this process for TensorFlow: virtual CPU devices.

TensorFlow fixes its devices and threads when it first runs an operation, so `prepare` is called before,
exactly once.

Threads: all virtual CPU devices share one pool of intra-op threads. With at least as many devices as cores,
every operation runs on one thread: the devices give the parallelism (a prototype's step took 12-19 % less
time than with the default), and a virtual device then behaves like one core, as calibration assumes. With
fewer devices than cores, TensorFlow's default (all cores) stays.
"""

import importlib.util
import sys
from functools import cache
from typing import Any

from mesh_tf_core.cores import cores
from mesh_tf_core.errors import UserError, not_installed

UNASKED = ("keras", "jax", "h5py")
"""Libraries that TensorFlow loads for saved models and phones, two thirds of its start; no engine uses them.
It continues without them, and a later import gets them."""


@cache
def installed() -> bool:
    """True if TensorFlow is there; loads nothing."""
    return importlib.util.find_spec("tensorflow") is not None


def require() -> None:
    """UserError unless TensorFlow is installed; loads nothing."""
    if not installed():
        raise not_installed("TensorFlow", "tensorflow", "the engine 'local'")


def tensorflow() -> Any:
    """The module; the loaded one, if there is one. UserError where it is not installed."""
    require()
    if "tensorflow" not in sys.modules:
        absent = [name for name in UNASKED if name not in sys.modules]
        sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]
        try:
            import tensorflow
        finally:
            for name in absent:
                del sys.modules[name]
    import tensorflow

    return tensorflow


SPARE = 8
"""Virtual devices made at least: they cost nothing, and later engines of the process may need them."""


def prepare(devices: int) -> tuple[str, ...]:
    """Names of `devices` virtual CPU devices.

    Raises:
      UserError: TensorFlow already runs with fewer devices.
    """
    tf = tensorflow()

    make_virtual(devices)
    found = tf.config.list_logical_devices("CPU")
    if len(found) < devices:
        raise UserError(
            f"the mesh needs {devices} devices, but TensorFlow has already started in this process with "
            f"{len(found)} CPU devices; call mesh_tf_core.engines.prepare({devices}) before the first "
            "use of TensorFlow, or start a new process"
        )
    return tuple(d.name for d in found[:devices])


def make_virtual(devices: int) -> None:
    """Makes virtual CPU devices and sets threads, unless TensorFlow already runs."""
    tf = tensorflow()

    cpu = tf.config.list_physical_devices("CPU")[0]
    existing = tf.config.get_logical_device_configuration(cpu)
    if existing is None or len(existing) < devices:
        count = max(devices, SPARE)
        try:
            tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * count)
            if devices >= cores() > 1:
                tf.config.threading.set_intra_op_parallelism_threads(1)
        except RuntimeError:  # TensorFlow has started; the caller compares counts
            return
