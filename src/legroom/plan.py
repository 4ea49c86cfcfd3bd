"""The plan: one decision for each gap of a trace.

A decision says what to do with a storage between two of its uses. It never says what a value is: the runtime takes that
from the step it runs in, so a wrong plan costs time or is refused.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from dataclasses import dataclass
from typing import Any, Literal, cast

from legroom.errors import PlanError, quote
from legroom.ir import Trace
from legroom.jsonio import Node, dump, parse

VERSION = 1
MOST_GAPS = 1_000_000  # a refusal in place of an endless read; traces have a few thousand
MOST_TICKS = 10_000_000

When = Literal["overlap", "sync", "ahead"]


@dataclass(frozen=True, slots=True)
class Keep:
    """Leave the storage where it is."""


@dataclass(frozen=True, slots=True)
class Swap:
    """Copy to the host, free, and copy back.

    overlap: out as early as possible, free once the copy is modelled complete, fetch just in time.
    sync: out and freed at the start of the gap, fetched at its end; compute waits for both copies.
    ahead: out as with overlap, fetched `ahead` ticks before the end of the gap.
    """

    when: When = "overlap"
    ahead: int = 0

    def __post_init__(self) -> None:
        if self.ahead < 0 or (self.ahead and self.when != "ahead"):
            raise PlanError(f"Swap(when={self.when!r}) cannot have ahead={self.ahead}")


@dataclass(frozen=True, slots=True)
class Recompute:
    """Free at the start of the gap, replay the ops that made it at its end.

    share: if a replay before that makes it on its way to something else, it stays in memory from then on.
    """

    share: bool = False


Decision = Keep | Swap | Recompute


@dataclass(frozen=True, slots=True)
class Plan:
    decisions: tuple[Decision, ...]  # aligned with Trace.gaps
    trace_signature: str
    planner: str
    budget_bytes: int
    predicted_peak_bytes: int
    predicted_seconds: float
    notes: tuple[str, ...]
    lower_bound_seconds: float | None = None  # no plan within the budget is faster, in the model; None: not known

    @property
    def gap(self) -> float | None:
        """How far the plan lies above its bound, as a share of it."""
        bound = self.lower_bound_seconds
        return self.predicted_seconds / bound - 1 if bound else None


# Of traces that are there, by where they lie: a plan and its schedule are held against their trace time and again, and
# a trace with the numbers of another size is a new one.
_signatures: dict[int, tuple[weakref.ref[Trace], str]] = {}


def signature(trace: Trace) -> str:
    """A short hash over what a plan depends on: storages, gaps, ticks and op lineage.

    Measured seconds, memory levels and names of places are left out, so that a second measurement of the same step, or
    a moved source line, keeps its plans.
    """
    key = id(trace)
    known = _signatures.get(key)
    if known is None or known[0]() is not trace:
        gone = weakref.ref(trace, lambda _: _signatures.pop(key, None))
        known = _signatures[key] = gone, _signature(trace)
    return known[1]


def _signature(trace: Trace) -> str:
    facts = (
        trace.device,
        [(s.nbytes, s.kind, s.persistent, s.held, s.gaps, s.gap_version) for s in trace.storages],
        [(t.kind, t.storage, t.op) for t in trace.ticks],
        [(o.name, o.phase, o.reads, o.writes) for o in trace.ops],
    )
    text = json.dumps(facts, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fits(trace: Trace, plan: Plan) -> None:
    """Refuse a plan that was made for another trace."""
    expected = signature(trace)
    if plan.trace_signature != expected:
        raise PlanError(f"the plan is for trace {plan.trace_signature}, this trace is {expected}; plan it again")
    gaps = sum(len(storage.gaps) for storage in trace.storages)
    if len(plan.decisions) != gaps:
        raise PlanError(f"the plan has {len(plan.decisions)} decisions, the trace has {gaps} gaps; plan it again")


def checked(trace: Trace, plan: object) -> Plan:
    """What a planner gave, if it is a plan for this trace."""
    if not isinstance(plan, Plan):
        raise PlanError(f"a planner returns a Plan; this one returned {quote(plan)}")
    check_fits(trace, plan)
    return plan


def to_json(plan: Plan) -> str:
    return dump(
        "plan",
        VERSION,
        {
            "trace_signature": plan.trace_signature,
            "planner": plan.planner,
            "budget_bytes": plan.budget_bytes,
            "predicted_peak_bytes": plan.predicted_peak_bytes,
            "predicted_seconds": plan.predicted_seconds,
            **({} if plan.lower_bound_seconds is None else {"lower_bound_seconds": plan.lower_bound_seconds}),
            "notes": list(plan.notes),
            "decisions": [_decision_to_dict(decision) for decision in plan.decisions],
        },
    )


def from_json(text: str) -> Plan:
    fields = parse(text, kind="plan", version=VERSION, error=PlanError).fields(
        "trace_signature",
        "planner",
        "budget_bytes",
        "predicted_peak_bytes",
        "predicted_seconds",
        "notes",
        "decisions",
        optional=("lower_bound_seconds",),
    )
    seconds = fields["predicted_seconds"].number()
    bound = fields["lower_bound_seconds"].number(most=seconds) if "lower_bound_seconds" in fields else None
    return Plan(
        decisions=tuple(_decision_from(node) for node in fields["decisions"].items(longest=MOST_GAPS)),
        trace_signature=fields["trace_signature"].text(longest=64),
        planner=fields["planner"].text(longest=64),
        budget_bytes=fields["budget_bytes"].integer(),
        predicted_peak_bytes=fields["predicted_peak_bytes"].integer(),
        predicted_seconds=seconds,
        notes=tuple(node.text() for node in fields["notes"].items(longest=1000)),
        lower_bound_seconds=bound,
    )


def _decision_to_dict(decision: Decision) -> dict[str, Any]:
    match decision:
        case Keep():
            return {"do": "keep"}
        case Swap(when="ahead"):
            return {"do": "swap", "when": "ahead", "ahead": decision.ahead}
        case Swap():
            return {"do": "swap", "when": decision.when}
        case Recompute(share=True):
            return {"do": "recompute", "share": True}
        case Recompute():
            return {"do": "recompute"}


def _decision_from(node: Node) -> Decision:
    fields = node.fields("do", optional=("when", "ahead", "share"))
    match fields["do"].one_of(("keep", "swap", "recompute")):
        case "keep":
            node.fields("do")
            return Keep()
        case "recompute":
            fields = node.fields("do", optional=("share",))
            return Recompute(share="share" in fields and fields["share"].boolean())
    when = cast(When, node.fields("do", "when", optional=("ahead",))["when"].one_of(("overlap", "sync", "ahead")))
    if when != "ahead":
        node.fields("do", "when")
        return Swap(when=when)
    return Swap(when=when, ahead=node.fields("do", "when", "ahead")["ahead"].integer(most=MOST_TICKS))
