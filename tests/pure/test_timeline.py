from __future__ import annotations

import json

import pytest

from legroom.errors import PlanError
from legroom.plan import Keep, Recompute, Swap
from legroom.schedule import lower
from legroom.simulate import simulate
from legroom.timeline import Timeline, from_json, to_json, to_perfetto
from tests.pure.strategies import make_plan
from tests.pure.test_schedule import LINK, chain


def example() -> Timeline:
    trace = chain(4)
    return simulate(trace, lower(trace, make_plan(trace, (Swap(when="sync"), Keep(), Recompute())), LINK), LINK)


def test_a_timeline_survives_json() -> None:
    assert from_json(to_json(example())) == example()


@pytest.mark.parametrize(
    ("table", "column", "value", "field"),
    [
        ("intervals", "lane", "gpu", "timeline.intervals[0].lane"),
        ("intervals", "start_ns", -1, "timeline.intervals[0].start_ns"),
        ("intervals", "start_ns", 10**12, "timeline.intervals[0].end_ns"),
        ("memory", "peak_bytes", 0.5, "timeline.memory[0].peak_bytes"),
        ("stalls", "seconds", -1.0, "timeline.stalls[0].seconds"),
    ],
)
def test_a_bad_row_is_refused(table: str, column: str, value: object, field: str) -> None:
    document = json.loads(to_json(example()))
    document[table][column][0] = value
    with pytest.raises(PlanError) as caught:
        from_json(json.dumps(document))
    assert field in str(caught.value)


def test_columns_of_unequal_length_are_refused() -> None:
    document = json.loads(to_json(example()))
    document["memory"]["tick"].pop()
    with pytest.raises(PlanError, match=r"timeline\.memory"):
        from_json(json.dumps(document))


def test_perfetto_has_a_track_for_each_lane_and_every_interval() -> None:
    timeline = example()
    events = json.loads(to_perfetto(timeline))["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"host", "compute", "out", "in"}
    shown = [e for e in events if e["ph"] == "X"]
    assert len(shown) == len(timeline.intervals)
    assert max(e["ts"] + e["dur"] for e in shown) == pytest.approx(timeline.seconds * 1e6)
    assert max(e["args"]["peak"] for e in events if e["ph"] == "C") == timeline.peak_bytes
