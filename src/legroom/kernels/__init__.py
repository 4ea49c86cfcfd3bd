"""The compiled half of planning: lower decisions to a walk through the ticks, run it, and search.

`lower_and_run` is the only lowering there is. What it decides is written down twice: as the instructions of
`schedule.lower` (by `packing.lower`), and as a walk, which has fewer steps (frees are summed up by tick, and what
always comes in pairs is one step) and which the evaluator runs. That must agree to the nanosecond and the byte with
`simulate()` and `check_schedule()` of the instructions.

All compiled functions that call one another are in this folder, and so are the constants they freeze: see `compiling`.
They take flat arrays, which `packing` makes from the tables and names; row r of a table has its columns from r *
(length of a row) on. They allocate nothing: every kind of allocation costs numba a third of a second of compilation,
and without any, no references need be counted.
"""
