"""The inner loops of the local search and of the swarm, compiled: they ask for the cost of one plan after another, each
a change or two away from the one before, and Python would take longer to ask than the answer takes.

What each is for is said in `planners.local` and `planners.home`, where it is called, by `Evaluator.loop()`. A plan's
cost is here (nanoseconds, bytes above the budget summed over all ticks), both NEVER where a replay is impossible. Each
returns how many plans it judged before all else, and leaves `codes` as it went on from them.
"""

from __future__ import annotations

import math
from typing import Any

from legroom.kernels.codes import KEEP, Codes
from legroom.kernels.compiling import compiled, inlined, inner
from legroom.kernels.lowering import lower_and_run
from legroom.tables import G_BYTES, G_END, G_START, NEVER, T_PEAK, Bools, Floats, Ints

# (budget, what is above it whatever is done, by gap whether anything can be done about it, room for the codes with all
# others kept, fetches ahead, whether the last plan was possible, the evaluator's arrays)
View = tuple[int, int, Codes, Codes, Ints, Ints, tuple[Any, ...]]
ALL, WIN, TAKE = 0, 1, 2  # what try_changes() does
_RADIX = 16  # more than there are codes
_OFF = 1.02  # times: so much may a price be above the next before that comes first


@inlined
def _judge(view: View, epoch: int) -> tuple[int, int]:
    budget, above, _, codes, ahead, again, arrays = view
    used, nanoseconds, _, excess = lower_and_run(True, True, again[0] > 0, budget, codes, ahead, epoch, *arrays)
    again[0] = used >= 0
    if used < 0:
        return NEVER, NEVER
    return nanoseconds, excess + above


@inner
def _set(view: View, codes: Codes, gap: int, action: int) -> None:
    codes[gap] = action
    view[3][gap] = action * view[2][gap]


@inner
def _set_all(view: View, codes: Codes) -> None:
    for gap in range(len(codes)):
        view[3][gap] = codes[gap] * view[2][gap]


@inlined
def _changed(view: View, epoch: int, codes: Codes, gap: int, action: int) -> tuple[int, int]:
    """What the plan costs with one gap changed."""
    before = codes[gap]
    _set(view, codes, gap, action)
    cost = _judge(view, epoch)
    _set(view, codes, gap, before)
    return cost


@compiled
def try_changes(
    view: View, epoch: int, codes: Codes, places: Ints, actions: int, now_ns: int, most: int, how: int, costs: Ints
) -> tuple[int, int, int]:
    """(how many plans were judged, nanoseconds, changes made). places: gap * actions + action, those of a gap together.

    how: judge ALL; or those that may WIN, of as many gaps as are begun before `most` are judged; or TAKE those that are
    better. The costs of what is not judged stay as they are.
    """
    _set_all(view, codes)
    judged = taken = 0
    before, lost = -1, False
    for i in range(len(places)):
        gap, action = places[i] // actions, places[i] % actions
        if how == WIN and gap != before:
            if judged >= most:
                break
            before, lost = gap, False
        if lost:
            continue
        then_ns, excess = _changed(view, epoch + judged, codes, gap, action)
        judged += 1
        costs[i, 0], costs[i, 1] = then_ns, excess
        if how == WIN and action == KEEP and then_ns >= now_ns:
            lost = True  # not even keeping it would win time: nothing else will
        if how == TAKE and excess == 0 and (then_ns < now_ns or (then_ns == now_ns and action == KEEP)):
            _set(view, codes, gap, action)
            now_ns = then_ns
            taken += 1
    return judged, now_ns, taken


@inner
def _differ(codes: Codes, others: Codes) -> bool:
    differ = False
    for gap in range(len(codes)):
        differ = differ or codes[gap] != others[gap]
    return differ


@compiled
def take_faster(
    view: View, epoch: int, codes: Codes, together: Ints, actions: Ints, now_ns: int, most: int
) -> tuple[int, int, int]:
    """Change all gaps of a row at once, in every way, if that is faster: (how many plans were judged, nanoseconds,
    changes). No more than so many are judged."""
    _set_all(view, codes)
    rows, many = together.shape
    ways = len(actions) ** many
    judged = taken = 0
    for row in range(rows):
        gaps = together[row]
        kept = True
        for i in range(many):
            kept = kept and codes[gaps[i]] == KEEP
        if kept and many > 1:
            continue
        for way in range(ways):
            if not _differs(codes, gaps, actions, way):
                continue
            if judged >= most:
                return judged, now_ns, taken
            before = _put(view, codes, gaps, actions, way)
            ns, excess = _judge(view, epoch + judged)
            judged += 1
            if excess == 0 and ns < now_ns:
                now_ns = ns
                taken += 1
            else:
                _put_back(view, codes, gaps, before)
    return judged, now_ns, taken


@inner
def _differs(codes: Codes, gaps: Ints, actions: Ints, way: int) -> bool:
    """Whether something else is done about each of these gaps."""
    for i in range(len(gaps) - 1, -1, -1):
        if codes[gaps[i]] == actions[way % len(actions)]:
            return False
        way //= len(actions)
    return True


@inner
def _put(view: View, codes: Codes, gaps: Ints, actions: Ints, way: int) -> int:
    """Do about these gaps what the way says, of which the last digit is for the last gap. Returns what was done before,
    for _put_back()."""
    before = 0
    for i in range(len(gaps) - 1, -1, -1):
        before = before * _RADIX + codes[gaps[i]]
        _set(view, codes, gaps[i], actions[way % len(actions)])
        way //= len(actions)
    return before


@inner
def _put_back(view: View, codes: Codes, gaps: Ints, before: int) -> None:
    for gap in gaps:
        _set(view, codes, gap, before % _RADIX)
        before //= _RADIX


# A heap of places in these arrays, by price, then rank, then gap and action.


@inner
def _before(i: int, j: int, prices: Floats, ranks: Floats, places: Ints) -> bool:
    if prices[i] != prices[j]:
        return bool(prices[i] < prices[j])
    if ranks[i] != ranks[j]:
        return bool(ranks[i] < ranks[j])
    return bool(places[i] < places[j])


@inner
def _sink(heap: Ints, size: int, at: int, prices: Floats, ranks: Floats, places: Ints) -> None:
    moving = heap[at]
    while 2 * at + 1 < size:
        child = 2 * at + 1
        if child + 1 < size and _before(heap[child + 1], heap[child], prices, ranks, places):
            child += 1
        if not _before(heap[child], moving, prices, ranks, places):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moving


@compiled
def prices_off(
    now: Codes, trial: Codes, factors: Floats, known: Floats, prices: Floats, ranks: Floats, places: Ints
) -> int:
    """Put the known prices of what a trial keeps, each multiplied by its factor, into these arrays; returns how many.
    What the plan before did there counts as free where nobody has asked."""
    many = 0
    for gap in range(len(trial)):
        if trial[gap] != KEEP:
            continue
        for action in range(factors.shape[1]):
            place = gap * factors.shape[1] + action
            if math.isnan(known[place, 0]):
                if action == KEEP or action != now[gap]:
                    continue
                known[place, 0] = known[place, 1] = 0.0
            prices[many] = known[place, 0] * factors[gap, action]
            ranks[many] = known[place, 1] * factors[gap, action]
            places[many] = place
            many += 1
    return many


@compiled
def reach(
    view: View, epoch: int, codes: Codes, prices: Floats, ranks: Floats, places: Ints, heap: Ints, actions: int,
    now_ns: int, now_excess: int, most: int, give_up_ns: int, fresh: bool, sync: int, known: Floats,
) -> tuple[int, int, int, bool]:  # fmt: skip
    """(how many plans were judged, nanoseconds, excess, whether nothing was changed since prices were fresh).

    places: gap * actions + action. known: by place, the price and the rank when last asked for.
    """
    _set_all(view, codes)
    size = len(heap)
    for i in range(size):
        heap[i] = i
    for i in range(size // 2 - 1, -1, -1):
        _sink(heap, size, i, prices, ranks, places)
    judged = 0
    while size > 0 and now_excess > 0 and judged < most and now_ns < give_up_ns:
        first = heap[0]
        gap, action = places[first] // actions, places[first] % actions
        done = codes[gap] != KEEP and (action != sync or codes[gap] == sync) and not fresh
        then_ns = then_excess = fall = 0
        helps = False
        if not done:
            then_ns, then_excess = _changed(view, epoch + judged, codes, gap, action)
            judged += 1
            fall = now_excess - then_excess
            helps = then_ns != NEVER and fall > 0
        if helps:
            price, rank = (then_ns - now_ns) / fall, -float(fall)
            known[places[first], 0], known[places[first], 1] = price, rank
            if price > 0.0 and size > 1:
                following = heap[1]
                if size > 2 and _before(heap[2], following, prices, ranks, places):
                    following = heap[2]
                if price > _OFF * prices[following]:
                    prices[first], ranks[first] = price, rank
                    _sink(heap, size, 0, prices, ranks, places)
                    continue
            _set(view, codes, gap, action)
            now_ns, now_excess, fresh = then_ns, then_excess, False
        size -= 1
        heap[0] = heap[size]
        _sink(heap, size, 0, prices, ranks, places)
    return judged, now_ns, now_excess, fresh


@compiled
def anneal(
    view: View, epoch: int, codes: Codes, now_ns: int, gaps: Ints, chosen: Ints, many: Ints, luck: Floats,
    temperature: float, cooling: float, penalty: float, grows: float, start: Codes, found: Codes,
) -> tuple[int, int]:  # fmt: skip
    """(how many plans were judged, nanoseconds of the best other than the start, or NEVER where there is none): that
    plan in `found`."""
    _set_all(view, codes)
    now_excess, found_ns = 0, NEVER
    for i in range(len(gaps)):
        temperature *= cooling
        first, second = gaps[i, 0], gaps[i, 1]
        before_first, before_second = codes[first], codes[second]
        _set(view, codes, first, chosen[i, 0])
        if many[i] > 1:
            _set(view, codes, second, chosen[i, 1])
        ns, excess = _judge(view, epoch + i)
        if ns < NEVER:
            worse = ns - now_ns + penalty * (excess - now_excess)
            takes = worse <= 0 or luck[i] < math.exp(-worse / temperature)
        else:
            takes = False
        if takes:
            now_ns, now_excess = ns, excess
            if excess == 0 and ns < found_ns and _differ(codes, start):
                found_ns = ns
                for gap in range(len(codes)):  # a slice would be copied twice, which takes memory
                    found[gap] = codes[gap]
        else:
            _set(view, codes, first, before_first)
            _set(view, codes, second, before_second)
        penalty *= grows if now_excess else 1.0 / grows
    return len(gaps), found_ns


@inner
def _raise(least: Ints, start: int, end: int, nbytes: int, budget: int) -> int:
    """Add to all of these ticks. Returns how many more of them are above the budget then."""
    more = 0
    for tick in range(start, end):
        more -= least[tick] > budget
        least[tick] += nbytes
        more += least[tick] > budget
    return more


@compiled
def follow(
    view: View, epoch: int, policy: Codes, p1: Codes, tried: Bools, gaps: Ints, ticks: Ints, least: Ints, o2_ns: int,
    o2_away: int,
) -> tuple[int, int, int, int, bool]:  # fmt: skip
    """HOME's algorithm 3, lines 3 to 14: (how many plans were judged, how many were tried, nanoseconds and gaps not
    kept of the policy as it is left, whether it was changed).

    tried: by gap and action, whether that was tried on this very policy. gaps, ticks: as in the tables. least: room for
    the bytes of each tick without all that may be away. P2 is the policy itself.
    """
    budget = view[0]
    _set_all(view, policy)
    short = away = 0  # ticks at which even `least` is above the budget; gaps that are not kept
    for tick in range(len(least)):
        least[tick] = ticks[tick, T_PEAK]
        short += least[tick] > budget
    for gap in range(len(policy)):
        if policy[gap] != KEEP:
            short += _raise(least, gaps[gap, G_START], gaps[gap, G_END], -gaps[gap, G_BYTES], budget)
            away += 1
    judged = trials = 0
    changed = False
    for gap in range(len(policy)):
        action, own = p1[gap], policy[gap]
        if action == own or tried[gap, action]:
            continue
        tried[gap, action] = True
        trials += 1
        start, end = gaps[gap, G_START], gaps[gap, G_END]
        goes = (action != KEEP) - (own != KEEP)
        nbytes = goes * gaps[gap, G_BYTES]
        # Of P1's action: O1.
        _set(view, policy, gap, action)
        if nbytes != 0:
            short += _raise(least, start, end, -nbytes, budget)
        faster, o1_ns = False, NEVER
        if short == 0:
            o1_ns, excess = _judge(view, epoch + judged)
            judged += 1
            faster = excess == 0 and (o1_ns < o2_ns or (o1_ns == o2_ns and away + goes < o2_away))
        # The faster of the two is taken, P2's if they are equal.
        if faster:
            o2_ns = o1_ns
            o2_away = away = away + goes
            changed = True
            for other in range(len(policy)):
                for i in range(tried.shape[1]):
                    tried[other, i] = False
        else:
            _set(view, policy, gap, own)
            if nbytes != 0:
                short += _raise(least, start, end, nbytes, budget)
    return judged, trials, o2_ns, o2_away, changed
