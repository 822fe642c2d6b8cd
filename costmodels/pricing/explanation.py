"""Opens an estimate: the formula of every priced line, with the numbers of the hardware that entered."""

from __future__ import annotations

from collections import Counter

from costmodels.kernels.array_functions import calls
from costmodels.kernels.compute import Quantity, compute_cost
from costmodels.network.collectives import collective_cost, full_bytes
from costmodels.pricing.lines import Called, Line, Sent
from costmodels.pricing.pricer import Pricer


def formula(prices: Pricer, line: Line) -> str:
    """How the seconds of one run of a line follow, in words."""
    if isinstance(line.opened, Quantity):
        found = compute_cost(prices.hardware, line.opened, prices.devices)
        return f"{found.words}; bound by {found.bound}"
    if isinstance(line.opened, Called):
        return _calls(line.opened)
    if isinstance(line.opened, Sent):
        return _messages(prices, line, line.opened)
    return "measured: what a step takes under every layout"


def _calls(called: Called) -> str:
    op, inputs, outputs, split, stays = called.key
    found = Counter(c.op_class for c in calls(op, inputs, outputs, split))
    moved = sum(c.bytes for c in calls(op, inputs, outputs, split))
    listed = " + ".join(f"{n} x {name}" if n > 1 else name for name, n in found.items())
    kept = ", and memory for a result that stays" if stays else ""
    return f"measured array functions: {listed or 'none'}; {moved:.4g} bytes{kept}"


def _messages(prices: Pricer, line: Line, sent: Sent) -> str:
    placement, mesh = prices.placement, prices.placement.mesh
    size = full_bytes(line.name, max(sent.payloads), mesh.group_size(line.axes))
    found = collective_cost(prices.hardware, placement, line.name, line.axes, size)
    words = f"{found.algorithm}: {found.words}"
    if len(sent.payloads) > 1:
        how = "travel as one" if sent.together else "are sent one by one"
        words += f" (the largest of {len(sent.payloads)} values that {how})"
    if line.exposed < line.seconds:
        words += f"; {1 - line.exposed / line.seconds:.0%} of it runs under compute ({line.purpose})"
    return words
