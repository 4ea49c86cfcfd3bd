"""Polynomials through a handful of samples: which dimensions move, and what each number is in them.

A size in a training step is nearly always one product of the input's dimensions (batch * length * width), and what
memory rises by between two ticks is a sum of one to three. So each column gets the fewest terms that give all its
samples; these are known from fewer samples than a full quadratic, one term from two. A term may also hold a dimension
divided by a power of two and cut off or rounded up, as pooling, strides and padded rows make it.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import mul

import numpy as np
import numpy.typing as npt

from legroom.ir import LARGEST_SECONDS
from legroom.tables import Floats, Ints
from legroom.units import LARGEST_BYTES

EXACT_BYTES = 0.01  # what arithmetic leaves; a multiple of n is not n + 1
MOST_RESIDUAL = 0.01  # of the peak; beyond that no size is predicted
BEYOND = 2  # how many times larger or smaller than any sample an input may be
DIVISORS = np.repeat([2.0, 4.0, 8.0, 16.0, 32.0], 2).reshape(5, 2, 1)  # to be cut off, and rounded up
# How much larger than their sum terms may be. From four samples on it is 7 at most in steps of BERT, T5 and a CNN.
CANCELLING = 32
BLOCK = 64  # sets of terms tried at once
PIVOTAL = 0.05  # a sample that all but decides its own fit cannot be left out; its error counts 20-fold at most


@dataclass(frozen=True, slots=True)
class Dims:
    """Which of the features move on their own; the others follow from them, or stand still."""

    columns: Ints  # of the features
    relation: Floats  # [1, dims] @ relation: all features
    low: Floats
    high: Floats

    def of(self, features: Sequence[int]) -> Floats:
        return np.array(features, dtype=np.float64)[self.columns]


def moving(features: Sequence[Sequence[int]]) -> Dims:
    """Features that the ones before them do not give, as a sum of multiples and a constant."""
    table = np.array(features, dtype=np.float64)
    chosen: list[int] = []
    known = np.ones((len(table), 1))
    for column, values in enumerate(table.T):
        if np.abs(known @ np.linalg.lstsq(known, values)[0] - values).max() > 1e-6 * max(1.0, values.max()):
            chosen.append(column)
            known = np.column_stack([known, values])
    dims = table[:, chosen]
    relation: Floats = np.linalg.pinv(known) @ table
    return Dims(np.array(chosen, dtype=np.int64), relation, dims.min(axis=0), dims.max(axis=0))


@dataclass(frozen=True, slots=True)
class Basis:
    """Terms in the moving dimensions: monomials of low degree first, then those with a dimension cut off."""

    # Rows: terms; up to four factors. 0 is one, then come the dimensions, each divided by 2 and cut off, by 2 and
    # rounded up, by 4 and cut off, ...
    factors: Ints
    plain: int  # terms that are monomials
    nested: tuple[Ints, ...]  # rows of the constant, linear, quadratic basis, and that with n * d^2
    most: int  # terms that are looked for in a sum

    def at(self, dims: Floats) -> Floats:
        """A row of terms for each row of dimensions."""
        parts = [np.ones((*dims.shape[:-1], 1)), dims]
        if self.plain < len(self.factors):
            divided = dims[..., None, None, :] / DIVISORS
            np.floor(divided[..., :1, :], out=divided[..., :1, :])
            np.ceil(divided[..., 1:, :], out=divided[..., 1:, :])
            parts.append(divided.reshape(*dims.shape[:-1], -1))
        out: Floats = np.concatenate(parts, axis=-1)[..., self.factors].prod(axis=-1)
        return out

    def only(self, rows: Ints) -> Basis:
        """The basis for prediction: these terms alone."""
        return Basis(self.factors[rows], int((rows < self.plain).sum()), (), 0)


class Asked:
    """Dims and Basis for one input, without arrays: a step waits, and what lies in no cache is what takes time then.
    One call of numpy's takes 2 µs in a loop, and 20 between two steps of a model."""

    def __init__(self, dims: Dims, basis: Basis, weights: Floats) -> None:
        """weights: turn terms into weights of the samples, whose length is how far errors are carried."""
        self._weights = weights.T.tolist()
        self._columns = dims.columns.tolist()
        self._constant, *self._slopes = dims.relation.tolist()
        self._bounds = list(zip(dims.low.tolist(), dims.high.tolist(), strict=True))
        self._terms = [tuple(factor for factor in row if factor) for row in basis.factors.tolist()]
        self._divisors = DIVISORS[:, 0, 0].tolist() if basis.plain < len(basis.factors) else []
        self._last: tuple[Sequence[int], list[float]] = (), []

    def is_near(self, features: Sequence[int]) -> bool:
        """Whether each dimension that moves is near the samples', and the others are what they should be."""
        dims = [features[column] for column in self._columns]
        for dim, (low, high) in zip(dims, self._bounds, strict=True):
            if dim > BEYOND * high or dim * BEYOND < low:
                return False
        for number, (feature, expected) in enumerate(zip(features, self._constant, strict=True)):
            for dim, slopes in zip(dims, self._slopes, strict=True):
                expected += dim * slopes[number]
            if not abs(expected - feature) < 0.5:
                return False
        return True

    def terms(self, features: Sequence[int]) -> list[float]:
        """The row of Basis.at(). A size is asked about more than once."""
        last, terms = self._last
        if last == features:
            return terms
        dims = [float(features[column]) for column in self._columns]
        values = [1.0, *dims]
        for divisor in self._divisors:
            values += [float(dim // divisor) for dim in dims]
            values += [-float(-dim // divisor) for dim in dims]
        terms = [math.prod([values[factor] for factor in term], start=1.0) for term in self._terms]
        self._last = tuple(features), terms
        return terms

    def carried(self, features: Sequence[int]) -> float:
        """The length of the weights that the samples have here."""
        terms = self.terms(features)
        return math.hypot(*(sum(map(mul, terms, weights)) for weights in self._weights))


@functools.cache
def basis_of(count: int) -> Basis:
    """Each dimension to the second power, to the fourth in all; attention over the pixels of a square is n^4."""
    plain: list[tuple[int, ...]]
    dims = range(1, count + 1)
    if count == 1:
        plain = [(1,) * power for power in range(5)]
    else:  # of more than three dimensions nine samples do not tell more than a plane, and single products
        most = 4 if count <= 3 else 2
        plain = [term for size in range(most + 1) for term in itertools.combinations_with_replacement(dims, size)]
        plain = [term for term in plain if all(term.count(dim) <= 2 for dim in term)]
    rows = list(plain)
    for variant in range(1, 1 + DIVISORS.size) if 1 <= count <= 3 else ():
        rows += [tuple(dim + variant * count * cut for dim, cut in term) for term in _cut_terms(count)]
    degree = np.array([len(term) for term in plain])
    nested = tuple(np.flatnonzero(degree <= size) for size in range(3 if count == 1 else 4))
    factors = np.array([row + (0,) * (4 - len(row)) for row in rows], dtype=np.int64)
    return Basis(factors, len(plain), nested, 4 if count <= 2 else 3 if count == 3 else 2)


def _cut_terms(count: int) -> list[tuple[tuple[int, bool], ...]]:
    """Factors (dimension, whether it is cut off): one or more are cut off, at most one dimension is squared."""
    choices = ((), (False,), (True,), (True, True), (False, True))[: 5 if count < 3 else 4]
    terms = []
    for row in itertools.product(choices, repeat=count):
        term = tuple((dim, cut) for dim, cuts in enumerate(row, start=1) for cut in cuts)
        if any(cut for _, cut in term) and len(term) <= 4 and sum(len(cuts) > 1 for cuts in row) <= 1:
            terms.append(term)
    return terms


@dataclass(frozen=True, slots=True)
class Fit:
    coefficients: Floats  # rows: terms, columns: fields
    errors: Floats  # rows: samples; what a fit without this sample would be short by


def fit(basis: Basis, raw: Floats, fields: Ints, tolerance_bytes: float) -> Fit:
    """The fewest terms that give each column of `fields` within the tolerance; else the best polynomial there is.

    raw: a row of terms for each sample.
    """
    scale = np.abs(raw).max(axis=0)
    scale[scale == 0] = 1.0
    terms = raw / scale
    targets = fields.astype(np.float64)
    coefficients = np.zeros((terms.shape[1], targets.shape[1]))
    errors = np.zeros_like(targets)
    left = np.arange(targets.shape[1])
    plain, cut = np.arange(basis.plain), np.arange(basis.plain, terms.shape[1])
    uses = np.zeros(terms.shape[1], dtype=np.int64)  # of a term, in columns of one or two
    for size in range(1, min(basis.most, len(terms) - 1) + 1):
        for cutting in (False, True):
            if cutting and tolerance_bytes > EXACT_BYTES and size > len(terms) - 2:
                continue  # among so many terms some fit by chance, unless sizes are exact or a sample more confirms it
            known = np.union1d(plain, np.flatnonzero(uses)) if cutting else plain
            added = np.union1d(plain, cut) if cutting and size <= 2 else known
            cost = 10 / (1 + uses) + np.count_nonzero(basis.factors, axis=1) / 10
            cost[0] = 0.0  # anything may have a constant beside it
            for columns, rows in _candidates(terms, cost, known, added, size, targets[:, left], tolerance_bytes):
                part, wanted = terms[:, rows], targets[:, left[columns]]
                found = np.linalg.lstsq(part, wanted)[0]
                if cutting and tolerance_bytes <= EXACT_BYTES:
                    # Among so many terms some fit by chance; but not with whole coefficients.
                    found = np.round(found / scale[rows, None]) * scale[rows, None]
                off = wanted - part @ found
                worst = np.abs(off).max(axis=0)
                good = (worst <= tolerance_bytes) & _likely(part, found, wanted)
                here = left[columns][good]
                coefficients[np.ix_(rows, here)] = found[:, good]
                errors[:, here] = np.where(worst <= EXACT_BYTES, 0.0, off)[:, good]
                left = np.where(np.isin(left, here), -1, left)
            left = left[left >= 0]
        if size <= 2:
            uses = np.count_nonzero(coefficients, axis=1)
    if len(left):
        coefficients[:, left], errors[:, left] = _nested(basis, terms, scale, targets[:, left], tolerance_bytes)
    return Fit(_whole(coefficients / scale[:, None]), errors)


def _likely(part: Floats, found: Floats, wanted: Floats) -> npt.NDArray[np.bool_]:
    """Whether the terms do not cancel: through samples close to one another steep curves go that mean nothing."""
    out: npt.NDArray[np.bool_] = (np.abs(part) @ np.abs(found)).max(axis=0) <= CANCELLING * np.abs(wanted).max(axis=0)
    return out


def _whole(coefficients: Floats) -> Floats:
    """Sizes are whole multiples of monomials: what arithmetic left beside that would grow with the input."""
    whole = np.round(coefficients)
    return np.where(np.abs(coefficients - whole) < 1e-6, whole, coefficients)


def _candidates(
    terms: Floats, cost: Floats, known: Ints, added: Ints, size: int, targets: Floats, tolerance_bytes: float
) -> list[tuple[Ints, Ints]]:
    """For each column that `size` terms may give, which: as (columns, terms).

    One term of `added` comes to `size - 1` of `known`: what is left of it and of a column beside these says how well.
    """
    count, columns = targets.shape
    sets = np.array(list(itertools.combinations(known, size - 1)), dtype=np.int64)
    if not columns or not len(sets):
        return []
    best = np.full(columns, np.inf)
    choice = np.zeros((columns, size), dtype=np.int64)
    new = terms[:, added]
    for first in range(0, len(sets), BLOCK):
        block = sets[first : first + BLOCK]
        space: Floats = np.linalg.qr(terms[:, block].swapaxes(0, 1))[0]
        beside_new = new - space @ (space.swapaxes(1, 2) @ new)
        beside = targets - space @ (space.swapaxes(1, 2) @ targets)
        square = (beside_new**2).sum(axis=1)
        given = square <= 1e-12 * (new**2).sum(axis=0)  # the set gives the term itself
        along = beside_new.swapaxes(1, 2) @ beside
        whole = (beside**2).sum(axis=1)[:, None]
        off = whole - along**2 / np.where(given, np.inf, square)[..., None]
        # A difference of two large numbers: those that look exact are looked at again. Of those that are, the one is
        # taken whose terms are common in other columns: as long as a single sample has another batch, a constant and a
        # multiple of the length give what a multiple of their product does.
        sets_at, new_at, columns_at = np.nonzero((off <= count * EXACT_BYTES**2 + 1e-12 * whole) & ~given[..., None])
        slope = along[sets_at, new_at, columns_at] / square[sets_at, new_at]
        rest = beside[sets_at, :, columns_at] - beside_new[sets_at, :, new_at] * slope[:, None]
        exact = (rest**2).sum(axis=1)
        price = 1e-9 * (cost[block].sum(axis=1)[sets_at] + cost[added][new_at])
        off[sets_at, new_at, columns_at] = np.where(exact <= count * EXACT_BYTES**2, price, exact)
        off = np.where(given[..., None], np.inf, off).reshape(-1, columns)
        nearest = off.argmin(axis=0)
        least = off[nearest, np.arange(columns)]
        better = least < best
        best[better] = least[better]
        chosen = np.column_stack([block[nearest // len(added)], added[nearest % len(added)]])
        choice[better] = chosen[better]
    groups: dict[bytes, list[int]] = {}
    for column in np.flatnonzero(best <= count * tolerance_bytes**2).tolist():
        groups.setdefault(choice[column].tobytes(), []).append(column)
    return [(np.array(group), choice[group[0]]) for group in groups.values()]


def _nested(
    basis: Basis, terms: Floats, scale: Floats, targets: Floats, tolerance_bytes: float
) -> tuple[Floats, Floats]:
    """Of the nested bases the one that says best what a sample left out would have been, for each column."""
    count = len(terms)
    coefficients = np.zeros((terms.shape[1], targets.shape[1]))
    coefficients[0] = targets.mean(axis=0)
    # Until there are more samples than a quadratic takes, luck may look like a fit: then all that moves is in doubt.
    errors = (targets - targets.mean(axis=0)) * (count / max(1, count - 1))
    sure = count > len(basis.nested[2])
    best = np.abs(errors).max(axis=0)
    for rows in basis.nested[1:]:
        part = terms[:, rows]
        if len(rows) > count or np.linalg.matrix_rank(part, rtol=1e-9) < len(rows):
            break
        inverse = np.linalg.pinv(part, rcond=1e-9)
        found = inverse @ targets
        if len(rows) == count:
            if len(rows) <= len(basis.nested[2]):
                coefficients[rows] = found
            if len(rows) == len(basis.nested[2]) and tolerance_bytes <= EXACT_BYTES:
                # Nothing is left to check it with, except that a true one of whole sizes has whole coefficients.
                raw = found / scale[rows, None]
                whole = (np.abs(raw - np.round(raw)) < 1e-4).all(axis=0)
                errors[:, whole & _likely(part, found, targets)] = 0.0
            break
        off = targets - part @ found
        left_out = off / np.maximum(1 - np.einsum("ij,ji->i", part, inverse), PIVOTAL)[:, None]
        left_out[:, np.abs(off).max(axis=0) <= EXACT_BYTES] = 0.0
        worst = np.abs(left_out).max(axis=0)
        better = worst < best
        coefficients[:, better] = 0.0
        coefficients[np.ix_(rows, better)] = found[:, better]
        best = np.minimum(best, worst)
        if sure:
            errors[:, better] = left_out[:, better]
    return coefficients, errors


def fit_seconds(basis: Basis, rows: Floats, seconds: Floats) -> Floats:
    """A constant and one monomial for each column, neither of them negative: noise cannot make a time negative."""
    out = np.zeros((rows.shape[1], seconds.shape[1]))
    out[0] = seconds.mean(axis=0)
    best = ((seconds - out[0]) ** 2).sum(axis=0)
    for term in basis.nested[-1][1:].tolist():
        if np.ptp(rows[:, term]) == 0:
            continue
        work = rows[:, term] / rows[:, term].max()
        slope = (work - work.mean()) @ seconds / ((work - work.mean()) ** 2).sum()
        constant = seconds.mean(axis=0) - slope * work.mean()
        slope = np.where(constant < 0, work @ seconds / (work @ work), slope)
        constant = np.maximum(constant, 0.0)
        wrong = ((seconds - constant - work[:, None] * slope) ** 2).sum(axis=0)
        better = (wrong < 0.9 * best) & (slope > 0)  # a higher degree must earn its place: noise prefers steep curves
        out[:, better] = 0.0
        out[0, better] = constant[better]
        out[term, better] = slope[better] / rows[:, term].max()
        best[better] = wrong[better]
    return out


@dataclass(frozen=True, slots=True)
class Model:
    """The fit of some samples, ready to be asked."""

    dims: Dims
    coefficients: Floats  # columns: those that differ
    index: Ints  # which of them are the storages, levels, rises above them, head, workspaces
    second_coefficients: Floats
    second_index: Ints
    errors: Floats  # rows: samples, columns: peaks by tick, the head's last; real less predicted
    residual: float  # the largest of them, as a share of the sample's peak
    spare: int  # samples beyond what a full quadratic takes
    storage_error_bytes: float  # the largest of any storage's size
    asked: Asked

    @property
    def reserve_bytes(self) -> int:
        # The worst of few is not the worst there is: 3 times it with one sample to spare, 1.5 times with four.
        return math.ceil(max(0.0, float(self.errors.max())) * (1 + 2 / self.spare if self.spare > 0 else 1))

    def sizes(self, features: Sequence[int], grain: int) -> Ints:
        """All sizes, by `index` and rounded up."""
        # What arithmetic adds to a whole number must not be rounded up to the next.
        grains = np.array(self.asked.terms(features)) @ self.coefficients
        grains *= (1 - 1e-12) / grain
        grains -= 0.01 / grain
        np.ceil(grains, out=grains)
        most = float(grains.max()) * grain
        if most * len(self.index) >= LARGEST_BYTES:
            raise ValueError(f"a step at {tuple(features)} is beyond all bounds: {most:.3g} bytes at once")
        np.maximum(grains, 0.0, out=grains)
        whole = grains.astype(np.int64)
        whole *= grain
        return whole[self.index]

    def seconds(self, features: Sequence[int]) -> Floats:
        seconds: Floats = (np.array(self.asked.terms(features)) @ self.second_coefficients)[self.second_index]
        if seconds.sum() >= LARGEST_SECONDS:
            raise ValueError(f"a step at {tuple(features)} is beyond all bounds: {seconds.sum():.3g} seconds")
        return seconds

    def knows(self, features: Sequence[int], *, most_residual: float = MOST_RESIDUAL) -> bool:
        if not self.asked.is_near(features):
            return False
        carried = self.asked.carried(features)
        return self.residual * max(1.0, carried) <= most_residual


def learn(
    features: Sequence[Sequence[int]],
    fields: Ints,
    seconds: Floats,
    *,
    storages: int,
    ticks: int,
    tolerance_bytes: float,
) -> Model:
    """A model of `fields`, whose columns are storages, rises from tick to tick, rises above that, head, workspaces."""
    dims = moving(features)
    basis = basis_of(len(dims.columns))
    terms = basis.at(np.array([dims.of(each) for each in features]))
    # Layers repeat: of ten thousand columns a few hundred differ.
    distinct, where = np.unique(fields, axis=1, return_inverse=True)
    where = where.reshape(-1)
    found = fit(basis, terms, distinct, tolerance_bytes)
    distinct_seconds, second_index = np.unique(seconds, axis=1, return_inverse=True)
    times = fit_seconds(basis, terms, distinct_seconds)
    weights = np.zeros(terms.T.shape)
    nested = [rows for rows in basis.nested[:3] if len(rows) <= len(terms)][-1]
    weights[nested] = np.linalg.pinv(terms[:, nested], rcond=1e-12)
    used = np.flatnonzero(found.coefficients.any(axis=1) | times.any(axis=1) | weights.any(axis=1))
    coefficients, head = found.coefficients[used], storages + 2 * ticks
    levels, above = slice(storages, storages + ticks), slice(storages + ticks, head)
    index = where.copy()
    index[levels] = coefficients.shape[1] + np.arange(ticks)
    level_errors = found.errors[:, where[levels]].cumsum(axis=1)
    off = np.column_stack([level_errors + found.errors[:, where[above]], found.errors[:, where[head]]])
    peaks = np.column_stack([fields[:, levels].cumsum(axis=1) + fields[:, above], fields[:, head]]).max(axis=1)
    return Model(
        dims=dims,
        coefficients=np.column_stack([coefficients, coefficients[:, where[levels]].cumsum(axis=1)]),
        index=index,
        second_coefficients=times[used],
        second_index=second_index.reshape(-1),
        errors=off,
        residual=float((np.abs(off).max(axis=1) / np.maximum(peaks, 1)).max()),
        spare=len(features) - len(basis.nested[2]),
        storage_error_bytes=float(np.abs(found.errors[:, where[:storages]]).max(initial=0.0)),
        asked=Asked(dims, basis.only(used), weights[used]),
    )
