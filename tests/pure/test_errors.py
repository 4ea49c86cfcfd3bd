from __future__ import annotations

import inspect
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom import errors, units
from legroom.errors import BudgetError, LegroomError


def tree() -> list[type[LegroomError]]:
    return [
        value
        for module in (errors, units)
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, LegroomError) and value.__module__ == module.__name__
    ]


@pytest.mark.parametrize("error", tree())
def test_every_error_is_in_the_drawn_tree_and_explains_itself(error: type[LegroomError]) -> None:
    assert error.__name__ in (errors.__doc__ or "")
    assert error.__doc__
    assert str(error("what happened")) == "what happened"
    assert str(pickle.loads(pickle.dumps(error("what happened")))) == "what happened"


def test_unit_error_is_a_value_error() -> None:
    assert issubclass(units.UnitError, ValueError)


@given(
    st.text(),
    st.integers(0, 2**62),
    st.integers(0, 2**62),
    st.lists(st.tuples(st.text(max_size=8), st.integers(0, 2**62)), max_size=4).map(tuple),
)
def test_budget_error_carries_its_numbers_through_pickle(
    message: str, budget: int, floor: int, breakdown: tuple[tuple[str, int], ...]
) -> None:
    error = BudgetError(message, budget_bytes=budget, floor_bytes=floor, breakdown=breakdown)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is BudgetError
    assert (str(again), again.budget_bytes, again.floor_bytes, again.breakdown) == (message, budget, floor, breakdown)
