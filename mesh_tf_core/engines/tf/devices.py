"""Devices of this process for TensorFlow: virtual CPU devices.

TensorFlow fixes its devices and threads when it first runs an operation, so `prepare` is called before,
exactly once.

Threads: all virtual CPU devices share one pool of intra-op threads. With at least as many devices as cores,
every operation runs on one thread: the devices give the parallelism (a prototype's step took 12-19 % less
time than with the default), and a virtual device then behaves like one core, as calibration assumes. With
fewer devices than cores, TensorFlow's default (all cores) stays.
"""

from mesh_tf_core.cores import cores
from mesh_tf_core.engines.tf.loading import tensorflow
from mesh_tf_core.errors import UserError

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
