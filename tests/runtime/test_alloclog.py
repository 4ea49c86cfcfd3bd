"""Two logs of one step made into one: what the allocator's counters said, and what the profiler saw."""

from __future__ import annotations

from legroom.alloclog import OP, TICK, Allocation, Enter, Event, Leave, SampledLog

MAIN, ENGINE = 1, 2


def enter(name: str, seconds: float = 0.0) -> Enter:
    return Enter(name, seconds, "", False)


def test_marks_keep_their_order_where_the_profilers_clock_does_not() -> None:
    """The engine's thread seems to have begun before the last mark of the main one was over."""
    log = SampledLog(0, ops=False)
    first, second = log.numbered(OP), log.numbered(TICK)
    log._events = [enter(first), Allocation(512), Leave(first), enter(second), Allocation(-512), Leave(second)]
    profiled: list[tuple[int, Event]] = [
        (MAIN, enter(first, 1.0)),
        (MAIN, enter("aten::mm", 2.0)),
        (ENGINE, enter(second, 3.0)),
        (ENGINE, enter("aten::add", 4.0)),
        (ENGINE, Leave("aten::add")),
        (MAIN, Leave("aten::mm")),
        (MAIN, Leave(first)),
        (ENGINE, Leave(second)),
    ]
    assert list(log._merged(iter(profiled))) == [
        enter(OP, 1.0),
        enter("aten::mm", 2.0),
        Leave("aten::mm"),
        Allocation(512),
        Leave(OP),
        enter(TICK, 3.0),
        enter("aten::add", 4.0),
        Leave("aten::add"),
        Allocation(-512),
        Leave(TICK),
    ]


def test_a_mark_that_the_profiler_lost_stays() -> None:
    log = SampledLog(0, ops=False)
    lost = log.numbered(TICK)
    log._events = [enter(lost), Allocation(512), Leave(lost)]
    assert list(log._merged(iter([]))) == [enter(TICK), Allocation(512), Leave(TICK)]
