"""HOME: a particle swarm over the whole vector of actions.

Shuibing He, Ping Chen, Shuaiben Chen, Zheng Li, Siling Yang, Weijian Chen, Lidan Shou, "HOME: A Holistic GPU Memory
Management Framework for Deep Learning", IEEE Transactions on Computers, 2023. Algorithms 1 to 3.

Guarantee: a plan for every budget that has one, down to the floor. Never slower than the policy it starts from; not
optimal.

A particle is a policy: an action for each gap. Where the paper has a tensor for each layer, a trace has about ten gaps.
In each iteration every particle tries, gap by gap, the action of the best particle of the last iteration (P1) and that
of its own best so far (P2), and takes P1's where that is faster. A policy above the budget, or one that asks for an
impossible replay, is an error, slower than anything else.

Deviations, and why:

- Algorithm 2 is the exact evaluator. The paper's waits for swaps under way where memory runs short (lines 3 to 10); a
  plan says in advance where it waits, so a swap that waits (`sync`) is a fourth action beside retain, swap and
  recompute. Without it, few policies would be within a budget that a slow link cannot keep up with.
- One particle is seeded: the policy that waits for every swap, as it has the lowest peak of all. The paper does not say
  what happens when all random policies are errors; none would ever move.
- How likely "randomly" takes each action (line 2 of algorithm 1) is left open. Here each particle draws that too: were
  all actions equally likely for all particles, hardly any would be within a small budget. What no plan could recompute
  is not drawn to be recomputed.
- What a replay makes on its way to something else stays where it is to be recomputed too (`share`). The paper does not
  say, but its algorithm 2 pays for each recomputation once. On a GPT of 24 layers that is 3.6 % above `auto` at a
  quarter of the range where throwing it away is 13 to 45 %.
- The search stops when an iteration changes no particle, as every later one would do the same, or when the best has not
  improved for `patience` iterations.
- The second candidate of figure 5 is misprinted: [1,1,2,0] is meant. And a particle that is not its own best, as there,
  cannot come about by algorithm 3 as printed: see the first shortcut.

Shortcuts that change nothing about what is found; of the 2n evaluations of a particle about one in eight is left:

- A particle changes only where that is faster, so it is its own best: P2 is the particle itself, and O2 is known.
- Where P1 agrees with it there is nothing to evaluate, nor for an action tried before on the very same policy.
- Nothing in an update is random, so particles that have become equal stay so: one of them goes on.
- What is away is so for its whole gap at most. Where memory without all of that is above the budget, the policy is an
  error, whatever its timing.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import numpy.typing as npt

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware
from legroom.ir import Trace
from legroom.kernels import Codes
from legroom.plan import Plan
from legroom.tables import G_BYTES, G_END, G_START, NEVER, T_PEAK, Ints

_CODES = 1 + max(KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED)
_POINTS = 60  # of the convergence curve in the notes

Progress = Callable[[int, float], None]  # iteration, seconds of the best policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    particles: int = 500
    iterations: int = 500
    patience: int = 50  # iterations without a faster policy after which the search ends
    share: bool = True  # whether what a replay makes on its way stays, if it is to be recomputed too
    seed: int = 0
    threads: int | None = None  # None: one for each core; the plan does not depend on it
    progress: Progress | None = None  # called in each iteration

    def __post_init__(self) -> None:
        for name in ("particles", "iterations", "patience", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"home: {name} must be at least 1, got {value}")

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        best = np.full(evaluator.gaps, KEEP, np.int8)
        notes: tuple[str, ...] = ("everything fits: nothing to search",)
        if evaluator.judge(best, budget_bytes)[2] > 0:
            threads = min(self.threads or _cores(), self.particles)
            evaluators = [evaluator, *(Evaluator(trace, hardware) for _ in range(threads - 1))]
            best, notes = self._search(evaluators, budget_bytes)
        return evaluator.plan(best, planner="home", budget_bytes=budget_bytes, notes=notes)

    def _search(self, evaluators: list[Evaluator], budget_bytes: int) -> tuple[Codes, tuple[str, ...]]:
        """Algorithm 1."""
        recompute = SHARED if self.share else RECOMPUTE
        policies = initial(evaluators[0], self.particles, recompute=recompute, seed=self.seed)
        swarm = [_Particle(policy, evaluators[0], budget_bytes) for policy in policies]
        if swarm[0].ns == NEVER:
            return swarm[0].policy, ()  # below the floor
        best_policy, lowest_ns = swarm[0].policy, NEVER
        curve: list[int] = []
        trials, vain, why = len(swarm), 0, "as many as allowed"
        with ThreadPoolExecutor(len(evaluators)) as pool:
            while True:
                best = min(swarm, key=lambda particle: particle.ns)  # the first of equals
                p1 = best.policy.copy()
                vain += 1
                if best.ns < lowest_ns:
                    best_policy, lowest_ns, vain = p1, best.ns, 0
                curve.append(lowest_ns)
                if self.progress is not None:
                    self.progress(len(curve), lowest_ns / 1e9)
                if len(curve) == self.iterations:
                    break
                if vain == self.patience:
                    why = f"the last {vain} in vain"
                    break
                trials += _update(swarm, p1, evaluators, pool)
                if not any(particle.changed for particle in swarm):
                    why = "no particle changes any more"
                    break
                swarm = _different(swarm)
        counts = np.bincount(best_policy, minlength=_CODES)
        swapped = f"{counts[OVERLAP]} swapped, {counts[SYNC]} swapped with waiting"
        return best_policy, (
            f"{counts[KEEP]} gaps kept, {swapped}, {counts[recompute]} recomputed",
            f"{len(curve)} iterations of {self.particles} particles ({why}); {trials} policies tried",
            convergence(curve),
        )


def initial(evaluator: Evaluator, particles: int, *, recompute: int = SHARED, seed: int = 0) -> list[Codes]:
    """Lines 1 to 3 of algorithm 1: random policies, after the one that is within any budget that can be met."""
    rng = np.random.default_rng(seed)
    gaps, possible = evaluator.gaps, _recomputable(evaluator)
    policies = [np.full(gaps, SYNC, np.int8)]
    while len(policies) < particles:
        odds = rng.dirichlet(np.ones(4))
        policy = rng.choice((KEEP, OVERLAP, SYNC, recompute), gaps, p=odds)
        others = rng.choice((KEEP, OVERLAP, SYNC), gaps, p=odds[:3] / odds[:3].sum())
        policies.append(np.where((policy == recompute) & ~possible, others, policy).astype(np.int8))
    return policies


def _recomputable(evaluator: Evaluator) -> npt.NDArray[np.bool_]:
    """The gaps that can be recomputed while all else is kept; the others cannot be, whatever the plan."""
    codes = np.full(evaluator.gaps, KEEP, np.int8)
    possible = np.zeros(evaluator.gaps, np.bool_)
    for gap in range(evaluator.gaps):
        codes[gap] = RECOMPUTE
        possible[gap] = evaluator.evaluate(codes)[0] < NEVER
        codes[gap] = KEEP
    return possible


class _Particle:
    """A policy on its way, and its nanoseconds: NEVER for an error."""

    def __init__(self, policy: Codes, evaluator: Evaluator, budget_bytes: int) -> None:
        self.policy = policy
        self.changed = False
        self._budget = budget_bytes
        self._tried = np.zeros((len(policy), _CODES), np.bool_)  # (gap, action), on this very policy
        self._gaps = evaluator.tables.gaps
        self._least: Ints = evaluator.tables.ticks[:, T_PEAK].copy()  # tick: memory without all that may be away
        for start, end, nbytes in self._gaps[policy != KEEP][:, (G_START, G_END, G_BYTES)].tolist():
            self._least[start:end] -= nbytes
        self.ns = self._evaluate(evaluator)

    def update(self, p1: Codes, evaluator: Evaluator) -> int:
        """Lines 3 to 14 of algorithm 3. Returns the number of policies tried."""
        self.changed = False
        trials = 0
        for gap in np.flatnonzero(p1 != self.policy).tolist():
            action, own = int(p1[gap]), int(self.policy[gap])
            if self._tried[gap, action]:
                continue
            self._tried[gap, action] = True
            self._set(gap, action)
            trials += 1
            o1, o2 = self._evaluate(evaluator), self.ns
            if o1 < o2:
                self.ns, self.changed = o1, True
                self._tried[:] = False
            else:
                self._set(gap, own)
        return trials

    def _set(self, gap: int, action: int) -> None:
        gone = int(action != KEEP) - int(self.policy[gap] != KEEP)
        self.policy[gap] = action
        if gone:
            row = self._gaps[gap]
            self._least[row[G_START] : row[G_END]] -= gone * row[G_BYTES]

    def _evaluate(self, evaluator: Evaluator) -> int:
        if self._least.max(initial=0) > self._budget:
            return NEVER
        ns, _, excess = evaluator.judge(self.policy, self._budget)
        return ns if excess == 0 else NEVER


def _update(swarm: list[_Particle], p1: Codes, evaluators: list[Evaluator], pool: ThreadPoolExecutor) -> int:
    """Algorithm 3. Returns the number of policies tried."""
    idle: SimpleQueue[Evaluator] = SimpleQueue()
    for evaluator in evaluators:
        idle.put(evaluator)

    def update(particle: _Particle) -> int:
        evaluator = idle.get()  # there is one for each thread
        try:
            return particle.update(p1, evaluator)
        finally:
            idle.put(evaluator)

    return sum(pool.map(update, swarm))


def _different(swarm: list[_Particle]) -> list[_Particle]:
    """The first of each group of equal particles."""
    found: dict[bytes, _Particle] = {}
    for particle in swarm:
        found.setdefault(particle.policy.tobytes(), particle)
    return list(found.values())


def convergence(curve: list[int]) -> str:
    """A note: milliseconds of the best policy, by iteration. Only where it has changed; of many, some."""
    points = [i for i, ns in enumerate(curve) if i == 0 or ns != curve[i - 1]]
    points = points[:: -(-len(points) // _POINTS)]
    if points[-1] != len(curve) - 1:
        points.append(len(curve) - 1)
    return "convergence (iteration:ms): " + " ".join(f"{i + 1}:{curve[i] / 1e6:.6g}" for i in points)


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
