"""What must hold, worked out from the rows: met or missed, with the figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from bench.measure import LEGROOM
from bench.peers import PEERS
from bench.rows import Results, Row
from legroom.units import format_bytes

ABOVE_FACTOR = 1.02
PEER_OVERHEAD_SHARE = 0.5
RANGE_OVERHEADS = {"50%": 0.05, "25%": 0.12}  # on the GPT
RANGE_WORKLOAD = "gpt"
FRAGMENTATION = 0.05
PEAK_ERROR, TIME_ERROR = 0.01, 0.03
SMALLEST = "the smallest budget is lower than any peer's peak"
# A peer within this of plain has no overhead that could be halved: what is asked for is then the noise of two runs.
LEAST_OVERHEAD = 0.01


@dataclass(frozen=True, slots=True)
class Verdict:
    workload: str
    claim: str
    met: bool | None  # None: not measured
    figures: str

    @property
    def word(self) -> str:
        return "not measured" if self.met is None else "met" if self.met else "missed"

    def __str__(self) -> str:
        return f"{self.word:12} {self.workload}: {self.claim}: {self.figures}"


def verdicts(results: Results) -> list[Verdict]:
    out: list[Verdict] = []
    for workload in results.workloads():
        rows = results.of(workload)
        plain = rows.get("plain")
        if plain is None or not plain.ok:
            out.append(Verdict(workload, "plain", None, "plain was not measured"))
            continue
        out += [_above(rows, plain), *_at_peers(rows, plain)]
        if workload == RANGE_WORKLOAD:
            out += [_in_range(rows, plain, share, limit) for share, limit in RANGE_OVERHEADS.items()]
        out += [_smallest(rows), _caps(rows), _fragmentation(rows), _predicted_peak(rows), _predicted_time(rows)]
        out = [Verdict(workload, v.claim, v.met, v.figures) if not v.workload else v for v in out]
    return out


def overhead(row: Row, plain: Row) -> float:
    return row.mean_ms / plain.mean_ms - 1


def _above(rows: dict[str, Row], plain: Row) -> Verdict:
    claim = f"above the plain peak at most {ABOVE_FACTOR} × plain"
    row = rows.get(f"{LEGROOM}above")
    if row is None or not row.ok:
        return _absent(claim, row)
    factor = row.mean_ms / plain.mean_ms
    return Verdict("", claim, factor <= ABOVE_FACTOR, f"{row.mean_ms:.1f} / {plain.mean_ms:.1f} ms = {factor:.3f}")


def _at_peers(rows: dict[str, Row], plain: Row) -> Iterator[Verdict]:
    for name, peer in rows.items():
        if name not in PEERS or not PEERS[name].checkpointing:
            continue
        claim = f"at the cap of {name!r} at most half of its overhead"
        row = rows.get(LEGROOM + name)
        if not peer.ok or row is None or not row.ok:
            yield _absent(claim, peer if not peer.ok else row)
            continue
        ours, theirs = overhead(row, plain), overhead(peer, plain)
        allowed = PEER_OVERHEAD_SHARE * max(theirs, LEAST_OVERHEAD)
        figures = f"{ours:+.1%} against {theirs:+.1%} in {format_bytes(row.cap_bytes)}"
        yield Verdict("", claim, ours <= allowed, figures if ours <= allowed else figures + _bound(row))


def _in_range(rows: dict[str, Row], plain: Row, share: str, limit: float) -> Verdict:
    claim = f"{share} of the activation range at most {limit:.0%} overhead"
    row = rows.get(LEGROOM + share)
    if row is None or not row.ok:
        return _absent(claim, row)
    ours = overhead(row, plain)
    figures = f"{ours:+.1%} in {format_bytes(row.cap_bytes)}"
    return Verdict("", claim, ours <= limit, figures if ours <= limit else figures + _bound(row))


def _bound(row: Row) -> str:
    """What no plan can do, by the linear program for the bytes that could be filled, with the host's part in it."""
    bound, baseline = row.reported("lower_bound_seconds"), row.reported("baseline_seconds")
    return f"; no plan is modelled below {bound / baseline - 1:+.1%}" if bound >= baseline > 0 else ""


def _smallest(rows: dict[str, Row]) -> Verdict:
    row, peaks = rows.get(f"{LEGROOM}smallest"), peaks_of_peers(rows)
    if row is None or not row.ok or not peaks:
        return _absent(SMALLEST, row if peaks else None)
    return lower_than(peaks, row)


def peaks_of_peers(rows: Mapping[str, Row]) -> dict[str, int]:
    return {name: r.allocated_bytes for name, r in rows.items() if name in PEERS and name != "plain" and r.ok}


def lower_than(peaks: Mapping[str, int], row: Row) -> Verdict:
    """Whether the budget of a row that ran is lower than the peak of any peer."""
    lowest = min(peaks, key=lambda name: peaks[name])
    figures = f"{format_bytes(row.cap_bytes)} against {format_bytes(peaks[lowest])} of {lowest!r}"
    return Verdict("", SMALLEST, row.cap_bytes < peaks[lowest], figures)


def _caps(rows: dict[str, Row]) -> Verdict:
    """Out of memory counts too: a cap that is kept by stopping is not kept."""
    claim = "never above the cap"
    ours = [row for row in _ours(rows) if row.status in ("ok", "oom")]
    if not ours:
        return _absent(claim, None)
    bad = [r for r in ours if r.status == "oom" or max(r.allocated_bytes, r.reserved_bytes) > r.cap_bytes]
    return Verdict("", claim, not bad, _named(bad) if bad else f"{len(ours)} budgets")


def _fragmentation(rows: dict[str, Row]) -> Verdict:
    claim = f"reserved − allocated at most {FRAGMENTATION:.0%} at the peak"
    shares = {r.contender: r.reserved_bytes / r.allocated_bytes - 1 for r in _ours(rows) if r.ok and r.reserved_bytes}
    return _worst(claim, shares, FRAGMENTATION)


def _predicted_peak(rows: dict[str, Row]) -> Verdict:
    errors = {
        r.contender: abs(r.reported("predicted_peak_bytes") / r.allocated_bytes - 1)
        for r in _ours(rows)
        if r.ok and r.reported("planned_steps") and r.allocated_bytes
    }
    return _worst(f"predicted peak within {PEAK_ERROR:.0%}", errors, PEAK_ERROR)


def _predicted_time(rows: dict[str, Row]) -> Verdict:
    errors = {
        r.contender: abs(r.reported("predicted_step_seconds") * 1e3 / r.mean_ms - 1)
        for r in _ours(rows)
        if r.ok and r.reported("planned_steps")
    }
    return _worst(f"predicted step time within {TIME_ERROR:.0%}", errors, TIME_ERROR)


def _worst(claim: str, values: dict[str, float], limit: float) -> Verdict:
    if not values:
        return _absent(claim, None)
    worst = max(values, key=lambda name: values[name])
    return Verdict("", claim, values[worst] <= limit, f"at worst {values[worst]:.2%} ({worst}, of {len(values)})")


def _ours(rows: dict[str, Row]) -> list[Row]:
    return [row for name, row in rows.items() if name.startswith(LEGROOM)]


def _named(rows: list[Row]) -> str:
    return ", ".join(f"{r.contender} {r.status} {format_bytes(r.reserved_bytes)}" for r in rows)


def _absent(claim: str, row: Row | None) -> Verdict:
    """A contender that ran and failed has missed what was asked of it; one that did not run says nothing."""
    if row is None or row.status in ("skipped", "unavailable", "timeout"):
        return Verdict("", claim, None, "did not run" if row is None else f"{row.contender}: {row.status}")
    ours = row.contender.startswith(LEGROOM)
    return Verdict("", claim, False if ours else None, f"{row.contender}: {row.status}")
