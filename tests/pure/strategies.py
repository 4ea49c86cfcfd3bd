"""Random traces that are legal, and random plans for them."""

from __future__ import annotations

import random

from hypothesis import strategies as st

from legroom.hardware import PRESETS, Hardware, HostCosts
from legroom.ir import Op, Storage, Tick, Trace, Value
from legroom.plan import Decision, Keep, Plan, Recompute, Swap, signature


class _Builder:
    """Writes a program op by op, then lays ticks, gaps and a memory curve over it."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.sizes: list[int] = []
        self.persistent: list[bool] = []
        self.versions: dict[int, int] = {}
        self.ops: list[Op] = []

    def storage(self, *, persistent: bool) -> int:
        self.sizes.append(self.rng.randrange(0, 60) * 512)
        self.persistent.append(persistent)
        return len(self.sizes) - 1

    def op(self, phase: str, readable: list[int]) -> None:
        rng = self.rng
        picks = rng.sample(readable, min(len(readable), rng.randrange(0, 4)))
        reads: list[Value] = [(s, self.versions[s]) for s in picks]
        writes: list[Value] = []
        if picks and rng.random() < 0.25:  # in place
            target = rng.choice(picks)
            writes.append((target, self.versions[target] + 1))
        for _ in range(rng.choice((0, 1, 2)) if writes else rng.choice((1, 1, 1, 2, 3))):
            writes.append((self.storage(persistent=False), 0))
        if reads and rng.random() < 0.1:
            reads.append(reads[0])  # mul(x, x) reads x twice
        for s, version in writes:
            self.versions[s] = version
        self.ops.append(
            Op(
                id=len(self.ops),
                name=rng.choice(("aten.mm.default", "aten.add_.Tensor", "aten.relu.default")),
                phase=phase,  # type: ignore[arg-type]
                seconds=rng.randrange(0, 40) * 1e-6,
                issue_seconds=rng.choice((0.0, 1e-6, 9e-6)),
                reads=tuple(reads),
                writes=tuple(writes),
                workspace_bytes=rng.choice((0, 0, 512, 8192)),
                why_not=rng.choice(("", "", "", "", "", "", "not deterministic")),
                module="",
                line="",
            )
        )


def make_trace(seed: int, *, forward: int, device: str = "cuda") -> Trace:
    """A step of `forward` forward ops, about as many backward ops, and an optimizer."""
    rng = random.Random(seed)
    build = _Builder(rng)
    for _ in range(rng.randrange(1, 4)):
        build.versions[build.storage(persistent=True)] = 0
    if rng.random() < 0.5:
        build.versions[build.storage(persistent=False)] = 0  # an input that nothing makes and nobody promises to keep
    for _ in range(forward):
        build.op("forward", sorted(build.versions))
    border = len(build.ops)
    for _ in range(rng.randrange(0, forward + 1)):
        fresh = [s for s, v in build.versions.items() if v == 0 and build.persistent[s]]
        build.op("backward", fresh)
    for _ in range(rng.randrange(0, 3)):
        build.op("optimizer", [s for s in build.versions if build.persistent[s]])
    issued = sorted(rng.randrange(0, border + 1) for _ in range(rng.randrange(0, forward + 2)))
    issued += sorted(rng.randrange(border, len(build.ops) + 1) for _ in range(rng.randrange(1, forward + 3)))
    storages = [_finish(build, index, issued) for index in range(len(build.sizes))]
    return Trace(
        storages=tuple(storages),
        ops=tuple(build.ops),
        ticks=_ticks(rng, storages, issued),
        head_peak_bytes=rng.randrange(0, 50) * 512,
        device=device,
    )


def _finish(build: _Builder, index: int, issued: list[int]) -> Storage:
    """Give a storage gaps between ticks at which one version stands in it."""
    rng = build.rng
    version = build.versions[index]
    made = max((op.id for op in build.ops if (index, version) in op.writes), default=-1)
    possible = [tick for tick, op in enumerate(issued) if op > made]
    gaps: list[tuple[int, int]] = []
    held = rng.random() < 0.1
    if len(possible) >= 2 and not held and rng.random() < (0.3 if build.persistent[index] else 0.9):
        bounds = sorted(rng.sample(possible, min(len(possible), rng.choice((2, 2, 2, 4, 6)))))
        gaps = list(zip(bounds[::2], bounds[1::2], strict=False))
        if len(gaps) > 1 and rng.random() < 0.2:
            gaps[1] = (gaps[0][1], gaps[1][1])  # used at the very tick at which the next gap starts
    return Storage(
        id=index,
        nbytes=build.sizes[index],
        kind="parameter" if build.persistent[index] else "activation" if gaps else "temporary",
        persistent=build.persistent[index],
        held=held,
        gaps=tuple(gaps),
        gap_version=version if gaps else 0,
        name=f"s{index}" if rng.random() < 0.5 else "",
    )


def _ticks(rng: random.Random, storages: list[Storage], issued: list[int]) -> tuple[Tick, ...]:
    ticks = []
    for index, op in enumerate(issued):
        level = rng.randrange(0, 20) * 512
        level += sum(s.nbytes for s in storages if s.persistent or any(a <= index <= b for a, b in s.gaps))
        used = [s.id for s in storages if any(index in gap for gap in s.gaps)] or [0]
        peak = level + rng.choice((0, 0, 512, 20 * 512))
        ticks.append(Tick(rng.choice(("pack", "unpack")), rng.choice(used), op, level, peak))  # type: ignore[arg-type]
    return tuple(ticks)


def random_decision(rng: random.Random) -> Decision:
    return rng.choice(
        (
            Keep(),
            Swap(),
            Swap(),
            Swap(when="sync"),
            Swap(when="ahead", ahead=rng.randrange(0, 4)),
            Recompute(),
            Recompute(),
            Recompute(share=True),
            Recompute(share=True),
        )
    )


def make_plan(trace: Trace, decisions: tuple[Decision, ...]) -> Plan:
    return Plan(decisions, signature(trace), "test", 0, 0, 0.0, ())


def traces(*, most_ops: int = 14) -> st.SearchStrategy[Trace]:
    return st.builds(lambda seed, n: make_trace(seed, forward=n), st.integers(0, 2**32), st.integers(1, most_ops))


def plans_for(trace: Trace) -> st.SearchStrategy[Plan]:
    """Random decisions; now and then most of them are to share, as chains of these are seldom drawn otherwise."""

    def build(seed: int) -> Plan:
        rng = random.Random(seed)
        sharing = rng.choice((0.0, 0.0, 0.7))
        decisions = (Recompute(share=True) if rng.random() < sharing else random_decision(rng) for _ in trace.gaps)
        return make_plan(trace, tuple(decisions))

    return st.builds(build, st.integers(0, 2**32))


def hardwares() -> st.SearchStrategy[Hardware]:
    """Machines from a link that hides everything to one that hides nothing, waiting hosts included."""
    rates = st.sampled_from((1e7, 1e9, 3.3e9, 55e9))
    random_ones = st.builds(
        Hardware,
        name=st.just("random"),
        device_bytes=st.just(2**34),
        host_bytes=st.just(2**36),
        out_bytes_per_second=rates,
        in_bytes_per_second=rates,
        duplex_out_bytes_per_second=rates,
        duplex_in_bytes_per_second=rates,
        latency_seconds=st.sampled_from((0.0, 1e-6, 2e-5)),
        synchronous=st.booleans(),
        copy_compute_share=st.sampled_from((0.0, 0.37, 1.0)),
        granularity_bytes=st.just(512),
        host=host_costs(),
    )
    return st.one_of(st.sampled_from(sorted(PRESETS.values(), key=lambda h: h.name)), random_ones)


def host_costs() -> st.SearchStrategy[HostCosts]:
    """Hosts that do a plan for nothing, and those that take longer for an instruction than compute for an op.

    No two costs are alike, so that none can stand for another.
    """
    few = {name: (1 + index) * 1.03e-6 for index, name in enumerate(HostCosts.__slots__)}
    some = st.builds(HostCosts, **{name: st.sampled_from((0.0, cost, 20 * cost)) for name, cost in few.items()})
    return st.one_of(st.just(HostCosts()), some)
