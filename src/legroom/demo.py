"""`legroom demo`: a small GPT trained plainly and under budgets, side by side.

Every contender is a process of its own (`python -m legroom.demo --worker ...`), since a resident set that has grown
once says nothing about the next run. A worker prints one line of JSON; the parent compares the losses bit for bit.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from legroom.doctor import ALLOCATOR_SETTINGS
from legroom.errors import LegroomError, StepError
from legroom.hardware import PRESETS
from legroom.planners import named
from legroom.units import UnitError, format_bytes, parse_bytes

DEFAULT_BUDGETS = ("75%", "50%", "25%")
WORKER_TIMEOUT_SECONDS = 1800


@dataclass(frozen=True, slots=True)
class Setup:
    """The training run. A plain step takes some three seconds of CPU time (ARM) and stands at 331 MiB at its peak."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    context: int = 256
    batch: int = 8
    vocabulary: int = 2048
    dropout: float = 0.1
    steps: int = 10
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Result:
    """What one contender did."""

    name: str
    budget_bytes: int  # 0: none
    peak_bytes: int  # by the allocator's log
    resident_bytes: int  # growth of the resident set over the run
    step_seconds: float  # median of the second half of the steps
    losses: tuple[str, ...]  # hexadecimal: equal texts are equal bits
    floor_bytes: int = 0  # plain only: the smallest budget that works
    fallbacks: str = ""

    @property
    def within_budget(self) -> bool:
        return not self.budget_bytes or self.peak_bytes <= self.budget_bytes


class Block(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.heads = setup.heads
        self.dropout = setup.dropout
        self.norm_1 = nn.LayerNorm(setup.width)
        self.qkv = nn.Linear(setup.width, 3 * setup.width)
        self.proj = nn.Linear(setup.width, setup.width)
        self.norm_2 = nn.LayerNorm(setup.width)
        self.mlp = nn.Sequential(
            nn.Linear(setup.width, 4 * setup.width),
            nn.GELU(),
            nn.Linear(4 * setup.width, setup.width),
            nn.Dropout(setup.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, context, width = x.shape
        split = self.qkv(self.norm_1(x)).view(batch, context, 3, self.heads, width // self.heads)
        q, k, v = split.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        mixed = self.proj(mixed.transpose(1, 2).reshape(batch, context, width))
        x = x + F.dropout(mixed, self.dropout, self.training)
        return x + self.mlp(self.norm_2(x))


class GPT(nn.Module):
    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.tokens = nn.Embedding(setup.vocabulary, setup.width)
        self.positions = nn.Embedding(setup.context, setup.width)
        self.dropout = nn.Dropout(setup.dropout)
        self.blocks = nn.ModuleList(Block(setup) for _ in range(setup.layers))
        self.norm = nn.LayerNorm(setup.width)
        self.head = nn.Linear(setup.width, setup.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions.weight[: ids.shape[1]])
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def parse_budgets(texts: tuple[str, ...]) -> tuple[float | int, ...]:
    """Budgets as "50%" of the way from the floor to the plain peak (a float), or as bytes (an int)."""
    out: list[float | int] = []
    for text in texts:
        share = re.fullmatch(r"\s*([0-9]{1,3}(?:\.[0-9]{1,6})?)\s*%\s*", text, re.ASCII)
        if share is None:
            out.append(parse_bytes(text))
            continue
        percent = float(share[1])
        if not 0 <= percent <= 100:
            raise UnitError(f"expected a budget of 0% (the floor) to 100% (the plain peak), got {text!r}")
        out.append(percent / 100)
    return tuple(out)


def budget_bytes(budget: float | int, plain: Result) -> int:
    if isinstance(budget, int):
        return budget
    return plain.floor_bytes + round(budget * max(0, plain.peak_bytes - plain.floor_bytes))


def run(
    setup: Setup,
    budgets: tuple[float | int, ...],
    *,
    progress: Callable[[str], None],
    spill_dir: str | None = None,
    html_path: str | None = None,
) -> list[Result]:
    """All contenders, one after the other, the plain run first. Raises if any loss differs in any bit.

    html_path: where the last room writes its report.
    """
    progress("plain PyTorch")
    results = [_run_worker(setup, 0, spill_dir, None)]
    for number, budget in enumerate(budgets, 1):
        nbytes = budget_bytes(budget, results[0])
        progress(f"legroom in {format_bytes(nbytes)}")
        results.append(_run_worker(setup, nbytes, spill_dir, html_path if number == len(budgets) else None))
    check_losses(results)
    return results


def check_losses(results: list[Result]) -> None:
    plain = results[0]
    for result in results[1:]:
        if len(result.losses) != len(plain.losses):
            raise StepError(f"{result.name} made {len(result.losses)} steps, plain {len(plain.losses)}")
        for step, (ours, theirs) in enumerate(zip(result.losses, plain.losses, strict=True)):
            if ours != theirs:
                raise StepError(
                    f"the losses differ: {result.name} has {float.fromhex(ours)!r} in step {step + 1}, plain "
                    f"{float.fromhex(theirs)!r}; this must never happen, please report it"
                )


def to_json(setup: Setup, results: list[Result]) -> str:
    document = {
        "kind": "demo",
        "version": 1,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "setup": asdict(setup),
        "results": [asdict(result) for result in results],
    }
    return json.dumps(document, indent=1) + "\n"


def _run_worker(setup: Setup, budget: int, spill_dir: str | None, html_path: str | None) -> Result:
    task = json.dumps({"setup": asdict(setup), "budget": budget, "spill_dir": spill_dir, "html_path": html_path})
    command = [sys.executable, "-m", "legroom.demo", "--worker", task]
    name = f"legroom in {format_bytes(budget)}" if budget else "plain"
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **ALLOCATOR_SETTINGS},
            capture_output=True,
            text=True,
            timeout=WORKER_TIMEOUT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StepError(f"{name}: not done after {WORKER_TIMEOUT_SECONDS} s; try fewer steps") from None
    lines = done.stdout.strip().splitlines()
    try:
        answer = json.loads(lines[-1])
    except (IndexError, ValueError):
        said = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise StepError(f"{name}: the worker ended with status {done.returncode} and said: {said}") from None
    if "error" in answer:
        raise StepError(f"{name}: {answer['error']}")
    return Result(**{**answer, "name": name, "losses": tuple(answer["losses"])})


def _work(setup: Setup, budget: int, spill_dir: str | None, html_path: str | None) -> dict[str, Any]:
    import legroom

    _load_code(setup, spill_dir)
    model, optimizer, train = _training(setup)
    room = legroom.fit(model, optimizer, budget=budget, spill_dir=spill_dir) if budget else None
    losses, seconds = [], []
    with _resident_growth() as growth:
        for _ in range(setup.steps):
            start = time.perf_counter()
            with room.step() if room is not None else contextlib.nullcontext():
                loss = train()
            seconds.append(time.perf_counter() - start)
            losses.append(float(loss).hex())
    answer: dict[str, Any] = {
        "budget_bytes": budget,
        "resident_bytes": growth[0],
        "step_seconds": statistics.median(seconds[len(seconds) // 2 :]),
        "losses": losses,
    }
    if room is not None:
        report = room.report()
        room.close()
        if html_path is not None:
            report.to_html(html_path)
        return {**answer, "peak_bytes": report.peak_bytes, "fallbacks": _summary(report.fallbacks)}
    # The plain run's peak, and how far down a budget can go, come from a trace of one more step. Its resident set and
    # its time are already taken: tracing costs both.
    from legroom.evaluate import floor_bytes

    trace = legroom.capture(train, model=model, optimizer=optimizer)
    return {**answer, "peak_bytes": trace.peak_bytes, "floor_bytes": floor_bytes(trace)}


def _training(setup: Setup) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    torch.manual_seed(setup.seed)
    model = GPT(setup)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    data = torch.Generator().manual_seed(setup.seed + 1)

    def train() -> Tensor:
        text = torch.randint(setup.vocabulary, (setup.batch, setup.context + 1), generator=data)
        loss = model(text[:, :-1], text[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return model, optimizer, train


def _load_code(setup: Setup, spill_dir: str | None) -> None:
    """Train a tiny model plainly and in a room, in every worker, before the resident set is looked at.

    The first step of a process loads code: 90 MiB for torch's optimizers alone, 70 MiB for the compiler behind
    planning. Beside 300 MiB of tensors that would hide what is compared.
    """
    import legroom

    tiny = replace(setup, layers=1, width=32, heads=2, context=16, batch=2, vocabulary=64)
    model, optimizer, train = _training(tiny)
    train()
    room = legroom.fit(model, optimizer, budget="1GiB", spill_dir=spill_dir)
    for _ in range(4):  # enough to get from the first, sheltered steps to planned ones
        with room.step():
            train()
    if room.trace is not None:  # that budget is kept without a search: load the solver as well
        named("auto")(room.trace, PRESETS["cpu"], legroom.floor_bytes(room.trace))
    room.close()


def _summary(fallbacks: Any) -> str:
    pairs = dict(fallbacks).items()
    return ", ".join(f"{name} {count}" for name, count in pairs if count)


@contextlib.contextmanager
def _resident_growth() -> Iterator[list[int]]:
    """Yields a list that holds, afterwards, by how many bytes the resident set had grown at its highest."""
    out: list[int] = []
    # Sets VmHWM back to the present value. Where the kernel does not allow it, the mark is at worst too high.
    with contextlib.suppress(OSError), open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    before = _status_bytes("VmRSS")
    yield out
    out.append(_status_bytes("VmHWM") - before)


def _status_bytes(field: str) -> int:
    try:
        with open("/proc/self/status") as file:
            for line in file:
                if line.startswith(f"{field}:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _main(arguments: list[str]) -> int:
    if len(arguments) != 2 or arguments[0] != "--worker":
        print("this is a worker of `legroom demo`; run that instead", file=sys.stderr)
        return 2
    task = json.loads(arguments[1])
    try:
        answer = _work(Setup(**task["setup"]), task["budget"], task["spill_dir"], task["html_path"])
    except LegroomError as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
