"""From decisions to what they cost: the one lowering there is."""

from __future__ import annotations

from legroom.kernels.codes import *
from legroom.kernels.compiling import compiled
from legroom.kernels.releases import make_fetches, make_releases
from legroom.kernels.replays import make_replays
from legroom.kernels.walk import emit_walk, run_walk
from legroom.tables import Floats, Ints


@compiled
def lower_and_run(
    lowers: bool, runs: bool, again: bool, limit: int, codes: Codes, ahead: Ints, epoch: int,
    words: Words, ints: Ints, rates: Floats, work_words: Words, work_ints: Ints, edges: Ints,
    offsets: Words, steps: Words, freed: Ints, charges: Charges, waits: Words, replays: Ints, replay_ops: Ints,
    failure: Ints,
) -> tuple[int, int, int, int]:  # fmt: skip
    """Lower the codes into a walk if `lowers`, then run it if `runs`.

    Returns how much the replays need of `replay_ops` (see packing.lower), -1 where one is impossible, and what run_walk
    returns. `again` says that the last lowering succeeded, with all these arrays. One entry for both, and what is in
    `packing.Packed` and `packing.Scratch` in blocks: Python takes 60 ns to hand over an array.
    """
    # In the order of packing.in_blocks().
    starts = words[edges[0] : edges[1]]
    ends = words[edges[2] : edges[3]]
    firsts = words[edges[4] : edges[5]]
    makers = words[edges[6] : edges[7]]
    ops = words[edges[8] : edges[9]]
    reads = words[edges[10] : edges[11]]
    writes = words[edges[12] : edges[13]]
    by_end = words[edges[14] : edges[15]]
    copies = ints[edges[16] : edges[17]]
    targets = ints[edges[18] : edges[19]]
    lanes = ints[edges[20] : edges[21]]
    heights = ints[edges[22] : edges[23]]
    costs = ints[edges[24] : edges[25]]
    events = ints[edges[26] : edges[27]]
    wanted = work_words[edges[28] : edges[29]]
    back = work_words[edges[30] : edges[31]]
    away = work_words[edges[32] : edges[33]]
    fetch = work_words[edges[34] : edges[35]]
    copied = work_words[edges[36] : edges[37]]
    reused = work_words[edges[38] : edges[39]]
    queue = work_words[edges[40] : edges[41]]
    following = work_words[edges[42] : edges[43]]
    latest = work_words[edges[44] : edges[45]]
    found = work_words[edges[46] : edges[47]]
    asked = work_words[edges[48] : edges[49]]
    memory = work_words[edges[50] : edges[51]]
    release = work_ints[edges[52] : edges[53]]
    done = work_ints[edges[54] : edges[55]]
    lists = work_ints[edges[56] : edges[57]]
    times = work_ints[edges[58] : edges[59]]
    waiting = work_ints[edges[60] : edges[61]]
    due = work_ints[edges[62] : edges[63]]
    seen = work_ints[edges[64] : edges[65]]
    uses = work_ints[edges[66] : edges[67]]
    leaves = work_ints[edges[68] : edges[69]]
    peaks = work_ints[edges[70] : edges[71]]
    used = nanoseconds = highest = excess = 0
    if lowers:
        synchronous = rates[RATE_SYNCHRONOUS] > 0.0
        failure[0] = OK
        differ = 0
        for gap in range(len(codes)):
            release[gap] = -1
            copied[gap] = reused[gap] = 0
            before = wanted[gap]
            wanted[gap] = (ALONE if codes[gap] == RECOMPUTE else HERE) | (STAYS if codes[gap] == SHARED else HERE)
            differ |= before ^ wanted[gap]
        # What replays do depends only on what is recomputed; `back`, `away` and `replays` have stood since.
        if differ or not again:
            for gap in range(len(codes)):
                back[gap] = ends[gap]
                away[gap] = wanted[gap]
            used = make_replays(
                epoch, starts, ends, targets, makers, ops, reads, writes, costs, by_end, synchronous,
                int(rates[HOST_REPLAY]), back, away, found, seen, asked, uses, memory, leaves, replays, replay_ops,
                failure,
            )  # fmt: skip
        if failure[0] == OK and len(times) > 0:
            make_releases(
                codes, ahead, starts, copies, firsts, lanes, events, rates, replays, back, away, release, fetch, copied,
                reused, queue, done, following, lists, times, waiting, due, latest, freed, charges, waits,
            )  # fmt: skip
            make_fetches(copies, release, fetch, following, times, latest)
            emit_walk(codes, starts, ends, copies, back, away, release, fetch, reused, lists, offsets, steps, freed)
            if charges is not None and offsets[len(times)] == 0:
                charges[:] = 0  # a step in which nothing is done has no hooks
    if runs and failure[0] == OK:
        nanoseconds, highest, excess = run_walk(
            limit, copies, lanes, heights, rates, done, peaks, offsets, steps, freed, charges, waits, replays,
        )  # fmt: skip
    return used if failure[0] == OK else -1, nanoseconds, highest, excess
