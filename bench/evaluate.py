"""How fast plans are evaluated: lowering and running them, planning with `auto`, and compiling the kernels.

    PYTHONPATH=src python bench/evaluate.py [--gaps 100,500,1000,2000] [--repeats 200] [--json PATH]

The traces are GPT training steps written by a generator: a pack and an unpack for each gap. Times are processor time of
one thread, the least of many passes, so that other work on the machine changes them little. A pass goes over 16
different random mixes: one vector again and again would be learnt by heart by the branch predictor. In "one changes"
each differs from the one before in one gap, as when a planner searches.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import itertools
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator, floor_bytes
from legroom.hardware import PRESETS
from legroom.ir import Op, Phase, Storage, Tick, Trace, Value, validate
from legroom.kernels.codes import Codes
from legroom.planners import PLANNERS
from legroom.tables import NEVER

ROOT = Path(__file__).parents[1]
MIXES = 16
GAPS_OF_A_LAYER = 15


class _Step:
    """Writes a step op by op: storages, what each op saves, and the memory that stands after each op."""

    def __init__(self) -> None:
        self.nbytes: list[int] = []
        self.persistent: list[bool] = []
        self.ops: list[Op] = []
        self.saves: list[tuple[int, int]] = []  # (op, storage)

    def storage(self, nbytes: int, *, persistent: bool = False) -> int:
        self.nbytes.append(nbytes)
        self.persistent.append(persistent)
        return len(self.nbytes) - 1

    def op(self, name: str, phase: Phase, nanoseconds: int, reads: Sequence[int], writes: Sequence[int]) -> None:
        made: tuple[Value, ...] = tuple((s, 0) for s in writes)
        read: tuple[Value, ...] = tuple((s, 0) for s in reads)
        op = Op(len(self.ops), name, phase, nanoseconds / 1e9, 4e-6, read, made, 0, "", "", "")
        self.ops.append(op)

    def forward(self, name: str, nanoseconds: int, reads: Sequence[int], nbytes: int, *, extra: int = 0) -> list[int]:
        made = [self.storage(nbytes)] + ([self.storage(extra)] if extra else [])
        self.op(name, "forward", nanoseconds, reads, made)
        return made

    def save(self, *storages: int) -> None:
        self.saves += [(len(self.ops) - 1, storage) for storage in storages]

    def backward(self) -> Trace:
        """Unpack what was saved, the last first, an op after the last unpack of each forward op; then the optimizer."""
        packs = [(op + 1, storage) for op, storage in self.saves]
        unpacks = []
        gradient = self.storage(self.nbytes[-1])
        self.op("aten.ones_like", "backward", 1000, (), (gradient,))
        for position in range(len(self.saves) - 1, -1, -1):
            op, storage = self.saves[position]
            unpacks.append((len(self.ops), storage))
            if position == 0 or self.saves[position - 1][0] != op:
                reads = [s for maker, s in self.saves if maker == op] if position < 8 else []
                reads = [s for maker, s in self.saves[position : position + 8] if maker == op] or reads
                after = self.storage(max(self.nbytes[s] for s in reads))
                self.op("backward", "backward", 2 * round(self.ops[op].seconds * 1e9), (gradient, *reads), (after,))
                gradient = after
        weights = [s for s, persistent in enumerate(self.persistent) if persistent]
        self.op("aten._foreach_add_", "optimizer", 500_000, weights, ())
        return self._trace(packs, unpacks)

    def _trace(self, packs: list[tuple[int, int]], unpacks: list[tuple[int, int]]) -> Trace:
        ticks = [("pack", *at) for at in packs] + [("unpack", *at) for at in unpacks]
        last_read = {storage: op.id for op in self.ops if op.phase == "forward" for storage, _ in op.reads}
        bounds: dict[int, list[int]] = {}
        issued = np.array([op for _, op, _ in ticks])
        for index, (kind, _, storage) in enumerate(ticks):
            if kind == "pack":
                free = int(np.searchsorted(issued, last_read.get(storage, -1), side="right"))
                bounds[storage] = [max(index, free)]
            else:
                bounds[storage].append(index)
        gaps = {s: tuple((a, b) for a, b in itertools.pairwise(at) if a < b) for s, at in bounds.items()}
        after = self._levels()
        edges = [*issued.tolist(), len(self.ops)]
        kinds = ["parameter" if p else "temporary" for p in self.persistent]
        for storage in gaps:
            kinds[storage] = "activation"
        return Trace(
            storages=tuple(
                Storage(s, self.nbytes[s], kinds[s], self.persistent[s], False, gaps.get(s, ()), 0, "")  # type: ignore[arg-type]
                for s in range(len(self.nbytes))
            ),
            ops=tuple(self.ops),
            ticks=tuple(
                Tick(kind, storage, op, int(after[op]), int(after[op : edges[index + 1] + 1].max()))  # type: ignore[arg-type]
                for index, (kind, op, storage) in enumerate(ticks)
            ),
            head_peak_bytes=int(after[0]),
            device="cuda",
        )

    def _levels(self) -> Any:
        """Bytes alive before each op, and after the last."""
        change = np.zeros(len(self.ops) + 2, np.int64)
        first = {s: op.id for op in reversed(self.ops) for s, _ in (*op.reads, *op.writes)}
        last = {s: op.id for op in self.ops for s, _ in (*op.reads, *op.writes)}
        for storage, nbytes in enumerate(self.nbytes):
            change[0 if self.persistent[storage] else first[storage] + 1] += nbytes
            if not self.persistent[storage]:
                change[last[storage] + 1] -= nbytes
        return np.cumsum(change)


def gpt(gaps: int, *, width: int = 2048, tokens: int = 8192) -> Trace:
    """A training step of a GPT with as many layers as come to about so many gaps."""
    step = _Step()
    row = 2 * tokens * width  # bytes of one activation in bfloat16
    vector = 4 * tokens
    ids = step.storage(8 * tokens, persistent=True)
    table = step.storage(2 * 32768 * width, persistent=True)
    x = step.forward("aten.embedding", 40_000, (ids, table), row)[0]
    for _ in range(max(1, round(gaps / GAPS_OF_A_LAYER))):
        x = _layer(step, x, row, vector, [step.storage(2 * n * width * width, persistent=True) for n in (3, 1, 4, 4)])
    step.forward("aten.mean", 30_000, (x,), row)
    trace = step.backward()
    validate(trace)
    return trace


def _layer(step: _Step, x: int, row: int, vector: int, weights: list[int]) -> int:
    qkv, proj, up, down = weights
    normed, statistics = step.forward("aten.native_layer_norm", 45_000, (x,), row, extra=vector)
    step.save(x, statistics)
    heads = step.forward("aten.addmm", 700_000, (normed, qkv), 3 * row)[0]
    step.save(normed)
    mixed, logsumexp = step.forward("aten._flash_attention", 500_000, (heads,), row, extra=vector)
    step.save(heads, mixed, logsumexp)
    out = step.forward("aten.addmm", 240_000, (mixed, proj), row)[0]
    step.save(mixed)
    dropped, mask = step.forward("aten.native_dropout", 45_000, (out,), row, extra=row // 2)
    step.save(mask)
    residual = step.forward("aten.add", 45_000, (x, dropped), row)[0]
    normed, statistics = step.forward("aten.native_layer_norm", 45_000, (residual,), row, extra=vector)
    step.save(residual, statistics)
    wide = step.forward("aten.addmm", 950_000, (normed, up), 4 * row)[0]
    step.save(normed)
    active = step.forward("aten.gelu", 120_000, (wide,), 4 * row)[0]
    step.save(wide)
    out = step.forward("aten.addmm", 950_000, (active, down), row)[0]
    step.save(active)
    dropped, mask = step.forward("aten.native_dropout", 45_000, (out,), row, extra=row // 2)
    step.save(mask)
    after, scale = step.forward("aten.add", 45_000, (residual, dropped), row, extra=vector)
    step.save(scale)
    return after


def microseconds(calls: Sequence[Callable[[], object]], repeats: int) -> float:
    """Of one call on average, in the quickest pass over all of them."""
    best = float("inf")
    for _ in range(repeats):
        start = time.thread_time_ns()
        for call in calls:
            call()
        best = min(best, (time.thread_time_ns() - start) / len(calls))
    return best / 1000


def vectors(gaps: int) -> dict[str, list[Codes]]:
    rng = np.random.default_rng(0)
    plain = {"all keep": KEEP, "overlap": OVERLAP, "sync": SYNC}
    same = {name: [np.full(gaps, code, np.int8)] * MIXES for name, code in plain.items()}
    mixes = {"random mix": (KEEP, OVERLAP, SYNC, RECOMPUTE), "with sharing": (KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED)}
    fresh = {name: [rng.choice(m, gaps).astype(np.int8) for _ in range(MIXES)] for name, m in mixes.items()}
    steps = [fresh["with sharing"][0]]
    while len(steps) < MIXES:
        steps.append(steps[-1].copy())
        steps[-1][rng.integers(gaps)] = rng.choice(mixes["with sharing"])
    return same | fresh | {"one changes": steps}


def evaluation(gaps: int, repeats: int) -> list[dict[str, Any]]:
    trace = gpt(gaps)
    evaluator = Evaluator(trace, PRESETS["h200"])
    rows = []
    for name, codes in vectors(evaluator.gaps).items():
        lowered = [evaluator.lowered(c) for c in codes]
        calls = {
            "lower": [lambda c=c: evaluator._work(c, NEVER, evaluator._judged, runs=False) for c in codes],
            "run": [lambda p=p: evaluator.run(p) for p in lowered],
            "evaluate": [lambda c=c: evaluator.evaluate(c) for c in codes],
        }
        times = {key: round(microseconds(call, repeats), 1) for key, call in calls.items()}
        rows.append({"gaps": evaluator.gaps, "ticks": len(trace.ticks), "plan": name, **times})
    return rows


def planning(gaps: int) -> list[dict[str, Any]]:
    trace = gpt(gaps)
    floor, peak = floor_bytes(trace), trace.peak_bytes
    rows = []
    for share in (0.75, 0.5, 0.25):
        budget = floor + round(share * (peak - floor))
        start = time.process_time()
        plan = PLANNERS["auto"](trace, PRESETS["h200"], budget)
        seconds = time.process_time() - start
        row = {"gaps": len(trace.gaps), "budget": share, "seconds": round(seconds, 3)}
        rows.append({**row, "step_ms": round(plan.predicted_seconds * 1e3, 3), "notes": list(plan.notes)})
    return rows


_FIRST_CALL = """
import time, numpy as np
from legroom.evaluate import Evaluator
from legroom.hardware import PRESETS
from legroom.ir import Trace
start = time.process_time()
Evaluator(Trace((), (), (), 0, "cuda"), PRESETS["h200"]).evaluate(np.zeros(0, np.int8))
print(time.process_time() - start)
"""


def compilation() -> dict[str, float]:
    """Processor seconds of the first evaluation of a process: without a cache, then with the one it left."""
    with tempfile.TemporaryDirectory() as cache:
        path = os.environ.get("PYTHONPATH", str(ROOT / "src"))
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": path}
        command = [sys.executable, "-c", _FIRST_CALL]
        cold, warm = (
            float(subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout)
            for _ in range(2)
        )
    return {"cold_seconds": round(cold, 2), "warm_seconds": round(warm, 3)}


def conditions() -> dict[str, Any]:
    git = ["git", "-C", str(ROOT)]
    commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    changed = subprocess.run([*git, "status", "--porcelain", "src"], capture_output=True, text=True, check=False).stdout
    versions = {name: importlib.metadata.version(name) for name in ("numba", "numpy", "llvmlite")}
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit + ("+changes" if changed.strip() else ""),
        "python": platform.python_version(),
        **versions,
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gaps", default="100,500,1000,2000", help="sizes, separated by commas")
    parser.add_argument("--repeats", type=int, default=200, help="passes; the quickest counts")
    parser.add_argument("--json", type=Path, help="write the results here too")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"conditions": conditions(), "compilation": compilation()}
    print(f"compilation: {results['compilation']['cold_seconds']} s, from the cache: ", end="")
    print(f"{results['compilation']['warm_seconds']} s")
    print(f"\n{'gaps':>6} {'ticks':>6}  {'plan':<12} {'lower µs':>9} {'run µs':>9} {'evaluate µs':>12}")
    results["evaluation"] = []
    for gaps in (int(text) for text in arguments.gaps.split(",")):
        rows = evaluation(gaps, arguments.repeats)
        results["evaluation"] += rows
        for r in rows:
            print(f"{r['gaps']:>6} {r['ticks']:>6}  {r['plan']:<12} {r['lower']:>9} {r['run']:>9} {r['evaluate']:>12}")
    print(f"\n{'gaps':>6} {'budget':>7} {'planning s':>11} {'step ms':>9}")
    results["planning"] = planning(500)
    for row in results["planning"]:
        print(f"{row['gaps']:>6} {row['budget']:>7.0%} {row['seconds']:>11} {row['step_ms']:>9}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
