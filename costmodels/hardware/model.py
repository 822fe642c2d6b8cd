"""Hardware as cost models use it: frozen values in SI units, every number with its source and date.

A *device* is an element of a mesh, which runs one copy of the program: a GPU, a TPU chip, or half a chip if
the two cores have separate memory (TPU v2, v3, v7). Files give numbers per chip, as sources print them;
`Hardware` gives them per device. A field states the quantity of its number, and so how files say it
(`costmodels.hardware.schema` reads them).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field

from costmodels.frameworks import DEFAULT, load_framework
from costmodels.frameworks.framework import ChipKind, Text
from costmodels.hardware.links import GpuCluster, SharedMemory, Torus
from costmodels.hardware.measured import CollectiveCurve, ComputeCurve, Efficiency
from costmodels.hardware.numbers import (
    Bandwidth,
    ByHead,
    ByName,
    Checked,
    Count,
    Date,
    Fraction,
    Memory,
    Number,
    PositiveFraction,
    Rate,
    ReadAs,
    Time,
    mapping,
)
from costmodels.hardware.peaks import Tf32, computed_in, note_of, peaks_fault
from mesh_tf_core.errors import UserError

CompilerName = Literal[
    "none", "xla", "xla-tpu", "xla-gpu", "xla-cpu", "launched", "hand-fused", "eager", "eager-norms", "local"
]
"""The compiler profiles that a file may name (`costmodels.pricing.compilers`)."""
Purpose = Literal["gradient", "parameter", "activation", "experts", "paired_experts", "all_to_all"]
"""The classes of messages of which a file may say what is hidden (`costmodels.pricing.overlap`)."""
HeldRule = Literal[
    "loss_copies", "step_copies", "step_gradients", "gradient_bytes", "gathers", "to_the_end", "buffers"
]
"""The rules of memory and recomputation that a file may give a number (`liveness.MemoryRules`)."""


@dataclass(frozen=True, slots=True)
class MatrixUnit:
    """The matrix unit: the sizes m, n, k are padded to; `processors` work on tiles in waves."""

    m: Count
    n: Count
    k: Count
    processors: Count | None = None


@dataclass(frozen=True, slots=True)
class Registers:
    """Memory tiles of a vector unit: `lanes` × `sublanes` elements of a dtype; bytes pad to whole tiles."""

    lanes: Count
    sublanes: Annotated[ByName, mapping(str, Count)]


@dataclass(frozen=True, slots=True)
class Chip(Checked):
    """One chip. Rates and sizes are per chip, not per device.

    `element_time`: seconds in which one device brings an element through the registers of its vector unit.
    `launch_interval`: a host that launches kernels one by one needs so long for each; None: it does not
    launch them (one program is compiled for the step). `host_interval`: its time for each in a whole step,
    which is no shorter than all of them together.
    `sustained`: what whole steps keep of `matmul_efficiency`, which is of one product alone, the best of a
    scan: clocks fall under load, and not every product has the best shape. None: all of it.
    `unaligned_efficiency`: what products of 16-bit matrices keep whose rows begin at odd elements: copies of
    4 bytes and more, as tensor cores are fed by, cannot be used. None: all (a compiler pads such matrices).
    `grouped_efficiency`: what products keep whose rows have matrices of their groups, as those of experts.
    None: all.
    `attention_efficiency`: of kernels that compute attention as one; None: as any product.
    `attention_block`: queries and keys of the blocks that these work out as wholes; None: pairs that the mask
    hides cost nothing.
    `published_mfu`: the most that a published run reached (`costmodels.utilisation`, from its seconds); no
    price reads it, plans are held against it. None: no run is known.
    `chunk_efficiency`, `chunk_products`, `chunk_vector`: shares of the bandwidth, of the peak and of the
    vector rate that a library's kernels on chunks of states reach (delta rules, state spaces); None:
    `memory_efficiency`, and all. `chunk_time`: seconds from one chunk to the next, at least.
    `tap_time`: seconds in which one device adds an element of what one tap of a convolution makes, with
    channels padded to the lanes.
    `host_link`: between a chip and its host's memory, one way while nothing goes the other; `host_memory`: a
    chip's share of that. None: of the first, none is known, so nothing lies on the host; of the second, it is
    not checked. `host_update`: rate of optimizer state there that the host updates itself; None: the state
    moves to the chip and back.
    `memory_doubt`: share of the usable memory that a step may need beyond what is predicted: what allocators
    cannot use and libraries take, and what predictions are too low. No price and no limit reads it; a plan
    that leaves less is doubted (`layoutopt.plan.known`). None: nothing is known.
    `product_launch`: launch of a matrix product whose operands are on the chip, as those of small products
    are; `matmul_efficiency` then begins with such products. None: as any kernel's.
    """

    devices: Count
    peak_flops: Annotated[ByName, mapping(str, Rate, 1)]
    memory: Memory
    memory_reserve: Memory
    memory_bandwidth: Bandwidth
    memory_efficiency: PositiveFraction
    launch_overhead: Time
    matrix_unit: MatrixUnit
    matmul_efficiency: Efficiency
    vector_flops: Rate | None = None
    element_time: Time | None = None
    registers: Registers | None = None
    host_cores: Count | None = None
    launch_interval: Time | None = None
    host_interval: Time | None = None
    sustained: PositiveFraction | None = None
    unaligned_efficiency: PositiveFraction | None = None
    grouped_efficiency: PositiveFraction | None = None
    attention_efficiency: ByHead | None = None
    attention_block: Count | None = None
    published_mfu: PositiveFraction | None = None
    chunk_efficiency: PositiveFraction | None = None
    chunk_products: PositiveFraction | None = None
    chunk_vector: PositiveFraction | None = None
    chunk_time: Time | None = None
    tap_time: Time | None = None
    product_launch: Time | None = None
    host_link: Bandwidth | None = None
    host_memory: Memory | None = None
    host_update: Bandwidth | None = None
    memory_doubt: Fraction | None = None

    def fault(self) -> str | None:
        if self.memory_reserve.value >= self.memory.value:
            return "memory_reserve must be less than memory"
        return peaks_fault(dict(self.peak_flops))


def _json(form: Any) -> ReadAs:
    return ReadAs(form, lambda found: json.dumps(found, sort_keys=True))


JsonMapping = Annotated[str, _json(dict[str, Any])]


@dataclass(frozen=True, slots=True)
class Calibration:
    """The origin of a profile; mappings and measurements are JSON text, so that the value is hashable. `fit`
    should name its method and held-out error, `machine` its noise."""

    date: Date
    machine: JsonMapping
    versions: JsonMapping
    fit: JsonMapping
    measurements: Annotated[str, _json(list[dict[str, Any]])]
    base: Text


@dataclass(frozen=True)
class Hardware(Checked):
    """A machine for which programs are predicted. All numbers below are per DEVICE and in SI units.

    Attributes:
      compiler: the profile of the compiler or engine of its programs (`costmodels.pricing.compilers`).
      tf32: the products of float32 that its software computes in TF32, where the chip has it.
      framework: the software whose overlays its numbers have (`costmodels.load_framework`).
      holds: numbers of the rules of memory, by their names.
      jax_devices: JAX's names of such a device (`jax.Device.device_kind`).

    Example:
      >>> import costmodels
      >>> machine = costmodels.load_hardware("tpu-v5e")
      >>> machine.peak_flops("bfloat16")
      197000000000000.0
    """

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", allow_inf_nan=False)
    format: Literal["layoutopt-hardware/1"] = field(kw_only=True)
    name: Text
    kind: ChipKind
    summary: Text
    device: Text
    calibrated: bool
    chip: Chip
    topology: Annotated[Torus | GpuCluster | SharedMemory, Field(discriminator="kind")]
    compiler: CompilerName = "none"
    tf32: Tf32 = "products"
    framework: Text = DEFAULT
    jax_devices: tuple[Text, ...] = ()
    overlap: Annotated[tuple[tuple[Purpose, Number], ...], mapping(Purpose, Fraction)] = ()
    holds: Annotated[tuple[tuple[HeldRule, Number], ...], mapping(HeldRule, Count)] = ()
    collective_curves: tuple[CollectiveCurve, ...] = ()
    compute_curves: tuple[ComputeCurve, ...] = ()
    calibration: Calibration | None = None
    notes: tuple[Text, ...] = ()

    def fault(self) -> str | None:
        lacks = self.calibrated and self.calibration is None
        return "'calibrated' is true but 'calibration' is missing" if lacks else None

    @property
    def tiles(self) -> bool:
        """True if arrays lie in tiles of its registers (`costmodels.kernels.quantities.tiling`)."""
        return self.chip.registers is not None

    @cached_property
    def devices_per_chip(self) -> int:
        return int(self.chip.devices.value)

    def chips(self, devices: int) -> int:
        """Number of chips of so many devices; virtual devices of a CPU belong to one machine."""
        return 1 if self.chip.host_cores is not None else -(-devices // self.devices_per_chip)

    def chips_note(self, devices: int) -> str:
        """Number of chips of so many devices in a sentence; '' where each device is a whole chip or more."""
        are = f"{devices:,} devices of {self.name} are {self.chips(devices):,} chips"
        return f"{are}: a device is {self.device}" if min(devices, self.devices_per_chip) > 1 else ""

    @cached_property
    def devices_per_process(self) -> int | None:
        """Devices that a process holds, in the order of ranks; None unless collectives were measured so."""
        found = self.topology.devices_per_process if isinstance(self.topology, SharedMemory) else None
        return None if found is None else int(found.value)

    @cached_property
    def memory_bytes(self) -> float:
        """Memory of one device."""
        return self.chip.memory.value / self.devices_per_chip

    @cached_property
    def usable_memory_bytes(self) -> float:
        """Memory of one device without the runtime's reserve."""
        return (self.chip.memory.value - self.chip.memory_reserve.value) / self.devices_per_chip

    @property
    def is_host(self) -> bool:
        """True if its devices are cores of the host and share its memory."""
        return self.chip.host_cores is not None

    @property
    def hosts_apart(self) -> bool:
        """True if something may lie in the hosts' memory: its link is known, and it is another memory."""
        return self.host_link is not None and not self.is_host

    @cached_property
    def host_link(self) -> float | None:
        """Bytes/s between one device and its host's memory, in one direction; None: unknown."""
        link = self.chip.host_link
        return None if link is None else link.value / self.devices_per_chip

    @cached_property
    def host_memory_bytes(self) -> float | None:
        """One device's share of its host's memory, if it is known."""
        memory = self.chip.host_memory
        return None if memory is None else memory.value / self.devices_per_chip

    def host_seconds(self, moved: float, updated: bool = False) -> float:
        """Seconds of a transfer of this many bytes between a device and its host; `updated`: an update reads
        or writes them.

        Raises:
          UserError: nothing is known of the link.
        """
        if updated and self.chip.host_update is not None:
            return moved * self.devices_per_chip / self.chip.host_update.value
        if self.host_link is not None:
            return moved / self.host_link
        if self.is_host:
            return 0.0
        raise UserError(
            f"hardware {self.name}: the bandwidth of the host link is unknown, so nothing can be "
            "offloaded; remove --offload, or set the bandwidth, e.g. --set-hardware host_link=15GB/s"
        )

    @cached_property
    def memory_bandwidth(self) -> float:
        """Peak bytes/s between one device and its memory."""
        return self.chip.memory_bandwidth.value / self.devices_per_chip

    @cached_property
    def _peaks(self) -> dict[str, float]:
        return {dtype: number.value / self.devices_per_chip for dtype, number in self.chip.peak_flops}

    def peak_dtype(self, dtype: str) -> str:
        """The dtype whose peak applies to products of `dtype` (`costmodels.hardware.peaks`)."""
        return computed_in(dtype, self._peaks)

    def peak_flops(self, dtype: str) -> float:
        """Peak FLOP/s of one device for products of `dtype` (see `peak_dtype`)."""
        return self._peaks[self.peak_dtype(dtype)]

    def product_flops(self, dtype: str, convolution: bool = False) -> float:
        """Peak FLOP/s of one device for products of `dtype`, or convolutions, as the software computes them:
        float32 may be slower than the chip could (`tf32`)."""
        allowed = self.tf32 == "products" or (convolution and self.tf32 == "convolutions")
        return self._peaks[computed_in(dtype, self._peaks, tf32=allowed)]

    def peak_note(self, dtype: str) -> str | None:
        """A note on products of `dtype` where the chip has no peak for it, or the software does not use it;
        None: no note. Hosts have one measured rate for all dtypes."""
        if dtype == "float32" and (times := self.peak_flops(dtype) / self.product_flops(dtype)) > 1:
            software, _, options = self.framework.partition(":")
            asked = [*(o for o in options.split(",") if o and not o.startswith("float32=")), "float32=tf32"]
            named = f" (--framework {software}:{','.join(asked)})"
            said = f"{software} computes products of float32 in float32 by default; the peak of TF32"
            said += named if "float32" in load_framework(self.framework).variants else ""
            return f"{said} is {times:.3g} times as high on {self.name}"
        return None if self.is_host else note_of(dtype, self._peaks, self.name)

    def contention(self, devices: int) -> float:
        """The number of devices that share one core when `devices` of them run: 1 unless devices are
        virtual."""
        if self.chip.host_cores is None:
            return 1.0
        return max(1.0, devices / self.chip.host_cores.value)

    def hidden_fraction(self, purpose: str) -> float:
        """Fraction of a collective's time that runs under compute, by its class
        (`costmodels.pricing.overlap`); 0 unless the file has one."""
        known: dict[str, float] = {name: number.value for name, number in self.overlap}
        return known.get(purpose, known.get(purpose.removeprefix("paired_"), 0.0))

    def numbers(self) -> Iterator[tuple[str, Number]]:
        """Every number with its path, for `layoutopt hardware NAME`."""
        yield from _numbers("chip", self.chip)
        yield from _numbers("topology", self.topology)
        yield from _numbers("overlap", self.overlap)
        yield from _numbers("holds", self.holds)

    def curves(self) -> Iterator[tuple[str, CollectiveCurve | ComputeCurve | Efficiency]]:
        """Every measured curve with its path."""
        yield "chip.matmul_efficiency", self.chip.matmul_efficiency
        for c in self.collective_curves:
            over = f" over {c.processes} processes" if c.processes > 1 else ""
            yield f"collective_curves.{c.collective}.{c.group_size}{over}", c
        for k in self.compute_curves:
            yield f"compute_curves.{k.op_class}.{k.dtype}", k


def _numbers(path: str, value: Any) -> Iterator[tuple[str, Number]]:
    if isinstance(value, Number):
        yield path, value
    elif is_dataclass(value):
        for each in fields(value):
            yield from _numbers(f"{path}.{each.name}", getattr(value, each.name))
    elif isinstance(value, tuple):
        for index, item in enumerate(value):
            if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str | int):
                yield from _numbers(f"{path}.{item[0]}", item[1])
            else:
                yield from _numbers(f"{path}.{index}", item)
