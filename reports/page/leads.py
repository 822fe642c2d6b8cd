"""How to read each section, in a sentence or two."""

from __future__ import annotations

LEADS = {
    "repairs": (
        "Each row changes one option of the search and shows the best plan. Its command finds that plan "
        "again."
    ),
    "mesh": (
        "Every square is a device. The first device, top left, exchanges data with the coloured ones over "
        "each axis."
    ),
    "split": (
        "A dimension that is split over an axis is cut into as many pieces as the axis has devices; one "
        "that is not is whole on every device."
    ),
    "pieces": (
        "The box is the whole variable (its width is the last dimension); the filled part is on one device."
    ),
    "time": (
        "Compute, the part of compute behind which communication is hidden, and exposed communication "
        "add up to the step. Hatched layouts do not fit; an arrow marks a bar that is longer"
        " than the scale."
    ),
    "memory": (
        "Peak memory of a device by layout, and memory during the step of this plan, with the iterations "
        "of a loop together. The red line is the memory of a device."
    ),
    "frontier": (
        "Layouts that no other layout beats in time and memory both. Beyond a knee, more memory saves "
        "little time: the point farthest below the line between the two ends (Satopää et al., 2011)."
    ),
    "sensitivity": (
        "The step time of the best layout when one number of the hardware changes and the search is run "
        "again. A letter marks where another layout becomes the best."
    ),
    "operations": (
        "What each operation adds to the step in one phase: its computation and the communication that "
        "the step waits for."
    ),
    "evidence": "Whole training steps, timed under several layouts on real hardware, against the prediction.",
    "calibration": (
        "What the hardware profile was fitted to: each dot is one measurement, its height the fit's error. "
        "A curve passes near the points that it is made from, so trust the errors of operations that were "
        "not part of the fit."
    ),
    "assumptions": "The numbers behind every prediction. Those that are assumptions come first.",
    "record": "Everything needed to run this plan, or to find it again.",
}
