"""The peak rate of products of a dtype on a chip whose file has none for it.

A dtype without a peak is computed in another one, the first of a list that the chip has. No float is ever
computed in integers.

  float64, float32  in the widest float there is: a TPU multiplies float32 in bfloat16 passes at default
                    precision (docs.cloud.google.com/tpu/docs/bfloat16, read 2026-11-25)
  float32           in TF32 on chips that have it, where the software does so: XLA by default on NVIDIA's GPUs
                    alone (docs.jax.dev/en/latest/201/precision.html, GetBlasComputationType of its GPU
                    backend), TransformerEngine (cublaslt_gemm.cu @0143a5e), PyTorch only convolutions
                    (torch.get_float32_matmul_precision() is "highest", torch.backends.cudnn.allow_tf32 True)
  float16           as bfloat16 on a TPU: for products of 4096 x 4096 x 4096 the compiler of libtpu 0.0.42
                    estimates 1,121,024 cycles in float16 on v5e, 1,083,068 in bfloat16 and 543,542 in int8;
                    on v5p 561,063, 544,925 and 275,904 (compiled 2026-11-25)
  bfloat16          in float32 on GPUs before Ampere (openxla/xla issue 12429, 2024-05-13)
  float8            in bfloat16, to which a chip without units for it converts its factors
  integers          in floats, which hold those of 8 bits exactly
"""

from collections.abc import Iterable, Mapping
from typing import Literal

from mesh_tf_core.ir.dtypes import DTYPES, FLOATS

FLOAT8 = "float8"
"""The formats of float8 have one peak."""
TF32 = "tf32"
"""Products of float32 whose factors keep 10 bits of the fraction."""
Tf32 = Literal["products", "convolutions", "never"]
"""The products of float32 that software computes in TF32, where a chip has it."""
PEAKS = (*DTYPES, FLOAT8, TF32)
"""Types that a file may give a peak for."""
_WIDER = ("float32", "float64")
_COMPUTED_IN: Mapping[str, tuple[str, ...]] = {
    "float64": ("float32", "bfloat16"),
    "float32": ("bfloat16", "float64"),
    "bfloat16": _WIDER,
    "float16": ("bfloat16", *_WIDER),
    FLOAT8: ("bfloat16", *_WIDER),
    "int8": ("bfloat16", *_WIDER),
}
_OTHERS = ("float32", "bfloat16", "float64")
"""In which wider integers and bool are computed."""


def computed_in(dtype: str, peaks: Iterable[str], tf32: bool = True) -> str:
    """The dtype whose peak applies to products of `dtype`: itself, or the dtype of the computation.

    Args:
      peaks: types that the chip has a peak for; at least one is a float (`peaks_fault`).
      tf32: float32 may be computed in TF32.
    """
    known, name = set(peaks), FLOAT8 if dtype.startswith(FLOAT8) else dtype
    first = (TF32,) if tf32 and name == "float32" else ()
    order = (*first, name, *_COMPUTED_IN.get(name, _OTHERS), *FLOATS)
    return next(other for other in order if other in known)


def peaks_fault(peaks: Iterable[str]) -> str | None:
    """Why these cannot be all the types that a chip has a peak for; None if they can."""
    known = tuple(peaks)
    if strange := [name for name in known if name not in PEAKS]:
        return f"peak_flops has unknown element types: {', '.join(strange)}; known: {', '.join(PEAKS)}"
    if not set(known) & set(FLOATS):
        return f"peak_flops has no floating-point type; add at least one of {', '.join(FLOATS)}"
    return None


def note_of(dtype: str, peaks: Mapping[str, float], name: str) -> str | None:
    """A sentence about products of a float type without a peak of its own on a chip; None if there is nothing
    to report. Float32 on a TPU has none either: that is the rule there, and no surprise.

    Args:
      peaks: type -> FLOP/s of a device; name: of the hardware.
    """
    own = computed_in(dtype, peaks)
    if dtype.startswith(FLOAT8) and own != FLOAT8:
        return f"{name} has no units for float8, so its products are predicted in {own}; leave float8 out"
    if own == dtype or dtype not in ("float64", "bfloat16", "float16"):
        return None
    said = f"{name} has no peak FLOP/s for {dtype}, so its matrix products are predicted at the peak of {own}"
    if dtype == "float64":
        return f"{said} and take longer than predicted"
    if faster := [other for other in ("bfloat16", "float16") if peaks.get(other, 0.0) > peaks[own]]:
        return f"{said}; {faster[0]} would be faster"
    return f"{said}; {own} would lose no speed and needs no loss scale" if own == "bfloat16" else said
