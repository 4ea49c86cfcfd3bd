"""The numbers of a trace at one size of the input, as plain values and back: for who has the trace at another size."""

from __future__ import annotations

from typing import Any

import numpy as np

from legroom.ir import LARGEST_SECONDS, Trace
from legroom.jsonio import Node
from legroom.sizes import Numbers
from legroom.tables import Floats, Ints
from legroom.units import LARGEST_BYTES

_INTEGERS = ("nbytes", "level_bytes", "peak_bytes", "workspace_bytes")


def to_fields(numbers: Numbers) -> dict[str, Any]:
    lists = {name: getattr(numbers, name).tolist() for name in _INTEGERS}
    return {**lists, "head_peak_bytes": numbers.head_peak_bytes, "seconds": numbers.seconds.tolist()}


def from_node(node: Node, template: Trace) -> Numbers:
    """Within the bounds of validate(), so that with_numbers() gives a trace that is valid if the template is."""
    found = node.fields(*_INTEGERS, "head_peak_bytes", "seconds")
    rows = {
        "nbytes": len(template.storages),
        "level_bytes": len(template.ticks),
        "peak_bytes": len(template.ticks),
        "workspace_bytes": len(template.ops),
        "seconds": len(template.ops),
    }
    for name, count in rows.items():
        if len(found[name].array()) != count:
            found[name].fail(f"expected {count} entries, got {len(found[name].array())}")
    sizes: dict[str, Ints] = {name: np.array(found[name].integers(), np.int64) for name in _INTEGERS}
    # As a float first: the sum may not fit.
    if float(sizes["nbytes"].sum(dtype=np.float64)) >= LARGEST_BYTES:
        found["nbytes"].fail("all sizes together are 2**62 bytes or more")
    seconds: Floats = np.array(found["seconds"].numbers(), np.float64)
    issued = sum(op.issue_seconds for op in template.ops)
    if float(seconds.sum()) + issued >= LARGEST_SECONDS:
        found["seconds"].fail(f"all ops together take {LARGEST_SECONDS:.3g} seconds or more")
    return Numbers(**sizes, head_peak_bytes=found["head_peak_bytes"].integer(), seconds=seconds)
