"""What the trace and the chart contain, read back with a JSON and an XML parser."""

import json
import xml.etree.ElementTree as ElementTree
from itertools import pairwise
from pathlib import Path

import pytest

from penstock.schedule import Costs, EventKind, TimedEvent, build, chrome_trace, gantt_svg, simulate, write_timeline
from penstock.simulation.timeline import LOOKS

SVG = "{http://www.w3.org/2000/svg}"


def events_of(name: str, num_ranks: int, num_microbatches: int) -> tuple[TimedEvent, ...]:
    return simulate(build(name, num_ranks, num_microbatches), Costs(0.01, 0.01, 0.01, latency=0.001)).events


def test_a_trace_has_every_event_in_microseconds_on_its_ranks_track() -> None:
    events = [*events_of("zb-h1", 3, 4), TimedEvent(1, EventKind.REDUCTION, 0.2, 0.25, 1)]
    records = json.loads(chrome_trace(events, "a run"))["traceEvents"]
    tracks = {r["tid"]: r["args"]["name"] for r in records if r["name"] == "thread_name"}
    found = [(tracks[r["tid"]], r["name"], r["ts"] / 1e6, r["dur"] / 1e6) for r in records if r["ph"] == "X"]
    wanted = [(f"rank {e.rank}", f"{e.stage}{e.kind.value}{e.microbatch}", e.start, e.duration) for e in events[:-1]]
    wanted.append(("rank 1 reduction", "reduction", 0.2, 0.05))
    assert [f[:2] for f in found] == [w[:2] for w in wanted]
    assert [f[2:] for f in found] == [pytest.approx(w[2:]) for w in wanted]


def boxes(svg: str) -> list[ElementTree.Element]:
    return [box for box in ElementTree.fromstring(svg).iter(f"{SVG}rect") if box.find(f"{SVG}title") is not None]


def texts(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def test_a_chart_has_a_box_per_event_at_its_time_in_its_colour() -> None:
    events = events_of("zb-h1", 3, 4)
    drawn = [box for box in boxes(gantt_svg(events, width=1000.0)) if "waiting" not in (box[0].text or "")]
    assert len(drawn) == len(events) == 3 * 4 * 3
    makespan = max(event.end for event in events)
    left = min(float(box.attrib["x"]) for box in drawn)
    widths = sorted(float(box.attrib["width"]) for box in drawn)
    assert widths == pytest.approx(sorted(event.duration / makespan * 1000 for event in events), abs=0.02)
    assert max(float(b.attrib["x"]) + float(b.attrib["width"]) for b in drawn) - left == pytest.approx(1000, abs=0.1)
    assert len({box.attrib["fill"] for box in drawn}) == 3


def test_a_chart_has_a_legend_of_what_it_shows_ranks_idle_shares_and_an_axis() -> None:
    events = [*events_of("zb-v", 2, 4), TimedEvent(1, EventKind.REDUCTION, 0.2, 0.25, 1)]
    shown = [text.text for text in texts(gantt_svg(events, "V & <time>"))]
    names = {"F forward", "B input gradient", "W weight gradient", "waiting", "gradient reduction", "rank 0", "rank 1"}
    assert names | {"V & <time>", "paler: a later stage of the same rank", "time (ms)"} <= set(shown)
    plain = [text.text for text in texts(gantt_svg(events_of("1f1b", 2, 4)))]
    assert "B backward" in plain
    assert "W weight gradient" not in plain and "gradient reduction" not in plain
    assert sum(text.endswith(" %") for text in plain if text) == 2


def test_the_colours_of_the_five_kinds_differ_also_in_grey() -> None:
    assert set(LOOKS) == set(EventKind)
    lightness = sorted(
        0.299 * red + 0.587 * green + 0.114 * blue for red, green, blue in (look.colour for look in LOOKS.values())
    )
    assert min(b - a for a, b in pairwise(lightness)) > 7


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
def test_at_8_ranks_and_32_microbatches_every_box_has_its_number_and_no_number_leaves_its_box(name: str) -> None:
    events = events_of(name, 8, 32)
    svg = gantt_svg(events)
    assert float(ElementTree.fromstring(svg).attrib["width"]) <= 2600
    root = list(ElementTree.fromstring(svg))
    numbered = 0
    for box, text in pairwise(root):
        title = box.find(f"{SVG}title")
        if text.tag != f"{SVG}text" or title is None or "microbatch" not in (title.text or ""):
            continue
        numbered += 1
        assert f" of microbatch {text.text} on stage" in (title.text or "")
        size = float(text.attrib["font-size"])
        assert size >= 7.0
        assert len(text.text or "") * 0.56 * size <= float(box.attrib["width"])
    assert numbered == len(events)


def test_a_chart_of_nothing_is_still_a_chart() -> None:
    assert ElementTree.fromstring(gantt_svg([])).tag == f"{SVG}svg"


def test_the_ending_of_the_path_says_what_is_written(tmp_path: Path) -> None:
    events = events_of("1f1b", 2, 2)
    assert ElementTree.parse(write_timeline(events, tmp_path / "a.svg")).getroot().tag == f"{SVG}svg"
    assert "traceEvents" in json.loads(write_timeline(events, str(tmp_path / "a.json")).read_text())
    with pytest.raises(ValueError, match=r"as \.svg \(chart\) or \.json \(Chrome trace\), but the path is a\.png"):
        write_timeline(events, "a.png")
