"""Units of a hardware file: how a number as its source prints it becomes an SI number."""

# unit -> (what it measures, factor to the SI unit). A file's field asks for one quantity, never for one unit.
UNITS: dict[str, tuple[str, float]] = {
    "FLOP/s": ("compute rate", 1.0), "GFLOP/s": ("compute rate", 1e9), "TFLOP/s": ("compute rate", 1e12),
    "PFLOP/s": ("compute rate", 1e15), "TOP/s": ("compute rate", 1e12),
    "B": ("memory", 1.0), "MB": ("memory", 1e6), "GB": ("memory", 1e9), "KiB": ("memory", 2.0**10),
    "MiB": ("memory", 2.0**20), "GiB": ("memory", 2.0**30),
    "B/s": ("bandwidth", 1.0), "GB/s": ("bandwidth", 1e9), "GiB/s": ("bandwidth", 2.0**30),
    "TB/s": ("bandwidth", 1e12), "Gb/s": ("bandwidth", 1e9 / 8),
    "s": ("time", 1.0), "ms": ("time", 1e-3), "us": ("time", 1e-6), "ns": ("time", 1e-9),
    "1": ("fraction", 1.0),
    "count": ("count", 1.0),
}  # fmt: skip

SI = {quantity: unit for unit, (quantity, factor) in UNITS.items() if factor == 1.0}


def units_of(quantity: str) -> tuple[str, ...]:
    """The units in which a file may give `quantity`."""
    return tuple(unit for unit, (measured, _) in UNITS.items() if measured == quantity)


def to_si(value: float, unit: str) -> float:
    """`value` in the SI unit of the quantity of `unit`; KeyError for an unknown unit."""
    return value * UNITS[unit][1]
