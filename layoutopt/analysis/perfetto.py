"""A step in the format of trace viewers (ui.perfetto.dev, chrome://tracing): the predicted step, alone or
beside measured ones.

JSON of Google's Trace Event Format: complete events ("X") in microseconds, each on the track of a thread.
Times are whole nanoseconds, so that nested slices stay inside their slice.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from costmodels.pricing.explanation import formula
from costmodels.pricing.hidden import under
from costmodels.pricing.timeline import timeline

if TYPE_CHECKING:
    from costmodels.pricing.hidden import Line, Under
    from costmodels.pricing.pricer import Pricer
    from layoutopt.optimize.evaluation.evaluation import Evaluation
    from mesh_tf_core.engines.jax.profile import Track

Event = Mapping[str, Any]
PREDICTED = 1
"""Process id of the predicted step's tracks."""


def predicted(found: Evaluation, begin: float = 0.0) -> list[Event]:
    """The predicted step of one device; `begin`: seconds at which it starts."""
    prices, program = found.prices, found.program
    slices = timeline(program, found.cost)
    tracks = {track: number for number, track in enumerate(dict.fromkeys(s.track for s in slices))}
    title = f"predicted: one device of {program.mesh}, {prices.hardware.name}"
    events: list[Event] = [*_named(PREDICTED, title, tracks)]
    details: dict[int, Mapping[str, Any]] = {}
    meanwhile = under(program, found.cost)
    for s in slices:
        at, end = round((begin + s.begin) * 1e9), round((begin + s.end) * 1e9)
        event = {"ph": "X", "pid": PREDICTED, "tid": tracks[s.track], "name": s.name}
        event |= {"ts": at / 1e3, "dur": (end - at) / 1e3}
        if s.line is not None:
            if id(s.line) not in details:
                details[id(s.line)] = _details(prices, s.line, meanwhile.get(s.line.value))
            event["args"] = details[id(s.line)]
        events.append(event)
    return events


def measured(tracks: Sequence[Track]) -> tuple[list[Event], float]:
    """Recorded steps, and seconds at which their first work begins."""
    homes: dict[str, list[Track]] = {}
    for track in tracks:
        homes.setdefault(track.home, []).append(track)
    events: list[Event] = []
    for process, (home, own) in enumerate(homes.items(), PREDICTED + 1):
        events += _named(process, f"measured: {home}", {t.name: n for n, t in enumerate(own)})
        for thread, track in enumerate(own):
            for name, begin, lasting in track.events:
                event = {"ph": "X", "pid": process, "tid": thread, "name": name}
                events.append({**event, "ts": begin / 1e3, "dur": lasting / 1e3})
    work = [track.events[0][1] for track in tracks[1:] if track.events]
    return events, min(work, default=0.0) / 1e9


def _named(process: int, title: str, tracks: Mapping[str, int]) -> list[Event]:
    """What viewers call a process and its tracks, in this order."""

    def said(what: str, thread: int = 0, **args: Any) -> Event:
        return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": args}

    events = [said("process_name", name=title), said("process_sort_index", sort_index=process)]
    for track, number in tracks.items():
        events += [
            said("thread_name", number, name=track),
            said("thread_sort_index", number, sort_index=number),
        ]
    return events


def written(events: Sequence[Event], packed: bool = False) -> bytes:
    """The file; `packed` by gzip, which viewers open too."""
    text = json.dumps({"displayTimeUnit": "ms", "traceEvents": events}, separators=(",", ":")) + "\n"
    return gzip.compress(text.encode(), 6, mtime=0) if packed else text.encode()


def _details(prices: Pricer, line: Line, meanwhile: Under | None) -> Mapping[str, Any]:
    """What a viewer shows of a slice that is clicked."""
    found = {
        "scope": line.origin.scope,
        "phase": line.origin.phase,
        "fused": line.text if not line.is_communication else "",
        "runs in a step": line.times,
        "flops": line.flops,
        "bytes": line.bytes,
        "sent bytes": line.sent,
        "axes": "+".join(line.axes),
        "price": formula(prices, line, meanwhile),
    }
    return {name: value for name, value in found.items() if value}
