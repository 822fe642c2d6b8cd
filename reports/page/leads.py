"""How to read each section, in a sentence or two."""

from __future__ import annotations

LEADS = {
    "repairs": (
        "Each row changes one option of the search and shows the best plan with this change. The command "
        "finds this plan again."
    ),
    "mesh": (
        "Every square is a device. The coloured squares are the devices with which the first device, at "
        "the top left, communicates over each axis."
    ),
    "split": (
        "A dimension that is split over an axis has as many shards as the axis has devices. A dimension "
        "that is not split is whole on every device."
    ),
    "pieces": (
        "Each box is a whole variable; its width is the last dimension. The filled part is the shard on "
        "one device."
    ),
    "time": (
        "The step time is the sum of compute, compute overlapped with communication, and exposed "
        "communication. Hatched layouts do not fit in memory. An arrow marks a bar that is longer than "
        "the scale."
    ),
    "memory": (
        "Peak memory per device by layout, and memory during a step of this plan, where the iterations "
        "of a loop are drawn as one. The red line is the memory of a device."
    ),
    "frontier": (
        "Pareto-optimal layouts: no other layout is better in both time and memory. A knee is the point "
        "farthest below the line between the two ends (Satopää et al., 2011); beyond a knee, more memory "
        "saves little time."
    ),
    "sensitivity": (
        "The step time of the best layout when one property of the hardware changes and the search is "
        "repeated. A letter marks where another layout becomes the best."
    ),
    "operations": (
        "The time that each operation adds to the step in one phase: its compute and its exposed "
        "communication."
    ),
    "evidence": (
        "Predicted and measured times of whole training steps under several layouts on real hardware."
    ),
    "calibration": (
        "The measurements to which the hardware profile was fitted: each dot is one measurement, and its "
        "height is the error of the fit. A fitted curve passes near its own points, so the errors of "
        "held-out operations are the meaningful ones."
    ),
    "assumptions": "The numbers behind every prediction. Those that are assumptions come first.",
    "record": "Everything needed to run this plan or to find it again.",
}
