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
  all actions equally likely for all particles, hardly any would be within a small budget. As the paper's vectors are
  short, with one tensor for each layer, gaps of one kind are drawn alike: as many bytes, made by the same ops, which is
  what repeated blocks have in common. What no plan could recompute is not drawn to be recomputed.
- Particles that stand still, or have become equal to another, are drawn anew near the best one (`restless`): some runs
  of gaps, of one kind or of one layer, get another action, and algorithm 3 then takes back, gap by gap, what is no
  better than P1. Nothing in algorithm 3 as printed is random, and with ten times the paper's gaps the swarm stands
  still after 5 to 10 iterations where the paper's converges in 16 to 89: on ResNet-152 at half of the range and PCIe 3
  at 104.9 ms instead of 96. (The swarm that it builds on had such "craziness": Kennedy and Eberhart, 1995.)
- Of two policies that are equally fast, the one that keeps more gaps is better. A swap that hides costs nothing, but
  where many of them fill the link, nothing else fits.
- Three swarms of 50 particles, one after the other, instead of one of 500: an update of a particle evaluates up to n
  policies, where the search times in the paper's table 3 fit one for each particle and iteration, 250,000 in all. On
  ResNet-152 a swarm of 50 takes about that many, and gets further with them than one of 500; but what it ends at varies
  by 0.5 % from swarm to swarm.
- What a replay makes on its way to something else stays where it is to be recomputed too (`share`). The paper does not
  say, but its algorithm 2 pays for each recomputation once. On a GPT of 24 layers that is 3.6 % above `auto` at a
  quarter of the range where throwing it away is 13 to 45 %.
- A swarm ends when its best has not improved for `patience` iterations, or, unless it is `restless`, when an iteration
  changes no particle, as every later one would do the same.
- The second candidate of figure 5 is misprinted: [1,1,2,0] is meant. And a particle that is not its own best, as there,
  cannot come about by algorithm 3 as printed: see the first shortcut.

Shortcuts that change nothing about what is found; of the 2n evaluations of a particle about one in eight is left:

- A particle changes only where that is faster, so it is its own best: P2 is the particle itself, and O2 is known.
- Where P1 agrees with it there is nothing to evaluate, nor for an action tried before on the very same policy.
- Nothing in an update is random, so particles that have become equal stay so: one of them goes on as it is.
- What is away is so for its whole gap at most. Where memory without all of that is above the budget, the policy is an
  error, whatever its timing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from queue import SimpleQueue

import numpy as np

from legroom.evaluate import KEEP, OVERLAP, RECOMPUTE, SHARED, SYNC, Evaluator
from legroom.hardware import Hardware, cores
from legroom.ir import Trace
from legroom.kernels import loops
from legroom.kernels.codes import Codes
from legroom.plan import Plan
from legroom.planners.kinds import kinds_of, numbers
from legroom.tables import NEVER, Bools

_CODES = 1 + max(KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED)
_POINTS = 60  # of the convergence curve in the notes
_ALIKE = 3  # how much gaps of a kind have in common when they are drawn: 0 all, the more the less
# What is drawn anew near the best: how many runs on average, how many of these among gaps of one kind, how long others
# are at most (the gaps of a layer), and how likely they are kept, swapped, swapped with waiting and recomputed.
_RUNS, _BY_KIND, _LAYER = 4, 0.7, 4
_ODDS = (0.35, 0.25, 0.05, 0.35)
_EDGES = tuple(accumulate(_ODDS[:3]))

_Cost = tuple[int, int]  # nanoseconds, and how many gaps are not kept
_ERROR: _Cost = (NEVER, 0)
Progress = Callable[[int, float], None]  # iteration, seconds of the best policy


@dataclass(frozen=True, slots=True, kw_only=True)
class Home:
    particles: int = 50
    iterations: int = 500  # of a swarm, at most
    swarms: int = 3  # one after the other; the best policy of all is taken
    patience: int = 100  # iterations without a faster policy after which a swarm ends
    restless: bool = True  # whether particles that stand still are drawn anew; without it, algorithm 3 as printed
    share: bool = True  # whether what a replay makes on its way stays, if it is to be recomputed too
    seed: int = 0
    threads: int | None = None  # None: one for each core; the plan does not depend on it
    progress: Progress | None = None  # called in each iteration

    def __post_init__(self) -> None:
        for name in ("particles", "iterations", "swarms", "patience", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"home: {name} must be at least 1, got {value}")

    def __call__(self, trace: Trace, hardware: Hardware, budget_bytes: int) -> Plan:
        evaluator = Evaluator(trace, hardware)
        best = np.full(evaluator.gaps, KEEP, np.int8)
        notes: tuple[str, ...] = ("everything fits: nothing to search",)
        if evaluator.judge(best, budget_bytes)[2] > 0:
            threads = min(self.threads or cores(), self.particles)
            evaluators = [evaluator, *(Evaluator(trace, hardware) for _ in range(threads - 1))]
            best, notes = self._search(evaluators, budget_bytes)
        return evaluator.plan(best, planner="home", budget_bytes=budget_bytes, notes=notes)

    def _search(self, evaluators: list[Evaluator], budget_bytes: int) -> tuple[Codes, tuple[str, ...]]:
        recompute = SHARED if self.share else RECOMPUTE
        draw = Draw(evaluators[0], recompute, self.seed)
        found = _Found(draw.policies(1)[0])
        why: list[str] = []
        with ThreadPoolExecutor(len(evaluators)) if len(evaluators) > 1 else nullcontext() as pool:
            for _ in range(self.swarms):
                why.append(self._swarm(draw, found, evaluators, pool, budget_bytes))
                if found.cost == _ERROR:
                    return found.policy, ()  # below the floor
        counts = np.bincount(found.policy, minlength=_CODES)
        swapped = f"{counts[OVERLAP]} swapped, {counts[SYNC]} swapped with waiting"
        each = f"{self.particles} particles" + (f" in each of {self.swarms} swarms" if self.swarms > 1 else "")
        return found.policy, (
            f"{counts[KEEP]} gaps kept, {swapped}, {counts[recompute]} recomputed",
            f"{len(found.curve)} iterations of {each} ({', '.join(dict.fromkeys(why))}); {found.trials} policies tried",
            convergence(found.curve),
        )

    def _swarm(
        self,
        draw: Draw,
        found: _Found,
        evaluators: list[Evaluator],
        pool: ThreadPoolExecutor | None,
        budget_bytes: int,
    ) -> str:
        """Algorithm 1. Returns why it ended."""
        swarm = [_Particle(policy, budget_bytes) for policy in draw.policies(self.particles)]
        found.trials += _in_parallel(_Particle.evaluate, swarm, evaluators, pool)
        if swarm[0].cost == _ERROR:
            return "an error"
        iteration = vain = 0
        lowest_ns = NEVER
        while True:
            best = min(swarm, key=lambda particle: particle.cost)  # the first of equals
            p1 = best.policy.copy()
            iteration, vain = iteration + 1, vain + 1
            if best.cost[0] < lowest_ns:
                lowest_ns, vain = best.cost[0], 0
            if best.cost < found.cost:
                found.policy, found.cost = p1, best.cost
            found.curve.append(found.cost[0])
            if self.progress is not None:
                self.progress(len(found.curve), found.cost[0] / 1e9)
            if iteration == self.iterations:
                return "as many as allowed"
            if vain == self.patience:
                return f"the last {vain} in vain"
            found.trials += _in_parallel(partial(_Particle.update, p1=p1), swarm, evaluators, pool)
            if not self.restless and not any(particle.changed for particle in swarm):
                return "no particle changes any more"
            swarm = _different(swarm)
            if self.restless:
                swarm = self._drawn_anew(swarm, draw, budget_bytes)

    def _drawn_anew(self, swarm: list[_Particle], draw: Draw, budget_bytes: int) -> list[_Particle]:
        """The best, those that an update still changes, and new ones near the best for all others."""
        best = min(swarm, key=lambda particle: particle.cost)
        stay = [best, *(particle for particle in swarm if particle.changed and particle is not best)]
        missing = self.particles - len(stay)
        return [*stay, *(_Particle(draw.near(best.policy), budget_bytes) for _ in range(missing))]


@dataclass(slots=True)
class _Found:
    """What the search knows: the best policy of all swarms so far."""

    policy: Codes
    cost: _Cost = _ERROR
    curve: list[int] = field(default_factory=list)
    trials: int = 0


class Draw:
    """Random policies."""

    def __init__(self, evaluator: Evaluator, recompute: int, seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._gaps = evaluator.gaps
        self._actions = np.array((KEEP, OVERLAP, SYNC, recompute), np.int8)
        self._possible = _recomputable(evaluator)
        kinds = kinds_of(evaluator.trace)
        self._kind = numbers(kinds, self._gaps)
        self._kinds = kinds
        self._all = np.arange(self._gaps)

    def policies(self, particles: int) -> list[Codes]:
        """Lines 1 to 3 of algorithm 1, after the policy that is within any budget that can be met."""
        policies = [np.full(self._gaps, SYNC, np.int8)]
        while len(policies) < particles:
            odds = self._rng.dirichlet(np.ones(4))
            edges = np.cumsum(self._rng.dirichlet(np.maximum(_ALIKE * odds, 1e-3), len(self._kinds)), axis=1)[:, :3]
            drawn = (self._rng.random(self._gaps)[:, None] >= edges[self._kind]).sum(axis=1)
            others = self._rng.choice(3, self._gaps, p=odds[:3] / odds[:3].sum())
            policies.append(self._actions[np.where((drawn == 3) & ~self._possible, others, drawn)])
        return policies

    def near(self, policy: Codes) -> Codes:
        """The policy with another action for some runs of gaps, half of the time long ones, half of any length."""
        drawn = policy.copy()
        length = 1.0 if self._rng.random() < 0.5 else self._rng.random()  # the exponent of the longest
        for _ in range(self._rng.geometric(1 / _RUNS)):
            gaps, longest = self._all, min(_LAYER, self._gaps)
            if self._rng.random() < _BY_KIND:
                gaps = self._kinds[self._kind[self._rng.integers(self._gaps)]]
                longest = len(gaps)
            count = int((longest + 1) ** (length * self._rng.random()))
            first = self._rng.integers(len(gaps) - count + 1)
            drawn[gaps[first : first + count]] = self._actions[bisect_right(_EDGES, self._rng.random())]
        return np.where((drawn == self._actions[3]) & ~self._possible, policy, drawn)


def _recomputable(evaluator: Evaluator) -> Bools:
    """The gaps that can be recomputed while all else is kept; the others cannot be, whatever the plan."""
    codes = np.full(evaluator.gaps, KEEP, np.int8)
    possible = np.zeros(evaluator.gaps, np.bool_)
    for gap in range(evaluator.gaps):
        codes[gap] = RECOMPUTE
        possible[gap] = evaluator.evaluate(codes)[0] < NEVER
        codes[gap] = KEEP
    return possible


class _Particle:
    """A policy on its way, and what it costs: _ERROR if it is one, and before it is evaluated."""

    def __init__(self, policy: Codes, budget_bytes: int) -> None:
        self.policy = policy
        self.changed = False
        self.cost = _ERROR
        self._budget = budget_bytes
        self._evaluated = False
        self._tried = np.zeros((len(policy), _CODES), np.bool_)  # (gap, action), on this very policy

    def evaluate(self, evaluator: Evaluator) -> int:
        """Returns the number of policies tried, as `update` does."""
        if self._evaluated:
            return 0
        ns, _, excess = evaluator.judge(self.policy, self._budget)
        self.cost = (ns, int(np.count_nonzero(self.policy))) if excess == 0 else _ERROR
        self._evaluated = True
        return 1

    def update(self, evaluator: Evaluator, *, p1: Codes) -> int:
        """Lines 3 to 14 of algorithm 3. Returns the number of policies tried."""
        trials = self.evaluate(evaluator)
        gaps, ticks = evaluator.tables.gaps, evaluator.tables.ticks
        _, more, ns, away, self.changed = evaluator.loop(
            loops.follow, self._budget, self.policy, p1, self._tried, gaps, ticks, np.empty(len(ticks), np.int64),
            *self.cost,
        )  # fmt: skip
        self.cost = ns, away
        return trials + int(more)


def _in_parallel(
    function: Callable[[_Particle, Evaluator], int],
    swarm: list[_Particle],
    evaluators: list[Evaluator],
    pool: ThreadPoolExecutor | None,
) -> int:
    """The sum of what the function returns for each particle."""
    if pool is None:  # to hand particles to a thread would take longer than many of them take
        return sum(function(particle, evaluators[0]) for particle in swarm)
    idle: SimpleQueue[Evaluator] = SimpleQueue()
    for evaluator in evaluators:
        idle.put(evaluator)

    def work(particle: _Particle) -> int:
        evaluator = idle.get()  # there is one for each thread
        try:
            return function(particle, evaluator)
        finally:
            idle.put(evaluator)

    return sum(pool.map(work, swarm))


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
