"""Why a measured step time may be far from the predicted one."""

import json
from collections.abc import Iterator, Sequence

from costmodels.calibration.clock import FOREIGN
from costmodels.calibration.runner import machine
from costmodels.hardware import Hardware
from layoutopt.plan.units import digits, seconds_text
from mesh_tf_core.ir.mesh import Mesh

FAR = 1.5
"""Ratio of measured and predicted time, either way, from which the difference is reported."""
SLOWER = 1.1
"""Ratio of the calibration's reference, now to then, from which the machine counts as slower."""
CONDITIONS = ("processor", "cores", "mesh", "engine")
"""The conditions of a calibration, as its profile records them."""


def runs_on(engine: str, hardware: Hardware) -> bool:
    """True if the devices of a run are such a machine's: accelerators, or virtual devices of a host on the
    engine that the machine describes (XLA compiles a whole program on some, `Hardware.compiler`)."""
    from mesh_tf_core.engines.jax import compat

    accelerated = engine == "jax" and compat.accelerated()
    if accelerated or not hardware.is_host:
        return accelerated and not hardware.is_host
    return engine != "lockstep" and (hardware.compiler == "xla-cpu") == (engine == "jax")


def difference_notes(
    times: Sequence[tuple[float, float]],
    mesh: Mesh,
    engine: str,
    hardware: Hardware,
    load: float | None = None,
    drift: float | None = None,
    compiled: bool = False,
) -> tuple[str, ...]:
    """One note if measured and predicted times differ by more than half, with the possible causes; else none.

    Args:
      times: predicted and measured seconds of every layout that ran.
      engine: the engine that ran the layouts.
      load: share of the cores that other processes used during the steps (None: unknown).
      drift: seconds of the calibration's reference now, relative to then (None: unknown).
      compiled: the measured time includes compilation.
    """

    def off(time: tuple[float, float]) -> float:
        return max(time) / min(time)

    far = [time for time in times if min(time) > 0 and off(time) > FAR]
    if not far:
        return ()
    predicted, measured = max(far, key=off)
    many = (
        f"in {len(far)} of {len(times)} layouts the measured and predicted times differ by more than half; "
    )
    took = f"a step took {seconds_text(measured)}, {digits(measured / predicted, 2)} times the predicted"
    said = [f"{many + 'at worst, ' if len(times) > 1 else ''}{took} {seconds_text(predicted)}"]
    if compiled:
        said.append("The only step includes compilation: train for more steps")
    said += _causes(mesh, engine, hardware, load, drift)
    return (". ".join(said if said[1:] else [*said, "The cause is unknown"]),)


def _causes(
    mesh: Mesh, engine: str, hardware: Hardware, load: float | None, drift: float | None
) -> Iterator[str]:
    """What may be why; the load in any case, for a low one is no cause."""
    if not runs_on(engine, hardware):
        yield f"The prediction is for {hardware.name}, but the steps ran on other devices"
        return
    made = {} if hardware.calibration is None else json.loads(hardware.calibration.machine)
    now = {**machine(), "mesh": str(mesh), "engine": engine}
    known = [n for n in CONDITIONS if n in made and "machines" not in made]
    changed = [f"{n} {made[n]} (here {now[n]})" for n in known if made[n] != now[n]]
    on = f' --mesh "{mesh}"' if mesh.devices > 1 else ""
    calibrate = (
        f"layoutopt calibrate{on}{'' if engine == 'local' else f' --engine {engine} --out PROFILE.json'}"
    )
    if not made.get("measured", hardware.calibrated):
        yield f"{hardware.name} is not calibrated for this machine: run `{calibrate}`"
    elif changed:
        yield f"{hardware.name} was calibrated on {', '.join(changed)}: run `{calibrate}`"
    if drift is not None and drift > SLOWER:
        yield f"The calibration's reference takes {digits(drift, 2)} times as long now: run `{calibrate}`"
    if load is not None and hardware.is_host:
        then = made.get("foreign", 0.0)
        before = f" and {then:.0%} during calibration" if "foreign" in made else ""
        again = "calibrate and measure" if then > FOREIGN else "measure"
        remedy = f": close them, then {again} again" if max(load, then) > FOREIGN else ""
        yield f"Other processes used {load:.0%} of the cores during the steps{before}{remedy}"
