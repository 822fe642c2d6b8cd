"""Everything of JAX that no release promises to keep: devices, meshes, `shard_map`, 64-bit numbers, TPUs that
are not there.
"""

import contextlib
import importlib.util
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from mesh_tf_core.errors import UserError, not_installed
from mesh_tf_core.ir.mesh import Mesh


def placed(mesh: Mesh, found: Sequence[Any], slices: Mapping[str, int] | None = None) -> list[Any]:
    """JAX's devices by rank of the mesh.

    Args:
      found: as many as the mesh has, of one slice after the other.
      slices: mesh axis -> number of slices that it spans in the predicted plan. If the machine has other
        slices, the first axes span them, because the last axes communicate most.
    """
    groups: dict[int, list[Any]] = {}
    for device in found:
        groups.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    over = _over(mesh, len(groups), slices or {})
    if over is None or len({len(group) for group in groups.values()}) > 1:
        return list(found)  # no axes fill the slices evenly: rank by rank
    inside = [n // s for n, s in zip(mesh.shape, over, strict=True)]
    grid = np.empty((len(groups), *inside), dtype=object)
    for at, group in enumerate(groups.values()):
        grid[at] = _on_links(inside, group)
    count = len(inside)
    pairs = [i for axis in range(count) for i in (axis, count + axis)]
    return list(grid.reshape(*over, *inside).transpose(pairs).flat)


def _over(mesh: Mesh, count: int, slices: Mapping[str, int]) -> list[int] | None:
    """For every axis over how many slices it lies; None if no such axes fill them all."""
    given = [slices.get(axis, 1) for axis in mesh.names]
    if math.prod(given) == count and all(n % s == 0 for n, s in zip(mesh.shape, given, strict=True)):
        return given
    out = []
    for size in mesh.shape:
        out.append(math.gcd(size, count))
        count //= out[-1]
    return out if count == 1 else None


def _on_links(shape: Sequence[int], devices: Sequence[Any]) -> Any:
    """Devices of one slice as a grid of that shape: on a TPU's torus by JAX's own rules, else in order."""
    plain = np.empty(len(devices), dtype=object)
    plain[:] = devices
    if devices[0].platform != "tpu":
        return plain.reshape(shape)
    from jax.experimental import mesh_utils

    try:
        return np.asarray(mesh_utils.create_device_mesh(shape, list(devices)), dtype=object).reshape(shape)
    except (
        NotImplementedError,
        ValueError,
        AssertionError,
    ):  # axes that fit no torus axes, or chips with gaps
        return plain.reshape(shape)


HOST = "pinned_host"
"""JAX's kind of memory of the hosts that devices read and write."""
SUPPORTED = ("0.10", "0.11")
"""The series of JAX with these entry points."""


def require(package: str = "jax") -> None:
    """UserError unless JAX of the supported series (and `package`, jax or libtpu) is installed.

    Loads nothing.
    """
    for name in dict.fromkeys(("jax", package)):
        if importlib.util.find_spec(name) is None:
            raise not_installed(name, "tpu" if package == "libtpu" else "jax")
    found = metadata.version("jax")
    if ".".join(found.split(".")[:2]) not in SUPPORTED:
        series = " and ".join(f"{known}.*" for known in SUPPORTED)
        raise UserError(
            f"layoutopt supports jax {series}, but jax {found} is installed; run: pip install "
            "'layoutopt[jax]'"
        )


def installed() -> bool:
    """True if JAX is there; loads nothing."""
    return importlib.util.find_spec("jax") is not None


def stay_on_cpu() -> None:
    """Keeps JAX, if it has not started, from looking for accelerators: it only compiles for them.

    Without this a machine with libtpu and no TPU waits for a metadata server that does not answer.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    # Without a chip nothing is shared, so several processes may compile at once.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


_CHIPS = {
    "nvidia[0-9]*": ("jax-cuda12-plugin", "jax-cuda13-plugin"),
    "kfd": ("jax-rocm60-plugin", "jax-rocm7-plugin"),
    "accel[0-9]*": ("libtpu",),
    "vfio/[0-9]*": ("libtpu",),
}
"""Files in /dev of accelerators, and the packages by which JAX uses them."""


def accelerated() -> bool:
    """True if JAX would find a GPU or a TPU here; starts nothing. JAX_PLATFORMS decides, if it is set."""
    if named := os.environ.get("JAX_PLATFORMS"):
        return named != "cpu"
    here = (packages for pattern, packages in _CHIPS.items() if any(Path("/dev").glob(pattern)))
    return any(_installed(package) for packages in here for package in packages)


def make_ready() -> None:
    """Before JAX starts: UserError unless it is here; it looks for accelerators only where there are some."""
    require()
    if not accelerated():
        stay_on_cpu()


def running() -> bool:
    """True if JAX has its devices in this process already; starts nothing."""
    if "jax" not in sys.modules:
        return False
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def _installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def device_count() -> int:
    """Devices that JAX has, in all processes of a job; starts JAX."""
    make_ready()
    import jax

    return int(jax.device_count())


def device_kind() -> tuple[str, str]:
    """Returns the name that JAX gives its devices, and their platform: cpu, gpu or tpu; starts JAX."""
    make_ready()
    import jax

    found = jax.devices()[0]
    return str(found.device_kind), str(found.platform)


def devices(count: int, processes: int = 1) -> tuple[Any, ...]:
    """The first `count` devices of this process, or all of a job's, divided equally; without an accelerator,
    virtual CPU devices, which are created here if JAX has not started.

    Raises:
      UserError: there are others.
    """
    make_ready()
    import jax

    own = count // processes
    # RuntimeError: JAX already runs, with the devices that it has.
    with contextlib.suppress(RuntimeError):
        if jax.config.jax_num_cpu_devices < own:
            jax.config.update("jax_num_cpu_devices", own)
    found = sorted(jax.devices(), key=lambda d: (getattr(d, "slice_index", 0), d.process_index, d.id))
    here = len(jax.local_devices())
    if processes > 1 and (len(found) != count or here != own):
        raise UserError(
            f"the mesh needs {own} devices in each of {processes} processes, but JAX found {here} devices "
            f"({found[0].platform}) in this process and {len(found)} in total; change the size of the mesh, "
            "or assign each process its own devices (JAX_LOCAL_DEVICE_IDS, CUDA_VISIBLE_DEVICES)"
        )
    if len(found) < count:
        raise UserError(
            f"the mesh needs {count} devices, but JAX in this process has {len(found)} "
            f"({found[0].platform}); use a smaller mesh, or start a new process with JAX_PLATFORMS=cpu "
            "to run on virtual CPU devices"
        )
    return tuple(found[:count])


LONG = 0.3
"""Seconds of compilation from which the result is cached."""
MOST_KEPT = 1 << 30
"""Bytes of compiled programs that are kept."""


def keep_compiled(place: Path) -> None:
    """Caches compiled programs in a folder for the next process; the oldest are removed beyond `MOST_KEPT`.

    A folder that the user named (JAX_COMPILATION_CACHE_DIR) is kept. Compiled programs are code, so one to
    which others could write is not used.
    """
    import jax

    if jax.config.jax_compilation_cache_dir:
        return
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            return
        entries = [(e.stat(), e.path) for e in os.scandir(place) if e.is_file(follow_symlinks=False)]
        room = MOST_KEPT
        for status, path in sorted(entries, key=lambda entry: entry[0].st_mtime, reverse=True):
            room -= status.st_size
            if room < 0:
                os.unlink(path)
    except OSError:  # no room, or another process tidies too
        return
    jax.config.update("jax_compilation_cache_dir", str(place))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LONG)


def compiled(lowered: Any) -> Any:
    """The executable of a lowered program: compiled, or read from the cache.

    An entry that cannot be read, such as one whose writer was killed, is removed, because JAX would not
    overwrite it; entries of other programs with the same name are removed too.
    """
    import jax

    def say(message: Warning | str, *rest: Any) -> None:
        text = str(message)
        if not text.startswith("Error reading persistent compilation cache"):
            shown(message, *rest)
            return
        name = text.split("'")[1]
        for entry in Path(jax.config.jax_compilation_cache_dir).glob(f"{name}-*-cache"):
            entry.unlink(missing_ok=True)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", "Error reading persistent compilation cache")
        shown = warnings.showwarning
        warnings.showwarning = say  # type: ignore[assignment]
        return lowered.compile()


def device_mesh(mesh: Mesh, found: Sequence[Any]) -> Any:
    """JAX's mesh over devices by rank."""
    import jax

    return jax.sharding.Mesh(np.array(found, dtype=object).reshape(mesh.shape), mesh.names)


def abstract_mesh(mesh: Mesh) -> Any:
    """JAX's mesh without devices: enough to lower, not to compile."""
    import jax

    return jax.sharding.AbstractMesh(mesh.shape, mesh.names)


def topology_mesh(topology: str, mesh: Mesh) -> Any:
    """A mesh over the chips of a TPU that need not be there, as JAX itself lays axes on the torus.

    Args:
      topology: the compiler's name, as v5e:2x4.

    Raises:
      UserError: libtpu is missing, the compiler does not know the name, or the number of devices differs from
        the mesh's.
    """
    require("libtpu")
    stay_on_cpu()
    from jax.experimental import topologies

    # A v4 chip is sold as one device of two cores, but compiled for as two unless the compiler is told.
    chip = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    try:
        found = topologies.get_topology_desc(platform="tpu", topology_name=topology, **chip).devices
    except Exception as error:  # the compiler's own kinds of error; all say that the name is not one
        said = " ".join(str(error).split())
        raise UserError(
            f"the TPU compiler does not support topology {topology!r} ({said[:200]}); write "
            "GENERATION:AxB, e.g. v5e:2x4, or GENERATION:AxBxC, e.g. v5p:4x4x4"
        ) from None
    if len(found) != mesh.devices:
        raise UserError(
            f"topology {topology} has {len(found)} devices, but mesh [{mesh}] has {mesh.devices}; choose "
            "a topology and a mesh of the same size"
        )
    return device_mesh(mesh, placed(mesh, found))


def sharding(mesh: Any, splits: Sequence[tuple[str, ...]], host: bool = False) -> Any:
    """The sharding of an array on JAX's mesh, or on its devices' hosts: for every dimension the axes that
    split it, the major one first."""
    import jax

    kind = {"memory_kind": HOST} if host else {}
    return jax.sharding.NamedSharding(mesh, partition(splits), **kind)


def transferred(array: Any, to_host: bool) -> Any:
    """An array, or a piece of one in a function that JAX compiles, on the other side of the host link."""
    import jax

    return jax.device_put(array, jax.memory.Space.Host if to_host else jax.memory.Space.Device)


def partition(splits: Sequence[tuple[str, ...]]) -> Any:
    """The same without the mesh."""
    import jax

    return jax.sharding.PartitionSpec(*(axes or None for axes in splits))


def per_device(function: Callable[..., Any], mesh: Any, inputs: Any, outputs: Any) -> Callable[..., Any]:
    """`function` of pieces as one of whole arrays; `inputs` and `outputs` are trees of `partition`s."""
    import jax

    return jax.shard_map(function, mesh=mesh, in_specs=inputs, out_specs=outputs, check_vma=False)


def wide_numbers(needed: bool) -> AbstractContextManager[Any]:
    """64-bit numbers are 64-bit numbers inside; by default JAX halves them."""
    if not needed:
        return contextlib.nullcontext()
    import jax

    return jax.enable_x64(True)


def compile_errors() -> tuple[type[Exception], ...]:
    """The exceptions that a compiler raises when it refuses a program."""
    import jax

    return (jax.errors.JaxRuntimeError, NotImplementedError)
