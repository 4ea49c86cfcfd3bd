from __future__ import annotations

from legroom.ir import Op, Storage, Tick, Trace, Value
from legroom.reasons import Held, held, unreplayable


def storage(index: int, *, gaps: bool = False, persistent: bool = False, is_held: bool = False) -> Storage:
    spans = ((0, 1),) if gaps else ()
    return Storage(index, 2**index, "activation", persistent, is_held, spans, 0, f"module.{index}")


def op(index: int, reads: tuple[Value, ...], writes: tuple[Value, ...], why_not: str = "") -> Op:
    return Op(index, "aten.mm.default", "forward", 0.0, 0.0, reads, writes, 0, why_not, "", f"train.py:{index}")


def trace_of(storages: list[Storage], ops: list[Op]) -> Trace:
    ticks = (Tick("pack", 0, len(ops), 0, 0), Tick("unpack", 0, len(ops), 0, 0))
    return Trace(tuple(storages), tuple(ops), ticks, 0, "cpu")


def test_held_storages_name_the_line_that_made_them() -> None:
    storages = [storage(0, is_held=True), storage(1), storage(2, is_held=True)]
    ops = [op(0, ((0, 0),), ((1, 0),)), op(1, ((1, 0),), ((2, 0),)), op(2, ((2, 0),), ((2, 1),))]
    assert held(trace_of(storages, ops)) == (Held(1, "module.0", ""), Held(4, "module.2", "train.py:1"))


def test_what_can_be_made_again_from_what_lasts_or_is_saved_gives_no_reason() -> None:
    storages = [storage(0, persistent=True), storage(1), storage(2, gaps=True), storage(3, gaps=True)]
    ops = [op(0, ((0, 0),), ((1, 0),)), op(1, ((1, 0),), ((2, 0),)), op(2, ((2, 0),), ((3, 0),))]
    assert unreplayable(trace_of(storages, ops)) == ()


def test_a_reason_comes_through_values_nobody_saved_and_stops_at_saved_ones() -> None:
    storages = [storage(0, persistent=True), storage(1), storage(2), storage(3, gaps=True), storage(4, gaps=True)]
    ops = [
        op(0, ((0, 0),), ((1, 0),), "an out= op"),
        op(1, ((1, 0),), ((2, 0),)),
        op(2, ((2, 0),), ((3, 0),)),
        op(3, ((3, 0),), ((4, 0),)),
    ]
    assert unreplayable(trace_of(storages, ops)) == (("an out= op", 8),)


def test_reasons_add_up_and_the_largest_comes_first() -> None:
    storages = [storage(0, gaps=True), storage(1, gaps=True), storage(2, gaps=True), storage(3, gaps=True)]
    ops = [op(0, (), ((1, 0),), "an out= op"), op(1, (), ((3, 0),), "an out= op")]
    assert unreplayable(trace_of(storages, ops)) == (("an out= op", 2 + 8), ("made outside forward", 1 + 4))
