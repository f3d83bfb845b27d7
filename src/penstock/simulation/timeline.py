"""What happened when: the timed events that a simulation predicts and a run records, and what is drawn of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from html import escape
from itertools import groupby
from pathlib import Path
from typing import NamedTuple


class EventKind(StrEnum):
    """What a rank is busy with. F, B and W are the kinds of action."""

    F = "F"
    B = "B"
    W = "W"
    WAIT = "wait"
    REDUCTION = "reduction"


@dataclass(frozen=True, slots=True)
class TimedEvent:
    """`kind` on `rank` from `start` to `end`, in seconds since the step, or the first of several, began.

    `stage` and `microbatch` are ``None`` where they say nothing (a wait, the reduction of a whole rank), `step` where
    there is only one.
    """

    rank: int
    kind: EventKind
    start: float
    end: float
    stage: int | None = None
    microbatch: int | None = None
    step: int | None = None

    @property
    def duration(self) -> float:
        return self.end - self.start


def with_waits(events: Iterable[TimedEvent], shortest: float = 0.0) -> list[TimedEvent]:
    """`events` by rank and time, with a wait wherever a rank has nothing to do until its next or the last event of all.
    `events`: any order. A reduction runs beside the compute, so it does not end a wait. `shortest`: seconds; shorter
    gaps are no wait but the cost of going from one action to the next."""
    everything = sorted(events, key=lambda event: (event.rank, event.start, event.end))
    if not everything:
        return []
    finish = max(event.end for event in everything)
    begin = min(0.0, min(event.start for event in everything))
    result = []
    for rank, of_rank in groupby(everything, key=lambda event: event.rank):
        free_from = begin
        for event in of_rank:
            if event.kind is not EventKind.REDUCTION:
                if event.start - free_from > shortest:
                    result.append(TimedEvent(rank, EventKind.WAIT, free_from, event.start))
                free_from = max(free_from, event.end)
            result.append(event)
        if finish - free_from > shortest:
            result.append(TimedEvent(rank, EventKind.WAIT, free_from, finish))
    return result


def bubble_fractions(events: Sequence[TimedEvent], num_ranks: int) -> list[float]:
    """Per rank, the share of the step, from its first event on any rank to its last, without F, B or W."""
    busy = [0.0] * num_ranks
    for event in events:
        if event.kind in (EventKind.F, EventKind.B, EventKind.W):
            busy[event.rank] += event.duration
    span = max((event.end for event in events), default=0.0) - min((event.start for event in events), default=0.0)
    return [1 - seconds / span if span > 0 else 0.0 for seconds in busy]


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
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": title or "pipeline"}}
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
                "cname": LOOKS[event.kind].in_traces,
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


class _Look(NamedTuple):
    name: str
    colour: tuple[int, int, int]
    in_traces: str  # of the trace viewer's fixed palette; Perfetto picks its own colours by event name


# Colours differ in lightness too, so that the colour-blind, and a print in grey, can tell them apart.
LOOKS = {
    EventKind.F: _Look("forward", (111, 168, 220), "thread_state_running"),
    EventKind.B: _Look("backward", (35, 134, 92), "good"),
    EventKind.W: _Look("weight gradient", (244, 190, 66), "bad"),
    EventKind.WAIT: _Look("waiting", (236, 239, 241), "grey"),
    EventKind.REDUCTION: _Look("gradient reduction", (106, 27, 154), "rail_animation"),
}
INK = "#263238"
FAINT = "#607d8b"

_LEFT, _RIGHT, _TOP, _ROW, _GAP, _AXIS = 84.0, 78.0, 66.0, 26.0, 5.0, 46.0
_DIGIT = 0.56  # width of a digit, in font sizes


@dataclass(frozen=True)
class _Chart:
    """What is drawn, and where time and ranks lie on the page."""

    events: Sequence[TimedEvent]
    begin: float
    end: float
    num_ranks: int
    width: float
    stages_of_rank: dict[int, list[int]]
    relative: bool

    def x(self, time: float) -> float:
        return _LEFT + (time - self.begin) / ((self.end - self.begin) or 1.0) * self.width

    def y(self, rank: int) -> float:
        return _TOP + rank * (_ROW + _GAP)


def gantt_svg(events: Iterable[TimedEvent], title: str = "", width: float | None = None, relative: bool = False) -> str:
    """`events` as an SVG document: boxes numbered by microbatch where a number fits, ranks, a legend, a time axis.

    Args:
        events: of one step, or several in a row. Waits are filled in if there are none among them.
        title: printed above the chart.
        width: of the chart in pixels, without the labels at its sides. ``None``: wide enough for numbers in most boxes.
        relative: times are in no unit.
    """
    drawn = list(events)
    if not any(event.kind is EventKind.WAIT for event in drawn):
        drawn = with_waits(drawn)
    stages_of_rank: dict[int, set[int]] = {}
    for event in drawn:
        if event.microbatch is not None and event.stage is not None:
            stages_of_rank.setdefault(event.rank, set()).add(event.stage)
    begin = min((event.start for event in drawn), default=0.0)
    end = max((event.end for event in drawn), default=1.0)
    if width is None:
        # Room for two digits in a box of lower-quartile length, within what a screen shows.
        lengths = sorted(event.duration for event in drawn if event.microbatch is not None and event.duration > 0)
        wanted = 13.0 * (end - begin) / lengths[len(lengths) // 4] if lengths else 0.0
        width = min(2400.0, max(900.0, wanted))
    num_ranks = 1 + max((event.rank for event in drawn), default=0)
    stages = {rank: sorted(held) for rank, held in stages_of_rank.items()}
    chart = _Chart(drawn, begin, end, num_ranks, width, stages, relative)
    total_width = _LEFT + chart.width + _RIGHT
    total_height = chart.y(chart.num_ranks) + _AXIS
    parts = [
        *svg_head(total_width, total_height, title or "pipeline timeline"),
        svg_text(_LEFT, 24, title, size=15, weight="bold"),
        *_legend(chart),
        *_axis(chart),
        *_ranks(chart),
        *_boxes(chart),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def _legend(chart: _Chart) -> Iterator[str]:
    kinds = {event.kind for event in chart.events}
    x = _LEFT
    for kind in (kind for kind in EventKind if kind in kinds):
        name = "input gradient" if kind is EventKind.B and EventKind.W in kinds else LOOKS[kind].name
        name = name if kind in (EventKind.WAIT, EventKind.REDUCTION) else f"{kind.value} {name}"
        yield f'<rect x="{x:.1f}" y="36" width="14" height="14" rx="2" fill="{_colour(kind)}" stroke="{FAINT}"/>'
        yield svg_text(x + 20, 47, name, size=12)
        x += 20 + 6.2 * len(name) + 22
    if any(len(stages) > 1 for stages in chart.stages_of_rank.values()):
        yield svg_text(x, 47, "paler: a later stage of the same rank", size=12, colour=FAINT)


def _axis(chart: _Chart) -> Iterator[str]:
    step, unit, per_unit = _ticks(chart.end - chart.begin, chart.width)
    words = f"time ({unit})"
    if chart.relative:
        words, per_unit = "relative time", 1.0
    bottom = chart.y(chart.num_ranks)
    for tick in range(int((chart.end - chart.begin) / step + 1e-9) + 1):
        time = tick * step
        x = chart.x(chart.begin + time)
        yield f'<line x1="{x:.1f}" y1="{_TOP - 4:.1f}" x2="{x:.1f}" y2="{bottom:.1f}" stroke="#cfd8dc"/>'
        yield svg_text(x, bottom + 14, f"{time * per_unit:g}", size=11, colour=FAINT, anchor="middle")
    yield svg_text(_LEFT + chart.width / 2, bottom + 33, words, size=12, colour=FAINT, anchor="middle")


def _ticks(span: float, width: float) -> tuple[float, str, float]:
    """Seconds between ticks (1, 2 or 5 times a power of ten, at least 70 pixels), the unit, how many are a second."""
    smallest = (span or 1.0) * 70.0 / width
    power = 10.0 ** math.floor(math.log10(smallest))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9))
    for unit, per_unit in (("s", 1.0), ("ms", 1e3)):
        if span * per_unit >= 2.0:
            return step, unit, per_unit
    return step, "µs", 1e6


def _ranks(chart: _Chart) -> Iterator[str]:
    idle = bubble_fractions(chart.events, chart.num_ranks)
    right = _LEFT + chart.width
    yield svg_text(right + 8, _TOP - 10, "idle", size=11, colour=FAINT)
    for rank in range(chart.num_ranks):
        middle = chart.y(rank) + _ROW / 2 + 4
        yield svg_text(_LEFT - 10, middle, f"rank {rank}", size=12, anchor="end")
        yield svg_text(right + 8, middle, f"{100 * idle[rank]:.1f} %", size=11, colour=FAINT)


def _boxes(chart: _Chart) -> Iterator[str]:
    unit = "" if chart.relative else " s"
    # Reductions run beside the compute and are drawn last, as a band along the foot of the row.
    for event in sorted(chart.events, key=lambda event: event.kind is EventKind.REDUCTION):
        x, y = chart.x(event.start), chart.y(event.rank)
        width = chart.x(event.end) - x
        height = _ROW
        if event.kind is EventKind.REDUCTION:
            y, height = y + 0.72 * _ROW, 0.28 * _ROW
        stages = chart.stages_of_rank.get(event.rank, [])
        paleness = (
            stages.index(event.stage) / len(stages) if event.microbatch is not None and event.stage in stages else 0
        )
        what = LOOKS[event.kind].name
        if event.microbatch is not None:
            what += f" of microbatch {event.microbatch} on stage {event.stage}"
        edge = ' stroke="#ffffff" stroke-width="0.7"' if width > 4 and event.kind is not EventKind.WAIT else ""
        yield (
            f'<rect x="{x:.2f}" y="{y:.1f}" width="{width:.2f}" height="{height:.1f}" '
            f'fill="{_colour(event.kind, paleness)}"{edge}><title>{what}: {event.start:.6g} to {event.end:.6g}{unit}'
            "</title></rect>"
        )
        # The number at the largest size that fits into the box; none if it would be too small to read.
        number = "" if event.microbatch is None else str(event.microbatch)
        size = min(12.0, (width - 1.5) / (_DIGIT * max(1, len(number))))
        if number and size >= 7.0:
            colour = "#ffffff" if event.kind is EventKind.B and paleness < 0.4 else INK
            yield svg_text(x + width / 2, y + _ROW / 2 + 0.36 * size, number, size=size, colour=colour, anchor="middle")


def _colour(kind: EventKind, paleness: float = 0.0) -> str:
    """The colour of `kind`, mixed with white: 0 is none, 1 all."""
    red, green, blue = (round(channel + (255 - channel) * paleness) for channel in LOOKS[kind].colour)
    return f"#{red:02x}{green:02x}{blue:02x}"


def svg_head(width: float, height: float, title: str) -> list[str]:
    """How a picture begins, on white."""
    size = f"{width:.0f} {height:.0f}"
    return [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" width="{width:.0f}" height="{height:.0f}" '
        'font-family="Helvetica, Arial, sans-serif">',
        f"<title>{escape(title)}</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]


def svg_text(
    x: float, y: float, text: str, *, size: float, colour: str = INK, anchor: str = "start", weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:.3g}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}">{escape(text)}</text>'
    )
