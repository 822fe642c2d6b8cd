"""Explains a cost: the formula of every line, with the numbers of the hardware that entered."""

from collections import Counter

from costmodels.kernels.compute import compute_cost
from costmodels.network.collectives import collective_cost, full_bytes
from costmodels.pricing.hidden import Line, Under, rule_of
from costmodels.pricing.items import Called, Computed, Sent, Transferred
from costmodels.pricing.op_by_op import array_functions
from costmodels.pricing.pricer import Pricer


def formula(prices: Pricer, line: Line, under: Under | None = None) -> str:
    """How the seconds of one run of a line follow, in words.

    Args:
      under: for a message, the instructions between its start and its done.
    """
    item = line.item
    if isinstance(item, Computed):
        found = compute_cost(prices.hardware, item.quantity, prices.devices)
        lacks = f"{item.lacks}, so predicted from FLOPs and bytes: " if item.lacks else ""
        return f"{lacks}{found.words}; bound by {found.bound}"
    if isinstance(item, Called):
        return _called(item)
    if isinstance(item, Sent):
        return _sent(prices, item) + _hides(line, under)
    if isinstance(item, Transferred):
        return _transferred(prices, item) + _hides(line, under)
    return "measured time per step that does not depend on the layout"


def _called(item: Called) -> str:
    found = array_functions(item)
    counts = Counter(c.op_class for c in found)
    listed = " + ".join(f"{n} x {name}" if n > 1 else name for name, n in counts.items())
    kept = "; includes the allocation of memory for a result that is kept" if item.stays else ""
    return f"measured array functions: {listed or 'none'}; {sum(c.bytes for c in found):.4g} bytes{kept}"


def _hides(line: Line, under: Under | None) -> str:
    """What of a message is hidden, and under what."""
    if line.exposed >= line.seconds:
        return ""
    share, rule = f"; {1 - line.exposed / line.seconds:.0%} of this time is hidden", f"rule: {rule_of(line)}"
    if under is None:
        return f"{share} ({rule})"
    if not under.seconds:
        return f"{share} ({rule}), but nothing runs between its start and its end"
    return f"{share} behind {under.words} ({under.seconds:.3g} s per step; {rule})"


def _sent(prices: Pricer, item: Sent) -> str:
    placement, payloads = prices.placement, prices.payloads(item)
    size = full_bytes(item.kind, max(payloads), placement.mesh.group_size(item.axes))
    found = collective_cost(prices.hardware, placement, item.kind, item.axes, size, item.experts)
    words = f"{found.algorithm}: {found.words}"
    if len(payloads) > 1:
        how = "are sent as one message" if item.together else "are sent in separate messages"
        words += f" (the largest of {len(payloads)} values that {how})"
    if item.joined:
        words += "; sent together with a larger message of the same layer, so no latency is added"
    return words


def _transferred(prices: Pricer, item: Transferred) -> str:
    link = prices.hardware.host_link
    if link is None:
        return "device and host share one memory, so nothing is copied"
    if item.updated and (rate := prices.hardware.chip.host_update):
        return f"{item.sent:.4g} bytes / {rate.value:.4g} B/s, at which the host updates them"
    return f"{item.sent:.4g} bytes / {link:.4g} B/s of the host link"
