"""What a room did, in numbers."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from legroom.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Where the modelled step spends its time."""

    computation_seconds: float
    overlapped_copy_seconds: float
    stalled_copy_seconds: float
    recomputation_seconds: float


@dataclass(frozen=True, slots=True)
class Held:
    """A saved storage that stays because Python code refers to it."""

    nbytes: int
    module: str
    line: str


@dataclass(frozen=True, slots=True)
class Report:
    steps: int
    sheltered_steps: int
    planned_steps: int
    measured_steps: int  # steps whose peak was read from the allocator's log
    budget_bytes: int
    peak_bytes: int  # measured, worst step
    planned_peak_bytes: int  # measured, the last planned step that was measured
    predicted_peak_bytes: int
    floor_bytes: int  # the smallest budget that works; 0 until it is known
    step_seconds: float
    predicted_step_seconds: float
    baseline_seconds: float
    bytes_kept: int
    bytes_swapped: int
    bytes_recomputed: int
    breakdown: Breakdown
    held: tuple[Held, ...]
    unreplayable: tuple[tuple[str, int], ...]  # reason, bytes of saved storages it keeps from being recomputed
    fallbacks: dict[str, int]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2, sort_keys=True)

    def __str__(self) -> str:
        lines = [
            f"steps {self.steps}, sheltered {self.sheltered_steps}, planned {self.planned_steps}",
            f"budget {format_bytes(self.budget_bytes)}, peak {format_bytes(self.peak_bytes)} "
            f"(measured in {self.measured_steps} steps)"
            + (f", predicted {format_bytes(self.predicted_peak_bytes)}" if self.predicted_peak_bytes else "")
            + (f", smallest that works {format_bytes(self.floor_bytes)}" if self.floor_bytes else ""),
        ]
        if self.planned_steps:
            lines.append(
                f"step {format_seconds(self.step_seconds)}, predicted {format_seconds(self.predicted_step_seconds)}, "
                f"without any action {format_seconds(self.baseline_seconds)} (modelled)"
            )
            lines.append(
                f"kept {format_bytes(self.bytes_kept)}, swapped {format_bytes(self.bytes_swapped)}, "
                f"recomputed {format_bytes(self.bytes_recomputed)}"
            )
            b = self.breakdown
            lines.append(
                f"computation {format_seconds(b.computation_seconds)}, "
                f"overlapped copy {format_seconds(b.overlapped_copy_seconds)}, "
                f"stalled copy {format_seconds(b.stalled_copy_seconds)}, "
                f"recomputation {format_seconds(b.recomputation_seconds)}"
            )
        for held in sorted(self.held, key=lambda h: -h.nbytes)[:5]:
            lines.append(f"held by Python code: {format_bytes(held.nbytes)} {held.module} {held.line}".rstrip())
        for name, count in sorted(self.fallbacks.items()):
            lines.append(f"fallback: {name}: {count}")
        return "\n".join(lines)
