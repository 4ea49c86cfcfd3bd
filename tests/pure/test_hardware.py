from __future__ import annotations

import dataclasses
import json

import pytest

from legroom.errors import PlanError
from legroom.hardware import PRESETS, Hardware, HostCosts, from_json, to_json

HOST = HostCosts(1e-6, 2e-6, 3e-6, 4e-6, 5e-6, 6e-6, 7e-6, 8e-6)


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


def test_costs_of_the_host_survive_json() -> None:
    hardware = dataclasses.replace(PRESETS["h200"], host=HOST)
    assert from_json(to_json(hardware)) == hardware


def test_a_file_without_costs_of_the_host_has_none() -> None:
    fields = json.loads(to_json(dataclasses.replace(PRESETS["h200"], host=HOST))) | {"version": 1}
    del fields["host"]
    assert from_json(json.dumps(fields)) == PRESETS["h200"]
    assert PRESETS["h200"].host == HostCosts() == HostCosts(*([0.0] * 8))


@pytest.mark.parametrize("name", HostCosts.__slots__)
@pytest.mark.parametrize("seconds", [-1e-9, 10.5, float("inf"), float("nan")])
def test_a_bad_cost_of_the_host_is_refused_by_name(name: str, seconds: float) -> None:
    with pytest.raises(PlanError, match=rf"hardware\.host\.{name}: expected 0 to 10"):
        HostCosts(**{name: seconds})


@pytest.mark.parametrize("host", [3, None, {}, {"tick": 1.0}, {**dataclasses.asdict(HOST), "other": 0.0}])
def test_costs_of_the_host_are_all_there_or_none(host: object) -> None:
    text = json.dumps(json.loads(to_json(PRESETS["h200"])) | {"host": host})
    with pytest.raises(PlanError, match=r"hardware\.host"):
        from_json(text)


@pytest.mark.parametrize(("name", "seconds"), [("drop", -1.0), ("await_", 11), ("tick", "long"), ("replay", True)])
def test_a_bad_cost_of_the_host_in_a_file_is_refused_by_name(name: str, seconds: object) -> None:
    host = dataclasses.asdict(HOST) | {name: seconds}
    with pytest.raises(PlanError, match=rf"hardware\.host\.{name}"):
        from_json(json.dumps(json.loads(to_json(PRESETS["h200"])) | {"host": host}))


def test_a_slower_host_is_slower_in_everything() -> None:
    hardware = dataclasses.replace(PRESETS["h200"], host=HOST)
    slower = hardware.scaled_host(3.0)
    assert dataclasses.astuple(slower.host) == pytest.approx([3 * seconds for seconds in dataclasses.astuple(HOST)])
    assert dataclasses.replace(slower, host=HOST) == hardware
    assert hardware.scaled_host(0.0) == PRESETS["h200"]
    for factor in (-1.0, float("nan"), 1e9):
        with pytest.raises(PlanError, match=r"hardware\.host\.tick"):
            hardware.scaled_host(factor)


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
