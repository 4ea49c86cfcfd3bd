"""The order of HOME's paper, for real: steps on the GPU under plans of the four planners it compares.

    python bench/order.py --make-plans plans [--only vgg16,resnet152] [--shares 75,50,25] [--planners home,vdnn]
    python bench/order.py [--plans plans] [--only vgg16] [--shares 75,50,25] [--planners home,vdnn] [--limit 500]
    python bench/order.py --tiny
    python bench/order.py --render bench/results/order.json

The same planners, models and shares of the range as in the last table of `bench/planners.py`, which has them in the
simulator on another GPU's link. Here they plan for the GPU that they run on. A search such as HOME's takes minutes but
no GPU: `--make-plans` makes all plans on any machine, from the recorded traces, for an H200 as `bench/planners.py` has
it, and for as much of each cap as a plan may fill whose memory nobody arranges. `--plans` runs those; where one is not
there, and without `--plans`, the planner is asked when the step is known.

As in `bench/evaluator.py` every budget is a hard cap, a model's budgets share a process, and steps are timed once the
plan has settled. A planner whose rule does not reach a budget counts as slower than any that does.

Results are written after each process. `--from` takes an earlier file along, so that a long run can be made in parts.
"""

from __future__ import annotations

import argparse
import itertools
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

# The folder of a script is on the path, not the one above it.
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import budget, tables
from bench.evaluator import add_options, plan_file, run_models
from bench.meters import at_share
from bench.planners import ORDER, ORDER_TRACES
from bench.record import SUFFIX
from bench.rows import Results, Row, read
from bench.verdicts import Verdict
from bench.workloads import TINY, names_of
from legroom import traceio
from legroom.brim import Brim
from legroom.commands.arguments import hardware_of
from legroom.errors import BudgetError, LegroomError, PlanError
from legroom.evaluate import floor_bytes
from legroom.jsonio import write_text
from legroom.plan import to_json
from legroom.planners import PLANNERS

NOISE = 0.01  # of a step's time: two runs of one plan differ by so much
GIB = 2**30
_HEAD = (
    "model", "budget", "GiB", "planner", "ms", "overhead", "steps/s", "predicted ms", "reserved GiB", "swapped",
    "recomputed", "waited ms", "host ms", "notes",
)  # fmt: skip
_WORDS = (0, 3, 13)
_PREFACE = (
    "Written by `python bench/order.py`. Steps under plans of four planners, each for the GPU it ran on, at the "
    "same hard caps on reserved memory: shares of the range from the smallest peak to the plain peak. With `--plans` "
    "they were made from the recorded traces, as in `planners.md` but for as much of the cap as a plan may fill whose "
    "memory nobody arranges; `predicted` includes the pace of the first steps. The median of single steps by events on "
    "the device. `swapped` and `recomputed` are GiB in a step, `waited` is what the simulator says of waiting for "
    "copies, `host` what a fixed piece of Python took around the timing at worst: steps of many small ops wait for the "
    "host, and it is not always as fast. So there are residual nets with more to compute in each op, too. They are not "
    "among the recorded traces: `bench/record.py --only resnet50,resnet152_batch384 traces` makes theirs, which "
    "`--make-plans` takes with `--traces traces`."
)


def verdicts(results: Results) -> Iterator[Verdict]:
    for model in results.workloads():
        rows = results.of(model)
        for share in dict.fromkeys(_share(row) for row in rows.values() if "@" in row.contender):
            for better, worse in itertools.pairwise(ORDER):
                yield _ordered(model, share, better, rows.get(f"{better}@{share}"), worse, rows.get(f"{worse}@{share}"))


def _ordered(model: str, share: str, better: str, one: Row | None, worse: str, other: Row | None) -> Verdict:
    claim = f"{share}: {better} ≥ {worse}"
    answered = ("ok", "budget")
    if one is None or other is None or one.status not in answered or other.status not in answered:
        return Verdict(model, claim, None, "not run, or not to the end")
    if not one.ok and not other.ok:
        return Verdict(model, claim, None, "neither reaches the budget")
    met = one.ok and (not other.ok or one.median_ms <= other.median_ms * (1 + NOISE))
    return Verdict(model, claim, met, f"{_speed(one)} against {_speed(other)} steps/s")


def _speed(row: Row) -> str:
    return f"{1e3 / row.median_ms:.3f}" if row.ok and row.median_ms else "no plan"


def _share(row: Row) -> str:
    return row.contender.partition("@")[2]


def lines(results: Results) -> Iterator[tuple[str, ...]]:
    for model in results.workloads():
        rows = results.of(model)
        plain = rows.get("plain")
        for row in rows.values():
            yield _cells(row, plain if plain is not None and plain.median_ms else None, runs=len(results.runs))


def _cells(row: Row, plain: Row | None, *, runs: int) -> tuple[str, ...]:
    planner = row.contender.partition("@")[0]
    notes = [f"run {row.run}"] if runs > 1 else []
    head = (row.workload, _share(row), f"{row.cap_bytes / GIB:.2f}" if row.cap_bytes else "", planner)
    if not row.ok:
        return (*head, *[""] * (len(_HEAD) - len(head) - 1), "; ".join([*notes, f"{row.status}: {row.detail}"])[:120])
    breakdown = row.report.get("breakdown")
    stalled = breakdown.get("stalled_copy_seconds") if isinstance(breakdown, dict) else None
    waited = float(stalled) if isinstance(stalled, (int, float)) else 0.0
    planned = bool(row.reported("planned_steps"))
    return (
        *head,
        f"{row.median_ms:.1f}",
        f"{row.median_ms / plain.median_ms - 1:+.1%}" if plain is not None and row is not plain else "",
        _speed(row),
        f"{row.reported('predicted_step_seconds') * 1e3:.1f}" if planned else "",
        f"{row.reserved_bytes / GIB:.2f}" if row.reserved_bytes else "",
        f"{row.reported('bytes_swapped') / GIB:.2f}" if planned else "",
        f"{row.reported('bytes_recomputed') / GIB:.2f}" if planned else "",
        f"{waited * 1e3:.1f}" if planned else "",
        f"{row.host_ms:.1f}" if row.host_ms else "",
        "; ".join([*notes, *([row.detail] if row.detail else []), *_fallbacks(row)])[:120],
    )


def _fallbacks(row: Row) -> list[str]:
    told = row.report.get("fallbacks")
    return [f"{name} ({count}×)" for name, count in told.items()] if isinstance(told, dict) else []


def page(results: Results) -> str:
    out = ["# The papers' order on a GPU", _PREFACE]
    for number, run in enumerate(results.runs):
        out.append(f"Run {number}: " + ", ".join(f"{key} {value}" for key, value in run.items() if key != "command"))
        out.append(f"```console\n$ {run.get('command', '')}\n```")
    out.append(tables.markdown(_HEAD, list(lines(results)), words=_WORDS))
    out.append("## What must hold")
    found = [(verdict.workload, verdict.claim, verdict.word, verdict.figures) for verdict in verdicts(results)]
    out.append(f"Two that differ by {NOISE:.0%} or less count as equal.")
    out.append(tables.markdown(("model", "claim", "", "figures"), found, words=(0, 1, 2, 3)))
    return "\n\n".join(out) + "\n"


def render(path: Path) -> None:
    results = read(path)
    path.with_suffix(".md").write_text(page(results), encoding="utf-8")
    print(f"\n{tables.text(_HEAD, list(lines(results)), words=_WORDS)}\n")
    for verdict in verdicts(results):
        print(verdict)


def make_plans(
    folder: Path, traces: Path, names: Sequence[str], shares: Sequence[str], planners: Sequence[str]
) -> None:
    """Plans of recorded steps, for run_models(). Where a planner's rule does not reach a budget, there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as cause:
        raise LegroomError(f"{folder}: no folder to write plans to ({cause.strerror})") from None
    for name in names:
        trace = traceio.load(traces / f"{name}{SUFFIX}")
        hardware = hardware_of(None, trace)
        floor = floor_bytes(trace)
        for share, planner in itertools.product(shares, planners):
            cap_bytes = at_share(share, floor, trace.peak_bytes)
            path = plan_file(folder, name, f"{planner}@{share}")
            try:
                path.unlink(missing_ok=True)  # of another day: there may be none this time
            except OSError as cause:
                raise LegroomError(f"{path}: cannot be replaced ({cause.strerror})") from None
            try:
                plan = PLANNERS[planner](trace, hardware, Brim(cap_bytes).unarranged_bytes)
            except BudgetError as error:
                print(f"{name} {planner}@{share}: {error}", flush=True)
                continue
            write_text(path, to_json(plan), error=PlanError)
            seconds, peak = plan.predicted_seconds, plan.predicted_peak_bytes
            print(f"{name} {planner}@{share}: {seconds * 1e3:.1f} ms, {peak / GIB:.2f} GiB, {path}", flush=True)


def _planners(text: str) -> tuple[str, ...]:
    names = tuple(part.strip() for part in text.split(","))
    for name in names:
        if name not in PLANNERS:
            raise argparse.ArgumentTypeError(f"no planner {name!r}; there are {', '.join(PLANNERS)}")
    return names


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of, help=f"default: {','.join(ORDER_TRACES)}")
    parser.add_argument("--tiny", action="store_true", help=f"on the CPU, as a trial: {TINY[0]}")
    parser.add_argument("--planners", type=_planners, default=ORDER, help=f"default: {','.join(ORDER)}")
    plans = parser.add_mutually_exclusive_group()
    plans.add_argument("--make-plans", metavar="FOLDER", type=Path, help="only make plans, from the recorded traces")
    plans.add_argument("--plans", metavar="FOLDER", type=Path, help="take plans from here, where there is one")
    add_options(parser, timeout_seconds=120.0, results="order.json")
    return parser


def main(arguments: Sequence[str]) -> int:
    parsed = _parser().parse_args(arguments)
    if parsed.render:
        render(parsed.render)
        return 0
    names = parsed.only or (TINY[:1] if parsed.tiny else ORDER_TRACES)
    if parsed.make_plans:
        make_plans(parsed.make_plans, parsed.traces, names, parsed.shares, parsed.planners)
        return 0
    if parsed.plans is not None and not parsed.plans.is_dir():
        raise LegroomError(f"{parsed.plans}: there is no such folder of plans; make one with --make-plans")
    conditions = budget.conditions(arguments, parsed.commit, script="bench/order.py")
    failed = run_models(parsed, conditions, names, *parsed.planners, plans=parsed.plans)
    render(parsed.json)
    return failed


if __name__ == "__main__":
    # Ended from outside, it leaves by way of `finally`, and a child that measures ends with it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        sys.exit(main(sys.argv[1:]))
    except LegroomError as error:
        sys.exit(f"order.py: {error}")
