"""What of a trace depends on the input's size, learned from steps of a few sizes.

After Liao et al., "Mimose: An Input-Aware Checkpointing Planner for Efficient Training on GPU", whose estimator is a
quadratic of one input size for each layer's bytes and time. Here it is one for each storage, tick and op, in however
many dimensions move, with as few terms as the samples need: see fitting.py. Sizes that are no polynomial (pooling that
cuts off, proposals that depend on the content) leave an error, which is kept as a reserve.

Levels are fitted as rises from tick to tick and peaks as rises above the level: these are sums of few sizes where a
level is a sum of hundreds.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from legroom.fitting import EXACT_BYTES, MOST_RESIDUAL, Model, learn
from legroom.ir import Op, Storage, Tick, Trace
from legroom.tables import Floats, Ints

Parts = dict[tuple[int, int], Model]
Features = tuple[int, ...]  # all dimensions of all tensors that the model is called with

LARGEST_FEATURE = 2**40
MOST_SAMPLES = 9  # sheltered steps that are asked for
LAST_RESIDUAL = 0.05  # of the peak, as MOST_RESIDUAL, once that many have come
MOST_KEPT = 32  # of those that came unasked
MOST_ASKED = 4096  # sizes whose answer is remembered
MOST_HEARD = 8  # sizes whose last measured step counts
ROUNDINGS = 4  # sizes that come and go between two ticks, each rounded by the allocator


@dataclass(frozen=True, slots=True)
class Numbers:
    """What of a trace depends on the input's size."""

    nbytes: Ints  # by storage
    level_bytes: Ints  # by tick
    peak_bytes: Ints  # by tick
    head_peak_bytes: int
    workspace_bytes: Ints  # by op
    seconds: Floats  # by op; none where only sizes were asked for


def numbers_of(trace: Trace) -> Numbers:
    return Numbers(
        nbytes=_ints([storage.nbytes for storage in trace.storages]),
        level_bytes=_ints([tick.level_bytes for tick in trace.ticks]),
        peak_bytes=_ints([tick.peak_bytes for tick in trace.ticks]),
        head_peak_bytes=trace.head_peak_bytes,
        workspace_bytes=_ints([op.workspace_bytes for op in trace.ops]),
        seconds=np.array([op.seconds for op in trace.ops], dtype=np.float64),
    )


def with_numbers(trace: Trace, numbers: Numbers) -> Trace:
    """The trace at the size that the numbers are of."""
    for what, have, need in (
        ("storages", (len(numbers.nbytes),), len(trace.storages)),
        ("ticks", (len(numbers.level_bytes), len(numbers.peak_bytes)), len(trace.ticks)),
        ("ops", (len(numbers.workspace_bytes), len(numbers.seconds)), len(trace.ops)),
    ):
        if set(have) != {need}:
            raise ValueError(f"the numbers are of {have[0]} {what}, the trace has {need}; take those of its structure")
    levels = numbers.level_bytes.tolist()
    peaks = np.maximum(numbers.peak_bytes, numbers.level_bytes).tolist()
    workspaces, seconds = numbers.workspace_bytes.tolist(), numbers.seconds.tolist()
    # Written out: a step may wait for it, and replace() takes twice as long.
    return replace(
        trace,
        storages=tuple(
            s
            if s.nbytes == nbytes
            else Storage(s.id, nbytes, s.kind, s.persistent, s.held, s.gaps, s.gap_version, s.name)
            for s, nbytes in zip(trace.storages, numbers.nbytes.tolist(), strict=True)
        ),
        ticks=tuple(
            Tick(tick.kind, tick.storage, tick.op, level, peak)
            for tick, level, peak in zip(trace.ticks, levels, peaks, strict=True)
        ),
        ops=tuple(
            Op(
                op.id,
                op.name,
                op.phase,
                time,
                op.issue_seconds,
                op.reads,
                op.writes,
                workspace,
                op.why_not,
                op.module,
                op.line,
                None if op.replay_seconds is None else _again(op, time),
                op.short,
                op.twin,
            )
            for op, workspace, time in zip(trace.ops, workspaces, seconds, strict=True)
        ),
        head_peak_bytes=numbers.head_peak_bytes,
        requests=(),  # those of one size tell nothing of the sizes of another
    )


def _again(op: Op, seconds: float) -> float:
    """What a replay takes where the op takes so long."""
    assert op.replay_seconds is not None
    if seconds == op.seconds:
        return op.replay_seconds
    share, more = _share(op)
    return seconds * share + more


def _share(op: Op) -> tuple[float, float]:
    """What a replay takes: that share of the op's own seconds, and so many more whatever those are. What waits for a
    pass of another op takes that pass longer, and its own seconds may be next to nothing beside it."""
    if op.replay_seconds is None:
        return 1.0, 0.0
    own = min(op.replay_seconds, op.seconds)
    return own / op.seconds if own else 0.0, op.replay_seconds - own


def again_shares(trace: Trace) -> tuple[Floats, Floats]:
    """Of each op, what a replay takes: as with_numbers() has it."""
    both = np.array([_share(op) for op in trace.ops], np.float64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


def structure_of(trace: Trace) -> str:
    """A short hash over what stays when the input has another size.

    Gaps and whether an op can be replayed are left out: a storage that is too small to be swapped has no gap.
    """
    facts = (
        trace.device,
        [(s.kind, s.persistent) for s in trace.storages],
        [(t.kind, t.storage, t.op) for t in trace.ticks],
        [(o.name, o.phase, o.reads, o.writes) for o in trace.ops],
    )
    return hashlib.sha256(json.dumps(facts, separators=(",", ":")).encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class _Sample:
    """All steps at the very same features: the largest of each size, the mean of each time."""

    numbers: Numbers
    least_peak_bytes: Ints  # by tick, the head's last
    steps: int
    alike: bool = True  # whether every storage had the same size in all of them

    def joined(self, other: Numbers) -> _Sample:
        mine = self.numbers
        return _Sample(
            Numbers(
                nbytes=np.maximum(mine.nbytes, other.nbytes),
                level_bytes=np.maximum(mine.level_bytes, other.level_bytes),
                peak_bytes=np.maximum(mine.peak_bytes, other.peak_bytes),
                head_peak_bytes=max(mine.head_peak_bytes, other.head_peak_bytes),
                workspace_bytes=np.maximum(mine.workspace_bytes, other.workspace_bytes),
                seconds=mine.seconds + (other.seconds - mine.seconds) / (self.steps + 1),
            ),
            np.minimum(self.least_peak_bytes, _peaks(other)),
            self.steps + 1,
            self.alike and np.array_equal(mine.nbytes, other.nbytes),
        )


class SizeModel:
    """The numbers of one structure at any size, learned from sheltered steps."""

    def __init__(self, *, granularity_bytes: int = 1) -> None:
        if granularity_bytes < 1:
            raise ValueError(f"expected a granularity of at least 1 byte, got {granularity_bytes}")
        self.granularity_bytes = granularity_bytes
        self._samples: dict[Features, _Sample] = {}
        self._structure = ""
        self._template: Trace | None = None
        self._correction = np.zeros(0, dtype=np.int64)
        self._heard: dict[Features, Ints] = {}  # by size, how far its peaks lay above what was learned
        self._models: tuple[Model, Parts] | None = None
        self._reserve_bytes: int | None = None  # of the samples so far
        self._asked: dict[Features, bool] = {}  # what knows() said, with these samples

    @property
    def samples(self) -> int:
        """Distinct inputs seen."""
        return len(self._samples)

    @property
    def template(self) -> Trace:
        """The sample with the most gaps, without those that any other sample rules out."""
        if self._template is None:
            raise ValueError("there is no sample yet; add the trace of a sheltered step first")
        return self._template

    def add(self, features: Features, trace: Trace) -> None:
        """Learn from a sheltered step."""
        if not features:
            raise ValueError(
                "expected the dimensions of the model's inputs, got none; sizes cannot follow from nothing"
            )
        self._check(features)
        structure = structure_of(trace)
        if self._template is None:
            self._structure, self._template = structure, trace
            self._correction = np.zeros(len(trace.ticks), dtype=np.int64)
        elif structure != self._structure:
            raise ValueError(
                f"the trace has structure {structure}, the samples have {self._structure}; use another model"
            )
        self._template = _merged(self._template, trace)
        numbers = numbers_of(trace)
        old = self._samples.pop(features, None)
        self._samples[features] = old.joined(numbers) if old else _Sample(numbers, _peaks(numbers), 1)
        if len(self._samples) > MOST_KEPT:
            del self._samples[next(iter(self._samples))]
        self._models = self._reserve_bytes = None
        self._asked.clear()

    def wants_more(self) -> bool:
        """Whether a sheltered step at an input that is not known would make predictions surer."""
        return self.samples < MOST_SAMPLES

    def knows(self, features: Features) -> bool:
        """Whether `predict` can be relied upon, up to `reserve_bytes`."""
        self._check(features)
        known = self._asked.get(features)
        if known is None:
            if len(self._asked) >= MOST_ASKED:
                self._asked.clear()
            known = self._asked[features] = self._knows(features)
        return known

    def _knows(self, features: Features) -> bool:
        if features in self._samples:
            return True
        # Where no more samples will come, a rough fit with a large reserve is better than none.
        most = MOST_RESIDUAL if self.wants_more() else LAST_RESIDUAL
        return self.samples > 1 and self._model_for(features).knows(features, most_residual=most)

    def predict(self, features: Features, *, timed: bool = True) -> Numbers:
        """The numbers at this input: those of a sample where there is one, else fitted. timed: with seconds, which are
        half of the work, else there may be none."""
        return self.predicting(features)(timed)

    def predicting(self, features: Features) -> Callable[[bool], Numbers]:
        """`predict` with what is known now, to be called in any thread."""
        sample = self._samples.get(features)
        if sample is not None:
            numbers = sample.numbers
            seen = replace(numbers, peak_bytes=numbers.peak_bytes + self._correction)
            return lambda _: seen
        self._check(features)
        model, grain, correction = self._model_for(features), self.granularity_bytes, self._correction
        storages, ticks = len(self.template.storages), len(self.template.ticks)

        def numbers_at(timed: bool) -> Numbers:
            sizes = model.sizes(features, grain)
            level_bytes, head = sizes[storages : storages + ticks], storages + 2 * ticks
            return Numbers(
                nbytes=sizes[:storages],
                level_bytes=level_bytes,
                peak_bytes=level_bytes + sizes[storages + ticks : head] + correction,
                head_peak_bytes=int(sizes[head]),
                workspace_bytes=sizes[head + 1 :],
                seconds=model.seconds(features) if timed else np.zeros(0),
            )

        return numbers_at

    def reserve_bytes(self) -> int:
        """How much a peak may lie above what is predicted."""
        if self._reserve_bytes is None:
            self._reserve_bytes = self._reserve()
        return self._reserve_bytes

    def _reserve(self) -> int:
        spread = max((int((_peaks(s.numbers) - s.least_peak_bytes).max()) for s in self._samples.values()), default=0)
        return max([spread, *(model.reserve_bytes for model in self._trusted())]) if self.samples > 1 else spread

    def sizes_are_sure(self) -> bool:
        """Whether all storages were as large as the input's size says, in every sample. Peaks may be less certain: they
        depend on what libraries take for themselves, too."""
        if not all(sample.alike for sample in self._samples.values()):
            return False
        most = ROUNDINGS * self.granularity_bytes
        return self.samples < 2 or all(model.storage_error_bytes <= most for model in self._trusted())

    def residual(self) -> float:
        """The largest error of a predicted peak, as a share of the step's; 1.0 as long as there is nothing to tell."""
        return max(min(1.0, model.residual) for model in self._trusted()) if self.samples > 1 else 1.0

    def heard(self, features: Features, peak_off: Ints) -> int:
        """Take over what a planned step measured: per tick its peak less the predicted one. By how much predictions
        rise for it, at the tick where they do most.

        Added to all later predictions where it is above zero: what runs without the recorder allocates a little more
        at some places, whatever the size. What a size needed counts until that size, or MOST_HEARD others, are measured
        again: something that happened once must not take room for ever.
        """
        self._check(features)
        if peak_off.shape != self._correction.shape:
            raise ValueError(
                f"expected {len(self._correction)} ticks, got {peak_off.shape}; compare steps of this structure"
            )
        before = self._correction
        self._heard.pop(features, None)
        self._heard[features] = np.maximum(peak_off + before, 0)
        if len(self._heard) > MOST_HEARD:
            del self._heard[next(iter(self._heard))]
        self._correction = np.maximum.reduce(list(self._heard.values()))
        return int((self._correction - before).max(initial=0))

    def _check(self, features: Features) -> None:
        for value in features:
            if type(value) is not int or not 0 <= value < LARGEST_FEATURE:
                raise ValueError(f"expected dimensions of at least 0 and below 2**40, got {value!r}")
        known = next(iter(self._samples), features)
        if len(known) != len(features):
            raise ValueError(
                f"expected {len(known)} dimensions as in the samples, got {len(features)}; use another model"
            )

    def _model_for(self, features: Features) -> Model:
        whole, parts = self._fitted()
        for (column, value), part in parts.items():
            if features[column] == value:
                return part
        return whole

    def _trusted(self) -> list[Model]:
        whole, parts = self._fitted()
        return list(parts.values()) or [whole]

    def _fitted(self) -> tuple[Model, Parts]:
        """A fit of all samples and, where it is no good, of those alike in one dimension, by its column and value.

        The last batch of an epoch is smaller: one sample of another batch must not undo what is known of the others.
        """
        if self._models is None:
            whole, parts = self._fit(self._samples), Parts()
            for column in whole.dims.columns.tolist() if whole.residual > MOST_RESIDUAL else ():
                for value in {features[column] for features in self._samples}:
                    alike = {features: s for features, s in self._samples.items() if features[column] == value}
                    part = self._fit(alike) if len(alike) > 1 else whole
                    if part.residual <= MOST_RESIDUAL:
                        parts[column, value] = part
            self._models = whole, parts
        return self._models

    def _fit(self, samples: dict[Features, _Sample]) -> Model:
        if not samples:
            raise ValueError("there is no sample yet; add the trace of a sheltered step first")
        numbers = [sample.numbers for sample in samples.values()]
        return learn(
            list(samples),
            np.array([_fields(each) for each in numbers]),
            np.array([each.seconds for each in numbers]),
            storages=len(numbers[0].nbytes),
            ticks=len(numbers[0].level_bytes),
            tolerance_bytes=EXACT_BYTES if self.granularity_bytes == 1 else float(ROUNDINGS * self.granularity_bytes),
        )


def _fields(numbers: Numbers) -> Ints:
    rises, above = np.diff(numbers.level_bytes, prepend=0), numbers.peak_bytes - numbers.level_bytes
    return np.concatenate([numbers.nbytes, rises, above, [numbers.head_peak_bytes], numbers.workspace_bytes])


def _merged(template: Trace, trace: Trace) -> Trace:
    """The one with more gaps, with all that either of them says cannot be done."""
    count = [sum(len(storage.gaps) for storage in each.storages) for each in (template, trace)]
    most, other = (trace, template) if count[1] > count[0] else (template, trace)

    def storage(mine: Storage, its: Storage) -> Storage:
        return replace(mine, held=True, gaps=(), gap_version=0) if its.held and not mine.held else mine

    def op(mine: Op, its: Op) -> Op:
        if mine.short and not its.short:
            mine = replace(mine, replay_seconds=None, short=False)
        elif mine.replay_seconds is not None and its.replay_seconds is None:
            mine = replace(mine, replay_seconds=None, twin=False)
        return replace(mine, why_not=its.why_not) if its.why_not and not mine.why_not else mine

    return replace(
        most,
        storages=tuple(map(storage, most.storages, other.storages)),
        ops=tuple(map(op, most.ops, other.ops)),
    )


def _peaks(numbers: Numbers) -> Ints:
    return np.append(numbers.peak_bytes, numbers.head_peak_bytes)


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
