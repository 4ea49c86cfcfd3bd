"""Inputs whose steps are other ones than most, told from their sizes.

A model that pads what is no multiple of eight runs other ops where it is one. Such a step comes now and then, hardly
ever twice in a row, and when it shows what it is it cannot be recorded any more: the next one has to be known before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from legroom.ladder import Features

if TYPE_CHECKING:
    from legroom.courses import Course

MULTIPLES = (64, 32, 16, 8, 4, 2)
FEWEST_ALIKE = 2  # that strayed: one may have been by chance
FEWEST_USUAL = 8


def foreseen(features: Features, course: Course, others: Sequence[Course]) -> Course | None:
    """The op sequence of a step, as far as its sizes tell, where this one is expected; None: one to be recorded."""
    alike = [other for other in others if foretold(features, other.ran, course.ran)]
    # Multiples of sixteen are multiples of eight, too: steps that were expected to be like those may have strayed.
    alike = [other for other in alike if not foretold(features, other.strayed, other.ran)]
    for other in alike:
        if other.model.knows(features):
            return other
    if alike:
        return None if any(other.model.wants_more() for other in alike) else course
    return None if foretold(features, course.strayed, course.ran) else course


def foretold(features: Features, strayed: Collection[Features], usual: Collection[Features]) -> bool:
    """Whether an input is like those whose steps strayed: one of them, or a multiple of what at least two of them are
    multiples of; and no usual one is that."""
    if features in strayed:
        return features not in usual
    if len(usual) < FEWEST_USUAL:
        return False
    for place, size in enumerate(features):
        for multiple in MULTIPLES:
            # A step waits: what is a multiple in all steps is found to be in the first.
            if size % multiple == 0 and all(other[place] % multiple for other in usual):
                alike = {other for other in strayed if other[place] % multiple == 0}
                if len(alike) >= FEWEST_ALIKE:
                    return True
    return False
