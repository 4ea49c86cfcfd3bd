"""The numbers that the compiled functions and those who call them agree on: codes, columns, rates."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from legroom.tables import Ints

Codes = npt.NDArray[np.int8]
Words = npt.NDArray[np.uint32]
# None where ticks and instructions cost the host nothing. That is another type, so other functions are compiled for it:
# the same ones for both were 5 to 15 % slower where they cost nothing.
Charges = Ints | None

# Decision codes. SHARED is a recomputation that stays once some replay has made it.
KEEP, OVERLAP, SYNC, RECOMPUTE, SHARED, AHEAD = 0, 1, 2, 3, 4, 5
# Instruction codes: those that copy, those that wait or free, and replays. An instruction is gap << KIND_BITS | code.
SWAP_OUT, PREFETCH, RELEASE, AWAIT, DROP, REPLAY, KIND_BITS, KIND_MASK = 0, 1, 2, 3, 4, 5, 3, 7
# Steps of a walk, coded alike: copy out, copy out and wait, fetch and wait, fetch, wait for a fetch, replay.
OUT, OUT_NOW, IN_NOW, IN, WAIT, AGAIN = 0, 1, 2, 3, 4, 5
# Why a recomputation is impossible.
OK, NO_WRITER, NOT_REPLAYABLE = 0, 1, 2
# Bit code * 2 + whether a gap ends: whether the model of the lanes must look at that (swaps start, replays end).
MATTERS = 1 << OVERLAP * 2 | 1 << SYNC * 2 | 1 << AHEAD * 2 | 1 << RECOMPUTE * 2 + 1 | 1 << SHARED * 2 + 1
# What a replay does that makes the storage of a gap: nothing as it is in memory (or comes back by then); throw it away;
# leave it in memory. REPLAYED is for those that are here since a replay of their own.
HERE, ALONE, STAYS, REPLAYED = 0, 1, 2, 4

# Columns, and the length of a row, all in words as they fill the cache: ops, what they read (with all there is to know
# about the value), what they write; and what ops cost. Bytes take two words, the lower first.
READS, WRITES, REPLAYABLE, OP = 0, 1, 2, 4
READ_VALUE, READ_FROM, READ_UNTIL, READ_FIRST, READ_STOP, READ_WRITER, READ_BYTES, READ = 0, 1, 2, 3, 4, 5, 6, 8
# The gaps of a value written are those that it stands in.
WRITE_VALUE, WRITE_BEFORE, WRITE_FIRST, WRITE_STOP, WRITE_BYTES, WRITE = 0, 1, 2, 3, 4, 8
NS, ISSUE_NS, WORKSPACE, COST = 0, 1, 2, 3
NONE = 2**32 - 1  # no op, no value
# Values, as stamps: the last replay that made it and still has it, and the last use.
MADE, LAST_USE, USE = 0, 1, 2
# Gaps: what copying them takes. Ticks: what the segment before does to the lanes; level and peak with everything kept.
NBYTES, OUT_NS, IN_NS, COPY = 0, 1, 2, 4
AFTER_COMPUTE, AFTER_HOST, ISSUED, LANES = 0, 1, 2, 3
LEVEL, TOP, HEIGHTS = 0, 1, 2
# Replays: what they do to the lanes, how far they take memory above the level at their start, the bytes they leave
# there; how many ops they have, where these are in `replay_ops`, and how many gaps follow them there, whose storages
# stay.
COMPUTE, HOST, ISSUE, PEAK, BYTES, OPS, REPLAY_OP, REPLAY_GAPS, ROW = 0, 1, 2, 3, 4, 5, 6, 7, 8
# Replays remembered: a tree for each gap, whose nodes ask what is done about another gap. A node has the question (gap
# << 1 | whether the replay makes its storage; otherwise it reads it), and for each answer what is met there: 0 nothing
# yet, node << 1, or leaf << 1 | 1. A leaf has the row of the replay up to OPS. Nodes 0 .. gaps - 1 only lead to the
# trees, so with 0 in all MET nothing is remembered. Leaf 0 has how many nodes and leaves are in use; when there are no
# more, all is forgotten. A replay that was not known adds at most GROWTH nodes, as few long ones come twice. All this
# pays where plans or parts of them come again: of plans never seen before it saves nearly nothing.
QUESTION, MET, MEMORY, LEAF, GROWTH, NODES_PER_GAP, LEAVES_PER_GAP = 0, 1, 4, 8, 4, 64, 32
# A question with its answer is question << ANSWER_BITS | answer.
ANSWER_BITS, ANSWER = 2, 3
# Rates.
RATE_OUT, RATE_IN, RATE_DUPLEX_OUT, RATE_DUPLEX_IN, RATE_SHARE, RATE_LATENCY, RATE_SYNCHRONOUS = 0, 1, 2, 3, 4, 5, 6
# Among them the nanoseconds that the host takes for ticks and instructions.
HOST_TICK, HOST_OUT, HOST_RELEASE, HOST_DROP, HOST_IN, HOST_AWAIT, HOST_REPLAY = 7, 8, 9, 10, 11, 12, 13

FAR = 2**62  # later than any time
# Ticks stand above, gaps below. `& LOW` also tells the compiler that an index is not negative, which spares it a test
# for those that count from the end (a fifth of the time of lowering); so do arrays of words.
TICKS, LOW = 2**32, 2**32 - 1
