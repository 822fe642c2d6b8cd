"""The attention that the libraries' own kernels take: Pallas's splash attention on TPUs, cuDNN's on GPUs."""

from mesh_tf_core.ir.dtypes import itemsize
from mesh_tf_core.ir.kernel import BLOCKS, Attending


def lacks_kernel(a: Attending, platform: str) -> str:
    """Why no library has a kernel for it on a 'tpu' or a 'gpu'; empty if one has. Of its operands, only
    shapes and dtypes are looked at."""
    reason = "dropout" if a.rate else "a bias" if a.bias is not None else ""
    return reason or (_not_splash(a) if platform == "tpu" else _not_cudnn(a))


def _not_splash(a: Attending) -> str:
    """As of Pallas's splash attention."""
    queries, keys = a.query.shape[-2], a.key.shape[-2]
    own = range(a.shared, len(a.query.shape) - 1)
    if a.mask is not None and any(a.mask.shape[i] != 1 for i in own):
        return "a mask for every pair of positions"
    if a.segments is not None and any(s.shape[i] != 1 for s in a.segments for i in own[:-1]):
        return "packed sequences that differ between heads"
    if queries % BLOCKS[-1] or keys % BLOCKS[-1]:
        return f"{queries} queries and {keys} keys, which must be multiples of {BLOCKS[-1]}"
    if queries % len(a.starts):
        return f"{queries} queries, which the {len(a.starts)} devices do not divide evenly"
    return "float64" if itemsize(str(a.query.dtype)) > 4 else ""


def _not_cudnn(a: Attending) -> str:
    """As of cuDNN on every GPU since A100."""
    width, dtype = a.query.shape[-1], str(a.query.dtype)
    if itemsize(dtype) != 2:
        return dtype
    if a.mask is not None or a.segments is not None:
        return "a mask" if a.mask is not None else "several packed sequences per row"
    if a.extra_logit is not None:
        return "an extra logit"
    if a.causal and tuple(a.starts) != (0,):
        return "causal queries that start in the middle of the keys"
    if a.window and not a.causal:
        return "a two-sided window"
    if width % 8 or width > 128 or width != a.value.shape[-1]:
        return f"heads of size {width} and values of size {a.value.shape[-1]}"
    return ""
