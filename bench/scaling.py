"""How planning with `auto` grows with the step: processor seconds by the number of gaps, and how close plans come.

    python bench/scaling.py [--gaps 100,300,700,1500,3000,5000] [--json PATH]

The traces are the GPT steps of bench/evaluate.py; a gap belongs to a storage of its own in nearly all cases. For each
size both presets are planned at 75, 50 and 25 % of the range from floor to plain peak. Seconds are those of one thread;
"program" is the part of them that the linear program takes, "quick" what planning takes without it and without asking
others (as in re-plans). "per n log n" is the slowest of a size over n log n, relative to the first size.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench.evaluate import conditions, gpt
from legroom.bound import lower_bound
from legroom.evaluate import floor_bytes
from legroom.hardware import PRESETS
from legroom.planners.auto import Auto

MACHINES = ("h200", "rtx2080ti-pcie3")
SHARES = (0.75, 0.5, 0.25)
LIMITS = {700: 2.0, 5000: 20.0}  # gaps: seconds within which a plan is promised


@dataclass(frozen=True, slots=True)
class Row:
    gaps: int
    storages: int
    ticks: int
    machine: str
    share: float
    seconds: float
    program_seconds: float
    quick_seconds: float
    gap: float
    quick_gap: float


def measured(gaps: int) -> list[Row]:
    trace = gpt(gaps)
    floor, peak = floor_bytes(trace), trace.peak_bytes
    rows = []
    for machine in MACHINES:
        for share in SHARES:
            budget = floor + round(share * (peak - floor))
            clock = [time.process_time()]
            plan = Auto()(trace, PRESETS[machine], budget)
            clock.append(time.process_time())
            bound = lower_bound(trace, PRESETS[machine], budget).seconds
            clock.append(time.process_time())
            quick = Auto(bound=False, thorough=False)(trace, PRESETS[machine], budget)
            clock.append(time.process_time())
            whole, program, rest = (round(clock[i + 1] - clock[i], 3) for i in range(3))
            assert plan.gap is not None
            row = Row(
                gaps=len(trace.gaps),
                storages=len(trace.storages),
                ticks=len(trace.ticks),
                machine=machine,
                share=share,
                seconds=whole,
                program_seconds=program,
                quick_seconds=rest,
                gap=plan.gap,
                quick_gap=quick.predicted_seconds / bound - 1,
            )
            rows.append(row)
            print(
                f"{row.gaps:>6} {row.storages:>8} {row.ticks:>6} {machine:>16} {share:>6.0%} {whole:>8.2f} "
                f"{program:>8.2f} {row.gap:>8.3%} {rest:>8.2f} {row.quick_gap:>9.3%}",
                flush=True,
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaps", default="100,300,700,1500,3000,5000", help="sizes, separated by commas")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    small = gpt(100)  # loads the compiled kernels, and scipy
    Auto()(small, PRESETS["h200"], (floor_bytes(small) + small.peak_bytes) // 2)
    print(
        f"{'gaps':>6} {'storages':>8} {'ticks':>6} {'machine':>16} {'budget':>6} {'plan s':>8} "
        f"{'program':>8} {'gap':>8} {'quick s':>8} {'quick gap':>9}"
    )
    rows = [row for gaps in arguments.gaps.split(",") for row in measured(int(gaps))]
    print(f"\n{'gaps':>6} {'slowest s':>9} {'promised':>8} {'per n log n':>11} {'worst gap':>9}")
    first: float | None = None
    for gaps in dict.fromkeys(row.gaps for row in rows):
        mine = [row for row in rows if row.gaps == gaps]
        slowest = max(row.seconds for row in mine)
        growth = slowest / (gaps * math.log(gaps))
        first = first or growth
        promised = next((f"{limit:.0f} s" for at, limit in LIMITS.items() if 0.9 * at <= gaps <= 1.1 * at), "")
        worst = max(row.gap for row in mine)
        print(f"{gaps:>6} {slowest:>9.2f} {promised:>8} {growth / first:>11.2f} {worst:>9.3%}")
    if arguments.json:
        results = {"conditions": conditions(), "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
