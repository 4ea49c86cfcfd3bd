from __future__ import annotations

import dataclasses
import json

import pytest

from legroom.errors import PlanError
from legroom.hardware import PRESETS, Hardware, from_json, to_json


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_survive_json_and_make_sense(name: str) -> None:
    hardware = PRESETS[name]
    assert from_json(to_json(hardware)) == hardware
    assert hardware.name == name
    assert hardware.duplex_out_bytes_per_second <= hardware.out_bytes_per_second
    assert hardware.duplex_in_bytes_per_second <= hardware.in_bytes_per_second


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("out_bytes_per_second", 0.0),
        ("in_bytes_per_second", -1.0),
        ("duplex_in_bytes_per_second", 1e300),
        ("duplex_out_bytes_per_second", "fast"),
        ("latency_seconds", -1e-6),
        ("copy_compute_share", 1.5),
        ("device_bytes", -1),
        ("device_bytes", 1.5),
        ("granularity_bytes", 0),
        ("synchronous", 1),
        ("name", 3),
    ],
)
def test_bad_fields_are_refused_by_name(field: str, value: object) -> None:
    text = json.dumps(json.loads(to_json(PRESETS["h200"])) | {field: value})
    with pytest.raises(PlanError, match=field):
        from_json(text)


@pytest.mark.parametrize("field", ["out_bytes_per_second", "latency_seconds", "copy_compute_share"])
def test_nan_is_refused_in_python_too(field: str) -> None:
    with pytest.raises(PlanError, match=field):
        dataclasses.replace(PRESETS["cpu"], **{field: float("nan")})


def test_a_missing_field_is_refused() -> None:
    fields = json.loads(to_json(PRESETS["cpu"]))
    del fields["host_bytes"]
    with pytest.raises(PlanError, match="host_bytes"):
        from_json(json.dumps(fields))


def test_hardware_is_a_value() -> None:
    assert isinstance(hash(PRESETS["cpu"]), int)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PRESETS["cpu"].name = "other"  # type: ignore[misc]
    assert Hardware.__slots__
