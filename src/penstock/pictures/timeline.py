"""Timed events as files: a trace for chrome://tracing or ui.perfetto.dev, and a Gantt chart."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from penstock.pictures.events import EventKind, TimedEvent
from penstock.pictures.gantt import gantt_svg

# Names from the trace viewer's fixed palette, near the chart's colours. Perfetto picks its own colours by event name.
_TRACE_COLOURS = {
    EventKind.F: "thread_state_running",
    EventKind.B: "good",
    EventKind.W: "bad",
    EventKind.WAIT: "grey",
    EventKind.REDUCTION: "rail_animation",
}


def write_timeline(events: Iterable[TimedEvent], path: str | Path, title: str = "", relative: bool = False) -> Path:
    """Write `events` to `path`, with a `title`: a chart if it ends in ``.svg``, a trace if it ends in ``.json``.

    Args:
        relative: times are in no unit; the chart says so.

    Raises:
        ValueError: another ending.
    """
    path = Path(path)
    if path.suffix == ".svg":
        text = gantt_svg(events, title, relative=relative)
    elif path.suffix == ".json":
        text = chrome_trace(events, title)
    else:
        raise ValueError(f"a timeline is written as .svg (chart) or .json (Chrome trace), but the path is {path}")
    path.write_text(text, encoding="utf-8")
    return path


def chrome_trace(events: Iterable[TimedEvent], title: str = "") -> str:
    """`events` with a `title` as JSON (Trace Event Format): one track per rank, and one below it for its reductions."""
    records: list[dict[str, object]] = [
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title or "pipeline"}},
    ]
    tracks: dict[int, str] = {}
    for event in events:
        is_reduction = event.kind is EventKind.REDUCTION
        track = 2 * event.rank + is_reduction
        tracks[track] = f"rank {event.rank} reduction" if is_reduction else f"rank {event.rank}"
        arguments = {"step": event.step, "stage": event.stage, "microbatch": event.microbatch}
        records.append(
            {
                "name": _name(event),
                "cat": event.kind.value,
                "ph": "X",
                "pid": 0,
                "tid": track,
                "ts": event.start * 1e6,
                "dur": event.duration * 1e6,
                "cname": _TRACE_COLOURS[event.kind],
                "args": {key: value for key, value in arguments.items() if value is not None},
            }
        )
    for track, name in sorted(tracks.items()):
        records.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": track, "args": {"name": name}})
        records.append({"name": "thread_sort_index", "ph": "M", "pid": 0, "tid": track, "args": {"sort_index": track}})
    return json.dumps({"traceEvents": records, "displayTimeUnit": "ms"})


def _name(event: TimedEvent) -> str:
    """As the schedule's text form names an action: stage, kind, microbatch."""
    if event.stage is None or event.microbatch is None:
        return event.kind.value
    return f"{event.stage}{event.kind.value}{event.microbatch}"
