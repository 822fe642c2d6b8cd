r"""Seconds of one local operation from its quantities: a roofline with padding, efficiency and a launch.

(1) t = launch + max(flop seconds, memory seconds); never less than the interval at which a host launches,
    when the file has one: the device waits for it. Matrix products have a launch of their own where the file
    says so: theirs waits for nothing that comes from memory, since their operands are fetched before
(2) flop seconds of a product = padded FLOPs / (peak(dtype) · efficiency(padded FLOPs) · sustained), where the
    file says what is sustained; of attention in one kernel, FLOPs / (peak(dtype) · efficiency(head)), where
    it says that: below the smallest head that was measured, the softmax bounds the kernel, and the efficiency
    falls with the head's size. A product of matrices whose rows begin at odd elements reaches
    `unaligned_efficiency` of the rate, one of groups of rows (experts) `grouped_efficiency`, where the file
    has them. Without an efficiency of attention, one
    that works on blocks (`Work.blocked`) takes its products and its vector operations / vector rate, one
    after the other; around it, its operands and results pass through the registers
(3) TPU padding: n and k to the width of the matrix unit, m to sublanes, in the better of the two orientations
(4) GPU padding: tiles = ceil(m / tile) · ceil(n / tile) · batch run in waves of one tile per multiprocessor;
    the last wave takes as long as a full one; the tile is the best of the whole one and its halves
(5) flop seconds of anything else = FLOPs / vector rate, when the hardware file has one; a product that pads
    so badly that it is faster there (a few rows, columns or terms) runs there too; work that is fused with a
    product runs beside it: the longer of both counts
(6) memory seconds = bytes / (bandwidth · efficiency). Without a product + elements · element time, when the
    file has one: values are not brought through the registers while others are waited for; with a product
    they are, and the longest counts; of a convolution also what its taps make: padded elements · tap time
    Library kernels that work on chunks of states move bytes at `chunk_efficiency` of the bandwidth, multiply
    at `chunk_products` of the peak, do other work at `chunk_vector` of the vector rate, where the file has
    these, and take no less than `chunk_time` for each of the chunks that wait for each other
(7) virtual devices share cores: everything takes max(1, devices / cores) times as long
(8) measured: t = max(curve(FLOPs or bytes) · contention / contention then, FLOPs / peak, memory seconds)

Nothing is faster than the peak: efficiency is at most 1, and (8) keeps to the roofline.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from costmodels.hardware import ComputeCurve, Hardware
from costmodels.kernels.padding import padding_ratio, up
from mesh_tf_core.errors import UserError
from mesh_tf_core.ir.op import NO_PRODUCT, PRODUCTS, Work

MATMUL_CLASSES = PRODUCTS
"""Kinds of operations whose FLOPs are matrix products (`Op.kind`); no other list repeats them."""
ADDING = "at the rate of adding the partial results of the convolution's taps"
Chooser = Callable[[Any, Any], Any]
"""The smaller or the larger of two."""


@dataclass(frozen=True, slots=True)
class Quantity:
    """The work of one operation on one device.

    Attributes:
      flops: floating-point operations as computed (a multiplication and an addition are two).
      bytes: bytes read and written.
      op_class: one of `MATMUL_CLASSES` (the matrix unit), or another class: 'elementwise', 'gather',
        'reduce', …
      dtype: element type of the operands.
      matmul_dims: (m, n, k, batch) of a product [batch, m, k] x [batch, k, n]. If it is None, no padding is
        counted.
      vector: FLOPs of the element-wise work in a kernel of products, or of a library, beside `flops`.
      elements: the number of elements of the largest array in its element-wise work and reductions.
      unaligned: an operand or the result has rows with an odd number of 2-byte elements.
      work: of the operation: what of it is a convolution's, in blocks, an attention's or of groups.
      tiled: bytes and elements in whole tiles; None if tiles add nothing.
      joins: it runs in one kernel with many others like it, and has no launch of its own.
      chunks: that wait for each other in a library's kernel on chunks of states; None: it is none.
    """

    flops: float
    bytes: float
    op_class: str
    dtype: str
    matmul_dims: tuple[int, int, int, int] | None = None
    vector: float = 0.0
    elements: int = 0
    unaligned: bool = False
    work: Work = NO_PRODUCT
    tiled: tuple[float, float] | None = None
    joins: bool = False
    chunks: int | None = None

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            found = f"{self.flops}, {self.bytes}"
            raise UserError(f"{self.op_class}: flops and bytes are {found}; both must be at least 0")
        dims = self.matmul_dims
        if dims is not None and (len(dims) != 4 or min(dims) < 1):
            raise UserError(f"{self.op_class}: matmul_dims is {dims}; give (m, n, k, batch), all positive")


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """The predicted seconds of one operation and the parts of this time.

    Attributes:
      seconds: the total.
      flop_seconds: seconds of the FLOPs at the reachable rate, including padding.
      memory_seconds: seconds of the bytes at the reachable bandwidth.
      launch_seconds: time to start the kernel.
      padding: padded FLOPs / FLOPs.
      bound: what limits the operation: 'flops', 'memory', 'launch' or 'measured'.
      words: the formula with its numbers.
    """

    seconds: float
    flop_seconds: float
    memory_seconds: float
    launch_seconds: float
    padding: float
    bound: str
    words: str


def compute_seconds(hardware: Hardware, quantity: Quantity, devices: int = 1) -> float:
    """Predicts the seconds of one operation on one device.

    Args:
      hardware: the hardware.
      quantity: the work of the operation on one device.
      devices: the number of devices that run the operation at the same time. Virtual devices that share the
        cores of a host slow each other down; on other hardware the number has no effect.

    Example:
      >>> import costmodels
      >>> work = costmodels.Quantity(2 * 4096**3, 3 * 2 * 4096**2, "matmul", "bfloat16")
      >>> 1e-4 < costmodels.compute_seconds(costmodels.load_hardware("h100"), work) < 1e-2
      True
    """
    return compute_cost(hardware, quantity, devices).seconds


@dataclass(frozen=True, slots=True)
class KernelParts:
    """The seconds of one operation at the full rates, or arrays with those of many, as constants are fitted
    (`costmodels.step_fit`): `sustained` and `memory_efficiency` come last.

    Attributes:
      product: of the matrix unit.
      beside: that follow these, whatever is sustained: the softmax of blocks, attention at a known rate.
      vector: of the same work on the vector unit; infinite where there is none.
      floor: of what runs beside either: fused work, passing, adding, the peak.
      moved: of the bytes.
      passed: of elements that follow these.
      launch: to start.
      in_turn: the bytes wait for the FLOPs.
      interval: between launches, at least.
      rate, padding: of the product, FLOP/s and ratio.
      where: what `floor` is of.
    """

    product: Any
    beside: Any
    vector: Any
    floor: Any
    moved: Any
    passed: Any
    launch: Any
    in_turn: Any
    interval: Any = 0.0
    rate: float = 0.0
    padding: float = 1.0
    where: str = ""

    def flops(self, sustained: Any, least: Chooser = min, most: Chooser = max) -> Any:
        """Seconds of the FLOPs; `least` and `most` choose of numbers, or of arrays."""
        return most(least(self.product / sustained + self.beside, self.vector), self.floor)

    def memory(self, efficiency: Any) -> Any:
        """Seconds of the bytes."""
        return self.moved / efficiency + self.passed

    def seconds(self, flops: Any, memory: Any, least: Chooser = min, most: Chooser = max) -> Any:
        """Seconds of the whole: equation (1)."""
        both = most(flops, memory) + self.in_turn * least(flops, memory)
        return most(self.launch + both, self.interval)


def kernel_parts(hardware: Hardware, quantity: Quantity, devices: int = 1) -> KernelParts:
    """The parts of an operation's time, with the arguments of `compute_seconds`."""
    chip, contention = hardware.chip, hardware.contention(devices)
    moved = contention * (_laid(hardware, quantity)[0] / hardware.memory_bandwidth)
    # The vector unit has one rate for all types, which may be above the peak of a wide one.
    is_product = quantity.op_class in MATMUL_CLASSES
    peak = hardware.product_flops(quantity.dtype, convolution=quantity.work.added is not None)
    at_peak = contention * quantity.flops / peak if is_product else 0.0
    if (curve := _curve(hardware, quantity)) is not None:
        taken = curve.seconds(_amount(curve, quantity)) * contention / hardware.contention(curve.devices)
        return KernelParts(0.0, math.inf, taken, at_peak, moved, 0.0, 0.0, False)
    interval = 0.0 if chip.launch_interval is None or quantity.joins else chip.launch_interval.value
    own = chip.product_launch if quantity.op_class == "matmul" else None
    launch = 0.0 if quantity.joins else contention * (own or chip.launch_overhead).value
    vector = contention * _vector_seconds(hardware, _reached(hardware, quantity))
    passing = contention * _passing_seconds(hardware, _laid(hardware, quantity)[1])
    if quantity.chunks is not None:
        waits = quantity.chunks * chip.chunk_time.value if chip.chunk_time else 0.0
        share, most = (s.value if s else 1.0 for s in (chip.chunk_products, chip.chunk_vector))
        beside = _vector_seconds(hardware, quantity.vector) / most
        waits = max(waits, contention * (quantity.flops / (peak * share) + beside))
        passed = moved / _bandwidth(hardware, quantity)
        return KernelParts(0.0, math.inf, waits, 0.0, 0.0, passed, launch, False, interval)
    if not is_product:
        return KernelParts(0.0, math.inf, vector, 0.0, moved, passing, launch, False, interval)
    known, after, handed, in_turn = _attention(hardware, quantity), 0.0, 0.0, False
    padding = (
        _whole_blocks(hardware, quantity) if known else padding_ratio(chip.matrix_unit, quantity.matmul_dims)
    )
    padded = quantity.flops * padding
    if quantity.work.blocked and not known and chip.vector_flops is not None:
        blocks, after, elements = quantity.work.blocked
        padded, in_turn, handed = blocks * padding, True, contention * _passing_seconds(hardware, elements)
    odd = chip.unaligned_efficiency if quantity.unaligned else None
    uneven = chip.grouped_efficiency if quantity.work.grouped else None
    efficiency = known or math.prod(s.value for s in (odd, uneven) if s) * _efficiency(hardware, padded)
    rate = peak * efficiency
    product, after = contention * padded / rate, contention * _vector_seconds(hardware, after)
    floor, where = max(
        (contention * _vector_seconds(hardware, quantity.vector), "fused"),
        (passing, "passing"),
        (contention * _adding_seconds(hardware, quantity), ADDING),
        (at_peak, "at the peak"),
        key=lambda each: each[0],
    )
    parts = (0.0, product) if known else (product, after)
    vector = math.inf if chip.vector_flops is None else vector
    return KernelParts(*parts, vector, floor, moved, handed, launch, in_turn, interval, rate, padding, where)


def compute_cost(hardware: Hardware, quantity: Quantity, devices: int = 1) -> ComputeCost:
    """Predicts the seconds of one operation on one device and the parts of this time (equations (1) to (8)).

    The arguments are those of `compute_seconds`.
    """
    k, chip = kernel_parts(hardware, quantity, devices), hardware.chip
    sustained = 1.0 if chip.sustained is None else chip.sustained.value
    flops, memory = k.flops(sustained), k.memory(chip.memory_efficiency.value)
    seconds = k.seconds(flops, memory)
    if (curve := _curve(hardware, quantity)) is not None:
        bound = "measured" if seconds == k.vector else "flops" if k.floor >= memory else "memory"
        amount = _amount(curve, quantity)
        words = (
            f"max({k.vector * 1e6:.4g} us measured for {amount:.4g} {curve.against}, {k.floor * 1e6:.4g} us "
            f"at the peak, {memory * 1e6:.4g} us for {quantity.bytes:.4g} bytes)"
        )
        return ComputeCost(seconds, k.floor, memory, 0.0, 1.0, bound, words)
    bound = "launch" if k.launch > max(flops, memory) else "flops" if flops >= memory else "memory"
    words = (
        f"{k.launch * 1e6:.3g} us launch + max({flops * 1e6:.4g} us for "
        f"{_work(hardware, quantity, k, sustained)}; {memory * 1e6:.4g} us for {_moved(hardware, quantity)})"
    )
    if (contention := hardware.contention(devices)) > 1:
        words += f", with {contention:.3g} devices per core"
    if chip.launch_interval is not None:
        words += f", at least {k.interval * 1e6:.3g} us between launches"
        bound = "launch" if seconds == k.interval else bound
    return ComputeCost(seconds, flops, memory, k.launch, k.padding, bound, words)


def _work(hardware: Hardware, quantity: Quantity, k: KernelParts, sustained: float) -> str:
    """The FLOPs that decide, and the rate they run at."""
    if quantity.chunks is not None:
        return f"{quantity.flops + quantity.vector:.4g} FLOPs and {quantity.chunks} chunks that wait in turn"
    product = k.product / sustained + k.beside
    if k.floor > min(product, k.vector):
        if k.where == "passing":
            return _passed(hardware, quantity)
        if k.where != "fused":
            return f"{quantity.flops:.4g} FLOPs {k.where}"
        amount = quantity.vector
    elif product <= k.vector:
        rate = k.rate * (sustained if k.product else 1.0)
        words = f"{quantity.flops:.4g} FLOPs x {k.padding:.3g} for padding, at {rate / 1e12:.4g} TFLOP/s"
        if k.in_turn and quantity.work.blocked:
            blocks, beside, _ = quantity.work.blocked
            words += f", for blocks of {blocks * k.padding:.4g} matmul FLOPs and {beside:.4g} softmax FLOPs"
        return words
    else:
        amount = _reached(hardware, quantity)
    vector = hardware.chip.vector_flops
    rated = f"{vector.value / hardware.devices_per_chip / 1e12:.4g} TFLOP/s" if vector else "no known rate"
    return f"{amount:.4g} FLOPs on the vector unit at {rated}"


def _bandwidth(hardware: Hardware, quantity: Quantity) -> float:
    """The share of the bandwidth that is reached."""
    own = hardware.chip.chunk_efficiency if quantity.chunks is not None else None
    return (own or hardware.chip.memory_efficiency).value


def _moved(hardware: Hardware, quantity: Quantity) -> str:
    """What memory seconds consist of."""
    rate = hardware.memory_bandwidth * _bandwidth(hardware, quantity)
    words = f"{_laid(hardware, quantity)[0]:.4g} bytes at {rate / 1e9:.4g} GB/s"
    if _passing_seconds(hardware, _laid(hardware, quantity)[1]) and quantity.op_class not in MATMUL_CLASSES:
        words += f" and {_passed(hardware, quantity)}"
    return words


def _passed(hardware: Hardware, quantity: Quantity) -> str:
    rate = f" at {time.value * 1e12:.3g} ps" if (time := hardware.chip.element_time) else ""
    return f"{_laid(hardware, quantity)[1]:.4g} elements passing through registers{rate}"


def _reached(hardware: Hardware, quantity: Quantity) -> float:
    """FLOPs at the full vector rate that take as long: a small product reaches no larger part of that rate
    than of the matrix unit's."""
    if quantity.matmul_dims is None:
        return quantity.flops
    most = hardware.chip.matmul_efficiency.curve.points[-1][1]
    return quantity.flops * most / _efficiency(hardware, quantity.flops)


def _vector_seconds(hardware: Hardware, flops: float) -> float:
    """Equation (5); 0 when the file has no vector rate."""
    rate = hardware.chip.vector_flops
    return 0.0 if rate is None else flops * hardware.devices_per_chip / rate.value


def _passing_seconds(hardware: Hardware, elements: float) -> float:
    """Of equations (2) and (6): elements through the registers; 0 when the file does not say how long one
    takes."""
    time = hardware.chip.element_time
    return 0.0 if time is None else elements * time.value


def _laid(hardware: Hardware, quantity: Quantity) -> tuple[float, float]:
    """Bytes and elements as they lie in memory and registers: in tiles where the file has such registers."""
    if quantity.tiled is None or not hardware.tiles:
        return quantity.bytes, quantity.elements
    return quantity.tiled


def _adding_seconds(hardware: Hardware, quantity: Quantity) -> float:
    """Of equation (6): what the taps of a convolution make; 0 when the file has no time for it."""
    time, registers = hardware.chip.tap_time, hardware.chip.registers
    if time is None or registers is None or quantity.work.added is None:
        return 0.0
    rows, width = quantity.work.added
    return rows * up(width, registers.lanes.value) * time.value


def _efficiency(hardware: Hardware, flops: float) -> float:
    curve = hardware.chip.matmul_efficiency.curve
    return min(1.0, curve(min(flops, curve.points[-1][0])))


def _attention(hardware: Hardware, quantity: Quantity) -> float | None:
    """Of equation (2): the efficiency of a kernel for attention; None if it is none or the file has none."""
    known = hardware.chip.attention_efficiency
    if quantity.op_class != "attention" or known is None or quantity.matmul_dims is None:
        return None
    head, (least, first) = quantity.matmul_dims[2], known[0]
    below = [number.value for size, number in known if size <= head]
    return below[-1] if below else first.value * head / least


def _whole_blocks(hardware: Hardware, quantity: Quantity) -> float:
    """Pairs of the blocks of a kernel for attention / visible pairs, if the file has the size of blocks."""
    if (size := hardware.chip.attention_block) is None or quantity.work.visible is None:
        return 1.0
    blocks = [int(size.value) >> i for i in range(int(size.value).bit_length())]
    return quantity.work.visible.pairs(blocks) / quantity.work.visible.pairs()


def _curve(hardware: Hardware, quantity: Quantity) -> ComputeCurve | None:
    """The measured curve of the class (any dtype if need be); 'elementwise' stands for non-products."""
    classes = [quantity.op_class]
    if quantity.op_class not in MATMUL_CLASSES:
        classes.append("elementwise")
    elif quantity.op_class != "matmul":
        classes.append("matmul")
    for op_class in classes:
        curves = [c for c in hardware.compute_curves if c.op_class == op_class]
        if curves:
            return next((c for c in curves if c.dtype == quantity.dtype), curves[0])
    return None


def _amount(curve: ComputeCurve, quantity: Quantity) -> float:
    return quantity.flops if curve.against == "flops" else quantity.bytes
