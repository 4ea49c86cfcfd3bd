"""Logs of one step made into one: what the allocator's counters said, what the profiler saw, and the history."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from legroom.alloclog import (
    OP,
    TICK,
    Allocation,
    Block,
    Enter,
    Event,
    Leave,
    MemoryLog,
    ProfilerLog,
    SampledLog,
    mark,
    profiler_is_free,
    with_requests,
)
from legroom.history import blocks

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


OURS, THEIRS = 0, 7  # streams


def entry(action: str, addr: int, size: int = 512, stream: int = OURS) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": stream, "time_us": 0}


def test_a_history_tells_of_blocks_one_by_one() -> None:
    entries = [
        entry("free_requested", 1),  # from before
        entry("free_completed", 1),
        entry("segment_map", 0, 2**21),
        entry("alloc", 1, 1000),
        entry("alloc", 2, 512, THEIRS),
        entry("alloc", 3, 1),
        entry("free_requested", 1, 1000),
        entry("free_completed", 1, 1000),
        entry("alloc", 1, 1025),  # where another one was
        entry("free_requested", 2, 512, THEIRS),
        entry("snapshot", 0, 0),
        {"action": "oom", "device_free": 5, "size": 9, "stream": OURS},
        entry("free_requested", 1, 1025),
        entry("alloc", 1, 512, THEIRS),
        entry("free_requested", 1, 512, THEIRS),
    ]
    told = [None, (0, 1024), None, (1, 512), (0, 0), (2, 1536), None, (2, 0), None, None]
    assert blocks(entries, OURS) == told


@given(st.lists(st.sampled_from(["enter", "allocate", "other", "leave"]), max_size=40))
def test_a_history_is_found_again_between_the_marks(doings: list[str]) -> None:
    events: list[Event] = []
    expected: list[Event] = []
    history: list[tuple[int, int] | None] = []
    places = []
    for number, doing in enumerate(doings):
        match doing:
            case "allocate":
                history.append((number, 512))
                expected.append(Block(number, 512))
            case "other":
                history.append(None)
            case _:
                mark = enter(TICK) if doing == "enter" else Leave(TICK)
                events.append(mark)
                expected.append(mark)
                places.append(len(history))
    assert with_requests(events, [*places, len(history)], history) == expected
    # One that is missing could be any of them.
    assert with_requests(events, [*places, len(history) + 1], history) == events


def test_counted_bytes_stay_before_the_mark_at_which_they_were_counted() -> None:
    events: list[Event] = [Allocation(512), enter(TICK), Allocation(1024), Leave(TICK)]
    assert with_requests(events, [1, 2, 3], [(0, 512), (1, 1024), None]) == [
        Allocation(512),
        Block(0, 512),
        enter(TICK),
        Allocation(1024),
        Block(1, 1024),
        Leave(TICK),
    ]


@pytest.mark.parametrize("blocks", [True, False])
def test_the_cpus_log_tells_which_block_goes(blocks: bool) -> None:
    log = ProfilerLog(blocks=blocks)
    log.start()
    kept = torch.empty(100, dtype=torch.uint8)
    gone = torch.empty(300, dtype=torch.uint8)
    del gone
    events = log.stop()
    assert len(kept) == 100
    assert [event.nbytes for event in events if isinstance(event, Allocation)] == [100, 300, -300]
    assert [(event.key, event.nbytes) for event in events if isinstance(event, Block)] == (
        [(0, 100), (1, 300), (1, 0)] if blocks else []
    )


def test_a_log_of_memory_alone_has_its_marks_in_their_places() -> None:
    """Blocks of the size of a mark among them, and blocks from before the log."""
    before = torch.empty(200, dtype=torch.uint8)
    log = MemoryLog()
    log.start()
    with mark(OP):
        kept = torch.empty(100, dtype=torch.uint8)
        with mark(TICK):
            like = torch.UntypedStorage(log._size)
            del before
        gone = torch.empty(300, dtype=torch.uint8)
    for _ in range(3):
        del gone
        gone = torch.empty(log._size, dtype=torch.uint8)
        with mark(TICK):
            pass
    events = log.stop()
    size = log._size
    moves = [event.nbytes if isinstance(event, Allocation) else (type(event), event.name) for event in events]
    inside = [(Enter, OP), 100, (Enter, TICK), size, (Leave, TICK), 300, (Leave, OP)]
    each = [size, (Enter, TICK), (Leave, TICK)]
    assert moves == [*inside, -300, *each, -size, *each, -size, *each]
    assert len(kept) == 100 and len(gone) == like.nbytes() == size
    with mark(OP):  # in no log
        pass


def test_marks_of_a_thread_that_the_profiler_does_not_hear_are_left_out() -> None:
    log = MemoryLog()
    log.start()

    def elsewhere() -> None:
        with mark(OP):
            pass

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    with mark(TICK):
        pass
    assert [(type(event), event.name) for event in log.stop() if isinstance(event, (Enter, Leave))] == [
        (Enter, TICK),
        (Leave, TICK),
    ]


def test_a_log_of_memory_alone_that_is_given_up_leaves_the_profiler_free() -> None:
    log = MemoryLog()
    log.start()
    with mark(OP):
        assert not profiler_is_free()
    log.cancel()
    log.cancel()
    assert profiler_is_free()
    assert isinstance(mark(OP), torch._C._profiler._RecordFunctionFast)
